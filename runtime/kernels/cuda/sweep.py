"""One sweep over the pixels of a map: the skeleton of the kernels that memory bounds.

    block (tile, column):               `rows` pixels by `across` vectors of channels
        for group of pixels in tile:    `down` * `unroll` of them
            for i in unroll:            fetch(i)     loads only
            for i in unroll:            finish(i)
        close(tile)                     the tile's sums

Threads next to each other take vectors next to each other, then pixels, so that memory is read in runs. Without sums a
tile is one group; with sums tiles are as many as keep the multiprocessors busy, for their rows must be merged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.device import Block, Expr, Stage
from bnfuse.runtime.kernels.cuda.partials import Team
from bnfuse.runtime.kernels.cuda.vector import Epilogue, Reductions, epilogue_of, width_of
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Param, Problem
from bnfuse.runtime.targets.target import CudaTarget

# chosen by hand, like those below
THREADS = 256
MOST_ACROSS = 128
LONGEST = 128  # pixels whose float32 sum one thread makes
BLOCKS = 8  # of each multiprocessor, where there are sums

# of a sample (Sweep.of_sample)
SLICE = 4  # vectors of a block that has all pixels
WIDE_SLICE = 32  # of one that has some
ALONE_THREADS = 512
ALONE_PASSES = 8  # pixels of a thread, where a block has all
MOST_UNROLLED = 4


@dataclasses.dataclass(frozen=True)
class Sweep:
    """How a map's pixels and channels are dealt to blocks and threads."""

    pixels: int
    channels: int
    team: Team
    columns: int  # blocks along the channels
    unroll: int
    groups: int  # of a tile

    @staticmethod
    def of(pixels: int, channels: int, width: int, target: CudaTarget, *, reads: int, sums: bool) -> Sweep:
        """Deal out pixels and channels, `width` at a time, where `reads` maps are read at a pixel."""
        vectors = -(-channels // width)
        columns = -(-vectors // MOST_ACROSS)
        across = -(-vectors // columns)
        down = max(1, THREADS // across)
        unroll = {0: 1, 1: 4, 2: 4, 3: 2, 4: 2}.get(reads, 1)  # by maps read; chosen by hand
        while unroll > 1 and pixels * columns < down * unroll * target.multiprocessors:
            unroll //= 2
        groups = 1
        if sums:
            groups = -(-pixels // max(1, down * unroll * target.multiprocessors * BLOCKS // columns))
            groups = max(1, min(groups, LONGEST // unroll))
        return Sweep(pixels, channels, Team(across, down, width), columns, unroll, groups)

    @staticmethod
    def of_sample(pixels: int, channels: int, width: int, target: CudaTarget) -> Sweep:
        """Deal out as `of` with one map and sums, where pixels are few or lie apart.

        Up to some thousand pixels a tile has all of them and 64 bytes of each: blocks are as many as such slices, and
        there is nothing to merge. More pixels are cut into tiles that fill the multiprocessors twice.
        """
        vectors = -(-channels // width)
        columns = -(-vectors // SLICE)
        across = -(-vectors // columns)
        down = min(ALONE_THREADS // across, pixels)
        passes = -(-pixels // down)
        if passes > ALONE_PASSES:
            columns = -(-vectors // WIDE_SLICE)
            across = -(-vectors // columns)
            down = THREADS // across
            tiles = -(-2 * target.multiprocessors // columns)
            passes = max(MOST_UNROLLED, min(-(-pixels // (down * tiles)), LONGEST))
        unroll = min(MOST_UNROLLED, passes)
        return Sweep(pixels, channels, Team(across, down, width), columns, unroll, -(-passes // unroll))

    @property
    def rows(self) -> int:
        """Count the pixels of a tile."""
        return self.team.down * self.unroll * self.groups

    @property
    def tiles(self) -> int:
        """Count the tiles along the pixels."""
        return -(-self.pixels // self.rows)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Give the grid in blocks: tiles, columns."""
        return self.tiles, self.columns, 1

    @property
    def merging(self) -> dict[str, Any]:
        """Give the arguments of the stage that merges the tiles."""
        return {"tiles": self.tiles, "rows": self.rows, "total": self.pixels, "channels": self.channels}

    def channel(self, block: Block) -> tuple[Expr, Expr | None]:
        """Find the thread's first channel, and how many are left from there on (None: its vector is whole)."""
        vector = self.team.vector(block.tid)
        if self.columns > 1:
            vector = block.y * self.team.across + vector
        channel = T.bind(vector * self.team.width)
        whole = self.columns * self.team.across * self.team.width == self.channels
        return channel, None if whole else T.bind(self.channels - channel)

    def holds(self, left: Expr | None) -> Expr:
        """Tell whether the thread has a channel at all."""
        if left is not None and (self.columns * self.team.across - 1) * self.team.width >= self.channels:
            return T.bind(left > 0)
        return True

    def run(
        self,
        block: Block,
        left: Expr | None,
        fetch: Callable[[int, Expr, Expr], None],
        finish: Callable[[int, Expr, Expr], None],
    ) -> None:
        """Emit the loops: `fetch(i, pixel, valid)` for each i of a group, then `finish(i, pixel, valid)`."""
        exact = self.pixels % self.rows == 0
        within = self.holds(left)
        lane = self.team.lane(block.tid)

        def group(number: Expr) -> None:
            base = T.bind((block.x * self.groups + number) * (self.team.down * self.unroll) + lane)
            pixels = [base + i * self.team.down for i in range(self.unroll)]
            valid = [d.all_of(within, d.below(pixel, self.pixels, exact)) for pixel in pixels]
            for i in range(self.unroll):
                fetch(i, pixels[i], valid[i])
            for i in range(self.unroll):
                finish(i, pixels[i], valid[i])

        if self.groups == 1:
            group(0)
        else:
            with T.serial(0, self.groups) as number:
                group(number)


# -- operators -----------------------------------------------------------------------------------------------------


def operator_kernel(
    problem: Problem,
    target: CudaTarget,
    sweep: Sweep,
    params: Sequence[Param],
    emit: Callable[[Block, Epilogue], None],
    *,
    shared: int = 0,
    min_blocks: int = 0,
) -> Kernel:
    """Make the kernel of an operator of steps. `emit(block, epilogue)` writes the tile, all but `epilogue.close`.

    `shared` are the bytes of shared memory that `emit` uses, as `epilogue.shared`; `min_blocks` as of a stage.
    """
    reductions = Reductions.of(problem.spec)
    params = (*params, *reductions.scratch(sweep.tiles, sweep.channels))
    name = unique_name(problem.op, problem, target)

    size = max(shared, reductions.shared_bytes(sweep.team) if reductions else 0)

    def build() -> tuple[Stage, ...]:
        first = reductions.first_stage(params)
        threads = sweep.team.threads
        with d.stage(name, first, grid=sweep.grid, threads=threads, shared=size, min_blocks=min_blocks) as block:
            memory = d.shared_memory(size).view("float32") if size else None
            epilogue = epilogue_of(problem)(block, problem, sweep.team, memory, sweep.unroll)
            emit(block, epilogue)
            epilogue.close(block.x)
        return (block.stage, *reductions.merge(f"{name}_merge", params, **sweep.merging, tail=problem.tail))

    return Kernel(name, problem, target, tuple(params), build)


def operator_sweep(problem: Problem, target: CudaTarget, result: MapType, reads: int) -> Sweep:
    """Deal out the pixels of an operator's result, where `reads` maps are read at a pixel."""
    width = width_of(kind for name, kind in problem.maps if name != "indices")
    sums = bool(Reductions.of(problem.spec))
    return Sweep.of(result.pixels, result.c, width, target, reads=reads, sums=sums)
