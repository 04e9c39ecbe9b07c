"""The parameters of a tail: of the operators that are done where an operator's sums are joined (`Problem.tail`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from bnfuse.runtime.kernels.common.coefficients import LOOPS
from bnfuse.runtime.kernels.common.params import operator_params
from bnfuse.runtime.kernels.kernel import Param, Problem


def params_with_tail(
    problem: Problem, *, weight: tuple[int, str] | None = None, unread: Collection[str] = ()
) -> tuple[Param, ...]:
    """List the parameters of an operator (`operator_params`), then those of its tail, operator by operator."""
    loops = [LOOPS[name](*arguments) for name, arguments in problem.tail]
    return (
        *operator_params(problem, weight=weight, unread=unread),
        *(dataclasses.replace(p, name=tail_name(i, p.name)) for i, loop in enumerate(loops) for p in loop.params),
    )


def tail_name(member: int, name: str) -> str:
    """Name a parameter of operator number `member` of a tail."""
    return f"tail{member}_{name}"


def is_of_tail(name: str) -> bool:
    """Tell whether a parameter is one of a tail."""
    return name.startswith("tail")
