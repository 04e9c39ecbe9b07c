"""Operators that have no kernel of their own (kernels/common/generic_ops.py), on a CPU."""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.generic import GenericProblem, dense_view, nest, walked_by
from bnfuse.runtime.kernels.common.generic_ops import NESTED, SCALARS, dropout_key, dropout_point, generic_params
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.steps import Expr
from bnfuse.runtime.kernels.cpu import generic_reduce, tir
from bnfuse.runtime.kernels.cpu.generic_nest import Nests
from bnfuse.runtime.kernels.cpu.sweep import Args
from bnfuse.runtime.kernels.kernel import Kernel, Param
from bnfuse.runtime.targets.target import CpuTarget


def generic(problem: GenericProblem, target: CpuTarget) -> Kernel:
    """Make the kernel in0, in1, ... -> out0, out1, ... Raises BnfuseError as `generic_params` does."""
    params = generic_params(problem)
    name = unique_name(problem.op_type, problem, target)
    return Kernel(name, problem, target, params, lambda: _build(name, params, problem, target))


def _build(name: str, params: tuple[Param, ...], problem: GenericProblem, target: CpuTarget) -> Any:
    with tir.function(name, params) as arguments, walked_by(Nests(target)):
        args = Args(arguments, {})
        scalars = [T.arg(scalar, T.int64()) for scalar in SCALARS.get(problem.op_type, ())]
        if problem.op_type == "Dropout":
            _dropout(problem, args, *scalars)
        elif problem.op_type in generic_reduce.OPS:
            generic_reduce.OPS[problem.op_type](problem, target, args)
        else:
            NESTED[problem.op_type](problem, args)
    return arguments.result


def _dropout(problem: GenericProblem, args: Args, seed: Expr, step: Expr) -> None:
    key = dropout_key(problem, seed, step)
    shape = problem.out_shape
    nest(shape, [dense_view(shape)], lambda at: dropout_point(problem, args, key, at))
