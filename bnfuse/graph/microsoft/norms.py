"""BatchNorms and their gradients, and the gradient of a LayerNormalization."""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.graph.microsoft.source import Dims, Source
from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.opset.training_ops import BATCH_NORM_DEFAULTS


def batch_norm(source: Source) -> None:
    """BatchNormInternal(x, scale, bias, running mean and variance): our BatchNorm, with all of its results."""
    op = PLAIN_OPS["BatchNorm"]
    values = [source.operand(place) for place in range(5)]
    source.require_float32(*values)
    operands = dict(zip(op.operands, values, strict=True))
    per_channel = None if values[1].shape is None else source.dims(values[1])
    shapes: dict[str, Dims | None] = dict.fromkeys(op.results, per_channel)
    shapes["y"] = None if values[0].shape is None else source.dims(values[0])
    attributes = {name: float(source.attribute(name, default)) for name, default in BATCH_NORM_DEFAULTS.items()}
    made = source.own(op, operands, shapes, attributes)
    for place, name in enumerate(op.results):
        source.give(place, made[name])


def batch_norm_grad(source: Source) -> None:
    """BatchNormalizationGrad(dy, x, scale, mean, inv_std): our BatchNormGrad."""
    op = PLAIN_OPS["BatchNormGrad"]
    values = [source.operand(place) for place in range(5)]
    source.require_float32(*values)
    operands = dict(zip(op.operands, values, strict=True))
    x, scale = (None if value.shape is None else source.dims(value) for value in values[1:3])
    made = source.own(op, operands, {"dx": x, "dscale": scale, "dbias": scale})
    for place, name in enumerate(op.results):
        source.give(place, made[name])


def layer_norm_grad(source: Source) -> None:
    """LayerNormalizationGrad(dy, x, scale, mean, inv_std): dx = inv_std*(g - mean of g - x_hat * mean of g*x_hat),
    g = dy*scale; mean and inv_std are of the axes from `axis` on."""
    dy, x, scale, mean, inv_std = (source.operand(place) for place in range(5))
    shape = source.sizes(x)
    axis = int(source.attribute("axis", -1)) % len(shape)
    inner, outer = range(axis, len(shape)), range(axis)
    row = [*shape[:axis], *(1 for _ in inner)]
    mean, inv_std = (_shaped(source, value, row) for value in (mean, inv_std))
    x_hat = source.calculate("Mul", source.calculate("Sub", x, mean), inv_std)
    weighted = source.calculate("Mul", dy, x_hat)
    if source.result(1) is not None:
        source.give(1, _parameter(source, weighted, outer, scale))
    if source.result(2) is not None:
        source.give(2, _parameter(source, dy, outer, scale))
    if source.result(0) is None:
        return
    count = source.number(float(_product(shape[axis:])), x, "count")
    g = source.calculate("Mul", dy, scale)
    along = source.sum(source.calculate("Mul", g, x_hat), inner, keepdims=True)
    rest = source.calculate("Mul", x_hat, source.calculate("Div", along, count))
    centred = source.calculate("Sub", g, source.calculate("Div", source.sum(g, inner, keepdims=True), count))
    source.give(0, source.calculate("Mul", source.calculate("Sub", centred, rest), inv_std))


def _shaped(source: Source, value: ir.Value, shape: list[int]) -> ir.Value:
    if value.shape is not None and source.dims(value) == shape:
        return value
    return source.op("Reshape", value, source.ints(shape, "row"), shape=shape)


def _parameter(source: Source, value: ir.Value, axes: range, like: ir.Value) -> ir.Value:
    """Sum over the rows, for a parameter."""
    wanted = source.sizes(like)
    summed = source.sum(value, axes)
    if source.sizes(summed) == wanted and summed is not value:
        return summed
    return source.op("Reshape", summed, source.ints(wanted, "shape"), shape=wanted)


def _product(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


CONVERSIONS = {
    "BatchNormInternal": batch_norm,
    "BatchNormalizationGrad": batch_norm_grad,
    "LayerNormalizationGrad": layer_norm_grad,
}
