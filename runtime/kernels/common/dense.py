"""Gemm and two-dimensional MatMul:  y = alpha * A * B + beta * C  in float32."""

from __future__ import annotations

import dataclasses

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.kernels.common.params import INT32_LIMIT
from bnfuse.runtime.kernels.common.steps import Expr
from bnfuse.runtime.kernels.kernel import Param


@dataclasses.dataclass(frozen=True)
class GemmProblem:
    """y [m, n] of A [m, k] (stored [k, m] if trans_a) and B [k, n] (stored [n, k] if trans_b).

    `bias` is the shape of C, which broadcasts to [m, n], or None.
    """

    m: int
    n: int
    k: int
    trans_a: bool = False
    trans_b: bool = False
    alpha: float = 1.0
    beta: float = 1.0
    bias: tuple[int, ...] | None = None

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
    largest = max(problem.m * problem.k, problem.k * problem.n, problem.m * problem.n)
    if min(problem.m, problem.n, problem.k) < 1 or largest >= INT32_LIMIT:
        raise BnfuseError(f"Gemm: [{problem.m}, {problem.k}] times [{problem.k}, {problem.n}] is empty or too large")
    strides = problem.bias_strides
    params = [Param("a", "in", problem.m * problem.k), Param("b", "in", problem.k * problem.n)]
    if problem.bias is not None and problem.beta:
        params.append(Param("c", "in", (problem.m if strides[0] else 1) * (problem.n if strides[1] else 1)))
    return (*params, Param("y", "out", problem.m * problem.n))
