"""Reductions over any axes on a GPU, softmax and its relatives: the formulas of kernels/common/generic_reduce.py.

Every result is a fold over `reduced` elements, always in the same order:

    thread:   a thread folds one result (neighbouring threads read neighbouring elements where the last axis stays)
    block:    a block folds one result; its threads stride over the elements and are joined at the end

Where the results are too few to fill the GPU, the elements are cut up into shares: partials [shares][results], and a
second stage joins the shares in order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.generic import GenericProblem, store
from bnfuse.runtime.kernels.common.generic_reduce import (
    BY_ROWS,
    FOLDINGS,
    Folding,
    accumulator_of,
    place,
    reduced_axes,
    rows_of,
)
from bnfuse.runtime.kernels.cuda.device import Block, Expr, Stage, put, registers, stage, when
from bnfuse.runtime.kernels.cuda.rows import BlockRows, join_threads
from bnfuse.runtime.kernels.kernel import Param
from bnfuse.runtime.targets.target import CudaTarget

THREADS = 128
LEAST = 64  # elements that are worth a share of a thread, or two warps of a block: chosen by hand


@dataclasses.dataclass(frozen=True)
class Fold:
    """`results` results of `reduced` elements each, as accumulators of `dtype`.

    `take(args, result, element)` reads one, `put(args, result, value)` writes a result. `by_block`: neighbouring
    elements of a result lie together, rather than neighbouring results.
    """

    results: int
    reduced: int
    by_block: bool
    dtype: str
    start: Any
    join: Callable[[Expr, Expr], Expr]
    take: Callable[[Any, Expr, Expr], Expr]
    put: Callable[[Any, Expr, Expr], None]

    def shares(self, target: CudaTarget) -> int:
        """Count the parts that the elements of a result are cut into."""
        blocks = self.results if self.by_block else -(-self.results // THREADS)
        most = self.reduced // (LEAST * (THREADS if self.by_block else 1))
        return max(1, min(4 * target.multiprocessors // blocks, most))


def fold_stages(name: str, fold: Fold, params: tuple[Param, ...], partials: str, target: CudaTarget) -> Iterator[Stage]:
    """Yield the stages of a fold. `partials` names the scratch that it needs where it has several shares."""
    shares = fold.shares(target)
    blocks = fold.results if fold.by_block else -(-fold.results // THREADS)
    with stage(name, params, grid=(blocks, shares, 1), threads=THREADS) as block:
        result = block.x if fold.by_block else T.bind(block.x * THREADS + block.tid)

        def each() -> None:
            value = _part(block, fold, result, shares)

            def write() -> None:
                if shares > 1:
                    put(block[partials], block.y * fold.results + result, value)
                else:
                    fold.put(block, result, value)

            when(block.tid == 0 if fold.by_block else True, write)

        when(True if fold.by_block or fold.results % THREADS == 0 else result < fold.results, each)
    yield block.stage
    if shares > 1:
        yield _join(f"{name}_join", fold, params, partials, shares)


def _part(block: Block, fold: Fold, result: Expr, shares: int) -> Expr:
    """Fold what is this thread's, or its block's."""
    most = -(-fold.reduced // shares)
    first = T.bind(block.y * most) if shares > 1 else 0
    stop = T.bind(tirx.Min(first + most, fold.reduced)) if shares > 1 else fold.reduced
    total = registers(1, fold.dtype)
    put(total, 0, fold.start)
    if not fold.by_block:
        with T.serial(0, tirx.Max(stop - first, 0) if shares > 1 else stop) as i:
            put(total, 0, fold.join(total[0], fold.take(block, result, first + i)))
        return total[0]
    turns = (most + THREADS - 1) // THREADS
    with T.serial(0, turns) as turn:
        element = T.bind(first + turn * THREADS + block.tid)
        when(element < stop, lambda: put(total, 0, fold.join(total[0], fold.take(block, result, element))))
    return join_threads(block, total[0], fold.dtype, fold.join)


def _join(name: str, fold: Fold, params: tuple[Param, ...], partials: str, shares: int) -> Stage:
    with stage(name, params, grid=(-(-fold.results // THREADS), 1, 1), threads=THREADS) as block:
        result = T.bind(block.x * THREADS + block.tid)

        def join() -> None:
            total = registers(1, fold.dtype)
            put(total, 0, block[partials][result])
            with T.serial(1, shares) as share:
                put(total, 0, fold.join(total[0], block[partials][share * fold.results + result]))
            fold.put(block, result, total[0])

        when(True if fold.results % THREADS == 0 else result < fold.results, join)
    return block.stage


# -- operators -----------------------------------------------------------------------------------------------------


def folds_of(problem: GenericProblem) -> list[Fold]:
    """List the folds that an operator is: none where its operand is empty."""
    return [_reduction(problem, FOLDINGS[problem.op_type])] if math.prod(problem.shape()) else []


def _reduction(problem: GenericProblem, folding: Folding) -> Fold:
    axes, dtype = reduced_axes(problem), accumulator_of(folding, problem)

    def take(args: Any, result: Expr, element: Expr) -> Expr:
        return folding.take(tirx.Cast(dtype, args["in0"][place(result, axes.kept) + place(element, axes.reduced)]))

    def finish(args: Any, result: Expr, value: Expr) -> None:
        value = folding.finish(value, axes.reduced_count)
        store(args, "out0", result, tirx.Cast(problem.out_dtype, value))

    by_block = not axes.last_is_kept and axes.reduced_count >= LEAST
    return Fold(axes.kept_count, axes.reduced_count, by_block, dtype, folding.start(dtype), folding.join, take, finish)


def row_stage(name: str, problem: GenericProblem, params: tuple[Param, ...], target: CudaTarget) -> Stage:
    """Build the stage of an operator that goes row by row."""
    rows = BlockRows.of(rows_of(problem))
    with stage(name, params, grid=rows.grid, threads=rows.threads) as block:
        own = rows.within(block)
        own.each(target, lambda index, at: BY_ROWS[problem.op_type](problem, target, block, own, index, at))
    return block.stage
