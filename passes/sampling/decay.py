"""Moving averages: how much a batch counts in every running statistic ([Chen18], eq. 8).

    running' = running*(1 - alpha) + batch*alpha

ONNX's momentum is 1 - alpha. The one number holds for all BatchNorms, in one node or in halves.
"""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.core.errors import BnfuseError
from bnfuse.passes.rewriter import FusionResult

AVERAGING = ("BatchNorm", "BatchNormFinalize", "LocalFinalize")


class SetDecay(ir.passes.InPlacePass):
    """Set the weight of a batch in all running statistics. Raises BnfuseError unless 0 < alpha <= 1."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        if not 0 < alpha <= 1:
            raise BnfuseError(f"decay {alpha:g} weighs a batch: give a number above 0 and at most 1, such as 0.1")
        self.alpha = alpha

    def call(self, model: ir.Model) -> FusionResult:
        """Set the momentum of every BatchNorm in place; all count as changed."""
        nodes = [node for node in model.graph if node.op_type in AVERAGING]
        for node in nodes:
            node.attributes["momentum"] = ir.AttrFloat32("momentum", 1 - self.alpha)
        return FusionResult(model, bool(nodes), tuple(node.name or node.op_type for node in nodes))
