"""Activations and residual additions in place, where torch's users write them so.

Only what a fresh result holds may be overwritten: one that a single node reads, and that its own producer does not need
for its gradient (a convolution and a BN keep their input; a sigmoid keeps its result).
"""

from __future__ import annotations

import operator
from typing import Any

FRESH = (
    *("Conv1d", "Conv2d", "Conv3d", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "Linear"),
    *("AvgPool1d", "AvgPool2d", "AvgPool3d", "MaxPool2d", "MaxPool3d"),
)
IN_PLACE = ("ReLU", "ReLU6", "Hardtanh", "LeakyReLU")  # whose gradient their result tells as well


def write_in_place(graph: Any, root: Any, cat: Any) -> None:
    """Change an fx graph over the layers of `root`; `cat` is torch.cat."""
    for node in graph.nodes:
        if node.op == "call_module":
            layer = getattr(root, node.target)
            if type(layer).__name__ in IN_PLACE and may_overwrite(node.args[0], root, cat):
                layer.inplace = True
        elif node.target is operator.add and same_shape(*node.args):
            first, second = node.args
            if may_overwrite(second, root, cat) and not may_overwrite(first, root, cat):
                first, second = second, first
            if may_overwrite(first, root, cat):
                node.target, node.args = operator.iadd, (first, second)


def may_overwrite(node: Any, root: Any, cat: Any) -> bool:
    """Tell whether a node's result may be written over: it is fresh, and one node reads it."""
    if len(node.users) != 1:
        return False
    if node.op == "call_module":
        return type(getattr(root, node.target)).__name__ in FRESH
    return node.op == "call_function" and node.target in (cat, operator.add, operator.iadd, operator.sub)


def same_shape(first: Any, second: Any) -> bool:
    """Tell whether two different fx nodes are of one known shape."""
    if not (hasattr(first, "meta") and hasattr(second, "meta")) or first is second:
        return False
    shape = first.meta.get("shape")
    return shape is not None and shape == second.meta.get("shape")
