"""Nests over views (kernels/common/generic.py) on a CPU.

collapse axes that all views walk as one  ->  parallel over the outer axes, vectors along the inner one
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.generic import GenericProblem, Nest, Shape, View, at_stride, collapse, starts_of
from bnfuse.runtime.kernels.common.steps import Expr
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.layout import flat
from bnfuse.runtime.kernels.cpu.sweep import Args, vectors
from bnfuse.runtime.targets.target import CpuTarget

Emit = Callable[[GenericProblem, CpuTarget, Args], None]


def walk_of(target: CpuTarget) -> Nest:
    """Give the nest of a target, for `nested_by`."""

    def walk(space: Shape, views: Sequence[View], emit: Callable[..., None]) -> None:
        if math.prod(space) == 0:
            T.evaluate(tirx.const(0, "int32"))
            return
        space, views = collapse(space, views)
        if not space:
            emit(*(tirx.const(view.base, "int32") for view in views))
        elif len(space) == 1:
            flat(space[0], target, lambda i: emit(*(at_stride(view.base, i, view.strides[0]) for view in views)))
        else:
            _rows(space, views, target, emit)

    return walk


def _rows(space: Shape, views: Sequence[View], target: CpuTarget, emit: Callable[..., None]) -> None:
    count, inner = math.prod(space[:-1]), space[-1]
    threads = min(target.threads, count)
    with T.parallel(0, threads) as thread:
        first, own = tir.share(count, threads, thread)
        with T.serial(0, own) as i:
            starts = [T.bind(start) for start in starts_of(first + i, space[:-1], views)]
            for vector in vectors(inner, target.lanes):
                with vector.each() as j:
                    ends = zip(starts, views, strict=True)
                    emit(*(at_stride(start, vector.base + j, view.strides[-1]) for start, view in ends))


def parallel_rows(count: int, target: CpuTarget, emit: Callable[[Expr], None]) -> None:
    """Emit `emit(row)` for each of `count` rows, dealt to the threads."""
    threads = min(target.threads, count)
    with T.parallel(0, threads) as thread:
        first, own = tir.share(count, threads, thread)
        with T.serial(0, own) as i:
            emit(first + i)
