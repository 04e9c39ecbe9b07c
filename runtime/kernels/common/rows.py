"""Rows along one axis of a dense tensor [n, length, inner]: a row is one n and one inner position.

A code generator walks along them in its own way: `along(target, emit)` and `fold(target, dtype, start, step, join)` of
its subclass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from bnfuse.runtime.kernels.common.steps import Expr

At = Callable[[Expr], Expr]  # position along the row -> index in the tensor


@dataclasses.dataclass(frozen=True)
class Rows:
    """The sizes: `n*inner` rows of `length` elements that lie `inner` apart."""

    n: int
    length: int
    inner: int = 1

    @property
    def count(self) -> int:
        """Count the rows."""
        return self.n * self.inner
