"""Which layer of the network each node of a training graph belongs to.

A node of the forward graph is a layer. A node of the backward graph belongs to the layer of its kind that it shares
most values with, else to the one of another kind: operands and results of the forward node that it reads (ConvGrad its
x and weight, BatchNormalizationGrad its x, scale, mean and inv_std). What reads gradients alone (a Sum, a Split,
AveragePoolGrad) belongs to the layer whose result it has the gradient of, which the nodes before it tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from bnfuse.diffing.match import label
from bnfuse.estimating.pieces import dims
from bnfuse.opset.spec import DOMAIN, OpSpec, find

Touching = dict[ir.Value, list[ir.Node]]

HALVES = ("/statistics", "/finalize")  # what splitting a BatchNorm puts behind its name
SUMS = ("Sum", "Add", "Identity")  # their result is the gradient of what each operand is one of


def parts_of(nodes: Sequence[ir.Node], forward: set[ir.Node]) -> dict[ir.Node, str]:
    """The name of its layer for each node, in an order of the nodes that runs; "" where none can be told."""
    return {node: name_of(layer) if layer is not None else "" for node, layer in layers_of(nodes, forward).items()}


def name_of(layer: ir.Node) -> str:
    """Of a half of a BatchNorm the BatchNorm's."""
    name = label(layer)
    for half in HALVES:
        name = name.removesuffix(half)
    return name


def layers_of(nodes: Sequence[ir.Node], forward: set[ir.Node]) -> dict[ir.Node, ir.Node | None]:
    touching = _touching(node for node in nodes if node in forward)
    gradient_of: dict[ir.Value, ir.Value] = {}
    found: dict[ir.Node, ir.Node | None] = {}
    for node in nodes:
        if node in forward:
            found[node] = node
            continue
        layer = _sharing(node, touching) or _of_gradient(node, gradient_of) or _before(node, found)
        found[node] = layer
        _note_gradients(node, layer, touching, gradient_of)
    return found


def _touching(layers: Iterable[ir.Node]) -> Touching:
    """The layers that read or make each value."""
    found: Touching = {}
    for layer in layers:
        for value in dict.fromkeys((*layer.inputs, *layer.outputs)):
            if value is not None and value.name:
                found.setdefault(value, []).append(layer)
    return found


def _sharing(node: ir.Node, touching: Touching) -> ir.Node | None:
    """Of the layers that share values with the node, those of its kind first: the one that shares most."""
    shared = Counter(layer for value in set(node.inputs) if value is not None for layer in touching.get(value, ()))
    if not shared:
        return None
    core = core_of(node)
    return max(shared, key=lambda layer: (core.startswith(core_of(layer)), shared[layer]))


def _of_gradient(node: ir.Node, gradient_of: dict[ir.Value, ir.Value]) -> ir.Node | None:
    """The layer that made what the node's first known gradient is of."""
    for value in node.inputs:
        if value is not None and value in gradient_of:
            return gradient_of[value].producer()
    return None


def _before(node: ir.Node, found: Mapping[ir.Node, ir.Node | None]) -> ir.Node | None:
    """The layer of the node before."""
    makers = (value.producer() for value in node.inputs if value is not None)
    return next((layer for maker in makers if maker is not None and (layer := found.get(maker)) is not None), None)


def _note_gradients(
    node: ir.Node,
    layer: ir.Node | None,
    touching: Touching,
    gradient_of: dict[ir.Value, ir.Value],
) -> None:
    """The first result of a node is the gradient of an operand of its layer that has the same shape; else of a forward
    value that the node reads."""
    if node.op_type in SUMS:
        for value in node.inputs:
            if value is not None and value in gradient_of:
                gradient_of[node.outputs[0]] = gradient_of[value]
                return
    if layer is None:
        return
    operands = [value for value in layer.inputs if value is not None]
    if node.op_type in ("Split", "SplitTraining"):
        gradient_of.update(zip(node.outputs, operands, strict=False))
    elif node.outputs and node.outputs[0].name:
        read = [value for value in node.inputs if value in touching]
        alike = [value for value in (*operands, *read) if value is not None and dims(value) == dims(node.outputs[0])]
        if alike:
            gradient_of[node.outputs[0]] = alike[0]


def core_of(node: ir.Node) -> str:
    """The core of a composed operator; the name of any other, a gradient's as that of its layer with more behind."""
    op = find(node.op_type) if node.domain == DOMAIN else None
    if isinstance(op, OpSpec):
        return op.core
    return node.op_type.replace("BatchNormalization", "BatchNorm").replace("Internal", "")
