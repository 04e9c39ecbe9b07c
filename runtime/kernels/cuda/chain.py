"""Chains of small operators on a GPU (common/chain.py).

Without sums a thread has an element, as everywhere in generic.py. With sums a block has 32 columns:

    thread:   its column in every `lanes`-th row: all results of the element, which its sums take in, float64
    block:    the lanes of a column join in shared memory, in an order that never changes
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.chain import (
    ChainProblem,
    accumulators,
    emit_elements,
    finished,
    load_all,
    made_of,
    store_all,
)
from bnfuse.runtime.kernels.common.generic import collapse, dense_view, starts_of, walked_by
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.device import Expr, Stage
from bnfuse.runtime.kernels.cuda.generic import Nests
from bnfuse.runtime.kernels.cuda.partials import Team, join_lanes
from bnfuse.runtime.kernels.kernel import Kernel
from bnfuse.runtime.targets.target import CudaTarget

COLUMNS, MOST_LANES = 32, 16  # of a block with sums: chosen by hand


def chain(problem: ChainProblem, target: CudaTarget) -> Kernel:
    """Make the kernel: in0, in1, ... -> out0, out1, ..."""
    name = unique_name("Chain", problem, target)
    build = _sums if problem.totals else _elements
    return Kernel(name, problem, target, problem.params, lambda: build(name, problem, target))


def _elements(name: str, problem: ChainProblem, target: CudaTarget) -> tuple[Stage, ...]:
    nests = Nests(name, problem.params, (), target)
    with walked_by(nests):
        emit_elements(problem, nests, T.bind)
    return tuple(nests.stages)


def _sums(name: str, problem: ChainProblem, target: CudaTarget) -> tuple[Stage, ...]:
    rows, columns, totals = problem.rows, problem.columns, problem.totals
    dtypes = accumulators(problem)
    assert set(dtypes) == {"float64"}, dtypes
    lanes = min(MOST_LANES, rows)
    team = Team(COLUMNS, lanes, 1)
    shared = team.shared_bytes(2 * len(totals))
    space, views = collapse(problem.space, [dense_view(problem.space), *(read.view for read in problem.reads)])
    grid = -(-columns // COLUMNS), 1, 1
    with d.stage(name, problem.params, grid=grid, threads=team.threads, shared=shared) as block:
        column, lane = T.bind(block.x * COLUMNS + team.vector(block.tid)), team.lane(block.tid)
        own = d.below(column, columns, columns % COLUMNS == 0)
        sums = d.registers(len(totals), "float64")
        for k in range(len(totals)):
            d.put(sums, k, tirx.const(0, "float64"))

        def element(row: Expr) -> None:
            at, *places = (T.bind(place) for place in starts_of(T.bind(row * columns + column), space, views))
            find = made_of(problem, load_all(problem, block, places), T.bind)
            store_all(problem, block, at, find)
            for k, total in enumerate(totals):
                d.put(sums, k, sums[k] + tirx.Cast("float64", find(total.operand)))

        with T.serial(0, -(-rows // lanes)) as turn:
            row = T.bind(turn * lanes + lane)
            d.when(d.all_of(own, d.below(row, rows, rows % lanes == 0)), lambda: element(row))

        def combine(partner: Callable[[int], Expr]) -> None:
            for k in range(len(totals)):
                d.put(sums, k, sums[k] + partner(k))

        memory = d.shared_memory(shared).view("float64") if lanes > 1 else None
        join_lanes(team, block.tid, memory, [sums[k] for k in range(len(totals))], combine)

        def write() -> None:
            for k, total in enumerate(totals):
                value = finished(total, sums[k], rows)
                result = block[f"out{len(problem.stored) + k}"]
                d.put(result, column, tirx.Cast(total.problem.out_dtype, value))

        d.when(d.all_of(own, True if lanes == 1 else lane == 0), write)
    return (block.stage,)
