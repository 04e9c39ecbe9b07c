"""The halves of a BatchNorm that stand alone and sweep maps (PLAIN_OPS of bnfuse/opset/spec.py).

Each tile of sweep.py leaves a row of partials; a last stage merges them. What is computed per channel is in
coefficients.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.script.ir_builder import tirx as T

from bnfuse.opset.spec import PLAIN_OPS
from bnfuse.runtime.kernels.cpu.norm import NormProblem
from bnfuse.runtime.kernels.cpu.sweep import unique_name
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
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Param, Target


def batch_norm_statistics(x: MapType, target: Target, sweeps: int = 1) -> Kernel:
    """x -> mean, variance (biased), [c] float32.

    `sweeps=2` reads the map twice, for the mean and then for the variance: the baseline that mvf improves on.
    """
    assert sweeps in (1, 2), sweeps
    problem = NormProblem("BatchNormStatistics", (("x", x),), (("sweeps", sweeps),))
    sweep = Sweep.of(x.pixels, x.c, width_of([x]), target, reads=1, sums=True)
    name, params = _named(problem, target, sweep, 3 - sweeps)

    def one_sweep() -> tuple[Stage, ...]:
        taken = _only(params, "x", "partials")
        merged = _only(params, "partials", "mean", "variance")
        merge = statistics_stage(f"{name}_merge", merged, **sweep.merging)
        return _moments(name, taken, sweep, x), merge

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

            taken = _only(params, "x", "partials", *vectors)
            merged = _only(params, "partials", part)
            label = f"{name}_{part}"
            return (
                _sums(label, taken, sweep, {"x": x}, vectors, 1, add),
                sums_stage(f"{label}_merge", merged, tiles=sweep.tiles, channels=x.c, results=[part], count=x.pixels),
            )

        return *total("mean"), *total("variance", "mean")

    return Kernel(name, problem, target, params, one_sweep if sweeps == 1 else two_sweeps)


def batch_norm_grad_reduce(dz: MapType, x: MapType, target: Target) -> Kernel:
    """dz, x, mean, inv_std -> dbeta, dgamma, [c] float32."""
    problem = NormProblem("BatchNormGradReduce", (("dz", dz), ("x", x)))
    sweep = Sweep.of(x.pixels, x.c, width_of([dz, x]), target, reads=2, sums=True)
    name, params = _named(problem, target, sweep, 2)

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
        taken = _only(params, "dz", "x", "mean", "inv_std", "partials")
        merged = _only(params, "partials", "dbeta", "dgamma")
        results = ["dbeta", "dgamma"]
        return (
            _sums(name, taken, sweep, dict(problem.maps), ("mean", "inv_std"), 2, add),
            sums_stage(f"{name}_merge", merged, tiles=sweep.tiles, channels=x.c, results=results),
        )

    return Kernel(name, problem, target, params, build)


def _named(problem: NormProblem, target: Target, sweep: Sweep, quantities: int) -> tuple[str, tuple[Param, ...]]:
    """The kernel's name, and its parameters: those of the operator and the partials."""
    op, maps = PLAIN_OPS[problem.op], dict(problem.maps)
    params = [
        Param(
            name,
            "in" if name in op.operands else "out",
            maps[name].elements if name in maps else sweep.channels,
            maps[name].dtype if name in maps else "float32",
            is_map=name in maps,
        )
        for name in (*op.operands, *op.results)
    ]
    params.append(partials_param(sweep.tiles, quantities, sweep.channels))
    return unique_name(problem.op, problem, target), tuple(params)


def _only(params: Sequence[Param], *names: str) -> list[Param]:
    return [param for param in params if param.name in names]


def _swept(
    block: Block, sweep: Sweep, reader: Reader, channel: Expr, left: Expr | None, add: Callable[[], None]
) -> None:
    """`add()` for each pixel, its channels in `reader`."""
    reader.open(channel, left, sweep.channels % 4 == 0)

    def finish(i: int, pixel: Expr, valid: Expr) -> None:
        def run() -> None:
            reader.unpack(i)
            add()

        d.when(valid, run)

    sweep.run(block, left, reader.fetch, finish)


def _leave(block: Block, sweep: Sweep, channel: Expr, left: Expr | None, quantities: int, values: Buffer) -> None:
    """The block's row of partials, by the threads of lane 0."""
    team = sweep.team

    def store() -> None:
        aligned = sweep.channels % 4 == 0
        write_row(block["partials"], block.x, quantities, sweep.channels, channel, team.width, values, left, aligned)

    d.when(True if team.down == 1 else team.lane(block.tid) == 0, store)


def _moments(name: str, params: Sequence[Param], sweep: Sweep, x: MapType) -> Stage:
    """The tiles' mean and M2 of x."""
    team = sweep.team
    with d.stage(name, params, grid=sweep.grid, threads=team.threads, shared=team.statistics_bytes) as block:
        memory = d.shared_memory(team.statistics_bytes).view("float32")
        reader = Reader(block, {"x": x}, (), team.width, sweep.unroll)
        moments = Moments(team)
        moments.clear()
        channel, left = sweep.channel(block)
        _swept(block, sweep, reader, channel, left, lambda: moments.add(reader.values["x"]))
        _leave(block, sweep, channel, left, 2, moments.join(block.tid, memory))
    return block.stage


def _sums(
    name: str,
    params: Sequence[Param],
    sweep: Sweep,
    maps: dict[str, MapType],
    vectors: Sequence[str],
    quantities: int,
    add: Callable[[Reader, Buffer], None],
) -> Stage:
    """The tiles' sums of what `add` adds to registers [quantities][width] at a pixel."""
    team, size = sweep.team, sweep.team.sums_bytes(quantities)
    with d.stage(name, params, grid=sweep.grid, threads=team.threads, shared=size) as block:
        memory = d.shared_memory(size).view("float32")
        reader = Reader(block, maps, vectors, team.width, sweep.unroll)
        sums = d.registers(quantities * team.width)
        for k in range(quantities * team.width):
            d.put(sums, k, T.float32(0))
        channel, left = sweep.channel(block)
        _swept(block, sweep, reader, channel, left, lambda: add(reader, sums))
        join_sums(team, block.tid, memory, sums, quantities)
        _leave(block, sweep, channel, left, quantities, sums)
    return block.stage
