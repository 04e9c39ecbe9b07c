"""Activations of kernels whose maps have 16 bits, by a GPU's own approximations.

    e**x           ex2.approx(x / ln 2)                       where steps.py has a polynomial of degree 7
    sigmoid(x)     rcp.approx(1 + ex2.approx(-x / ln 2))      and a division that is rounded correctly
    tanh(x)        1 - 2*rcp.approx(1 + e**2x), a polynomial where x is small
    x / c          x * (1/c) for a constant, x * rcp.approx(y) else
    max(x, y)      max.NaN, which is what a comparison and a choice are

An exponential is right to 2**-22, a reciprocal to 2**-23 (PTX ISA, 9.7.3). A map of 16 bits rounds what is made of
them to 2**-9 (bfloat16) or 2**-12 (float16), and most kernels would wait for the arithmetic of more, not for memory.
Kernels without such a map have the functions of steps.py.

These are functions without side effects, so that the compiler joins equal ones: a gradient asks for a sigmoid twice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.opset.expressions import Algebra
from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.common.steps import Expr, f32, fma, often

# name of the device function -> its instruction
INSTRUCTIONS = {
    "approximate_exp2": "ex2.approx.ftz.f32",
    "approximate_reciprocal": "rcp.approx.ftz.f32",
    "approximate_reciprocal_of_any": "rcp.approx.f32",  # also where it is below the normal floats
    "max_or_nan": "max.NaN.f32",
    "min_or_nan": "min.NaN.f32",
}
SMALL_TANH, SMALL_EXPM1 = 0.25, 0.125  # up to which they are the first terms of their series


def written(name: str, *operands: Expr) -> Expr:
    """Write a call of one of INSTRUCTIONS, float32, as a value that may be read often."""
    text = device_function(name, len(operands))
    return often(T.cuda.func_call(name, *operands, source_code=text, return_type="float32"))


def device_function(name: str, operands: int) -> str:
    """Write the function in CUDA."""
    names = "xy"[:operands]
    registers = ", ".join(f"%{i}" for i in range(operands + 1))
    inputs = ", ".join(f'"f"({x})' for x in names)
    takes = ", ".join(f"float {x}" for x in names)
    assembly = f'asm("{INSTRUCTIONS[name]} {registers};" : "=f"(made) : {inputs});'
    return f"__forceinline__ __device__ float {name}({takes}) {{\n  float made;\n  {assembly}\n  return made;\n}}\n"


def exp(x: Expr) -> Expr:
    """Write e**x: 0 below the normal floats, infinite above the floats."""
    return written("approximate_exp2", x * f32(1 / math.log(2)))


def sigmoid(x: Expr) -> Expr:
    """Write 1/(1 + e**-x)."""
    return written("approximate_reciprocal", f32(1.0) + written("approximate_exp2", x * f32(-1 / math.log(2))))


def tanh(x: Expr) -> Expr:
    """Write the hyperbolic tangent."""
    x = often(x)
    square = often(x * x)
    small = fma(steps.polynomial(square, (-1 / 3, 2 / 15, -17 / 315)) * square, x, x)
    large = fma(f32(-2.0), written("approximate_reciprocal", f32(1.0) + exp(f32(2.0) * x)), f32(1.0))
    return tirx.Select(tirx.abs(x) > f32(SMALL_TANH), large, small)


def elu(x: Expr) -> Expr:
    """Write x where x > 0, else e**x - 1."""
    x = often(x)
    small = fma(steps.polynomial(x, (1 / 2, 1 / 6, 1 / 24)) * x, x, x)
    below = tirx.Select(x > f32(-SMALL_EXPM1), small, exp(x) - f32(1.0))
    return tirx.Select(x > f32(0.0), x, below)


def divide(x: Expr, y: Expr) -> Expr:
    """Write x/y."""
    known = isinstance(y, tirx.FloatImm)
    return x * (f32(1.0 / float(y.value)) if known else written("approximate_reciprocal_of_any", y))


def maximum(x: Expr, y: Expr) -> Expr:
    """Write max(x, y), NaN where either is NaN."""
    return written("max_or_nan", x, y)


def minimum(x: Expr, y: Expr) -> Expr:
    """Write min(x, y), NaN where either is NaN."""
    return written("min_or_nan", x, y)


APPROXIMATIONS: Algebra = {
    "divide": divide,
    "relu": lambda x: maximum(x, f32(0.0)),
    "clamp": lambda x, low, high: minimum(maximum(x, low), high),
    "minimum": minimum,
    "exp": exp,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "erf": functools.partial(steps.erf, exp=exp),
    "softplus": functools.partial(steps.softplus, exp=exp),
    "elu": elu,
}


def activations_of(dtypes: Sequence[str]) -> Algebra:
    """Choose what a kernel with parameters of these dtypes has in the place of operations of steps.py."""
    return APPROXIMATIONS if {"bfloat16", "float16"} & {*dtypes} else {}
