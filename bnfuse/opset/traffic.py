"""The bytes of feature maps that one node reads and writes, at the ranges that it really touches.

A feature map is a tensor of rank 4 or more that is not a weight. Weights are told by where they stand: the weight
operand of a convolution, the weight gradient of its gradient, and every initializer. Where `batch` is given, a map
also has that first dimension, which leaves out what is made of weight gradients (the Sum over a shared weight).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import onnx_ir as ir

from bnfuse.opset.plain import PlainOp
from bnfuse.opset.spec import DOMAIN, READ_X, OpSpec, find, is_like_x

Shape = tuple[int, ...]
Touched = list[tuple[ir.Value, int]]

WEIGHT_INPUTS = {"Conv": (1,), "ConvTranspose": (1,)}
SHAPE_READERS = ("Shape", "Size")  # they read no element
RESHAPES = ("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze")  # the same bytes under another shape


def maps_touched(
    node: ir.Node, shape_of: Callable[[ir.Value], Shape | None], *, batch: int | None = None
) -> tuple[Touched, Touched]:
    """(read, written): each feature map at each operand and result of the node, with the bytes touched.

    A map that is read at two inputs is listed twice, but for those that an operator of steps reads element by element
    with its x: a skip of which sums are taken on the way out is at hand there, as x itself is. A tensor of unknown
    shape, and a result without a name (it is not computed), are not listed.
    """
    op = find(node.op_type) if node.domain == DOMAIN else None
    operands, results = _own_values(node, op) if op else _values(node)

    def measured(values: Iterable[tuple[str, ir.Value]]) -> Touched:
        touched = []
        for name, value in values:
            shape = shape_of(value)
            if shape is not None and len(shape) >= 4 and batch in (None, shape[0]):
                touched.append((value, _bytes(value, touched_shape(op, name, shape, node))))
        return touched

    return measured(operands), measured(results)


def reads_elements_of_x(op: OpSpec) -> bool:
    """Whether a gradient reads x itself, and not its shape alone."""
    if not op.is_gradient or op.weighs:
        return True
    return bool({*READ_X} & {*op.epilogue})


def _own_values(node: ir.Node, op: OpSpec | PlainOp) -> tuple[list[tuple[str, ir.Value]], list[tuple[str, ir.Value]]]:
    shape_only = isinstance(op, OpSpec) and not reads_elements_of_x(op)
    unread = {"weight", "x"} if shape_only else {"weight"}
    operands = _once([each for each in _named(op.operands, node.inputs) if each[0] not in unread])
    return operands, [(name, value) for name, value in _named(op.results, node.outputs) if name != "dweight"]


def _once(operands: list[tuple[str, ir.Value]]) -> list[tuple[str, ir.Value]]:
    """Leave out what is read again with x: under another name, in the same place."""
    first: dict[ir.Value, str] = {}
    for name, value in operands:
        if is_like_x(name):
            first.setdefault(value, name)
    return [(name, value) for name, value in operands if name == first.get(value, name) or not is_like_x(name)]


def _values(node: ir.Node) -> tuple[list[tuple[str, ir.Value]], list[tuple[str, ir.Value]]]:
    if node.op_type in SHAPE_READERS:
        return [], []
    weights = WEIGHT_INPUTS.get(node.op_type, ())
    operands = [value for place, value in enumerate(node.inputs) if place not in weights]
    return list(_named([""] * len(operands), operands)), list(_named([""] * len(node.outputs), node.outputs))


def _named(names: Iterable[str], values: Iterable[ir.Value | None]) -> Iterator[tuple[str, ir.Value]]:
    """Values that are there and no initializers, with their names in the spec."""
    for name, value in zip(names, values, strict=False):
        if value is not None and value.name and not value.is_initializer():
            yield name, value


def touched_shape(op: OpSpec | PlainOp | None, name: str, shape: Shape, node: ir.Node) -> Shape:
    """Slice and Accumulate read a range of the channels of dy and acc; a sample is read and added to on its own."""
    if isinstance(op, PlainOp):
        return _sample(op, name, shape, node)
    if bounds := channels_touched(op, name, node):
        return (shape[0], bounds[1] - bounds[0], *shape[2:])
    return shape


def channels_touched(op: OpSpec | PlainOp | None, name: str, node: ir.Node) -> tuple[int, int] | None:
    """Give the range of channels that a step of a composed operator reads of an operand; None for all of them."""
    steps = (*op.prologue, *op.epilogue) if isinstance(op, OpSpec) else ()
    for operand, step, bounds in (
        ("dy", "Slice", ("grad_start", "grad_stop")),
        ("acc", "Accumulate", ("acc_start", "acc_stop")),
    ):
        if name == operand and step in steps:
            start, stop = (node.attributes[bound].as_int() for bound in bounds)
            return start, stop
    return None


def _sample(op: PlainOp, name: str, shape: Shape, node: ir.Node) -> Shape:
    """Tell what operators of a sample touch of a map: dx is acc, changed in place."""
    if op.name in ("SampledStatistics", "AddSampled"):
        samples, height, width = node.attributes["extent"].as_ints()
        return (samples, shape[1], height, width)
    if op.name in ("PointStatistics", "AddAtPoints"):
        points = node.inputs[op.operands.index("points")]
        count = points.shape[0] if points is not None and points.shape is not None else None
        return (count, shape[1], 1, 1) if isinstance(count, int) else shape
    if op.name in ("LocalStatistics", "LocalAddSampled"):
        rows, samples = (node.attributes[key].as_int() for key in ("rows", "samples"))
        return (shape[0] // samples * rows, *shape[1:])
    return shape


def _bytes(value: ir.Value, shape: Shape) -> int:
    return math.prod(shape) * (value.dtype or ir.DataType.FLOAT).bitwidth // 8
