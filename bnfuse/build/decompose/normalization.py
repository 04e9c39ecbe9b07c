"""Normalisations, by what they are made of.

    GroupNormalization       of maps: GroupNorm of ours, whose halves the passes fuse; of another rank by
                             ReduceMean, averaged over the channels of a group and spread over them again
    InstanceNormalization    the same of one channel a group
    torch's GroupNorm        Reshape -> InstanceNormalization -> Reshape is read as the GroupNormalization that it is
    LayerNormalization       over the last axis our LayerNorm of rows, else ReduceMean over its axes
    RMSNormalization, MeanVarianceNormalization    ReduceMean over their axes
    LRN                      the mean of squares over neighbouring channels: AveragePool
    LpNormalization          ReduceSum over its axis

Maps stay maps: statistics are one number a sample and channel, [N, C, 1, ...].
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.opset.spec import DOMAIN

from .pixels import import_own
from .writer import Writer


def instance_normalization(write: Writer) -> None:
    """Write InstanceNormalization of any rank >= 3."""
    _by_groups(write, write.shape(write.node.input[0])[1])


def group_normalization(write: Writer) -> None:
    """Write GroupNormalization; its scale is one a group in opset 18 to 20, one a channel since."""
    _by_groups(write, int(write.given["num_groups"]))


def _by_groups(write: Writer, groups: int) -> None:
    """Write a GroupNorm of ours, or what it is made of."""
    shape, (scale, bias) = write.shape(write.node.input[0]), write.node.input[1:3]
    if len(shape) != 4:
        _written_out(write, groups)
        return
    operands = [scale, bias]
    if write.shape(scale) != [shape[1]]:  # one a group
        operands = [_by_channel(write, name, groups, shape[1]) for name in operands]
    epsilon = float(write.given.get("epsilon", 1e-5))
    write.own(PLAIN_OPS["GroupNorm"], [write.node.input[0], *operands], epsilon=epsilon, groups=groups)


def _by_channel(write: Writer, operand: str, groups: int, channels: int) -> str:
    """Give a parameter of each group as one of each channel."""
    column = write.add("Reshape", [operand, write.ints("column", [groups, 1])])
    spread = write.add("Expand", [column, write.ints("group", [groups, channels // groups])])
    return write.add("Reshape", [spread, write.ints("flat", [channels])])


def _written_out(write: Writer, groups: int) -> None:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias, over the channels of each group and all pixels of a
    sample. The scale meets the deviations, which are small, first."""
    x = write.node.input[0]
    shape = write.shape(x)
    rank, members = len(shape), [shape[0], groups, shape[1] // groups]

    def mean(value: str) -> str:
        if rank > 2:
            value = write.reduce("ReduceMean", value, range(2, rank))
        if groups == shape[1]:
            return value
        value = write.reduce("ReduceMean", write.add("Reshape", [value, write.ints("members", members)]), [2])
        value = write.add("Expand", [value, write.ints("members", members)])
        return write.add("Reshape", [value, write.ints("channels", [*shape[:2], *[1] * (rank - 2)])])

    def aligned(operand: str) -> str:
        if write.shape(operand)[0] != shape[1]:  # one a group
            operand = _by_channel(write, operand, groups, shape[1])
        return write.add("Reshape", [operand, write.ints("aligned", [shape[1], *[1] * (rank - 2)])])

    centred = write.add("Sub", [x, mean(x)])
    variance = mean(write.add("Mul", [centred, centred]))
    factor = _inverse_deviation(write, variance, float(write.given.get("epsilon", 1e-5)))
    scale, bias = write.node.input[1:3]
    if not write.is_all(scale, 1.0):
        factor = write.add("Mul", [factor, aligned(scale)])
    y = write.add("Mul", [centred, factor])
    write.give(y if write.is_all(bias, 0.0) else write.add("Add", [y, aligned(bias)]))


def _inverse_deviation(write: Writer, variance: str, epsilon: float) -> str:
    deviation = write.add("Sqrt", [write.add("Add", [variance, write.number("epsilon", epsilon)])])
    return write.add("Div", [write.number("one", 1.0), deviation])


def _affine(write: Writer, y: str, shape: list[int]) -> str:
    """Multiply by the second operand and add the third; a constant 1 or 0, as of affine=False, is left out."""
    for op, index, neutral in (("Mul", 1, 1.0), ("Add", 2, 0.0)):
        operand = write.operand(index)
        if operand and not write.is_all(operand, neutral):
            y = write.add(op, [y, write.reshape(operand, shape)])
    return y


def layer_normalization(write: Writer) -> None:
    """Write LayerNormalization over its last axes, with its mean and inverse deviation where they are read.

    Over the last one alone it is our LayerNorm of rows [M, C].
    """
    x = write.node.input[0]
    rank = len(write.shape(x))
    if _is_of_rows(write, x):
        _rows_norm(write, x)
        return
    axes = range(int(write.given.get("axis", -1)) % rank, rank)
    mean = write.reduce("ReduceMean", x, axes)
    centred = write.add("Sub", [x, mean])
    variance = write.reduce("ReduceMean", write.add("Mul", [centred, centred]), axes)
    inverse = _inverse_deviation(write, variance, float(write.given.get("epsilon", 1e-5)))
    write.give(_affine(write, write.add("Mul", [centred, inverse]), write.shape(write.node.input[1])))
    for index, name in ((1, mean), (2, inverse)):
        if write.has_result(index):
            write.give(name, index)


def _is_of_rows(write: Writer, x: str) -> bool:
    """Tell whether a LayerNormalization of what depends on the data is over the last axis, its statistics unread."""
    *rows, channels = write.shape(x)
    last = int(write.given.get("axis", -1)) in (-1, len(rows)) and bool(rows)
    whole = all(math.prod(write.shape(name)) == channels for name in write.node.input[1:] if name)
    return last and whole and x in write.around.from_data and not write.has_result(1) and not write.has_result(2)


def _rows_norm(write: Writer, x: str) -> None:
    """Write a LayerNormalization over the last axis as our LayerNorm of rows."""
    import_own(write.forward)
    shape, channels = write.shape(x), write.shape(x)[-1]
    scale, bias = write.operand(1), write.operand(2)
    bias = write.reshape(bias, [channels]) if bias else write.constant("bias", np.zeros(channels, np.float32))
    operands = [x if len(shape) == 2 else write.add("Reshape", [x, write.ints("rows", [-1, channels])])]
    operands += [write.reshape(scale, [channels]), bias]
    epsilon = float(write.given.get("epsilon", 1e-5))
    y, *_ = write.several("LayerNorm", operands, 3, domain=DOMAIN, epsilon=epsilon)
    write.give(y if len(shape) == 2 else write.add("Reshape", [y, write.ints("shape", [-1, *shape[1:]])]))


def rms_normalization(write: Writer) -> None:
    """Write RMSNormalization (opset 23) over its last axes."""
    x = write.node.input[0]
    rank = len(write.shape(x))
    axes = range(int(write.given.get("axis", -1)) % rank, rank)
    mean = write.reduce("ReduceMean", write.add("Mul", [x, x]), axes)
    y = write.add("Mul", [x, _inverse_deviation(write, mean, float(write.given.get("epsilon", 1e-5)))])
    write.give(_affine(write, y, write.shape(write.node.input[1])))


def mean_variance_normalization(write: Writer) -> None:
    """Write MeanVarianceNormalization: (x - mean) / (deviation + 1e-9)."""
    x = write.node.input[0]
    axes = [axis % len(write.shape(x)) for axis in write.given.get("axes", [0, 2, 3])]
    centred = write.add("Sub", [x, write.reduce("ReduceMean", x, axes)])
    deviation = write.add("Sqrt", [write.reduce("ReduceMean", write.add("Mul", [centred, centred]), axes)])
    write.add("Div", [centred, write.add("Add", [deviation, write.number("epsilon", 1e-9)])], last=True)


def local_response_normalization(write: Writer) -> None:
    """Write LRN as x / (bias + alpha*mean)^beta, where the mean is that of squares over `size` channels."""
    x = write.node.input[0]
    shape, size = write.shape(x), int(write.given["size"])
    squares = write.reshape(write.add("Mul", [x, x]), [shape[0], 1, shape[1], math.prod(shape[2:])])
    before, after = (size - 1) // 2, size // 2
    window: dict[str, Any] = {"kernel_shape": [size, 1], "strides": [1, 1], "pads": [before, 0, after, 0]}
    mean = write.reshape(write.add("AveragePool", [squares], count_include_pad=1, **window), shape)
    scaled = write.add("Mul", [mean, write.number("alpha", float(write.given.get("alpha", 1e-4)))])
    base = write.add("Add", [scaled, write.number("bias", float(write.given.get("bias", 1.0)))])
    power = write.add("Pow", [base, write.number("beta", float(write.given.get("beta", 0.75)))])
    write.add("Div", [x, power], last=True)


def lp_normalization(write: Writer) -> None:
    """Write LpNormalization as x over the norm along its axis."""
    x = write.node.input[0]
    axes = [int(write.given.get("axis", -1)) % len(write.shape(x))]
    if int(write.given.get("p", 2)) == 1:
        norm = write.reduce("ReduceSum", write.add("Abs", [x]), axes)
    else:
        norm = write.add("Sqrt", [write.reduce("ReduceSum", write.add("Mul", [x, x]), axes)])
    write.add("Div", [x, norm], last=True)
