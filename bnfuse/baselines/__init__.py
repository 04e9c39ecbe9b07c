"""The network of a training file in another framework, as its users write it: what a step is measured against.

    module = torch_module(graph)                  # idiomatic layers with the file's values; print(module.code)
    step = TorchStep(graph, "torch-cl", feeds)   # a whole training step on one batch
    step.run()                                    # Times(step, forward)

This package alone imports torch, and only when one of its functions is called. docs/baselines.md
"""

from bnfuse.baselines.names import BASELINES
from bnfuse.baselines.network import torch_module
from bnfuse.baselines.step import TorchStep

__all__ = ["BASELINES", "TorchStep", "torch_module"]
