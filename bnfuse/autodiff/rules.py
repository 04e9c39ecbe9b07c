"""The table of rules: which operators have a gradient, and the function that emits it.

A rule is a function of the node under differentiation (`Gradient`) that gives a gradient for each operand, in their
order; None, or leaving out the last, where an operand has none (integers, shapes). It need not ask which of them are
wanted: what nothing reads is removed. The families register their rules by importing this module's `rule`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence

import onnx_ir as ir

from bnfuse.autodiff.emitter import Gradient
from bnfuse.opset.spec import DOMAIN

Contributions = Sequence[ir.Value | None]  # the gradient at each operand
Rule = Callable[[Gradient], Contributions]

FAMILIES = (
    "activations",
    "convolution",
    "elementwise",
    "indexing",
    "losses",
    "matmul",
    "movement",
    "normalization",
    "pooling",
    "reductions",
    "resampling",
)

# operators whose results do not change, or jump, with their operands: the gradient is zero
FLAT = frozenset(
    {
        *("ArgMax", "ArgMin", "Ceil", "Floor", "Hardmax", "IsInf", "IsNaN", "NonZero", "OneHot", "Round", "Sign"),
        *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "And", "Or", "Xor"),
        *("BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"),
        *("Constant", "ConstantOfShape", "EyeLike", "Range", "Shape", "Size"),
        *("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    }
)

_RULES: dict[str, Rule] = {}


def rule(*operators: str) -> Callable[[Rule], Rule]:
    """Register a function as the rule of operators: standard ones by name, ours as `ai.bnfuse::Name`."""

    def register(function: Rule) -> Rule:
        for operator in operators:
            if operator in _RULES:
                raise AssertionError(f"{operator} has two rules")
            _RULES[operator] = function
        return function

    return register


def rules() -> dict[str, Rule]:
    """Give all rules by operator."""
    _load()
    return _RULES


@functools.cache
def _load() -> None:
    for family in FAMILIES:
        importlib.import_module(f"bnfuse.autodiff.{family}")


def key_of(node: ir.Node) -> str:
    """Name a node's operator as rules are registered."""
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}::{node.op_type}"


def rule_of(node: ir.Node) -> Rule | None:
    """Find the rule of a node's operator; None where it has none."""
    found = rules().get(key_of(node))
    if found is None and node.domain == DOMAIN:
        from bnfuse.autodiff.activations import own_pointwise

        return own_pointwise(node)
    return found


def is_flat(node: ir.Node) -> bool:
    """Tell whether a node's gradient is zero everywhere."""
    return node.domain in ("", "ai.onnx") and node.op_type in FLAT


def differentiable() -> list[str]:
    """List the standard operators that can be differentiated, those whose gradient is zero among them."""
    return sorted({*(name for name in rules() if "::" not in name), *FLAT})
