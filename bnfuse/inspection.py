"""Sizes and work of a training graph, layer by layer.

A layer is a node of the forward graph. A convolution or matrix product of the backward graph belongs to the layer
that it shares its operands with. FLOPs count convolutions and matrix products, a multiply-add as two, and poolings,
one for each element of each window (as `bnfuse models` does); what works elementwise shows in `bnfuse diff` as bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import onnx_ir as ir

from bnfuse.analysis.ancestors import ancestors
from bnfuse.diffing.match import label
from bnfuse.diffing.traffic import forward_nodes, node_maps
from bnfuse.opset.spec import CONV_GRADS, DOMAIN, OpSpec, parse
from bnfuse.text import Section, join, number, scaled
from bnfuse.training_graph import TrainingGraph

POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool")
FIELDS = ("output_bytes", "parameters", "parameter_bytes", "flops_forward", "flops_backward")


@dataclasses.dataclass(frozen=True)
class Layer:
    name: str
    op: str
    output_shape: tuple[Any, ...]
    output_bytes: int
    parameters: int
    parameter_bytes: int
    flops_forward: int
    flops_backward: int


@dataclasses.dataclass(frozen=True)
class Inspection:
    name: str
    layers: tuple[Layer, ...]
    inputs: dict[str, str]  # data and labels: name -> type

    @property
    def total(self) -> dict[str, int]:
        return {field: sum(getattr(layer, field) for layer in self.layers) for field in FIELDS}

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "inputs": self.inputs,
            "total": self.total,
            "layers": [dataclasses.asdict(layer) for layer in self.layers],
        }

    def sections(self) -> list[Section]:
        rows = [(x.name, x.op, "x".join(map(str, x.output_shape)), *cells(dataclasses.asdict(x))) for x in self.layers]
        rows.append(("total", "", "", *cells(self.total)))
        columns = ("layer", "operator", "output", "output bytes", "parameters", "forward", "backward")
        inputs = [f"{name}: {kind}" for name, kind in self.inputs.items()]
        return [Section.lines(self.name, inputs), Section.table("Layers", columns, rows)]

    def __str__(self) -> str:
        return join(self.sections())


def cells(values: dict[str, int]) -> tuple[str, ...]:
    def flops(n: int) -> str:
        return scaled(n, "FLOP") if n else "-"

    return (
        scaled(values["output_bytes"], "B"),
        number(values["parameters"]) if values["parameters"] else "-",
        flops(values["flops_forward"]),
        flops(values["flops_backward"]),
    )


def inspect_graph(graph: TrainingGraph) -> Inspection:
    model, roles = graph.model, graph.roles
    forward = forward_nodes(graph)
    layers = [node for node in model.graph if node in forward]
    backward = backward_flops((n for n in model.graph if n not in forward), layers, {*roles.trainable})
    owned: set[str] = set()
    rows = []
    for node in layers:
        parameters = [v for v in node.inputs if v is not None and v.name in {*roles.trainable, *roles.frozen}]
        new = [v for v in dict.fromkeys(parameters) if v.name not in owned]  # shared weights count once
        owned |= {v.name for v in new if v.name}
        maps = outputs_of(node, graph)
        rows.append(
            Layer(
                name=label(node),
                op=node.op_type,
                output_shape=tuple(shape(maps[0])) if maps else (),
                output_bytes=sum(size_in_bytes(v) for v in maps),
                parameters=sum(elements(v) for v in new),
                parameter_bytes=sum(size_in_bytes(v) for v in new),
                flops_forward=flops(node),
                flops_backward=backward.get(node, 0),
            )
        )
    inputs = {name: describe(graph.input(name)) for name in (*roles.data, *roles.labels)}
    return Inspection(graph.name, tuple(rows), inputs)


def outputs_of(node: ir.Node, graph: TrainingGraph) -> list[ir.Value]:
    """What the layer stores: its feature maps, or where it has none, what has an entry per image."""
    maps = [value for value, _ in node_maps(node, graph)[1]]
    batch = graph.batch
    rows = [batch, batch + sum(graph.shape_of(name)[0] for name in graph.roles.virtual)]
    return maps or [v for v in node.outputs if v.name and v.uses() and shape(v)[:1] in ([size] for size in rows)]


def backward_flops(nodes: Iterable[ir.Node], layers: list[ir.Node], trainable: set[str]) -> dict[ir.Node, int]:
    """The work of the backward nodes by the layer that each belongs to.

    The gradient of a pooling shares no operand with it; it is as much work as the pooling, where there is one.
    """
    trained = {v for layer in layers for v in layer.inputs if v is not None and v.name in trainable}
    found = {x: flops(x) for x in layers if core_of(x) in POOLS and reaches(x, trained)}
    for node in nodes:
        work = flops(node)
        if not work:
            continue
        operands = {v for v in node.inputs if v is not None}
        shared = {layer: len(operands & {v for v in layer.inputs if v is not None}) for layer in layers if flops(layer)}
        layer = max(shared, key=lambda x: shared[x], default=None)
        if layer is not None and shared[layer]:
            found[layer] = found.get(layer, 0) + work
    return found


def reaches(node: ir.Node, values: set[ir.Value]) -> bool:
    """Whether the node depends on one of the values."""
    return any(v in values for n in ancestors(node.outputs) for v in n.inputs)


def flops(node: ir.Node) -> int:
    """Multiply-adds times two of a convolution, its gradients or a matrix product; an operation per element of each
    window of a pooling; 0 for anything else.
    """
    core = core_of(node)
    if core == "Conv":
        return conv_flops(node.outputs[0], weight_of(node))
    if core in CONV_GRADS:
        results = results_of(node)
        return conv_flops(operand(node, "dy", 0), weight_of(node)) * results
    if core in ("MaxPool", "AveragePool"):
        return math.prod(shape(node.outputs[0])) * math.prod(node.attributes["kernel_shape"].as_ints())
    if core == "GlobalAveragePool":
        return math.prod(shape(operand(node, "x", 0)))
    if core == "Gemm":
        a, transposed = shape(node.inputs[0]), bool(integer(node, "transA"))
        return 2 * math.prod(shape(node.outputs[0])) * a[0 if transposed else 1]
    if core == "MatMul":
        return 2 * math.prod(shape(node.outputs[0])) * shape(node.inputs[0])[-1]
    return 0


def core_of(node: ir.Node) -> str:
    spec = spec_of(node)
    return spec.core if spec else node.op_type


def spec_of(node: ir.Node) -> OpSpec | None:
    return parse(node.op_type) if node.domain == DOMAIN else None


def operand(node: ir.Node, name: str, position: int) -> ir.Value | None:
    """An input by its name in the grammar, or by its position in a source operator."""
    spec = spec_of(node)
    return node.inputs[spec.operands.index(name) if spec else position]


def weight_of(node: ir.Node) -> ir.Value | None:
    return operand(node, "weight", 2 if core_of(node) in CONV_GRADS else 1)


def results_of(node: ir.Node) -> int:
    """How many of input and weight gradient a convolution's gradient computes."""
    spec = spec_of(node)
    if spec:
        return len({"dx", "dweight"} & {*spec.results})
    return sum(bool(value.name) for value in node.outputs[:2])


def conv_flops(output: ir.Value | None, weight: ir.Value | None) -> int:
    """2 x output elements x weight elements per output channel: the same for the forward and each gradient."""
    if output is None or weight is None:
        return 0
    w = shape(weight)
    dims = shape(output)
    pixels = math.prod((dims[0], *dims[2:]))
    return 2 * pixels * math.prod(w)


def shape(value: ir.Value | None) -> list[Any]:
    if value is None or value.shape is None:
        return []
    return [d if isinstance(d, int) else str(d) for d in value.shape]


def elements(value: ir.Value) -> int:
    dims = shape(value)
    return math.prod(dims) if all(isinstance(d, int) for d in dims) else 0


def size_in_bytes(value: ir.Value) -> int:
    return elements(value) * (value.dtype or ir.DataType.FLOAT).bitwidth // 8


def integer(node: ir.Node, name: str) -> int:
    attr = node.attributes.get(name)
    return attr.as_int() if attr is not None else 0


def describe(value: ir.Value) -> str:
    return f"{(value.dtype or ir.DataType.FLOAT).name.lower()}[{', '.join(map(str, shape(value)))}]"
