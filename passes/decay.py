"""Moving averages: how much a batch counts in every running statistic (papers/001, eq. 8).

    running' = running*(1 - alpha) + batch*alpha

ONNX's momentum is 1 - alpha. The one number holds for all BatchNorms, in one node or in halves.
"""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.errors import BnfuseError

AVERAGING = ("BatchNormInternal", "BatchNormFinalize", "LocalFinalize")


def set_decay(model: ir.Model, alpha: float) -> None:
    if not 0 < alpha <= 1:
        raise BnfuseError(f"decay {alpha:g} must be above 0 and at most 1: it is the weight of a batch, 0.1 as a rule")
    for node in model.graph:
        if node.op_type in AVERAGING:
            node.attributes["momentum"] = ir.AttrFloat32("momentum", 1 - alpha)
