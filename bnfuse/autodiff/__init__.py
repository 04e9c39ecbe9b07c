"""Reverse mode on ONNX graphs: the gradients of outputs with respect to inputs, as nodes of the same graph.

    differentiate(model, ["weight"], {loss: None})      # {"weight": its gradient, a value of model.graph}

A rule an operator (`rules.py` lists them, a file a family), each a small function that emits nodes: standard ONNX, and
gradients of `ai.bnfuse` where a kernel computes them in one sweep. What has no rule is named in one line.
"""

from .engine import differentiate
from .rules import differentiable

__all__ = ["differentiable", "differentiate"]
