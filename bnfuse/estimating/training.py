"""The workload of a training graph, source or rewritten: every node a layer, every operand an access.

    TrainingGraph  ->  places of values (pieces.py), layers of nodes (analysis/owners.py), costs (node_costs.py)

An operand counts with the bytes that are really touched: a range of channels, a sample. Views move nothing, so what
reads a concatenation reads its parts. Nodes that depend on shapes and constants alone are no layers: they are evaluated
when a graph is compiled.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import onnx_ir as ir

from bnfuse.analysis.ancestors import forward_nodes
from bnfuse.analysis.executed import executed, require_fixed_shapes
from bnfuse.analysis.match import label
from bnfuse.analysis.owners import layer_name, owners
from bnfuse.estimating.assumptions import check_choice
from bnfuse.estimating.node_costs import Costs, costs_of
from bnfuse.estimating.options import Optimizer, Order
from bnfuse.estimating.order import arranged
from bnfuse.estimating.pieces import Piece, Places, dims, size_of, width_of
from bnfuse.estimating.workload import Access, Kind, Layer, Phase, Tensor, Workload, is_stored_image
from bnfuse.graph import exchanges
from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.opset.plain import PlainOp
from bnfuse.opset.spec import DOMAIN, OpSpec, find
from bnfuse.opset.traffic import channels_touched, reads_elements_of_x, touched_shape

MOMENTS = {"none": 0, "sgd": 0, "momentum": 1, "adamw": 2, "adam": 2, "rmsprop": 1, "lion": 1}
UPDATE_FLOPS = {"sgd": 2, "momentum": 4, "adamw": 12, "adam": 12, "rmsprop": 9, "lion": 9}  # for each parameter
RANGES = {  # of entries of coefficients: the attributes that say them
    **dict.fromkeys(("beta_term", "gamma_term"), ("start", "stop")),
    **dict.fromkeys(("beta_acc", "gamma_acc"), ("acc_start", "acc_stop")),
}


def training_workload(
    graph: TrainingGraph, *, order: Order = "file", views: bool = False, optimizer: Optimizer = "none"
) -> Workload:
    """Give the workload of one iteration of a training graph.

    `order` is the file's, or depth first to the joins. `views` counts concatenations, splits and reshapes as the copies
    that they are where nothing is aliased. `optimizer` adds a layer for each parameter that updates it: it reads the
    parameter, its gradient and the moments (one with momentum, RMSprop and Lion, two with Adam), and writes all but
    the gradient.
    """
    check_choice("optimizer", optimizer, tuple(MOMENTS))
    require_fixed_shapes(graph)
    nodes, constants = executed(graph.model.graph)
    builder = _Builder(graph, Places(nodes, views=views), constants)
    forward = forward_nodes(graph.model.graph, graph.signature)
    network = [node for node in nodes if node in forward]
    layer_of = owners((node for node in nodes if node not in forward), network) | {node: node for node in network}
    layers = [
        builder.layer(node, "forward" if node in forward else "backward", layer_of[node])
        for node in nodes
        if not builder.places.is_view(node)
    ]
    if optimizer != "none":
        layers += builder.updates(optimizer)
    return Workload(graph.name, graph.batch, tuple(builder.tensors), arranged(layers, order))


EXCHANGES: dict[str, Literal["", "sum", "gather"]] = {
    exchanges.MOMENTS: "gather",
    exchanges.TERMS: "sum",
}  # between workers, of SyncBN


class _Builder:
    """Tensors as they are met, and the layers that touch them."""

    def __init__(self, graph: TrainingGraph, places: Places, constants: set[ir.Value]) -> None:
        self.places, self.tensors = places, list[Tensor]()
        self._graph, self._constants = graph, constants
        self._index: dict[ir.Value, int] = {}
        self._widths: dict[int, int] = {}  # channels
        self._batches = {graph.batch, graph.batch + sum(graph.shape_of(name)[0] for name in graph.signature.virtual)}
        outputs = {v.name: v for v in graph.model.graph.outputs}
        self._kept = {piece.value for value in outputs.values() for piece in places.whole(value)}
        gradients = (outputs[name] for name in graph.signature.gradients.values())
        self._gradients = {piece.value for value in gradients for piece in places.whole(value)}
        self._running = {*graph.signature.running, *graph.signature.running.values()}

    def layer(self, node: ir.Node, phase: Phase, part_of: ir.Node | None) -> Layer:
        """Make the layer of a node. `part_of` is the node's layer of the network, where one can be told."""
        op = find(node.op_type) if node.domain == DOMAIN else None
        costs = costs_of(node, op)
        reads = self._accesses(node, op, list(_operands(node, op)), phase, costs)
        writes = self._accesses(node, op, list(_results(node, op)), phase, Costs(costs.type, 0))
        part = layer_name(part_of) if part_of is not None else ""
        exchange = EXCHANGES.get(node.op_type, "") if op is not None else ""
        return Layer(label(node), costs.type, phase, costs.flops, reads, writes, part, exchange=exchange)

    def updates(self, optimizer: Optimizer) -> list[Layer]:
        found = []
        for name, gradient in self._graph.signature.gradients.items():
            value = self._graph.input(name)
            made = next(v for v in self._graph.model.graph.outputs if v.name == gradient)
            weight, slope = (self._tensor(self.places.whole(v)[0].value, "backward") for v in (value, made))
            size = size_of(value)
            self._mark_kept(weight)
            moments = [
                self._add(Tensor(f"{name}.moment{i or ''}", size, self.tensors[weight].kind, given=True, kept=True))
                for i in range(MOMENTS[optimizer])
            ]
            changed = tuple(Access(tensor, size) for tensor in (weight, *moments))
            flops = UPDATE_FLOPS[optimizer] * math.prod(dims(value))
            reads = (*changed, Access(slope, size))
            found.append(Layer(f"update {name}", "Other", "update", flops, reads, changed, part=name))
        return found

    def _accesses(
        self,
        node: ir.Node,
        op: OpSpec | PlainOp | None,
        values: Iterable[tuple[str, ir.Value]],
        phase: Phase,
        costs: Costs,
    ) -> tuple[Access, ...]:
        """One access a tensor, however many pieces of it are touched."""
        ranges: dict[ir.Value, list[tuple[int, int]]] = {}
        shares: dict[ir.Value, float] = {}
        for name, value in values:
            if value in self._constants:
                continue
            share = _share(op, name, value, node)
            for piece in self._pieces(node, op, name, value):
                ranges.setdefault(piece.value, []).append((piece.start, piece.stop))
                shares[piece.value] = max(shares.get(piece.value, 0.0), share)
        sweeps = {piece.value: costs.sweeps for i in costs.swept for piece in self._pieces_of_input(node, i)}
        return tuple(
            Access(
                tensor := self._tensor(value, phase), self._bytes(tensor, found, shares[value]), sweeps.get(value, 1)
            )
            for value, found in ranges.items()
        )

    def _bytes(self, tensor: int, ranges: list[tuple[int, int]], share: float) -> int:
        """Of these channels, and of each this share."""
        size, width = self.tensors[tensor].bytes, self._widths[tensor]
        channels = ranges[0][1] - ranges[0][0] if len(ranges) == 1 else covered(ranges)
        return size if channels == width and share == 1 else round(size * channels / width * share)

    def _pieces_of_input(self, node: ir.Node, index: int) -> Sequence[Piece]:
        value = node.inputs[index]
        return self.places.whole(value) if value is not None else ()

    def _pieces(self, node: ir.Node, op: OpSpec | PlainOp | None, name: str, value: ir.Value) -> Sequence[Piece]:
        bounds = channels_touched(op, name, node)
        if bounds is None and isinstance(op, PlainOp) and name in RANGES and RANGES[name][0] in op.attributes:
            start, stop = (node.attributes[key].as_int() for key in RANGES[name])
            bounds = start, stop
        return self.places.channels(value, *bounds) if bounds else self.places.whole(value)

    def _tensor(self, value: ir.Value, phase: Phase) -> int:
        if (index := self._index.get(value)) is None:
            given = value.producer() is None or value in self._constants
            kind, kept = self._kind(value, phase), value in self._kept
            image = value.dtype in (None, ir.DataType.FLOAT) and is_stored_image(kind, dims(value))
            index = self._add(Tensor(str(value.name), size_of(value), kind, given, kept, is_image=image))
            self._index[value] = index
            self._widths[index] = max(width_of(value), 1)
        return index

    def _add(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _mark_kept(self, index: int) -> None:
        old = self.tensors[index]
        self.tensors[index] = dataclasses.replace(old, kept=True)

    def _kind(self, value: ir.Value, phase: Phase) -> Kind:
        """By role, else by shape: what has no image axis is per channel (of rank 1), or made of weight gradients."""
        signature, shape = self._graph.signature, dims(value)
        if value.name in (*signature.data, *signature.labels, *signature.offsets, *signature.virtual):
            return "data"
        if len(shape) < 2 or value.name in self._running or _is_coefficient(value):
            return "vector"
        if value.producer() is None:
            return "weight"
        if value in self._gradients or _is_weight_gradient(value):
            return "weight_gradient"
        if phase == "forward":
            return "map"
        return "map_gradient" if shape[0] in self._batches else "weight_gradient"


def covered(ranges: Iterable[tuple[int, int]]) -> int:
    """Give the length of a union of ranges."""
    total, end = 0, -1
    for start, stop in sorted(ranges):
        start = max(start, end)
        if stop > start:
            total += stop - start
        end = max(end, stop)
    return total


def _operands(node: ir.Node, op: OpSpec | PlainOp | None) -> Iterable[tuple[str, ir.Value]]:
    """Operands of which elements are read, with their names in the grammar."""
    names = op.operands if op else itertools.repeat("")
    unread = "x" if isinstance(op, OpSpec) and not reads_elements_of_x(op) else None
    for name, value in zip(names, node.inputs, strict=False):
        if value is not None and value.name and (name != unread or name == ""):
            yield name, value


def _results(node: ir.Node, op: OpSpec | PlainOp | None) -> Iterable[tuple[str, ir.Value]]:
    """Results that somebody reads."""
    names = op.results if op else itertools.repeat("")
    for name, value in zip(names, node.outputs, strict=False):
        if value.name and (value.uses() or value.is_graph_output()):
            yield name, value


def _share(op: OpSpec | PlainOp | None, name: str, value: ir.Value, node: ir.Node) -> float:
    """Tell what part of a map an operator of a sample touches."""
    if not isinstance(op, PlainOp) or len(shape := dims(value)) < 4:
        return 1.0
    return math.prod(touched_shape(op, name, shape, node)) / max(math.prod(shape), 1)


def _is_coefficient(value: ir.Value) -> bool:
    """Whether it is made per group and channel (Local...): of two axes, but no map."""
    node = value.producer()
    op = find(node.op_type) if node is not None and node.domain == DOMAIN else None
    return len(dims(value)) == 2 and isinstance(op, PlainOp)


def _is_weight_gradient(value: ir.Value) -> bool:
    node = value.producer()
    if node is None:
        return False
    op = find(node.op_type) if node.domain == DOMAIN else None
    return op is not None and "dweight" in op.results and value is node.outputs[op.results.index("dweight")]
