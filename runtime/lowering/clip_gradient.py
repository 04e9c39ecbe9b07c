"""The gradient of a Clip as onnxruntime-training spells it, which is one kernel in place of five."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

Constant = Callable[[ir.Value | None], np.ndarray | None]


@dataclasses.dataclass(frozen=True)
class ClipGradient:
    """dy * Cast(x >= min And x <= max), as onnxruntime-training spells it: one kernel in place of five."""

    dy: ir.Value
    x: ir.Value
    bounds: tuple[float, float]
    nodes: tuple[ir.Node, ...]  # all but the Mul


def find_clip_gradient(node: ir.Node, constant: Constant) -> ClipGradient | None:
    """Find the gradient of a Clip that ends in this Mul, if nothing else reads its parts.

    `constant` gives what is known of a value.
    """
    if node.op_type != "Mul" or node.domain:
        return None
    for dy, mask in (node.inputs, reversed(node.inputs)):
        cast = _only_read(mask, "Cast")
        both = _only_read(cast.inputs[0], "And") if cast is not None else None
        if cast is None or both is None or dy is None:
            continue
        sides = {side.op_type: side for v in both.inputs if (side := _only_read(v, "GreaterOrEqual", "LessOrEqual"))}
        if len(sides) != 2:
            continue
        lower, upper = sides["GreaterOrEqual"], sides["LessOrEqual"]
        bounds = constant(lower.inputs[1]), constant(upper.inputs[1])
        x = lower.inputs[0]
        if x is not None and x is upper.inputs[0] and bounds[0] is not None and bounds[1] is not None:
            return ClipGradient(dy, x, (float(bounds[0]), float(bounds[1])), (lower, upper, both, cast))
    return None


def _only_read(value: ir.Value | None, *kinds: str) -> ir.Node | None:
    """Find the node of one of these kinds that makes the value, if the value has a single reader."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type not in kinds or value is None or value.is_graph_output():
        return None
    return node if len(tuple(value.uses())) == 1 else None
