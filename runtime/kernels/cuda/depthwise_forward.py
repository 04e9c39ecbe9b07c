"""Forward depthwise convolution on a GPU: windows of activated inputs slide down strips of columns, in registers.

    a thread takes E channels of `strip` neighbouring outputs and, tile by tile, `rows` of them from top to bottom:
        slide: the rows that are left move up, the next row, loaded one slide ago, is activated once and joins them;
               the row after it is asked for
        for the outputs side by side:  sum over taps of window * weight, float32
            + bias, activation; sum and squared deviations of the tile; store y
    a block joins the moments of its threads in shared memory and writes one row of partials
    merge: mean and variance of the rows

Neighbouring threads have neighbouring vectors of channels, then neighbouring strips, so that the columns between two
strips come from the first-level cache. Where a window does not fit in registers (large kernels, large dilations),
each output loads and activates what its taps need. With several outputs a channel a thread has one output channel.

By count of instructions a 3x3 output costs 25 to 30, which a multiprocessor can just do while 16-bit maps stream by;
so the plan (depthwise_shape.py) weighs instructions against bytes. Its constants are estimates, not yet measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.kernels.common.epilogue import EpiloguePlan
from bnfuse.runtime.kernels.common.geometry import spatial_axes
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.tails import is_of_tail, params_with_tail
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.depthwise_shape import (
    Plan,
    Work,
    choose_plan,
    choose_single,
    forward_line,
    gathering_plan,
    words_per_channel,
)
from bnfuse.runtime.kernels.cuda.depthwise_sums import (
    add_first,
    add_value,
    round_as_stored,
    team_of,
)
from bnfuse.runtime.kernels.cuda.depthwise_window import (
    Channels,
    Source,
    Tile,
    Weights,
    Window,
    each_tile,
    is_depthwise,
)
from bnfuse.runtime.kernels.cuda.device import Block, Buffer, Expr, Lanes, Stage
from bnfuse.runtime.kernels.cuda.operand import Operand
from bnfuse.runtime.kernels.cuda.partials import (
    Moments,
    counted_row,
    counted_statistics_stage,
    partials_param,
    write_row,
)
from bnfuse.runtime.kernels.kernel import Kernel, Param, Problem
from bnfuse.runtime.targets.target import CudaTarget


def depthwise_forward(problem: Problem, target: CudaTarget) -> Kernel:
    """Make the kernel: y = the convolution of the prologue of x with a weight [O, 1, kh, kw].

    O is a multiple of x's channels. Parameters as on a CPU (maps NHWC in their own types, weight float32 OIHW), then
    `partials` where y has statistics. BnfuseError for another operator.
    """
    spec, x = problem.spec, problem.map("x")
    if spec.core != "Conv" or not is_depthwise(problem.weight, problem.attribute("group"), x.c):
        raise BnfuseError(f"{problem.op} is no depthwise convolution; ask for it from another generator")
    params = params_with_tail(problem)
    work = work_of(problem)
    plan = plan_of(problem, work, target) or gathering_plan(work, target)
    if "Statistics" in spec.epilogue:
        params = (*params, partials_param(plan.blocks, 3, work.channels))
    name = unique_name(problem.op, problem, target)
    return Kernel(name, problem, target, params, partial(_stages, name, problem, target, params))


def work_of(problem: Problem) -> Work:
    """Describe the convolution as windows of inputs under outputs."""
    rows, columns = spatial_axes(problem)
    y, operand = problem.map("y"), Operand(problem, gradient=False)
    stored = len(operand.vectors) + (6 if "Statistics" in problem.spec.epilogue else 0)
    size = d.size_of(problem.map("x").dtype)
    return Work(
        images=y.n,
        rows=forward_line(rows),
        columns=forward_line(columns),
        channels=y.c,
        taps=rows.kernel * columns.kernel,
        stored=stored,
        raw=sum(words_per_channel(kind) for kind in operand.maps.values()),
        unit=1,
        per_source=2 + 2 * len(problem.spec.prologue),
        per_unit=rows.kernel * columns.kernel + 5,
        bytes_per_source=size * len(operand.maps),
        bytes_per_unit=d.size_of(y.dtype),
        base=24,
    )


def plan_of(problem: Problem, work: Work, target: CudaTarget) -> Plan | None:
    """Plan how windows slide, threads of one channel where several outputs share an input's; None where they cannot."""
    many = problem.map("y").c != problem.map("x").c
    size = d.size_of(problem.map("x").dtype)
    return (choose_single if many else choose_plan)(work, target, size)


