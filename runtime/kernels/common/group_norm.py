"""GroupNormFinalize and GroupNormGradFinalize of ai.bnfuse: the problem, and what is computed of each group.

Coefficients are [samples, channels] float32, dense. A group of a sample is a row of its channels; sums are float64. The
gradients of scale and bias are sums over the samples: rows of another kind.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.runtime.kernels.common.rows import At, Rows
from bnfuse.runtime.kernels.common.steps import Expr, f64, to_f32
from bnfuse.runtime.kernels.kernel import Param
from bnfuse.runtime.targets.target import Target

OF_CHANNELS = ("scale", "bias", "dscale", "dbias")  # [channels]; all others are [samples, channels]
OVER_SAMPLES = {"dscale": "dgamma", "dbias": "dbeta"}  # results that are sums over the samples, and of what


@dataclasses.dataclass(frozen=True)
class GroupProblem:
    """One of the two operators. `number` is epsilon of the first, the elements of a group of the second."""

    op: str
    samples: int
    channels: int
    groups: int
    number: float
    raw: bool = False  # dgamma is given as the sum of dz*x

    @property
    def members(self) -> int:
        """Count the channels of a group."""
        return self.channels // self.groups

    @property
    def along_groups(self) -> Rows:
        """Give the groups of all samples as rows of channels."""
        return Rows(self.samples * self.groups, self.members)

    @property
    def along_samples(self) -> Rows:
        """Give the channels as rows of samples."""
        return Rows(1, self.samples, self.channels)

    @property
    def params(self) -> tuple[Param, ...]:
        """List operands, then results."""
        op, size = PLAIN_OPS[self.op], self.samples * self.channels
        return tuple(
            Param(name, "in" if name in op.operands else "out", self.channels if name in OF_CHANNELS else size)
            for name in (*op.operands, *op.results)
        )


def write_group(problem: GroupProblem, target: Target, args: Any, rows: Any, row: Expr, at: At) -> None:
    """Write the coefficients of one group of one sample; `rows` are a target's."""
    first = T.bind(tirx.floormod(row, problem.groups) * problem.members)
    emit = _finalize if problem.op == "GroupNormFinalize" else _grad_finalize
    emit(problem, target, args, rows, first, at)


def _finalize(problem: GroupProblem, target: Target, args: Any, rows: Any, first: Expr, at: At) -> None:
    def mean_of(value: Any) -> Expr:
        total = rows.fold(target, "float64", 0.0, lambda so_far, k: so_far + value(k), _add)
        return T.bind(total / f64(float(problem.members)))

    mean = mean_of(lambda k: f64(args["mean"][at(k)]))

    def spread(k: Expr) -> Expr:
        gap = f64(args["mean"][at(k)]) - mean
        return f64(args["variance"][at(k)]) + gap * gap

    inv_std = T.bind(f64(1.0) / tirx.sqrt(mean_of(spread) + f64(problem.number)))

    def write(k: Expr) -> None:
        a = f64(args["scale"][first + k]) * inv_std
        T.buffer_store(args["a"], to_f32(a), [at(k)])
        T.buffer_store(args["b"], to_f32(f64(args["bias"][first + k]) - mean * a), [at(k)])
        T.buffer_store(args["group_mean"], to_f32(mean), [at(k)])
        T.buffer_store(args["inv_std"], to_f32(inv_std), [at(k)])

    rows.along(target, write)


def given(problem: GroupProblem, args: Any, of: str, index: Expr) -> Expr:
    """Write an element of dbeta or dgamma, float64."""
    value = f64(args[of][index])
    if of == "dbeta" or not problem.raw:
        return value
    return (value - f64(args["mean"][index]) * f64(args["dbeta"][index])) * f64(args["inv_std"][index])


def _grad_finalize(problem: GroupProblem, target: Target, args: Any, rows: Any, first: Expr, at: At) -> None:
    def share(of: str) -> Expr:
        def step(so_far: Expr, k: Expr) -> Expr:
            return so_far + f64(args["scale"][first + k]) * given(problem, args, of, at(k))

        return T.bind(rows.fold(target, "float64", 0.0, step, _add) / f64(-float(problem.number)))

    beta, gamma = share("dbeta"), share("dgamma")

    def write(k: Expr) -> None:
        inv_std = f64(args["inv_std"][at(k)])
        q = inv_std * inv_std * gamma
        T.buffer_store(args["q"], to_f32(q), [at(k)])
        T.buffer_store(args["w"], to_f32(inv_std * beta - q * f64(args["mean"][at(k)])), [at(k)])

    rows.along(target, write)


def write_sums(problem: GroupProblem, target: Target, args: Any, rows: Any, row: Expr, at: At) -> None:
    """Write the gradients of scale and bias of one channel; `rows` are a target's."""
    for result, of in OVER_SAMPLES.items():

        def step(so_far: Expr, k: Expr, of: str = of) -> Expr:
            return so_far + given(problem, args, of, at(k))

        total = rows.fold(target, "float64", 0.0, step, _add)

        def store(result: str = result, total: Expr = total) -> None:
            T.buffer_store(args[result], to_f32(total), [row])

        rows.once(store)


def _add(x: Expr, y: Expr) -> Expr:
    return x + y
