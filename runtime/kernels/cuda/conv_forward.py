"""The forward convolution: prologue, product on the tensor cores, epilogue; a second stage merges its statistics."""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.epilogue import EpiloguePlan
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.tails import params_with_tail
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.conv_group import emit
from bnfuse.runtime.kernels.cuda.conv_lines import LineEmitter
from bnfuse.runtime.kernels.cuda.conv_plan import forward_plans
from bnfuse.runtime.kernels.cuda.conv_sizes import LinePlan, LineTile, Tile, TilePlan, tile_of
from bnfuse.runtime.kernels.cuda.correlation import forward_correlation, with_groups_aligned
from bnfuse.runtime.kernels.cuda.depthwise_forward import depthwise_forward
from bnfuse.runtime.kernels.cuda.device import Stage
from bnfuse.runtime.kernels.cuda.operand import Operand
from bnfuse.runtime.kernels.cuda.vector import Reader, Reductions, Writer, width_of
from bnfuse.runtime.kernels.cuda.weights import FORWARD, is_packed, packed_elements
from bnfuse.runtime.kernels.kernel import Choice, Kernel, Param, Problem
from bnfuse.runtime.targets.target import CudaTarget

STORE_THREADS = 256


def choices(problem: Problem, target: CudaTarget) -> tuple[Choice, ...]:
    """List all ways to do a problem that are worth measuring, that of the rule first."""
    if not takes_packed(problem):
        return (Choice("depthwise"),)
    problem = with_groups_aligned(problem, target)
    c, operand = forward_correlation(problem, target), Operand(problem, False)
    return tuple(Choice("tile", plan) for plan in forward_plans(c, operand, target))


def conv_forward(
    problem: Problem, target: CudaTarget, algorithm: str | None = None, plan: TilePlan | LinePlan | None = None
) -> Kernel:
    """Make the kernel of a forward convolution, or of dx of a transposed one, which is a convolution of dy.

    `weight` is packed (weights.py), but for depthwise ones.
    """
    if not takes_packed(problem):
        return depthwise_forward(problem, target)
    problem = with_groups_aligned(problem, target)
    c = forward_correlation(problem, target)
    operand = Operand(problem, False)
    chosen = plan or next(forward_plans(c, operand, target))
    tile: Tile | LineTile
    if isinstance(chosen, LinePlan):
        tile = LineTile(c, chosen, target.precision)
    else:
        tile = tile_of(c, chosen, target.precision, operand)
    channels = problem.map(EpiloguePlan(problem).result).c
    scratch = Reductions.of(problem.spec).scratch(tile.rows_of_partials, channels)
    weight = packed_elements(problem.weight, problem.attribute("group"), FORWARD, c.merged), target.map_dtype
    params = (*params_with_tail(problem, weight=weight), *scratch)
    name = unique_name(problem.op, (problem, plan), target)
    return Kernel(name, problem, target, params, lambda: _stages(name, params, problem, tile), plan)


def takes_packed(problem: Problem) -> bool:
    """Tell whether a problem's kernel reads a packed weight: it is no depthwise one."""
    return is_packed(problem.weight, problem.spec.core, problem.attribute("group"))


def _stages(name: str, params: tuple[Param, ...], problem: Problem, tile: Tile | LineTile) -> tuple[Stage, ...]:
    c, reductions = tile.correlation, Reductions.of(problem.spec)
    first = [p for p in reductions.first_stage(params) if p.name != "stored"]
    plan = tile.plan
    launch = {"grid": tile.grid, "threads": plan.threads, "shared": shared_bytes(tile, reductions)}
    with d.stage(name, first, **launch, min_blocks=plan.min_blocks) as block:  # type: ignore[arg-type]
        operand = Operand(problem, False)
        if isinstance(tile, LineTile):
            LineEmitter(block, tile, operand, problem).run()
        else:
            emit(block, tile, operand, problem)
    merge = reductions.merge(
        f"{name}_merge",
        params,
        tiles=tile.rows_of_partials,
        rows=tile.pixels_of_partials,
        fewer=tile.fewer_pixels,
        total=c.rows,
        channels=problem.map(EpiloguePlan(problem).result).c,
        tail=problem.tail,
    )
    return (*_stored(name, params, problem), block.stage, *merge)


def shared_bytes(tile: Tile | LineTile, reductions: Reductions) -> int:
    """Count the bytes of shared memory of a tile's stage: the product's or, behind it, the sums'."""
    return max(tile.shared, reductions.shared_bytes(tile.team) if reductions else 0)


def _stored(name: str, params: tuple[Param, ...], problem: Problem) -> tuple[Stage, ...]:
    """Store the activated input in a sweep of its own, since tiles read it more than once or not at all."""
    if "StoreInput" not in problem.spec.epilogue:
        return ()
    operand, kind = Operand(problem, False), problem.map("stored")
    width = width_of([*operand.maps.values(), kind])
    vectors = -(-kind.c // width)
    taken = [p for p in params if p.name in {*operand.names, "stored"}]
    grid = -(-kind.pixels * vectors // STORE_THREADS), 1, 1
    with d.stage(f"{name}_store", taken, grid=grid, threads=STORE_THREADS) as block:
        index = T.bind(block.x * STORE_THREADS + block.tid)
        pixel, channel = T.bind(index // vectors), T.bind(index % vectors * width)
        left = None if kind.c % width == 0 else T.bind(kind.c - channel)
        reader = Reader(block, operand.maps, operand.vectors, width)
        writer, values = Writer(block, "stored", kind, width), d.registers(width)

        def sweep() -> None:
            reader.open(channel, left, kind.c % 4 == 0)
            reader.fetch(0, pixel)
            reader.unpack(0)
            for j in range(width):
                d.put(values, j, operand.value(reader.load(j)))
            writer.store(values, pixel, channel, left)

        d.when(pixel < kind.pixels, sweep)
    return (block.stage,)