def _stages(name: str, problem: Problem, target: CudaTarget, params: tuple[Param, ...]) -> tuple[Stage, ...]:
    work, spec = work_of(problem), problem.spec
    stages = [_main_stage(name, problem, target, params)]
    if "StoreInput" in spec.epilogue:
        stages.append(store_input_stage(f"{name}_store", problem, params))
    if "Statistics" in spec.epilogue:
        y = problem.map("y")
        tiles = (plan_of(problem, work, target) or gathering_plan(work, target)).blocks
        merged = [p for p in params if p.name in ("partials", "mean", "variance") or is_of_tail(p.name)]
        sizes = {"tiles": tiles, "total": y.pixels, "channels": work.channels}
        stages.append(counted_statistics_stage(f"{name}_merge", merged, **sizes, tail=problem.tail))
    return tuple(stages)


def _main_stage(name: str, problem: Problem, target: CudaTarget, params: tuple[Param, ...]) -> Stage:
    work, spec = work_of(problem), problem.spec
    plan = plan_of(problem, work, target)
    gathers = plan is None
    plan = plan or gathering_plan(work, target)
    used = [p for p in params if p.name not in ("stored", "mean", "variance") and not is_of_tail(p.name)]
    weight_bytes = 4 * work.taps * plan.vectors * plan.lanes if plan.shared else 0
    sums_bytes = team_of(plan).statistics_bytes if "Statistics" in spec.epilogue else 0
    shared = max(weight_bytes, sums_bytes)
    grid = (plan.blocks, plan.chunks(work), 1)
    with d.stage(name, used, grid=grid, threads=plan.threads, shared=shared, min_blocks=plan.resident) as block:
        memory = d.shared_memory(shared).view("float32") if shared else None
        nest = _Forward.make(problem, work, plan, block, memory if plan.shared else None)
        nest.sweep(_gather if gathers else _slide)
        if nest.moments is not None:
            if plan.shared:
                d.sync()
            row = counted_row(nest.moments, block.tid, memory)
            first = nest.channels.first
            d.when(
                block.tid < plan.vectors,
                lambda: write_row(
                    block["partials"], block.x, 3, work.channels, first, plan.lanes, row, nest.channels.guard, False
                ),
            )
    return block.stage


