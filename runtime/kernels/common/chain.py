"""Small operators one behind the other as one kernel: each element of all their results at once.

    t = Mul(beta, g)                              v       = beta*g + slope*s
    u = Mul(slope, s)                     ->      db      = sum over the rows of v
    v = Add(t, u)
    db = ReduceSum(v), over the first axis

All operators of a chain have results of one `space`, axes of size 1 apart, in the order in which they lie in memory;
what they read may be broadcast to it. What a later one takes of an earlier one never goes through memory: only what
somebody else reads is stored. Sums are over the first axes of the space, its `rows`.

Parameters are in0, in1, ... and out0, out1, ...: the results that are stored, then the sums.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bnfuse.runtime.kernels.common.epilogue import EpiloguePlan
from bnfuse.runtime.kernels.common.generic import (
    Buffers,
    GenericProblem,
    Shape,
    View,
    broadcast_view,
    dense_view,
    nest,
    store,
)
from bnfuse.runtime.kernels.common.generic_elementwise import NARY, UNARY
from bnfuse.runtime.kernels.common.generic_reduce import FOLDINGS, accumulator_of
from bnfuse.runtime.kernels.common.params import operator_params
from bnfuse.runtime.kernels.common.prologue import ProloguePlan
from bnfuse.runtime.kernels.common.steps import Expr
from bnfuse.runtime.kernels.kernel import Param, Problem

FORMULAS: dict[str, Callable[..., Expr]] = {**UNARY, **NARY, "Expand": lambda attributes, x: x}
SUMS = ("ReduceSum", "ReduceMean")
Bind = Callable[[Expr], Expr]


@dataclasses.dataclass(frozen=True)
class Read:
    """An operand in memory: the number of the chain's input, and how it is seen over the space."""

    number: int
    view: View


Operand = Read | int  # or the number of an earlier member of the chain


@dataclasses.dataclass(frozen=True)
class Member:
    """One operator: of the standard domain, or of elementwise steps on dense maps."""

    problem: GenericProblem | Problem
    operands: tuple[Operand, ...]

    @property
    def dtype(self) -> str:
        """Name the dtype of the result."""
        return self.problem.out_dtype if isinstance(self.problem, GenericProblem) else "float32"


@dataclasses.dataclass(frozen=True)
class Total:
    """A sum, or a mean, over the rows of what a chain reads or makes."""

    problem: GenericProblem
    operand: Operand


@dataclasses.dataclass(frozen=True)
class ChainProblem:
    """The operators of a chain. `inputs` are elements and dtypes, `stored` the numbers of the members that are."""

    space: Shape
    members: tuple[Member, ...]
    inputs: tuple[tuple[int, str], ...]
    stored: tuple[int, ...]
    totals: tuple[Total, ...] = ()
    rows: int = 1

    @property
    def op_type(self) -> str:
        """Name the operators, for people: Mul+Mul+Add."""
        problems = [member.problem for member in self.members] + [total.problem for total in self.totals]
        return "+".join(map(name_of, problems))

    @property
    def columns(self) -> int:
        """Count the elements of a row, which are those of a sum."""
        return math.prod(self.space) // self.rows

    @property
    def reads(self) -> tuple[Read, ...]:
        """List what is read of an element, each once."""
        operands = [o for member in self.members for o in member.operands] + [t.operand for t in self.totals]
        return tuple(dict.fromkeys(o for o in operands if isinstance(o, Read)))

    @property
    def params(self) -> tuple[Param, ...]:
        """List the parameters of the kernel."""
        count = math.prod(self.space)
        outputs = [(count, self.members[number].dtype) for number in self.stored]
        outputs += [(self.columns, total.problem.out_dtype) for total in self.totals]
        return (
            *(Param(f"in{i}", "in", elements, dtype) for i, (elements, dtype) in enumerate(self.inputs)),
            *(Param(f"out{i}", "out", elements, dtype) for i, (elements, dtype) in enumerate(outputs)),
        )


def name_of(problem: GenericProblem | Problem) -> str:
    """Name an operator as files have it."""
    return problem.op_type if isinstance(problem, GenericProblem) else problem.op


def squeezed(shape: Shape) -> Shape:
    """Give a shape without its axes of size 1."""
    return tuple(size for size in shape if size != 1)


def seen(shape: Shape, space: Shape) -> View:
    """View a dense tensor of this shape, broadcast to `space`, over the squeezed space."""
    strides = broadcast_view(shape, space).strides
    return View(tuple(stride for stride, size in zip(strides, space, strict=True) if size != 1))


