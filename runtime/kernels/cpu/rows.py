"""Work along one axis of a dense tensor [n, length, inner]: a row is one n and one inner position.

Rows are dealt to the threads; along a row, vectors (strided where inner > 1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.rows import At, Rows
from bnfuse.runtime.kernels.common.steps import Expr
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.sweep import vectors
from bnfuse.runtime.targets.target import CpuTarget


@dataclasses.dataclass(frozen=True)
class ThreadRows(Rows):
    """Rows as threads walk them."""

    @staticmethod
    def of(rows: Rows) -> ThreadRows:
        """Take over the sizes of rows."""
        return ThreadRows(rows.n, rows.length, rows.inner)

    def each(self, target: CpuTarget, emit: Callable[[Expr, At], None]) -> None:
        """Emit `emit(row, at)` for each row."""
        threads = min(target.threads, self.count)
        with T.parallel(0, threads) as thread:
            first, count = tir.share(self.count, threads, thread)
            with T.serial(0, count) as i:
                row = T.bind(first + i)
                image, place = tirx.floordiv(row, self.inner), tirx.floormod(row, self.inner)
                base = T.bind(image * (self.length * self.inner) + place)
                emit(row, lambda k: base + k * self.inner)

    def along(self, target: CpuTarget, emit: Callable[[Expr], None]) -> None:
        """Emit `emit(k)` for each position along the row."""
        for vector in vectors(self.length, target.lanes):
            with vector.each() as j:
                emit(vector.base + j)

    def once(self, emit: Callable[[], None]) -> None:
        """Emit `emit()` once for the row."""
        emit()

    def fold(
        self,
        target: CpuTarget,
        dtype: str,
        start: float,
        step: Callable[[Expr, Expr], Expr],
        join: Callable[[Expr, Expr], Expr],
    ) -> Expr:
        """Fold `step(so far, k)` along the row, lane by lane, then `join` the lanes."""
        folded = tir.registers(target.lanes, dtype)
        with T.vectorized(0, target.lanes) as j:
            T.buffer_store(folded, tirx.const(start, dtype), [j])
        for vector in vectors(self.length, target.lanes):
            with vector.each() as j:
                T.buffer_store(folded, step(folded[j], vector.base + j), [j])
        for lane in range(1, target.lanes):
            T.buffer_store(folded, join(folded[0], folded[lane]), [0])  # `join` may read its operands several times
        return T.bind(folded[0])
