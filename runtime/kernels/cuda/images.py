"""Sums of each image and channel, in a sweep over what a core has written (common/images.py).

block: an image and up to 16 vectors of channels; the lanes share its pixels and join in shared memory
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.images import ImagePlan, source_of, sums_params
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.device import Block, Buffer, Expr, Stage
from bnfuse.runtime.kernels.cuda.operand import load_vector
from bnfuse.runtime.kernels.cuda.partials import Moments, Team, join_sums, write_row
from bnfuse.runtime.kernels.cuda.pool import GLOBAL_ACROSS, GLOBAL_AT_A_TIME, GLOBAL_THREADS, Images
from bnfuse.runtime.kernels.cuda.vector import Reader, width_of
from bnfuse.runtime.kernels.kernel import Kernel, Problem
from bnfuse.runtime.targets.target import CudaTarget


def image_sums(problem: Problem, target: CudaTarget) -> Kernel:
    """Make the kernel of the sums alone, of a problem by `common.images.of_map`: float32 [n, c] each."""
    plan, source, params = ImagePlan.of(problem), source_of(problem), sums_params(problem)
    assert plan is not None, problem.op
    x = problem.map(source)
    maps = {name: problem.map(name) for name in (source, *plan.maps)}
    width = width_of(maps.values())
    vectors = -(-x.c // width)
    columns = -(-vectors // GLOBAL_ACROSS)
    across = -(-vectors // columns)
    down = max(1, min(GLOBAL_THREADS // across, x.h * x.w))
    team = Team(across, down, width)
    sweep = Images(x.n, x.c, team, columns, 1, 1)
    shared = team.statistics_bytes if plan.statistics else team.sums_bytes(len(plan.results))
    name = unique_name(f"{problem.op}_sums", problem, target)

    def build() -> tuple[Stage, ...]:
        with d.stage(name, params, grid=sweep.grid, threads=team.threads, shared=shared) as block:
            memory = d.shared_memory(shared).view("float32") if shared else None
            _emit(block, plan, sweep, Reader(block, maps, plan.vectors, width, _passes(len(maps))), memory)
        return (block.stage,)

    return Kernel(name, problem, target, params, build)


def _passes(maps: int) -> int:
    """Count the pixels whose vectors are on their way at a time."""
    return max(1, GLOBAL_AT_A_TIME // maps)


def _emit(block: Block, plan: ImagePlan, sweep: Images, reader: Reader, shared: Buffer) -> None:
    source, team = source_of(plan.problem), sweep.team
    x = plan.problem.map(source)
    area, width, quantities = x.h * x.w, team.width, len(plan.results)
    at_a_time = _passes(len(plan.maps) + 1)
    channel, left = sweep.channel(block)
    aligned = sweep.channels % 4 == 0
    reader.open(channel, left, aligned)
    lane = team.lane(block.tid)
    sums, moments = d.registers(quantities * width), Moments(team)
    if plan.statistics:
        moments.clear()
    for k in range(quantities * width):
        d.put(sums, k, T.float32(0))

    def take(i: int) -> None:
        reader.unpack(i)
        if plan.statistics:
            moments.add(reader.values[source])
            return
        for j in range(width):
            load = reader.load(j)
            for q, term in enumerate(plan.terms(load(source, False), load, T.bind)):
                d.put(sums, q * width + j, sums[q * width + j] + term)

    def group(first: Expr) -> None:
        places = [first + i * team.down + lane for i in range(at_a_time)]
        valid = [d.below(place, area, area % (at_a_time * team.down) == 0) for place in places]
        valid = [v if left is None else d.all_of(v, left > 0) for v in valid]
        for i in range(at_a_time):
            reader.fetch(i, block.x * area + places[i], valid[i])
        for i in range(at_a_time):
            d.when(valid[i], lambda i=i: take(i))  # type: ignore[misc]

    groups = -(-area // (at_a_time * team.down))
    if groups == 1:
        group(0)
    else:
        with T.serial(0, groups) as number:
            group(T.bind(number * (at_a_time * team.down)))
    if plan.statistics:
        made = moments.join(block.tid, shared)
        for j in range(width):
            d.put(made, width + j, made[width + j] / T.float32(area))
    else:
        join_sums(team, block.tid, shared, sums, quantities)
        made = sums

    def write() -> None:
        scale, row = d.registers(width), d.registers(width)
        for q, result in enumerate(plan.results):
            factor = plan.factor(result)
            if factor is not None:
                load_vector(block[factor], channel, width, scale, aligned, left)
            for j in range(width):
                value = made[q * width + j]
                d.put(row, j, value if factor is None else value * scale[j])
            write_row(block[result], block.x, 1, sweep.channels, channel, width, row, left, aligned)

    d.when(True if team.down == 1 else lane == 0, write)