# -- operators of steps --------------------------------------------------------------------------------------------


def is_elementwise(problem: Problem) -> bool:
    """Tell whether an operator of steps makes one map, dense, of others like it, each element by itself."""
    spec = problem.spec
    if spec.core not in ("Pointwise", "PointwiseGrad") or len(spec.results) != 1 or EpiloguePlan(problem).places:
        return False
    maps = [kind for _, kind in problem.maps]
    alike = all((kind.n, kind.h, kind.w, kind.c) == shape_of(problem) for kind in maps)
    return alike and all(kind.stride == kind.c and not kind.whole and kind.dtype == "float32" for kind in maps)


def shape_of(problem: Problem) -> Shape:
    """Give the shape of the result, NHWC."""
    kind = problem.map(EpiloguePlan(problem).result)
    return kind.n, kind.h, kind.w, kind.c


def operand_shapes(problem: Problem) -> tuple[tuple[str, Shape], ...]:
    """List the operands in the order of the kernel's parameters, with their shapes."""
    shape, known = shape_of(problem), dict(problem.maps)
    taken = [param for param in operator_params(problem) if param.access == "in"]
    return tuple((param.name, shape if param.name in known else shape[-1:]) for param in taken)


def _of_steps(problem: Problem, values: Sequence[Expr], bind: Bind) -> Expr:
    named = dict(zip((name for name, _ in operand_shapes(problem)), values, strict=True))
    load = lambda name, is_vector: named[name]  # noqa: E731
    plan = EpiloguePlan(problem)
    if problem.spec.is_gradient:
        return plan.changed(ProloguePlan.of_gradient(problem).value(load), load, bind)
    return plan.finished(ProloguePlan.of_input(problem).value(load), load)


# -- elements ------------------------------------------------------------------------------------------------------


def made_of(problem: ChainProblem, loaded: Mapping[Read, Expr], bind: Bind) -> Callable[[Operand], Expr]:
    """Write the result of each member at an element, of which `loaded` has what is read; each goes through `bind`.

    Gives what finds an operand.
    """
    made: list[Expr] = []

    def find(operand: Operand) -> Expr:
        return loaded[operand] if isinstance(operand, Read) else made[operand]

    for member in problem.members:
        values = [find(operand) for operand in member.operands]
        made.append(bind(_written(_result(member.problem, values, bind))))
    return find


def _written(value: Expr) -> Expr:
    """Write out a comparison: TVM leaves whether Python's or its own is meant open until it is stored."""
    return value.asobject() if hasattr(value, "asobject") else value


def _result(problem: GenericProblem | Problem, values: Sequence[Expr], bind: Bind) -> Expr:
    if isinstance(problem, Problem):
        return _of_steps(problem, values, bind)
    attributes: dict[str, Any] = {**dict(problem.attributes), "dtype": problem.out_dtype}
    return FORMULAS[problem.op_type](attributes, *values)


def load_all(problem: ChainProblem, args: Buffers, places: Sequence[Expr]) -> dict[Read, Expr]:
    """Read what a chain reads of an element; `places` are those of `problem.reads`."""
    return {read: args[f"in{read.number}"][at] for read, at in zip(problem.reads, places, strict=True)}


def store_all(problem: ChainProblem, args: Buffers, at: Expr, find: Callable[[Operand], Expr]) -> None:
    """Store the results of an element that are."""
    for i, number in enumerate(problem.stored):
        store(args, f"out{i}", at, find(number))


def emit_elements(problem: ChainProblem, args: Buffers, bind: Bind) -> None:
    """Emit a chain without sums, by the nest of the code generator at work."""

    def point(at: Expr, *places: Expr) -> None:
        store_all(problem, args, at, made_of(problem, load_all(problem, args, places), bind))

    nest(problem.space, [dense_view(problem.space), *(read.view for read in problem.reads)], point)


def accumulators(problem: ChainProblem) -> tuple[str, ...]:
    """Name the dtypes in which the sums are added up."""
    return tuple(accumulator_of(FOLDINGS[total.problem.op_type], total.problem) for total in problem.totals)


def finished(total: Total, value: Expr, rows: int) -> Expr:
    """Write the result of a sum of `rows` elements, before it is rounded."""
    return FOLDINGS[total.problem.op_type].finish(value, rows)
