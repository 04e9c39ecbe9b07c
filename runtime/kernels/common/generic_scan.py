"""Operators that go along an axis element after element: running sums and products, and the k greatest."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.generic import Buffers, Emit, GenericProblem, dtype_of, store, walk
from bnfuse.runtime.kernels.common.generic_elementwise import is_nan, like
from bnfuse.runtime.kernels.common.steps import Expr


def scan(join: Callable[[Expr, Expr], Expr], start: int) -> Emit:
    """Give what emits a running sum or product. That of floats is kept in float64."""

    def emit(problem: GenericProblem, args: Buffers) -> None:
        outer, length, inner = _sizes(problem, 0)
        dtype = problem.out_dtype
        accumulator = "float64" if dtype.startswith("float") else dtype
        is_exclusive, is_reverse = (bool(problem.attribute(name, 0)) for name in ("exclusive", "reverse"))

        def line(index: Expr) -> None:
            base = T.bind(tirx.floordiv(index, inner) * (length * inner) + tirx.floormod(index, inner))
            total = walk().register(accumulator)
            T.buffer_store(total, tirx.const(start, accumulator), [0])
            with T.serial(0, length) as i:
                at = T.bind(base + ((length - 1 - i) if is_reverse else i) * inner)
                if is_exclusive:
                    store(args, "out0", at, tirx.Cast(dtype, total[0]))
                T.buffer_store(total, join(total[0], tirx.Cast(accumulator, args["in0"][at])), [0])
                if not is_exclusive:
                    store(args, "out0", at, tirx.Cast(dtype, total[0]))

        walk().each(outer * inner if length else 0, line)

    return emit


def top_k(problem: GenericProblem, args: Buffers) -> None:
    """Write the k greatest (or least) elements along an axis and where they are, in order; of equal ones the first.

    NaN counts as greater than all numbers. Each result is looked for among all that come after the one before it.
    """
    outer, length, inner = _sizes(problem, -1)
    k = problem.out_shape[problem.axis(-1)]
    is_largest = bool(problem.attribute("largest", 1))

    def line(index: Expr) -> None:
        image, place = T.bind(tirx.floordiv(index, inner)), T.bind(tirx.floormod(index, inner))
        base = T.bind(image * (length * inner) + place)
        kind = dtype_of(order_of(args["in0"][base], is_largest))
        last, last_at, best, best_at = (walk().register(dtype) for dtype in (kind, "int32", kind, "int32"))
        T.buffer_store(last, tirx.const(int(np.iinfo(kind).max), kind), [0])
        T.buffer_store(last_at, tirx.const(-1, "int32"), [0])
        with T.serial(0, k) as j:
            T.buffer_store(best_at, tirx.const(-1, "int32"), [0])
            with T.serial(0, length) as i:
                own = T.bind(order_of(args["in0"][base + i * inner], is_largest))
                is_after = tirx.Or(own < last[0], tirx.And(own == last[0], i > last_at[0]))
                is_better = tirx.Or(best_at[0] < 0, own > best[0])
                with T.If(tirx.And(is_after, is_better)), T.Then():
                    T.buffer_store(best, own, [0])
                    T.buffer_store(best_at, i, [0])
            T.buffer_store(last, best[0], [0])
            T.buffer_store(last_at, best_at[0], [0])
            to = T.bind((image * k + j) * inner + place)
            store(args, "out0", to, args["in0"][base + best_at[0] * inner])
            if "out1" in args:
                store(args, "out1", to, tirx.Cast("int64", best_at[0]))

    walk().each(outer * inner if k else 0, line)


def order_of(x: Expr, is_largest: bool) -> Expr:
    """Write an integer that is the greater the earlier x is to come."""
    dtype = dtype_of(x)
    key: Expr = tirx.Cast("int32", x) if dtype == "bool" else x
    if dtype.startswith("float"):
        kind = "int64" if dtype == "float64" else "int32"
        most = tirx.const(int(np.iinfo(kind).max), kind)
        bits = tirx.reinterpret(kind, x if dtype in ("float32", "float64") else tirx.Cast("float32", x))
        key = tirx.Select(bits < tirx.const(0, kind), tirx.bitwise_xor(bits, most), bits)
        key = tirx.Select(is_nan(x), most, tirx.Select(x == like(x, 0), tirx.const(0, kind), key))
    return key if is_largest else tirx.bitwise_not(key)


def _sizes(problem: GenericProblem, axis: int) -> tuple[int, int, int]:
    shape, at = problem.shape(), problem.axis(axis)
    return math.prod(shape[:at]), shape[at] if shape else 1, math.prod(shape[at + 1 :])


OPS: dict[str, Emit] = {
    "CumSum": scan(lambda x, y: x + y, 0),
    "CumProd": scan(lambda x, y: x * y, 1),
    "TopK": top_k,
}
