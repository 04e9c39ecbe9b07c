"""The halves of a BatchNorm that stand alone and sweep maps (PLAIN_OPS of bnfuse/opset/plain.py).

Each tile of sweep.py leaves a row of partials; a last stage merges them. What is computed per channel is in
coefficients.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.script.ir_builder import tirx as T

from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.runtime.kernels.common.norm import NormProblem
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.device import Block, Buffer, Expr, Stage
from bnfuse.runtime.kernels.cuda.partials import (
    Moments,
    join_sums,
    partials_param,
    statistics_stage,
    sums_stage,
    write_row,
)
from bnfuse.runtime.kernels.cuda.sweep import Sweep
from bnfuse.runtime.kernels.cuda.vector import Reader, width_of
from bnfuse.runtime.kernels.kernel import Access, Kernel, MapType, Param
from bnfuse.runtime.targets.target import CudaTarget

MIN_BLOCKS = 4  # of a multiprocessor, chosen by hand: left to itself, the assembler may keep six, and spills
PLACES = ("offset", "points")  # operands that say where a sample lies
Place = Callable[[Expr], Expr]  # which pixel of the maps a pixel of the sweep is


def batch_norm_statistics(x: MapType, target: CudaTarget, sweeps: int = 1) -> Kernel:
    """Make the kernel: x -> mean, variance (biased), [c] float32.

    `sweeps=2` reads the map twice, for the mean and then for the variance: the baseline that mvf improves on.
    """
    assert sweeps in (1, 2), sweeps
    problem = NormProblem("BatchNormStatistics", (("x", x),), (("sweeps", sweeps),))
    sweep = Sweep.of(x.pixels, x.c, width_of([x]), target, reads=1, sums=True)
    alone = sweeps == 1 and sweep.tiles == 1
    name, params = named(problem, target, sweep, 0 if alone else 3 - sweeps)

    def one_sweep() -> tuple[Stage, ...]:
        return statistics_stages(name, params, sweep, x)

    def two_sweeps() -> tuple[Stage, ...]:
        def total(part: str, *vectors: str) -> tuple[Stage, Stage]:
            def add(reader: Reader, sums: Buffer) -> None:
                for j in range(sweep.team.width):
                    load = reader.load(j)
                    if vectors:
                        gap = T.bind(load("x", False) - load("mean", True))
                        d.put(sums, j, d.fma(gap, gap, sums[j]))
                    else:
                        d.put(sums, j, sums[j] + load("x", False))

            taken = only(params, "x", "partials", *vectors)
            merged = only(params, "partials", part)
            label = f"{name}_{part}"
            return (
                tile_sums(label, taken, sweep, {"x": x}, vectors, 1, add),
                sums_stage(f"{label}_merge", merged, tiles=sweep.tiles, channels=x.c, results=[part], count=x.pixels),
            )

        return *total("mean"), *total("variance", "mean")

    return Kernel(name, problem, target, params, one_sweep if sweeps == 1 else two_sweeps)


def batch_norm_grad_reduce(dz: MapType, x: MapType, target: CudaTarget) -> Kernel:
    """Make the kernel: dz, x, mean, inv_std -> dbeta, dgamma, [c] float32."""
    problem = NormProblem("BatchNormGradReduce", (("dz", dz), ("x", x)))
    sweep = Sweep.of(x.pixels, x.c, width_of([dz, x]), target, reads=2, sums=True)
    name, params = named(problem, target, sweep, 2)

    def add(reader: Reader, sums: Buffer) -> None:
        width = sweep.team.width
        for j in range(width):
            load = reader.load(j)
            dz_j = load("dz", False)
            d.put(sums, j, sums[j] + dz_j)
            gap = load("x", False) - load("mean", True)
            # scaled at once: inv_std stays in range where the plain product might not
            d.put(sums, width + j, d.fma(dz_j, gap * load("inv_std", True), sums[width + j]))

    def build() -> tuple[Stage, ...]:
        taken = only(params, "dz", "x", "mean", "inv_std", "partials")
        merged = only(params, "partials", "dbeta", "dgamma")
        results = ["dbeta", "dgamma"]
        return (
            tile_sums(name, taken, sweep, dict(problem.maps), ("mean", "inv_std"), 2, add),
            sums_stage(f"{name}_merge", merged, tiles=sweep.tiles, channels=x.c, results=results),
        )

    return Kernel(name, problem, target, params, build)


def named(
    problem: NormProblem, target: CudaTarget, sweep: Sweep, quantities: int = 0, places: int = 0
) -> tuple[str, tuple[Param, ...]]:
    """Name the kernel and list its parameters: the operator's, and the partials where there are `quantities`.

    `places` is the length of the int64 operand that says where a sample lies. A map that takes the place of an operand
    `acc` is updated in place, and `acc` is no parameter.
    """
    op, maps, params = PLAIN_OPS[problem.op], dict(problem.maps), []
    for name in (*op.operands, *op.results):
        access: Access = "in" if name in op.operands else "inout" if "acc" in op.operands else "out"
        if name in maps:
            params.append(Param(name, access, maps[name].elements, maps[name].dtype, is_map=True))
        elif name in PLACES:
            params.append(Param(name, access, places, "int64"))
        elif name != "acc":
            params.append(Param(name, access, sweep.channels))
    if quantities:
        params.append(partials_param(sweep.tiles, quantities, sweep.channels))
    return unique_name(problem.op, problem, target), tuple(params)


def only(params: Sequence[Param], *names: str) -> list[Param]:
    """Pick the parameters of these names, in the kernel's order."""
    return [param for param in params if param.name in names]


