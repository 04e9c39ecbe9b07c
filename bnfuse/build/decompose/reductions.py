"""Reductions by sums and maxima over constant axes; the mean over the pixels of a map is a GlobalAveragePool.

ReduceL1, ReduceL2, ReduceSumSquare, ReduceLogSum, ReduceLogSumExp    by ReduceSum
ReduceMax, ReduceMin    axes as an operand (opset 18), keepdims = 1, Squeeze where the file had 0
ReduceMean over [2, 3]  GlobalAveragePool, Flatten where the file had keepdims = 0
"""

from __future__ import annotations

from collections.abc import Callable

from .writer import Writer


def axes_of(write: Writer) -> list[int] | None:
    """List the axes, which are not negative, ascending; None where nothing is reduced. Raises where they are
    computed."""
    rank = len(write.shape(write.node.input[0]))
    axes = write.given.get("axes") or write.integers(1, "axes")
    if not axes:
        return None if write.given.get("noop_with_empty_axes") else list(range(rank))
    return sorted({axis % rank for axis in axes})


def _by_sum(before: Callable[[Writer, str], str], after: str = "") -> Callable[[Writer], None]:
    def reduction(write: Writer) -> None:
        axes, x = axes_of(write), before(write, write.node.input[0])
        if axes is not None:
            x = write.reduce("ReduceSum", x, axes, keepdims=bool(write.given.get("keepdims", 1)))
        write.give(write.add(after, [x]) if after else x)

    return reduction


def _square(write: Writer, x: str) -> str:
    return write.add("Mul", [x, x])


reduce_l1 = _by_sum(lambda write, x: write.add("Abs", [x]))
reduce_l2 = _by_sum(_square, "Sqrt")
reduce_sum_square = _by_sum(_square)
reduce_log_sum = _by_sum(lambda write, x: x, "Log")


def reduce_log_sum_exp(write: Writer) -> None:
    """Write ReduceLogSumExp relative to the maximum, so that nothing overflows."""
    axes, x = axes_of(write), write.node.input[0]
    if axes is None:
        write.add("Identity", [x], last=True)
        return
    highest = write.reduce("ReduceMax", x, axes)
    total = write.reduce("ReduceSum", write.add("Exp", [write.add("Sub", [x, highest])]), axes)
    y = write.add("Add", [write.add("Log", [total]), highest])
    write.give(y if write.given.get("keepdims", 1) else write.add("Squeeze", [y, write.ints("axes", axes)]))


def reduce_extreme(write: Writer) -> None:
    """Write ReduceMax or ReduceMin with its axes as a constant operand and its dimensions kept; a Squeeze takes them
    away."""
    x, axes = write.node.input[0], axes_of(write)
    if axes is None:
        write.add("Identity", [x], last=True)
    elif not write.given.get("keepdims", 1):
        write.give(write.add("Squeeze", [write.reduce(write.node.op_type, x, axes), write.ints("axes", axes)]))
    elif write.integers(1, "axes") != axes:
        write.give(write.reduce(write.node.op_type, x, axes))


def reduce_sum(write: Writer) -> None:
    """Write a ReduceSum that sums nothing (noop_with_empty_axes) as what it is."""
    if axes_of(write) is None:
        write.add("Identity", [write.node.input[0]], last=True)


def reduce_mean(write: Writer) -> None:
    """Write ReduceMean over the pixels of maps as GlobalAveragePool."""
    x = write.node.input[0]
    axes = axes_of(write)
    if axes is None:
        write.add("Identity", [x], last=True)
    elif len(write.shape(x)) == 4 and axes == [2, 3]:
        pooled = write.add("GlobalAveragePool", [x])
        write.give(pooled if write.given.get("keepdims", 1) else write.add("Flatten", [pooled], axis=1))