@dataclasses.dataclass
class _Forward:
    """A stage under construction and what its threads hold."""

    problem: Problem
    work: Work
    plan: Plan
    block: Block
    channels: Channels
    source: Channels  # of x
    weights: Weights | None
    moments: Moments | None

    @staticmethod
    def make(problem: Problem, work: Work, plan: Plan, block: Block, memory: Buffer | None) -> _Forward:
        channels = Channels.of(block, plan, work.channels)
        repeat = work.channels // problem.map("x").c
        source = channels if repeat == 1 else Channels(T.bind(channels.first // repeat), 1, None)
        weights = Weights.in_shared(block, plan, work.taps, work.channels, memory) if memory is not None else None
        moments = None
        if "Statistics" in problem.spec.epilogue:
            moments = Moments(team_of(plan))
            moments.clear()
        return _Forward(problem, work, plan, block, channels, source, weights, moments)

    @property
    def operand(self) -> Operand:
        return Operand(self.problem, gradient=False)

    def sweep(self, outputs: Callable[[_Forward], Callable[[Tile], None]]) -> None:
        """Visit all tiles of the thread, if it has any channels."""

        def run() -> None:
            each_tile(self.block, self.plan, self.work, outputs(self))

        d.when(self.channels.is_any(self.plan, self.work.channels), run)

    def finish(self, tile: Tile, row: Expr, sums: Buffer, bias: Buffer | None) -> None:
        """Finish the outputs side by side: bias, activation, statistics and the store; `sums` [strip][lane]."""
        y, plan, count = self.problem.map("y"), self.plan, self.channels.count
        target = self.block.map("y", y)
        pixel = T.bind((tile.image * y.h + row) * y.w + tile.column)
        epilogue = EpiloguePlan(self.problem)
        if epilogue.changes:

            def change(j: int, e: Expr) -> None:
                def load(name: str, per_channel: bool) -> Expr:
                    assert bias is not None and (name, per_channel) == ("bias", True)
                    return bias[e]

                d.put(sums, j * count + e, epilogue.finished(sums[j * count + e], load))

            for j in range(plan.strip):
                self.channels.each(partial(change, j))
        if self.moments is not None:  # of y as it is stored
            round_as_stored(sums, plan.strip * count, y.dtype)
            add_first(self.moments, sums)
        for j in range(plan.strip):

            def one(j: int = j) -> None:
                place = target.at(pixel + j, self.channels.first)
                d.write(target, place, Lanes.of(count, y), sums, j * count, self.channels.left)
                if self.moments is not None:
                    add_value(self.moments, sums, j * count)

            d.when(d.below(tile.column + j, y.w, j == 0 or y.w % plan.strip == 0), one)
        if self.moments is not None:
            pixels: Expr = T.float32(plan.strip)
            if y.w % plan.strip:
                pixels = tirx.Cast("float32", tirx.Min(y.w - tile.column, tirx.const(plan.strip, "int32")))
            d.put(self.moments.count, 0, self.moments.count[0] + pixels)


def _slide(nest: _Forward) -> Callable[[Tile], None]:
    """Sum up outputs from windows in registers."""
    work, plan, channels, block = nest.work, nest.plan, nest.channels, nest.block
    window = Window.make(block, nest.operand, (work.rows, work.columns), plan, nest.source)
    weights = nest.weights or Weights.in_registers(block, plan, channels, work.taps, work.channels)
    bias = channels.vector(block["bias"]) if "bias" in block else None
    sums, weight = d.registers(plan.strip * channels.count), d.registers(channels.count)
    rows, columns = spatial_axes(nest.problem)

    def product(r: Expr, s: Expr) -> None:
        tap = r * columns.kernel + s
        channels.each(lambda e: d.put(weight, e, weights.of(tap, e)))

        def column(j: Expr) -> None:
            at = window.at(r * rows.dilation, j * columns.stride + s * columns.dilation)
            place = j * channels.count
            channels.each(lambda e: d.put(sums, place + e, d.fma(window.values[at + e], weight[e], sums[place + e])))

        d.unrolled(plan.strip, column)

    def outputs(tile: Tile, row: Expr) -> None:
        d.unrolled(plan.strip * channels.count, lambda i: d.put(sums, i, T.float32(0)))
        d.unrolled(rows.kernel, lambda r: d.unrolled(columns.kernel, lambda s: product(r, s)))
        nest.finish(tile, row, sums, bias)

    return lambda tile: window.sweep(tile, work.rows.units, outputs)


def _gather(nest: _Forward) -> Callable[[Tile], None]:
    """Sum up outputs one at a time, from memory."""
    work, plan, block, x = nest.work, nest.plan, nest.block, nest.problem.map("x")
    source = Source.make(block, nest.operand, nest.source)
    bias = nest.channels.vector(block["bias"]) if "bias" in block else None
    sums = d.registers(1)
    rows, columns = spatial_axes(nest.problem)

    def outputs(tile: Tile, row: Expr) -> None:
        d.put(sums, 0, T.float32(0))
        with T.serial(0, rows.kernel) as r, T.serial(0, columns.kernel) as s:
            i = T.bind(row * rows.stride + r * rows.dilation - rows.pad)
            j = T.bind(tile.column * columns.stride + s * columns.dilation - columns.pad)

            def product() -> None:
                value = source.value((tile.image * x.h + i) * x.w + j)
                weight = block["weight"][nest.channels.first * work.taps + r * columns.kernel + s]
                d.put(sums, 0, d.fma(value, weight, sums[0]))

            d.when(d.all_of(d.within(i, x.h), d.within(j, x.w)), product)
        nest.finish(tile, row, sums, bias)

    def run(tile: Tile) -> None:
        with T.serial(0, tirx.Min(work.rows.units - tile.row, tirx.const(plan.rows, "int32"))) as r:
            outputs(tile, T.bind(tile.row + r))

    return run


def store_input_stage(name: str, problem: Problem, params: tuple[Param, ...]) -> Stage:
    """Build the stage: `stored` <- the prologue of x, for the inputs that no output reads as well."""
    x, stored, operand = problem.map("x"), problem.map("stored"), Operand(problem, gradient=False)
    lanes, threads = 4, 256
    vectors = -(-x.c // lanes)
    total = vectors * x.pixels
    used = [p for p in params if p.name in {*operand.names, "stored"}]
    with d.stage(name, used, grid=(-(-total // threads), 1, 1), threads=threads) as block:
        index = T.bind(block.x * threads + block.tid)

        def one() -> None:
            first, pixel = T.bind(index % vectors * lanes), T.bind(index // vectors)
            channels = Channels(first, lanes, T.bind(x.c - first) if x.c % lanes else None)
            values = Source.make(block, operand, channels).values(pixel)
            to = block.map("stored", stored)
            d.write(to, to.at(pixel, first), Lanes.of(lanes, stored), values, 0, channels.left)

        d.when(d.below(index, total, total % threads == 0), one)
    return block.stage
