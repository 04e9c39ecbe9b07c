"""Sums, means, extremes and norms over axes, and the softmaxes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from bnfuse.autodiff.emitter import Gradient
from bnfuse.autodiff.rules import Contributions, rule


def axes_of(g: Gradient) -> list[int]:
    """Give the axes that a reduction takes away: all where it names none, or none where noop_with_empty_axes is set."""
    rank, operand = g.rank(g.x), g.optional(1)
    if operand is None or g.shape(operand) == (0,):
        return [] if g.attribute("noop_with_empty_axes", 0) else list(range(rank))
    return sorted(int(axis) % rank for axis in g.constant(1, "axes").reshape(-1))


def kept(g: Gradient, value: ir.Value, axes: Sequence[int]) -> ir.Value:
    """Give a value of the result's shape with the reduced axes kept, as 1."""
    if g.attribute("keepdims", 1) or not axes:
        return value
    return g.reshape(value, [1 if axis in axes else size for axis, size in enumerate(g.shape(g.x))])


def spread(g: Gradient, value: ir.Value, axes: Sequence[int]) -> ir.Value:
    """Broadcast a value that has the reduced axes as 1 to the operand's shape."""
    shape = g.shape(g.x)
    return value if all(shape[axis] == 1 for axis in axes) else g.expand(value, shape)


@rule("ReduceSum")
def reduce_sum(g: Gradient) -> Contributions:
    """Pass the gradient on to all that was summed."""
    axes = axes_of(g)
    return [spread(g, kept(g, g.dy, axes), axes)]


@rule("ReduceMean")
def reduce_mean(g: Gradient) -> Contributions:
    """Pass equal shares on. How many they are is counted in the graph where the batch is among them."""
    axes = axes_of(g)
    number = math.prod(g.shape(g.x)[axis] for axis in axes)
    if number == 1:
        return [spread(g, kept(g, g.dy, axes), axes)]
    count = g.count(g.x, g.y) if 0 in axes else g.number(number, g.dy)
    return [spread(g, kept(g, g.div(g.dy, count), axes), axes)]


@rule("ReduceMax", "ReduceMin")
def reduce_extreme(g: Gradient) -> Contributions:
    """Share the gradient evenly among what attains the extreme, as torch's amax does."""
    axes = axes_of(g)
    hits = g.op("Cast", g.op("Equal", g.x, kept(g, g.y, axes)), to=int(g.dtype(g.x)))
    share = g.div(kept(g, g.dy, axes), g.sum(hits, axes, keepdims=True))
    return [g.mul(share, hits)]


@rule("ReduceProd")
def reduce_product(g: Gradient) -> Contributions:
    """Dy times the product of the other elements: that of those that are not 0, by x, where no other element is 0."""
    axes, zero, one = axes_of(g), g.number(0.0, g.x), g.number(1.0, g.x)
    is_zero = g.op("Equal", g.x, zero)
    own = g.op("Cast", is_zero, to=int(g.dtype(g.x)))
    other_zeros = g.sub(g.sum(own, axes, keepdims=True), own)
    factors = g.where(is_zero, one, g.x)
    product = g.op("ReduceProd", factors, g.ints(axes), keepdims=1) if axes else factors
    share = g.div(g.mul(kept(g, g.dy, axes), product), factors)
    return [g.where(g.op("Equal", other_zeros, zero), share, zero)]


@rule("ReduceSumSquare")
def reduce_sum_square(g: Gradient) -> Contributions:
    """2*x*dy."""
    return [g.mul(g.mul(g.x, g.number(2.0, g.x)), kept(g, g.dy, axes_of(g)))]


@rule("ReduceL1")
def reduce_l1(g: Gradient) -> Contributions:
    """Dy with the sign of x."""
    return [g.mul(g.op("Sign", g.x), kept(g, g.dy, axes_of(g)))]


@rule("ReduceL2")
def reduce_l2(g: Gradient) -> Contributions:
    """x*dy/y, and 0 where y is."""
    axes = axes_of(g)
    y = kept(g, g.y, axes)
    zero = g.number(0.0, y)
    none = g.op("Equal", y, zero)
    share = g.div(kept(g, g.dy, axes), g.where(none, g.number(1.0, y), y))
    return [g.mul(g.x, g.where(none, zero, share))]


@rule("ReduceLogSum")
def reduce_log_sum(g: Gradient) -> Contributions:
    """dy/exp(y)."""
    axes = axes_of(g)
    share = g.div(g.dy, g.op("Exp", g.y))
    return [spread(g, kept(g, share, axes), axes)]


@rule("ReduceLogSumExp")
def reduce_log_sum_exp(g: Gradient) -> Contributions:
    """dy*exp(x - y)."""
    axes = axes_of(g)
    return [g.mul(kept(g, g.dy, axes), g.op("Exp", g.sub(g.x, kept(g, g.y, axes))))]


@rule("Softmax")
def softmax(g: Gradient) -> Contributions:
    """y*(dy - sum of y*dy)."""
    weighed = g.mul(g.y, g.dy)
    total = g.sum(weighed, [g.attribute("axis", -1) % g.rank(g.x)], keepdims=True)
    return [g.sub(weighed, g.mul(g.y, total))]


@rule("LogSoftmax")
def log_softmax(g: Gradient) -> Contributions:
    """Dy - exp(y)*(sum of dy)."""
    total = g.sum(g.dy, [g.attribute("axis", -1) % g.rank(g.x)], keepdims=True)
    return [g.sub(g.dy, g.mul(g.op("Exp", g.y), total))]


@rule("CumSum")
def cumulative_sum(g: Gradient) -> Contributions:
    """Sum up from the other end."""
    reverse = 1 - g.attribute("reverse", 0)
    return [g.op("CumSum", g.dy, g.operand(1), reverse=reverse, exclusive=g.attribute("exclusive", 0))]
