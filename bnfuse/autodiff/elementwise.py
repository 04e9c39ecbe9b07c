"""Sums, products, powers and functions of one operand, each element by itself; operands broadcast."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from bnfuse.autodiff.emitter import Gradient
from bnfuse.autodiff.rules import rule

Contributions = Sequence[ir.Value | None]


@rule("Add")
def add(g: Gradient) -> Contributions:
    """Pass the gradient on to both."""
    return g.fit(g.dy, g.operand(0)), g.fit(g.dy, g.operand(1))


@rule("Mul")
def mul(g: Gradient) -> Contributions:
    """Weigh the gradient with the other operand."""
    a, b = g.operand(0), g.operand(1)
    return g.fit(g.mul(g.dy, b), a), g.fit(g.mul(g.dy, a), b)
