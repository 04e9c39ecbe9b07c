"""Chains of small operators on a CPU (common/chain.py): vectors of elements, in registers from the first to the last.

With sums a thread has vectors of columns, and goes down the rows with each: all results of the elements, which the sums
take in, float64.
"""

from __future__ import annotations

from typing import Any

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
from bnfuse.runtime.kernels.common.generic import at_stride, dense_view, store, walked_by
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.generic_nest import Nests, parallel_rows
from bnfuse.runtime.kernels.cpu.sweep import Args, Vector
from bnfuse.runtime.kernels.kernel import Kernel
from bnfuse.runtime.targets.target import CpuTarget


def chain(problem: ChainProblem, target: CpuTarget) -> Kernel:
    """Make the kernel: in0, in1, ... -> out0, out1, ..."""
    name = unique_name("Chain", problem, target)
    return Kernel(name, problem, target, problem.params, lambda: _build(name, problem, target))


def _build(name: str, problem: ChainProblem, target: CpuTarget) -> Any:
    with tir.function(name, problem.params) as arguments, walked_by(Nests(target)):
        args = Args(arguments, {})
        if problem.totals:
            _sums(problem, args, target)
        else:
            emit_elements(problem, args, lambda x: x)
    return arguments.result


def _sums(problem: ChainProblem, args: Args, target: CpuTarget) -> None:
    rows, columns = problem.space
    whole, rest = divmod(columns, target.lanes)
    if whole:
        parallel_rows(whole, target, lambda v: _column(problem, args, Vector(v * target.lanes, target.lanes), rows))
    if rest:
        _column(problem, args, Vector(tirx.const(whole * target.lanes, "int32"), rest), rows)


def _column(problem: ChainProblem, args: Args, vector: Vector, rows: int) -> None:
    """Emit a vector of columns, from the first row to the last."""
    totals = list(zip(problem.totals, accumulators(problem), strict=True))
    sums = [vector.local(dtype) for _, dtype in totals]
    views = [dense_view(problem.space), *(read.view for read in problem.reads)]
    with vector.each() as j:
        for held, (_, dtype) in zip(sums, totals, strict=True):
            T.buffer_store(held, tirx.const(0, dtype), [j])
    with T.serial(0, rows) as row:
        starts = [T.bind(at_stride(view.base, row, view.strides[0])) for view in views]
        with vector.each() as j:
            ends = zip(starts, views, strict=True)
            at, *places = (at_stride(start, vector.base + j, view.strides[1]) for start, view in ends)
            find = made_of(problem, load_all(problem, args, places), lambda x: x)
            store_all(problem, args, at, find)
            for held, (total, dtype) in zip(sums, totals, strict=True):
                T.buffer_store(held, held[j] + tirx.Cast(dtype, find(total.operand)), [j])
    with vector.each() as j:
        for k, (total, _) in enumerate(totals):
            value = tirx.Cast(total.problem.out_dtype, finished(total, sums[k][j], rows))
            store(args, f"out{len(problem.stored) + k}", vector.base + j, value)
