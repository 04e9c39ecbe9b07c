"""Canonical form: a channel shuffle is one permutation of channels.

    v = Reshape(x, [N, g, C/g, H, W])
    t = Transpose <perm = [0, 2, 1, 3, 4]> (v)       ->      y = Gather <axis = 1> (x, permutation)
    y = Reshape(t, [N, C, H, W])

So it is spelled in ShuffleNet, and its gradient the same way, with C/g for g. As one operator it is a single sweep that
moves channels where they lie, and passes can move what is per channel across it.

Refuses nothing: what does not match this shape is not its.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from bnfuse.passes.dialect.source_ops import constant_of, is_map, sizes
from bnfuse.passes.rewriter import Editor, FusionResult, is_only_read_by

EXCHANGED = (0, 2, 1, 3, 4)


class ChannelShuffle(ir.passes.InPlacePass):
    """Write a Reshape, Transpose, Reshape that permutes channels as one Gather."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "canonical")
        made: dict[tuple[int, int], ir.Value] = {}  # the permutation of each number of channels and of groups
        for node in [node for node in model.graph if node.op_type == "Transpose" and not node.domain]:
            if (parts := shuffle_at(node)) is None:
                continue
            wide, last = parts
            x, key = wide.inputs[0], sizes(node.inputs[0])[1:3]  # type: ignore[arg-type]
            assert x is not None and len(key) == 2
            if key not in made:
                order = np.arange(key[0] * key[1], dtype=np.int64).reshape(key).T.reshape(-1)
                made[key] = editor.constant(f"{node.name}/order", order)
            (y,) = editor.standard("Gather", [x, made[key]], 1, before=last, of=[wide, node, last], axis=1)
            editor.take_over(last.outputs[0], y)
            editor.remove_dead([wide, node, last])
            editor.fused.append(node.name or node.op_type)
        return editor.result()


def shuffle_at(node: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """Find the Reshapes around a Transpose that together exchange groups of channels, or None."""
    value, result = node.inputs[0], node.outputs[0]
    wide = value.producer() if value is not None else None
    uses = list(result.uses())
    if value is None or wide is None or len(uses) != 1 or not is_only_read_by(result, uses[0].node):
        return None
    last = uses[0].node
    if any(other.op_type != "Reshape" or other.domain for other in (wide, last)) or uses[0].idx:
        return None
    if "perm" not in node.attributes or tuple(node.attributes["perm"].as_ints()) != EXCHANGED:
        return None
    x, y = wide.inputs[0], last.outputs[0]
    if not (is_map(x) and is_map(y) and _is_static(value)) or sizes(x) != sizes(y):
        return None
    n, groups, members, *rest = sizes(value)
    channels = sizes(x)[1]
    return (wide, last) if (n, groups * members, *rest) == (sizes(x)[0], channels, *sizes(x)[2:]) else None


def permutation_of(node: ir.Node | None) -> npt.NDArray[np.int64] | None:
    """Give the permutation of channels that a node is (channel i of its result is channel order[i] of its operand)."""
    if node is None or node.domain or node.op_type != "Gather" or _axis(node) != 1:
        return None
    x, order = node.inputs[0], constant_of(node.inputs[1])
    if not is_map(x) or order is None or order.shape != (sizes(x)[1],):
        return None
    found: npt.NDArray[np.int64] = order % len(order)
    return found if (np.bincount(found, minlength=len(order)) == 1).all() else None


def _axis(node: ir.Node) -> Any:
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    return axis % 4


def _is_static(value: ir.Value) -> bool:
    return value.shape is not None and all(isinstance(size, int) for size in value.shape)
