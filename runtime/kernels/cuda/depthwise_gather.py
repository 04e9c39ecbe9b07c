"""The gradients of a depthwise convolution of any geometry, element by element from memory: right, and slow.

dx:       a thread has one input channel and one input at a time; loops over its outputs' channels and the taps
dweight:  a thread has one output channel and one tap; loops over outputs, dweight += dy * prologue of x
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.epilogue import EpiloguePlan
from bnfuse.runtime.kernels.common.geometry import spatial_axes
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.depthwise_epilogue import DepthwiseEpilogue, own_taps, quantities_of, reductions_of
from bnfuse.runtime.kernels.cuda.depthwise_shape import Line, Plan, Work
from bnfuse.runtime.kernels.cuda.depthwise_sums import team_of, zeroed
from bnfuse.runtime.kernels.cuda.depthwise_window import Channels, Source, Tile, Vectors, each_tile
from bnfuse.runtime.kernels.cuda.device import Expr, Lanes, Stage
from bnfuse.runtime.kernels.cuda.operand import Operand
from bnfuse.runtime.kernels.cuda.partials import join_sums, write_row
from bnfuse.runtime.kernels.kernel import MapType, Param, Problem


def pixels_of(kind: MapType) -> Work:
    """Describe the pixels of a map as work: a unit is a pixel."""
    rows, columns = Line(kind.h, kind.h, 0, 1, 1), Line(kind.w, kind.w, 0, 1, 1)
    return Work(kind.n, rows, columns, kind.c, 0, 0, 0, 0, 0, 0, 0, 0)


def each_pixel(tile: Tile, plan: Plan, kind: MapType, body: Callable[[Expr], None]) -> None:
    """Emit `body(row)` for the pixels of a tile one pixel wide."""
    with T.serial(0, tirx.Min(kind.h - tile.row, tirx.const(plan.rows, "int32"))) as r:
        body(T.bind(tile.row + r))


def input_stage(name: str, problem: Problem, plan: Plan, params: list[Param]) -> Stage:
    """Build the stage of dx and the partials of its sums."""
    x, dx, dy = problem.map("x"), problem.map("dx"), problem.map("dy")
    rows, columns = spatial_axes(problem)
    work, team, repeat = pixels_of(x), team_of(plan), dy.c // x.c
    taps = rows.kernel * columns.kernel
    shared = reductions_of(problem.spec).shared_bytes(team)
    grid = (plan.blocks, plan.chunks(work), 1)
    with d.stage(name, params, grid=grid, threads=plan.threads, shared=shared) as block:
        memory = d.shared_memory(shared).view("float32") if shared else None
        channels = Channels.of(block, plan, x.c)
        epilogue = DepthwiseEpilogue(block, problem, team, memory)
        epilogue.open(channels.first, channels.guard, False)
        made = d.registers(1)

        def output(k: Expr, pixel: Expr, weight: Expr) -> None:
            source = Source.make(block, Operand(problem, gradient=True), Channels(k, 1, None))
            d.put(made, 0, d.fma(source.value(pixel), weight, made[0]))

        def one(tile: Tile, h: Expr) -> None:
            d.put(made, 0, T.float32(0))
            with T.serial(0, repeat) as m, T.serial(0, rows.kernel) as r, T.serial(0, columns.kernel) as s:
                k = T.bind(channels.first * repeat + m)
                i, j = (
                    T.bind(h + rows.pad - r * rows.dilation),
                    T.bind(tile.column + columns.pad - s * columns.dilation),
                )
                meets = tirx.And(tirx.truncmod(i, rows.stride) == 0, tirx.truncmod(j, columns.stride) == 0)
                o, p = T.bind(tirx.truncdiv(i, rows.stride)), T.bind(tirx.truncdiv(j, columns.stride))
                inside = d.all_of(i >= 0, j >= 0, d.within(o, dy.h), d.within(p, dy.w))
                weight = block["weight"][k * taps + r * columns.kernel + s]
                d.when(
                    tirx.And(meets, inside),
                    lambda: output(k, (tile.image * dy.h + o) * dy.w + p, weight),
                )
            pixel = T.bind((tile.image * x.h + h) * x.w + tile.column)
            inlets.load(0, pixel, True)
            inlets.unpack(0, epilogue.reader.values)
            epilogue.steps(made)
            target = block.map("dx", dx)
            d.write(target, target.at(pixel, channels.first), Lanes.of(1, dx), made)

        def run() -> None:
            each_tile(block, plan, work, lambda tile: each_pixel(tile, plan, x, lambda h: one(tile, h)))

        known = dict(problem.maps)
        inlets = Vectors.make(block, {n: known[n] for n in EpiloguePlan(problem).maps}, channels, 1)
        d.when(channels.is_any(plan, x.c), run)
        epilogue.close(block.x)
    return block.stage


def weight_stage(name: str, problem: Problem, plan: Plan, params: list[Param]) -> Stage:
    """Build the stage of the partials of dweight and dbias; a block of the third axis has one of them."""
    x, dy = problem.map("x"), problem.map("dy")
    rows, columns = spatial_axes(problem)
    gradient, read = Operand(problem, gradient=True), Operand(problem, gradient=False)
    work, team, repeat, taps = pixels_of(dy), team_of(plan), dy.c // x.c, own_taps(problem)
    own = quantities_of(problem)
    wanted = {"weight_partials", *gradient.names} | (read.names if taps else set())
    params = [p for p in params if p.name in wanted]
    shared = team.sums_bytes(1)
    grid = (plan.blocks, plan.chunks(work), own)
    with d.stage(name, params, grid=grid, threads=plan.threads, shared=shared) as block:
        memory = d.shared_memory(shared).view("float32") if shared else None
        channels = Channels.of(block, plan, dy.c)
        sums = zeroed(1)

        def run() -> None:
            grads = Source.make(block, gradient, channels)
            inputs = None
            if taps:
                inputs = Source.make(block, read, Channels(T.bind(channels.first // repeat), 1, None))

            def one(tile: Tile, o: Expr) -> None:
                grad = T.bind(grads.value((tile.image * dy.h + o) * dy.w + tile.column))

                def product() -> None:
                    i = T.bind(o * rows.stride + block.z // columns.kernel * rows.dilation - rows.pad)
                    j = T.bind(tile.column * columns.stride + block.z % columns.kernel * columns.dilation - columns.pad)

                    def add() -> None:
                        assert inputs is not None
                        value = inputs.value((tile.image * x.h + i) * x.w + j)
                        d.put(sums, 0, d.fma(value, grad, sums[0]))

                    d.when(d.all_of(d.within(i, x.h), d.within(j, x.w)), add)

                def bias() -> None:
                    d.put(sums, 0, sums[0] + grad)

                if own == taps:
                    product()
                elif not taps:
                    bias()
                else:
                    d.when(block.z < taps, product, bias)

            each_tile(block, plan, work, lambda tile: each_pixel(tile, plan, dy, lambda o: one(tile, o)))

        d.when(channels.is_any(plan, dy.c), run)
        join_sums(team, block.tid, memory, sums, 1)
        row = block.x * own + block.z
        d.when(
            block.tid < plan.vectors,
            lambda: write_row(block["weight_partials"], row, 1, dy.c, channels.first, 1, sums, channels.guard, False),
        )
    return block.stage
