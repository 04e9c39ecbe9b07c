"""Work along one axis of a dense tensor [n, length, inner] on a GPU: the twin of kernels/cpu/rows.py.

inner = 1:   a block has one row; its threads share the row, and what they fold is joined by shuffles, then in
             shared memory, always in the same order
inner > 1:   a thread has a row: neighbours have neighbouring inner positions
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.rows import At, Rows
from bnfuse.runtime.kernels.cuda.device import WARP, Block, Expr, put, registers, shuffle_xor, sync, when
from bnfuse.runtime.targets.target import CudaTarget

Join = Callable[[Expr, Expr], Expr]

# chosen by hand
ALONE = 128  # threads of a block whose threads have a row each
MOST = 256  # threads of a block that has one row
EACH = 4  # elements of a row that are worth a thread


@dataclasses.dataclass(frozen=True)
class BlockRows(Rows):
    """Rows as a block sees them. `block` is None until a stage of `grid` and `threads` is open."""

    block: Block | None = None

    @staticmethod
    def of(rows: Rows) -> BlockRows:
        """Take rows to a block."""
        return BlockRows(rows.n, rows.length, rows.inner)

    @property
    def shared_by_block(self) -> bool:
        """Tell whether a block has one row, and not each thread."""
        return self.inner == 1

    @property
    def threads(self) -> int:
        """Count the threads of a block: ALONE, or one for EACH elements of its row, a power of two up to MOST."""
        if not self.shared_by_block:
            return ALONE
        threads = WARP
        while threads < MOST and threads * EACH < self.length:
            threads *= 2
        return threads

    @property
    def grid(self) -> tuple[int, int, int]:
        """Give the grid in blocks."""
        return (self.count if self.shared_by_block else -(-self.count // ALONE), 1, 1)

    def within(self, block: Block) -> BlockRows:
        """Give these rows inside a stage that is open."""
        return dataclasses.replace(self, block=block)

    def each(self, target: CudaTarget, emit: Callable[[Expr, At], None]) -> None:
        """Emit `emit(row, at)` for the row of this thread."""
        assert self.block is not None
        if self.shared_by_block:
            row = self.block.x
            emit(row, lambda k: row * self.length + k)
            return
        row = T.bind(self.block.x * ALONE + self.block.tid)

        def own() -> None:
            base = T.bind(tirx.floordiv(row, self.inner) * (self.length * self.inner) + tirx.floormod(row, self.inner))
            emit(row, lambda k: base + k * self.inner)

        when(True if self.count % ALONE == 0 else row < self.count, own)

    def along(self, target: CudaTarget, emit: Callable[[Expr], None]) -> None:
        """Emit `emit(k)` for each position along the row that is this thread's."""
        assert self.block is not None
        if self.shared_by_block:
            self.block.each(self.length, emit)
        else:
            with T.serial(0, self.length) as k:
                emit(k)

    def once(self, emit: Callable[[], None]) -> None:
        """Emit `emit()` for one thread of the row."""
        assert self.block is not None
        when(self.block.tid == 0 if self.shared_by_block else True, emit)

    def fold(self, target: CudaTarget, dtype: str, start: float, step: Join, join: Join) -> Expr:
        """Fold `step(so far, k)` along the row, thread by thread, then `join` the threads: all have the result."""
        assert self.block is not None
        folded = registers(1, dtype)
        put(folded, 0, tirx.const(start, dtype))
        self.along(target, lambda k: put(folded, 0, step(folded[0], k)))
        return join_threads(self.block, folded[0], dtype, join) if self.shared_by_block else T.bind(folded[0])


def join_threads(block: Block, value: Expr, dtype: str, join: Join) -> Expr:
    """Join a value over all threads of a block (a multiple of 32), for all of them."""
    own = registers(1, dtype)
    put(own, 0, value)
    for distance in (16, 8, 4, 2, 1):
        put(own, 0, join(own[0], shuffle_xor(own[0], distance)))
    warps = block.threads // WARP
    if warps > 1:
        of_warps = T.alloc_buffer((warps,), dtype, scope="shared")
        when(block.lane == 0, lambda: put(of_warps, block.warp, own[0]))
        sync()
        put(own, 0, of_warps[0])
        for warp in range(1, warps):
            put(own, 0, join(own[0], of_warps[warp]))
    return own[0]
