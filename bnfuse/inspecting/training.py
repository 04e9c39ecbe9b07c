"""A training graph, rewritten or not, layer by layer.

A layer is a node of the forward graph. The traffic of a node of the backward graph is that of the layer whose gradient
it computes (owners.py), the work that of the layer that it shares its operands with. What belongs to none is a row of
its own at the end, so that the totals are always those of the graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import onnx_ir as ir

from bnfuse.analysis.ancestors import ancestors, forward_nodes
from bnfuse.analysis.executed import require_fixed_shapes
from bnfuse.analysis.match import label
from bnfuse.analysis.owners import owners
from bnfuse.analysis.traffic import node_maps
from bnfuse.analysis.work import POOLS, batch_norm_part, core_of, flops
from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.graph.values import declared_shape, describe, elements, size_in_bytes
from bnfuse.inspecting.result import Inspection, Layer

UNOWNED = "(other gradients)"


def inspect_graph(graph: TrainingGraph) -> Inspection:
    """Count a training graph. Raises BnfuseError where a size is not known."""
    require_fixed_shapes(graph)
    model, signature = graph.model, graph.signature
    forward = forward_nodes(graph.model.graph, graph.signature)
    layers = [node for node in model.graph if node in forward]
    later = [node for node in model.graph if node not in forward]
    backward = backward_flops(later, layers, {*signature.trainable})
    owned: dict[ir.Node | None, list[ir.Node]] = defaultdict(list)
    for node, layer in owners(later, layers).items():
        owned[layer].append(node)
    parameters = {*signature.trainable, *signature.frozen}
    counted: set[ir.Value] = set()
    rows = []
    for node in layers:
        mine = {v for v in node.inputs if v is not None and v.name in parameters} - counted  # shared ones count once
        counted |= mine
        maps = outputs_of(node, graph)
        row = Layer(
            name=label(node),
            op=node.op_type,
            output_shape=tuple(declared_shape(maps[0])) if maps else (),
            output_bytes=sum(size_in_bytes(v) for v in maps),
            parameters=sum(elements(v) for v in mine),
            parameter_bytes=sum(size_in_bytes(v) for v in mine),
            flops_forward=flops(node),
            flops_backward=backward.get(node, 0),
            input_bytes=sum(size_in_bytes(v) for v in activations_read(node, graph)),
            **traffic([node], owned[node], graph),
            kernel_shape=kernel_shape(node),
            strides=tuple(node.attributes.get_ints("strides", ())),
        )
        rows.append(row)
    rest = traffic([], owned[None], graph)
    if any(rest.values()):
        rows.append(Layer(UNOWNED, "", (), **rest))
    inputs = {name: describe(graph.input(name)) for name in (*signature.data, *signature.labels)}
    return Inspection(graph.name, tuple(rows), inputs, graph.batch, "as the training graph has it")


def kernel_shape(node: ir.Node) -> tuple[int, ...]:
    """Give the window of a convolution or pooling; a convolution's is its weight's where no attribute says it."""
    given = tuple(node.attributes.get_ints("kernel_shape", ()))
    if not given and core_of(node) == "Conv":
        return tuple(declared_shape(node.inputs[1])[2:])
    return given


def rows_of_batch(graph: TrainingGraph) -> list[int]:
    """List the first dimensions of what has an entry per image: the batch, also with virtual rows before it."""
    batch = graph.batch
    return [batch, batch + sum(graph.shape_of(name)[0] for name in graph.signature.virtual)]


def outputs_of(node: ir.Node, graph: TrainingGraph) -> list[ir.Value]:
    """Tell what the layer stores: its feature maps, or where it has none, what has an entry per image."""
    maps = [value for value, _ in node_maps(node, graph)[1]]
    rows = [[size] for size in rows_of_batch(graph)]
    return maps or [v for v in node.outputs if v.name and v.uses() and declared_shape(v)[:1] in rows]


def activations_read(node: ir.Node, graph: TrainingGraph) -> list[ir.Value]:
    """List what a node reads of the data and of what nodes computed of it, with an entry per image; no parameters, no
    labels."""
    rows = [[size] for size in rows_of_batch(graph)]
    apart = {*graph.signature.trainable, *graph.signature.frozen, *graph.signature.running, *graph.signature.labels}
    return [
        v
        for v in node.inputs
        if v is not None
        and v.name not in apart
        and not v.is_initializer()
        and len(declared_shape(v)) > 1
        and declared_shape(v)[:1] in rows
    ]


def traffic(forward: Iterable[ir.Node], backward: Iterable[ir.Node], graph: TrainingGraph) -> dict[str, Any]:
    """Sum sweeps and bytes of feature maps that these nodes touch, and a BatchNorm's part of them."""
    found: dict[str, int] = defaultdict(int)
    for way, nodes in (("forward", forward), ("backward", backward)):
        for node in nodes:
            read, written = node_maps(node, graph)
            touched = read + written
            norms = batch_norm_part(node, touched)
            found[f"sweeps_{way}"] += len(touched)
            found[f"moved_bytes_{way}"] += sum(size for _, size in touched)
            found["batch_norm_sweeps"] += len(norms)
            found["batch_norm_bytes"] += sum(size for _, size in norms)
    return dict(found)


def backward_flops(nodes: Iterable[ir.Node], layers: list[ir.Node], trainable: set[str]) -> dict[ir.Node, int]:
    """Give the work of the backward nodes by the layer that each belongs to.

    The gradient of a pooling shares no operand with it; it is as much work as the pooling, where there is one.
    """
    trained = {v for layer in layers for v in layer.inputs if v is not None and v.name in trainable}
    found = {x: flops(x) for x in layers if core_of(x) in POOLS and reaches(x, trained)}
    working = [layer for layer in layers if flops(layer)]
    for node in nodes:
        work = flops(node)
        if not work:
            continue
        operands = {v for v in node.inputs if v is not None}
        counts = {layer: len(operands & {v for v in layer.inputs if v is not None}) for layer in working}
        layer = max(counts, key=lambda x: counts[x], default=None)
        if layer is not None and counts[layer]:
            found[layer] = found.get(layer, 0) + work
    return found


def reaches(node: ir.Node, values: set[ir.Value]) -> bool:
    """Tell whether the node depends on one of the values."""
    return any(v in values for n in ancestors(node.outputs) for v in n.inputs)