def swept(
    block: Block,
    sweep: Sweep,
    reader: Reader,
    channel: Expr,
    left: Expr | None,
    visit: Callable[[Expr], None],
    place: Place | None = None,
) -> None:
    """Emit `visit(pixel)` for each pixel, its channels in `reader`. `place` finds the sweep's pixels in the maps."""
    reader.open(channel, left, sweep.channels % 4 == 0)
    held = d.registers(sweep.unroll, "int32")

    def fetch(i: int, pixel: Expr, valid: Expr) -> None:
        def load() -> None:
            if place is not None:
                d.put(held, i, place(pixel))
            reader.fetch(i, pixel if place is None else held[i])

        d.when(valid, load)

    def finish(i: int, pixel: Expr, valid: Expr) -> None:
        def run() -> None:
            reader.unpack(i)
            visit(pixel if place is None else held[i])

        d.when(valid, run)

    sweep.run(block, left, fetch, finish)


def write_sums(
    block: Block,
    sweep: Sweep,
    channel: Expr,
    left: Expr | None,
    quantities: int,
    values: Buffer,
    result: str = "partials",
) -> None:
    """Write the block's row of partials, by the threads of lane 0. A result of one row needs no partials."""
    team = sweep.team

    def store() -> None:
        row = block.x if sweep.tiles > 1 else 0
        aligned = sweep.channels % 4 == 0
        write_row(block[result], row, quantities, sweep.channels, channel, team.width, values, left, aligned)

    d.when(True if team.down == 1 else team.lane(block.tid) == 0, store)


def statistics_stages(
    name: str,
    params: Sequence[Param],
    sweep: Sweep,
    x: MapType,
    where: Callable[[Block], Place] | None = None,
    takes: Sequence[str] = (),
) -> tuple[Stage, ...]:
    """Build the stages of mean and variance of the sweep's pixels, which `where` finds in x by the operands `takes`.

    Where the sweep is a single tile, its block writes them; else it leaves rows of partials, which are merged.
    """
    if sweep.tiles == 1:
        return (_moments_stage(name, only(params, "x", *takes, "mean", "variance"), sweep, x, where),)
    first = _moments_stage(name, only(params, "x", *takes, "partials"), sweep, x, where)
    merged = only(params, "partials", "mean", "variance")
    return first, statistics_stage(f"{name}_merge", merged, **sweep.merging)


def _moments_stage(
    name: str, params: Sequence[Param], sweep: Sweep, x: MapType, where: Callable[[Block], Place] | None
) -> Stage:
    """Build the stage of the tiles' mean and M2 of x, or of the mean and variance of the only one."""
    team, size, resident = sweep.team, sweep.team.statistics_bytes, 1 if sweep.tiles == 1 else MIN_BLOCKS
    with d.stage(name, params, grid=sweep.grid, threads=team.threads, shared=size, min_blocks=resident) as block:
        memory = d.shared_memory(size).view("float32")
        reader = Reader(block, {"x": x}, (), team.width, sweep.unroll)
        moments = Moments(team)
        moments.clear()
        channel, left = sweep.channel(block)
        place = where(block) if where else None
        swept(block, sweep, reader, channel, left, lambda pixel: moments.add(reader.values["x"]), place)
        made = moments.join(block.tid, memory)
        if "partials" in block:
            write_sums(block, sweep, channel, left, 2, made)
        else:
            write_sums(block, sweep, channel, left, 1, made, "mean")
            for j in range(team.width):
                d.put(made, j, made[team.width + j] / T.float32(sweep.pixels))
            write_sums(block, sweep, channel, left, 1, made, "variance")
    return block.stage


def tile_sums(
    name: str,
    params: Sequence[Param],
    sweep: Sweep,
    maps: dict[str, MapType],
    vectors: Sequence[str],
    quantities: int,
    add: Callable[[Reader, Buffer], None],
) -> Stage:
    """Build the stage of the tiles' sums: `add` adds to registers [quantities][width] at a pixel."""
    team, size = sweep.team, sweep.team.sums_bytes(quantities)
    with d.stage(name, params, grid=sweep.grid, threads=team.threads, shared=size) as block:
        memory = d.shared_memory(size).view("float32")
        reader = Reader(block, maps, vectors, team.width, sweep.unroll)
        sums = d.registers(quantities * team.width)
        for k in range(quantities * team.width):
            d.put(sums, k, T.float32(0))
        channel, left = sweep.channel(block)
        swept(block, sweep, reader, channel, left, lambda pixel: add(reader, sums))
        join_sums(team, block.tid, memory, sums, quantities)
        write_sums(block, sweep, channel, left, quantities, sums)
    return block.stage
