"""Graphs of onnxruntime-training, brought into our training dialect when they are read (docs/training-file.md).

    convert.py      which graphs, one node after the other, and what is left
    source.py       a node under conversion: its operands, what is known of them, and ways to write others
    norms.py, windows.py, activations.py, moves.py, dense.py, losses.py         the conversions, a family each

Operators of com.microsoft become standard ones, or those of `ai.bnfuse` that mean the same. So do the gradients of
poolings that onnxruntime has in the standard domain, and chains of standard nodes by which its gradient builder says
what we have one operator for. Values and nodes keep their names.
"""

from bnfuse.graph.microsoft.convert import convert, is_foreign

__all__ = ["convert", "is_foreign"]
