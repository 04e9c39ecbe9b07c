"""Gemm and MatMul:  y = alpha * A * B + beta * C  in float32, of two matrices or of each of a batch of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tvm import tirx

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.kernels.common.params import INT32_LIMIT
from bnfuse.runtime.kernels.common.steps import Expr
from bnfuse.runtime.kernels.kernel import Param


@dataclasses.dataclass(frozen=True)
class BatchAxis:
    """An axis along which products differ: the matrices of A and of B from one place to the next, 0 where it is one."""

    size: int
    a: int
    b: int


@dataclasses.dataclass(frozen=True)
class GemmProblem:
    """y [m, n] of A [m, k] (stored [k, m] if trans_a) and B [k, n] (stored [n, k] if trans_b).

    `bias` is the shape of C, which broadcasts to [m, n], or None. With `batch` there is a product for each place along
    its axes, the results one behind the other, and no C.
    """

    m: int
    n: int
    k: int
    trans_a: bool = False
    trans_b: bool = False
    alpha: float = 1.0
    beta: float = 1.0
    bias: tuple[int, ...] | None = None
    batch: tuple[BatchAxis, ...] = ()

    @property
    def count(self) -> int:
        """Count the products."""
        return math.prod(axis.size for axis in self.batch)

    @property
    def elements(self) -> tuple[int, int, int]:
        """Count the elements of all of A, of B and of y."""
        count_a, count_b = (math.prod(axis.size for axis in self.batch if getattr(axis, name)) for name in ("a", "b"))
        return count_a * self.m * self.k, count_b * self.k * self.n, self.count * self.m * self.n

    def starts(self, number: Expr) -> tuple[Expr, Expr, Expr]:
        """Give the first elements of A, B and y of the product of that number."""
        a: Expr = 0
        b: Expr = 0
        rest = number
        for place, axis in reversed([*enumerate(self.batch)]):
            at = tirx.floormod(rest, axis.size) if place else rest
            rest = tirx.floordiv(rest, axis.size)
            a, b = a + at * (axis.a * self.m * self.k), b + at * (axis.b * self.k * self.n)
        return a, b, number * (self.m * self.n)

    @property
    def bias_strides(self) -> tuple[int, int]:
        """Give the elements of C between rows and between columns of y; 0 where it broadcasts.

        Raises BnfuseError where C does not broadcast to [m, n].
        """
        rows, columns = ((1, 1) + (self.bias or ()))[-2:]
        if (rows, columns) not in {(r, c) for r in (1, self.m) for c in (1, self.n)}:
            raise BnfuseError(f"Gemm: C has the shape {self.bias}, which does not broadcast to [{self.m}, {self.n}]")
        return (columns if rows > 1 else 0), (1 if columns > 1 else 0)

    def at_a(self, row: Expr, k: Expr) -> Expr:
        """Give the index of A[row, k] in its flat buffer."""
        return k * self.m + row if self.trans_a else row * self.k + k

    def at_b(self, k: Expr, column: Expr) -> Expr:
        """Give the index of B[k, column] in its flat buffer."""
        return column * self.k + k if self.trans_b else k * self.n + column


def gemm_params(problem: GemmProblem) -> tuple[Param, ...]:
    """List a, b, [c] and y, flat float32; c only where beta is not 0.

    Raises BnfuseError where a size is 0, a matrix has more elements than int32 can index, or C does not broadcast.
    """
    a, b, y = problem.elements
    if min(problem.m, problem.n, problem.k, problem.count) < 1 or max(a, b, y) >= INT32_LIMIT:
        times = f"{problem.count} times " if problem.batch else ""
        sizes = f"[{problem.m}, {problem.k}] times [{problem.k}, {problem.n}]"
        raise BnfuseError(f"Gemm: {times}{sizes} is empty or too large")
    strides = problem.bias_strides
    params = [Param("a", "in", a), Param("b", "in", b)]
    if problem.bias is not None and problem.beta:
        params.append(Param("c", "in", (problem.m if strides[0] else 1) * (problem.n if strides[1] else 1)))
    return (*params, Param("y", "out", y))


def batch_axes(a: Sequence[int], b: Sequence[int]) -> tuple[BatchAxis, ...]:
    """Give the batch of a product of matrices whose further axes are `a` and `b`, broadcast by numpy's rule.

    Axes that both operands walk as one are one; none has the size 1. Raises BnfuseError where they do not broadcast.
    """
    rank = max(len(a), len(b))
    sizes_a, sizes_b = (1,) * (rank - len(a)) + tuple(a), (1,) * (rank - len(b)) + tuple(b)
    found: list[BatchAxis] = []
    steps = [1, 1]
    for own_a, own_b in reversed([*zip(sizes_a, sizes_b, strict=True)]):
        if own_a != own_b and 1 not in (own_a, own_b):
            raise BnfuseError(f"has the batches {list(a)} and {list(b)}, which do not broadcast")
        size = max(own_a, own_b) if 0 not in (own_a, own_b) else 0
        axis = BatchAxis(size, steps[0] if own_a != 1 else 0, steps[1] if own_b != 1 else 0)
        steps = [steps[0] * own_a, steps[1] * own_b]
        if found and axis.a == found[0].a * found[0].size and axis.b == found[0].b * found[0].size:
            found[0] = BatchAxis(size * found[0].size, found[0].a, found[0].b)
        elif size != 1:
            found.insert(0, axis)
    return tuple(found)
