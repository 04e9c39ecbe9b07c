"""Bodies of the operators of sampled, local and baseline statistics ([Chen18]), a part of `functions.py`.

Where a sample begins is data, so a box is a Slice from its offset on, and what is added in it is padded to the map's
size; points are a Gather of rows [C] and a ScatterND. Groups of samples are a first axis more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from bnfuse.opset.body import Body
from bnfuse.opset.functions_whole import running, unbiased

FLOAT = int(ir.DataType.FLOAT)
MAP = (0, 2, 3)  # N, H, W
GROUP = (1, 3, 4)  # samples, H, W of [G, samples, C, H, W]


def moments(x: ir.Value, axes: Sequence[int], body: Body) -> tuple[ir.Value, ir.Value]:
    """Mean and biased variance over the axes, in two passes; a result has the other axes."""
    total = body("ReduceSum", x, body.constant(axes), keepdims=1)
    count = body("Cast", body("Div", body("Size", x), body("Size", total)), to=FLOAT)
    mean = body("Div", total, count)
    centred = body("Sub", x, mean)
    variance = body("Div", body("ReduceSum", body("Mul", centred, centred), body.constant(axes), keepdims=0), count)
    flat = body("Div", body("ReduceSum", x, body.constant(axes), keepdims=0), count)
    return flat, variance


def mean_of(x: ir.Value, body: Body) -> ir.Value:
    """Give the mean over N, H, W, as [C]."""
    total = body.sum(x)
    count = body("Cast", body("Div", body("Size", x), body("Size", total)), to=FLOAT)
    return body("Div", total, count)


def exact(value: float, body: Body) -> ir.Value:
    """Give a constant to the last digit of whatever the floats of the graph are: it is cast from a double."""
    double = body("Constant", value=ir.AttrTensor("value", ir.tensor(np.array(value, np.float64))))
    return body("Cast", double, to=FLOAT)


def number(name: str, body: Body) -> ir.Value:
    """Give an integer attribute as a float."""
    return body("Cast", body.attribute(name), to=FLOAT)


def affine(q: ir.Value, x: ir.Value, w: ir.Value, body: Body) -> ir.Value:
    """Write q*x + w, coefficients [C]."""
    return body("Add", body("Mul", q, x), w)


# Samples: a box, or points


def _in_box(body: Body) -> ir.Value:
    offset = body["offset"]
    stop = body("Add", offset, body.attribute("extent"))
    return body("Slice", body["x"], offset, stop, body.constant(MAP))


def _sampled_statistics(body: Body) -> tuple[ir.Value, ...]:
    return moments(_in_box(body), MAP, body)


def _add_sampled(body: Body) -> tuple[ir.Value, ...]:
    added = affine(body.per_channel("q"), _in_box(body), body.per_channel("w"), body)
    sample, place = (body.slice(body["offset"], body.constant([i]), body.constant([j]), 0) for i, j in ((0, 1), (1, 3)))
    before = body("Concat", sample, body.constant([0]), place, axis=0)
    after = body("Sub", body("Sub", body("Shape", body["x"]), body("Shape", added)), before)
    padded = body("Pad", added, body("Concat", before, after, axis=0), body.constant(0.0))
    return (body("Add", body["acc"], padded),)


def _rows_of(name: str, body: Body) -> ir.Value:
    """Give a map as [N*H*W, C]."""
    last = body("Transpose", body[name], perm=ir.AttrInt64s("perm", [0, 2, 3, 1]))
    channels = body.slice(body("Shape", body[name]), body.constant([1]), body.constant([2]), 0)
    return body("Reshape", last, body("Concat", body.constant([-1]), channels, axis=0))


def _point_statistics(body: Body) -> tuple[ir.Value, ...]:
    return moments(body("Gather", _rows_of("x", body), body["points"], axis=0), (0,), body)


def _add_at_points(body: Body) -> tuple[ir.Value, ...]:
    """Each point occurs once, so the rows are replaced by their sums."""
    acc = _rows_of("acc", body)
    added = affine(body["q"], body("Gather", _rows_of("x", body), body["points"], axis=0), body["w"], body)
    rows = body("Add", body("Gather", acc, body["points"], axis=0), added)
    where = body("Reshape", body["points"], body.constant([-1, 1]))
    shape = body("Shape", body("Transpose", body["acc"], perm=ir.AttrInt64s("perm", [0, 2, 3, 1])))
    last = body("Reshape", body("ScatterND", acc, where, rows), shape)
    return (body("Transpose", last, perm=ir.AttrInt64s("perm", [0, 3, 1, 2])),)


def _mix(body: Body) -> tuple[ir.Value, ...]:
    weight = body.attribute("weight")
    rest = body("Sub", body.constant(1.0), weight)
    return tuple(
        body("Add", body("Mul", weight, body[name]), body("Mul", rest, body[f"{name}_2"]))
        for name in ("mean", "variance")
    )


def _sampled_grad_finalize(body: Body) -> tuple[ir.Value, ...]:
    share = body("Neg", body("Div", body.attribute("weight"), number("count", body)))
    q = body("Mul", share, body["gamma_term"])
    return q, body("Sub", body("Mul", share, body["beta_term"]), body("Mul", q, body["mean"]))


# Groups of consecutive samples


def _grouped(name: str, body: Body) -> ir.Value:
    """[N, C, H, W] as [N/samples, samples, C, H, W]."""
    rest = body.slice(body("Shape", body[name]), body.constant([1]), body.constant([4]), 0)
    return body("Reshape", body[name], body("Concat", body.constant([-1]), body.attribute("samples"), rest, axis=0))


def _of_group(name: str, body: Body) -> ir.Value:
    """[G, C] as [G, 1, C, 1, 1]."""
    return body("Unsqueeze", body[name], body.constant([1, 3, 4]))


def _sampled_rows(body: Body) -> ir.Value:
    first = body.attribute("first")
    return body.slice(_grouped("x", body), first, body("Add", first, body.attribute("rows")), 1)


def _like(name: str, value: ir.Value, body: Body) -> ir.Value:
    return body("Reshape", value, body("Shape", body[name]))


def _local_statistics(body: Body) -> tuple[ir.Value, ...]:
    return moments(_sampled_rows(body), GROUP, body)


def _local_finalize(body: Body) -> tuple[ir.Value, ...]:
    inv_std = body.power(body("Add", body["variance"], body.attribute("epsilon")), -0.5)
    a = body("Mul", body["scale"], inv_std)
    b = body("Sub", body["bias"], body("Mul", body["mean"], a))
    estimate = unbiased(_over_groups("variance", body), body.attribute("elements"), body)
    new = (running("mean", _over_groups("mean", body), body), running("variance", estimate, body))
    return a, b, inv_std, *new


def _over_groups(name: str, body: Body) -> ir.Value:
    """Give the mean over the groups, [C], of an operand [G, C]."""
    total = body("ReduceSum", body[name], body.constant([0]), keepdims=0)
    groups = body("Cast", body("Div", body("Size", body[name]), body("Size", total)), to=FLOAT)
    return body("Div", total, groups)


def _local_normalize(body: Body) -> tuple[ir.Value, ...]:
    y = affine(_of_group("a", body), _grouped("x", body), _of_group("b", body), body)
    return (_like("x", y, body),)


def _local_grad_reduce(body: Body) -> tuple[ir.Value, ...]:
    dz = _grouped("dz", body)
    centred = body("Sub", _grouped("x", body), _of_group("mean", body))
    normalised = body("Mul", centred, _of_group("inv_std", body))
    axes = body.constant(GROUP)
    return (
        body("ReduceSum", dz, axes, keepdims=0),
        body("ReduceSum", body("Mul", dz, normalised), axes, keepdims=0),
    )


def _local_scale(body: Body) -> tuple[ir.Value, ...]:
    return (_like("dz", body("Mul", _of_group("p", body), _grouped("dz", body)), body),)


def _local_add_sampled(body: Body) -> tuple[ir.Value, ...]:
    added = affine(_of_group("q", body), _sampled_rows(body), _of_group("w", body), body)
    first = body.attribute("first")
    after = body("Sub", body("Sub", body.attribute("samples"), body.attribute("rows")), first)
    one, three = body.constant([0]), body.constant([0, 0, 0])
    pads = body("Concat", one, first, three, one, after, three, axis=0)
    padded = body("Pad", added, pads, body.constant(0.0))
    return (_like("acc", body("Add", _grouped("acc", body), padded), body),)


# L1BN and RBN


def _l1_statistics(body: Body) -> tuple[ir.Value, ...]:
    mean = mean_of(body["x"], body)
    centred = body("Sub", body["x"], body("Reshape", mean, body.constant([1, -1, 1, 1])))
    deviation = mean_of(body("Abs", centred), body)
    variance = body("Mul", exact(math.pi / 2, body), body("Mul", deviation, deviation))
    return mean, variance, mean_of(body("Sign", centred), body)


def _l1_grad_finalize(body: Body) -> tuple[ir.Value, ...]:
    count = body("Neg", number("count", body))
    slope = body.power(body("Mul", exact(math.pi / 2, body), body["variance"]), 0.5)
    q = body("Div", body("Mul", body["gamma_term"], slope), count)
    return q, body("Sub", body("Div", body["beta_term"], count), body("Mul", q, body["sign_mean"]))


def _l1_grad_input(body: Body) -> tuple[ir.Value, ...]:
    sign = body("Sign", body("Sub", body["x"], body.per_channel("mean")))
    scaled = body("Mul", body.per_channel("p"), body["dz"])
    return (body("Add", scaled, affine(body.per_channel("q"), sign, body.per_channel("w"), body)),)


def _squared_factor(count: ir.Value, body: Body) -> ir.Value:
    """c^2 = 1/(8*ln(count)), and 0 where count is 1."""
    found = body("Log", count)
    inverse = body("Div", body.constant(0.125), found)
    return body("Where", body("Greater", found, body.constant(0.0)), inverse, body.constant(0.0))


def _highest(x: ir.Value, body: Body) -> ir.Value:
    """Give the maximum over N, H, W, as [1, C, 1, 1]. (ReduceMax has its axes in another place from opset 18 on.)"""
    of_sample = body("GlobalMaxPool", x)
    return body("GlobalMaxPool", body("Transpose", of_sample, perm=ir.AttrInt64s("perm", [2, 1, 0, 3])))


def _range_statistics(body: Body) -> tuple[ir.Value, ...]:
    x = body["x"]
    high, low = _highest(x, body), body("Neg", _highest(body("Neg", x), body))
    count = body("Cast", body("Div", body("Size", x), body("Size", high)), to=FLOAT)
    counts = tuple(body.sum(body("Cast", body("Equal", x, extreme), to=FLOAT)) for extreme in (low, high))
    low, high = (body("Reshape", extreme, body.constant([-1])) for extreme in (low, high))
    between = body("Sub", high, low)
    variance = body("Mul", body("Mul", between, between), _squared_factor(count, body))
    return mean_of(x, body), variance, low, high, *counts


def _range_grad_finalize(body: Body) -> tuple[ir.Value, ...]:
    count = number("count", body)
    between = body("Sub", body["high"], body["low"])
    share = body("Mul", body("Mul", body["gamma_term"], _squared_factor(count, body)), between)
    q_high = body("Neg", body("Div", share, body["high_count"]))
    return body("Div", share, body["low_count"]), q_high, body("Neg", body("Div", body["beta_term"], count))


def _range_grad_input(body: Body) -> tuple[ir.Value, ...]:
    dx = affine(body.per_channel("p"), body["dz"], body.per_channel("w"), body)
    for name in ("low", "high"):
        attained = body("Cast", body("Equal", body["x"], body.per_channel(name)), to=FLOAT)
        dx = body("Add", dx, body("Mul", body.per_channel(f"q_{name}"), attained))
    return (dx,)


SAMPLING: dict[str, Callable[[Body], tuple[ir.Value, ...]]] = {
    "SampledStatistics": _sampled_statistics,
    "PointStatistics": _point_statistics,
    "MixStatistics": _mix,
    "SampledGradFinalize": _sampled_grad_finalize,
    "AddSampled": _add_sampled,
    "AddAtPoints": _add_at_points,
    "LocalStatistics": _local_statistics,
    "LocalFinalize": _local_finalize,
    "LocalNormalize": _local_normalize,
    "LocalGradReduce": _local_grad_reduce,
    "LocalScale": _local_scale,
    "LocalAddSampled": _local_add_sampled,
    "L1Statistics": _l1_statistics,
    "L1GradFinalize": _l1_grad_finalize,
    "L1GradInput": _l1_grad_input,
    "RangeStatistics": _range_statistics,
    "RangeGradFinalize": _range_grad_finalize,
    "RangeGradInput": _range_grad_input,
}
