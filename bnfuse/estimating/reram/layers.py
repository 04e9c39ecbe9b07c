"""A network as [Joardar22]'s pipeline sees it: matrices for the ReRAM tiles and BatchNorms for the GPU tiles."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import onnx_graphsurgeon as gs
import onnx_ir as ir

from bnfuse.analysis.ancestors import forward_nodes
from bnfuse.core.errors import BnfuseError, at_node
from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.graph.values import static_shape
from bnfuse.opset.spec import DOMAIN, find, is_unfused
from bnfuse.passes.dialect.source_ops import BATCH_NORM
from bnfuse.passes.removal.placements import Selection, select

MATRICES = ("Conv", "Gemm", "MatMul")


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A Conv or FC layer, by what one image needs of it.

    Forward `vectors` of `rows` numbers each go through `groups` matrices of rows x columns; backward `error_vectors` of
    `error_rows` go through matrices with `error_columns` columns. `inputs` and `outputs` are the elements of its maps.
    """

    name: str
    kind: str  # Conv or FC
    groups: int
    rows: int
    columns: int
    vectors: int
    error_rows: int
    error_columns: int
    error_vectors: int
    inputs: int
    outputs: int

    @property
    def weights(self) -> int:
        """How many weights it has."""
        return self.groups * self.rows * self.columns

    @property
    def flops(self) -> int:
        """Of an image, forward; each gradient has as many."""
        return 2 * self.vectors * self.weights


@dataclasses.dataclass(frozen=True)
class Norm:
    """A BatchNorm: `elements` of the map of one image."""

    name: str
    channels: int
    elements: int


@dataclasses.dataclass(frozen=True)
class Network:
    """Layers in forward order."""

    name: str
    layers: tuple[Matrix | Norm, ...]

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The layers that crossbars hold."""
        return tuple(x for x in self.layers if isinstance(x, Matrix))

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The BatchNorms."""
        return tuple(x for x in self.layers if isinstance(x, Norm))


def network_of(source: gs.Graph | TrainingGraph, remove: Selection | None = None) -> Network:
    """Give the layers of a forward graph of the zoo, or of a source training graph.

    `remove` takes BatchNorms out, as `bnfuse rewrite --remove` does.
    """
    model = source.model if isinstance(source, TrainingGraph) else skeleton(source)
    forward = (
        forward_nodes(source.model.graph, source.signature) if isinstance(source, TrainingGraph) else set(model.graph)
    )
    gone = {norm.node for norm in select(model, remove)} if remove is not None else set()
    layers: list[Matrix | Norm] = []
    for node in model.graph:
        op = find(node.op_type) if node.domain == DOMAIN else None
        if op is not None and not is_unfused(op):
            name, what = node.name or "", "is fused: the pipeline runs BatchNorms apart. Give it the source graph."
            raise at_node(name, node.op_type, what)
        if node.op_type in (*MATRICES, BATCH_NORM) and node in forward and _has_weight(node) and node.name not in gone:
            layers.append(_layer(node))
    name = source.name or "network"
    if not any(isinstance(x, Matrix) for x in layers):
        raise BnfuseError(f"{name}: has no convolution and no matrix product for the ReRAM tiles")
    return Network(name, tuple(layers))


def skeleton(graph: gs.Graph) -> ir.Model:
    """Copy nodes, shapes and attributes of a forward graph, its BatchNorms named as in a training graph; no values."""
    values: dict[str, ir.Value] = {}

    def value(tensor: Any) -> ir.Value:
        if tensor.name not in values:
            values[tensor.name] = ir.Value(name=tensor.name, shape=ir.Shape(list(tensor.shape or [])))
        return values[tensor.name]

    nodes = []
    for node in graph.nodes:
        attributes = {k: v for k, v in node.attrs.items() if k in ("group", "transA", "transB")}
        inputs, outputs = [value(t) for t in node.inputs], [value(t) for t in node.outputs]
        domain, op = (DOMAIN, BATCH_NORM) if node.op == "BatchNormalization" else ("", node.op)
        nodes.append(
            ir.Node(domain, op, inputs, ir.convenience.convert_attributes(attributes), outputs=outputs, name=node.name)
        )
    inputs = [value(t) for t in graph.inputs]
    return ir.Model(
        ir.Graph(inputs, [value(t) for t in graph.outputs], nodes=nodes, name=graph.name, opset_imports={"": 17}),
        ir_version=8,
    )


def _has_weight(node: ir.Node) -> bool:
    """Tell whether it is a layer: a product of two maps, as in attention, has no weights that crossbars could hold."""
    return node.op_type == BATCH_NORM or (node.inputs[1] is not None and node.inputs[1].producer() is None)


def _layer(node: ir.Node) -> Matrix | Norm:
    x, y = _shape(node, node.inputs[0]), _shape(node, node.outputs[0])
    if node.op_type == BATCH_NORM:
        return Norm(node.name or "", x[1], math.prod(x[1:]))
    w = _shape(node, node.inputs[1])
    if node.op_type == "Conv":
        groups = node.attributes.get_int("group", 1)
        kernel, pixels, error_pixels = math.prod(w[2:]), math.prod(y[2:]), math.prod(x[2:])
        outputs = w[0] // groups
        shape = (groups, w[1] * kernel, outputs, pixels, outputs * kernel, w[1], error_pixels)
    else:
        transposed = bool(node.attributes.get_int("transB", 0))
        rows, columns = (w[1], w[0]) if transposed else (w[0], w[1])
        vectors = math.prod(y[1:-1])
        shape = (1, rows, columns, vectors, columns, rows, vectors)
    kind = "Conv" if node.op_type == "Conv" else "FC"
    return Matrix(node.name or "", kind, *shape, inputs=math.prod(x[1:]), outputs=math.prod(y[1:]))


def _shape(node: ir.Node, value: ir.Value | None) -> list[int]:
    dims = list(static_shape(value) or ()) if value is not None else []
    if not dims:
        raise at_node(node.name or "", node.op_type, "has a map of no fixed shape. Build with --batch.")
    return dims
