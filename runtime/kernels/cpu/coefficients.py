"""What a BatchNorm computes per channel: coefficients from statistics, and those of its input gradient.

Each operator is a serial loop of a few microseconds, and adjacent ones share a launch (runtime/lowering/grouping.py).
The length of a loop is a run-time value taken from the buffers, so one compiled kernel serves every BN of a network; a
range of channels of a longer vector is that vector and an offset, passed like a map's. Rows that lie one behind the
other are as long as it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.runtime.kernels.common.coefficients import LOOPS, Loop, Member, param_name
from bnfuse.runtime.kernels.common.norm import NormProblem
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.steps import Expr
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.kernel import Kernel, Param
from bnfuse.runtime.targets.target import CpuTarget


@dataclasses.dataclass(frozen=True)
class GroupProblem:
    """Operators that one launch does in turn. They may read what those before them wrote."""

    members: tuple[NormProblem, ...]

    @property
    def op(self) -> str:
        """Join the members' names by `+`."""
        return "+".join(member.op for member in self.members)


def coefficients(members: tuple[Member, ...], target: CpuTarget) -> Kernel:
    """Make the kernel of some operators, one after the other. With several, parameter x of member i is x_i."""
    loops = [LOOPS[name](*arguments) for name, arguments in members]
    params = tuple(
        dataclasses.replace(p, name=param_name(p.name, i, loops), length=_length(loop, p, i))
        for i, loop in enumerate(loops)
        for p in loop.params
    )
    problem = loops[0].problem if len(loops) == 1 else GroupProblem(tuple(loop.problem for loop in loops))
    name = unique_name(problem.op, problem, target)
    return Kernel(name, problem, target, params, lambda: _function(name, params, loops))


def _function(name: str, params: tuple[Param, ...], loops: list[Loop]) -> Any:
    lengths: dict[str, Any] = {p.length: tirx.Var(f"{name}_{p.length}", "int32") for p in params if p.length}
    symbolic = [dataclasses.replace(p, elements=lengths.get(p.length, p.elements)) for p in params]
    with tir.function(name, symbolic, may_alias=len(loops) > 1) as args:
        for i, loop in enumerate(loops):
            _emit_loop(args, loop, {p.name: param_name(p.name, i, loops) for p in loop.params})
    return args.result


def _length(loop: Loop, param: Param, number: int) -> str:
    """Name the length of a parameter's buffer; nothing where the code knows it, of rows with a pitch."""
    if param.name in loop.rows:
        return "" if loop.pitch else f"rows_{number}"
    return f"total_{number}" if param.is_map else f"channels_{number}"


def _emit_loop(args: tir.Arguments, loop: Loop, names: Mapping[str, str]) -> None:
    op = PLAIN_OPS[loop.problem.op]
    last_result = next(names[result] for result in reversed(op.results) if result not in loop.rows)
    channels = args[last_result].shape[0]

    def place(param: str, row: int, channel: Expr) -> Expr:
        at = channel + row * (loop.pitch or channels) if row else channel
        return args.offsets[param] + at if param in args.offsets else at

    with T.serial(0, channels) as channel:

        def get(param: str, row: int = 0) -> Expr:
            return args[names[param]][place(names[param], row, channel)]

        def put(param: str, value: Expr, row: int = 0) -> None:
            T.buffer_store(args[names[param]], value, [place(names[param], row, channel)])

        loop.emit(get, put)
