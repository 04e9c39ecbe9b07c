"""Nests over views (kernels/common/generic.py) on a CPU.

collapse axes that all views walk as one  ->  parallel over the outer axes, vectors along the inner one
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.generic import Along, GenericProblem, Shape, View, at_stride, collapse, starts_of
from bnfuse.runtime.kernels.common.steps import Expr
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.layout import flat
from bnfuse.runtime.kernels.cpu.sweep import Args, vectors
from bnfuse.runtime.targets.target import CpuTarget

Emit = Callable[[GenericProblem, CpuTarget, Args], None]


@dataclasses.dataclass(frozen=True)
class Nests:
    """Walks (kernels/common/generic.py) as loops that threads share."""

    target: CpuTarget
    busy: int = 1  # to share work out twice is never worth it

    def nest(self, space: Shape, views: Sequence[View], emit: Callable[..., None]) -> None:
        """Emit `emit(index of each view)` for every point, vectorised along the inner axis."""
        if math.prod(space) == 0:
            nothing()
            return
        space, views = collapse(space, views)
        if not space:
            emit(*(tirx.const(view.base, "int32") for view in views))
        elif len(space) == 1:
            flat(space[0], self.target, lambda i: emit(*(at_stride(view.base, i, view.strides[0]) for view in views)))
        else:
            _rows(space, views, self.target, emit)

    def each(self, count: int, emit: Callable[[Expr], None]) -> None:
        """Emit `emit(i)` for i < count, dealt to the threads."""
        if count:
            parallel_rows(count, self.target, emit)
        else:
            nothing()

    def rows(self, count: int, inner: int, emit: Callable[[Expr, Along], None]) -> None:
        """Emit `emit(row, along)`: threads have whole rows, or, where those are too few, runs of their elements."""
        threads, lanes = self.target.threads, self.target.lanes
        if count * inner == 0:
            nothing()
        elif count >= threads or inner < 2 * lanes:
            parallel_rows(count, self.target, lambda row: emit(row, lambda visit: _along(inner, lanes, visit)))
        else:
            run = -(-inner // (threads * lanes)) * lanes
            runs = -(-inner // run)

            def part(index: Expr) -> None:
                start = T.bind(tirx.floormod(index, runs) * run)
                size = T.bind(tirx.Min(inner - start, run))
                emit(tirx.floordiv(index, runs), lambda visit: _along_run(start, size, lanes, visit))

            parallel_rows(count * runs, self.target, part)

    def register(self, dtype: str) -> Any:
        """Give a buffer of one element, a thread's own."""
        return tir.registers(1, dtype)


def nothing() -> None:
    """Emit a statement that does nothing: a function must have one."""
    T.evaluate(tirx.const(0, "int32"))


def _along(count: int, lanes: int, visit: Callable[[Expr], None]) -> None:
    for vector in vectors(count, lanes):
        with vector.each() as j:
            visit(vector.base + j)


def _along_run(start: Expr, size: Expr, lanes: int, visit: Callable[[Expr], None]) -> None:
    """Visit elements whose number is known at run time: whole vectors, then one by one."""
    whole = tirx.floordiv(size, lanes)
    with T.serial(0, whole) as v, T.vectorized(0, lanes) as j:
        visit(start + v * lanes + j)
    with T.serial(0, size - whole * lanes) as j:
        visit(start + whole * lanes + j)


def _rows(space: Shape, views: Sequence[View], target: CpuTarget, emit: Callable[..., None]) -> None:
    count, inner = math.prod(space[:-1]), space[-1]
    threads = min(target.threads, count)
    with T.parallel(0, threads) as thread:
        first, own = tir.share(count, threads, thread)
        with T.serial(0, own) as i:
            starts = [T.bind(start) for start in starts_of(first + i, space[:-1], views)]
            for vector in vectors(inner, target.lanes):
                with vector.each() as j:
                    ends = zip(starts, views, strict=True)
                    emit(*(at_stride(start, vector.base + j, view.strides[-1]) for start, view in ends))


def parallel_rows(count: int, target: CpuTarget, emit: Callable[[Expr], None]) -> None:
    """Emit `emit(row)` for each of `count` rows, dealt to the threads."""
    threads = min(target.threads, count)
    with T.parallel(0, threads) as thread:
        first, own = tir.share(count, threads, thread)
        with T.serial(0, own) as i:
            emit(first + i)
