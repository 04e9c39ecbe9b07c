"""The reference of a convolution, with what the tensor cores read rounded to what they take.

All else is float64: prologues before the rounding, epilogues behind the product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from packed_weights import ROUNDED

from bnfuse.opset import reference
from bnfuse.opset.spec import OF_GRADIENT, OpSpec, masks_gated, of_skip

Arrays = dict[str, np.ndarray]


def run(spec: OpSpec, operands: Arrays, attributes: Mapping[str, Any], precision: str) -> Arrays:
    """The results by name, float64."""
    if precision == "fp32":
        return reference.run(spec, operands, attributes)
    found = (_backward if spec.is_gradient else _forward)(spec, operands, attributes, precision)
    return {name: found[name] for name in spec.results}


def rounded(values: np.ndarray, precision: str) -> np.ndarray:
    return ROUNDED[precision](values.astype(np.float32)).astype(np.float64)


def _entered(prologue: tuple[str, ...], operands: Arrays, attributes: Mapping[str, Any]) -> np.ndarray:
    return reference.run(OpSpec(prologue, "Pointwise"), operands, attributes)["y"]


def _forward(spec: OpSpec, operands: Arrays, attributes: Mapping[str, Any], precision: str) -> Arrays:
    stored = _entered(spec.prologue, operands, attributes)
    read = {name: rounded(value, precision) for name, value in {"x": stored, "weight": operands["weight"]}.items()}
    found = reference.run(OpSpec((), spec.core, spec.epilogue), {**operands, **read}, attributes)
    return {**found, "stored": stored}


def _backward(spec: OpSpec, operands: Arrays, attributes: Mapping[str, Any], precision: str) -> Arrays:
    forward = tuple(step for step in spec.prologue if step not in OF_GRADIENT)
    dy = operands["dy"]
    if own := tuple(step for step in spec.prologue if step in OF_GRADIENT):
        dy = reference.run(OpSpec(own, "PointwiseGrad"), operands, attributes)["dx"]
    read = {"dy": dy, "x": _entered(forward, operands, attributes), "weight": operands["weight"]}
    read = {name: rounded(value, precision) for name, value in read.items()}
    found = reference.run(OpSpec((), spec.core), read, attributes) | {"dbias": dy.sum(axis=reference.SUMMED)}
    if "dx" in found:
        masked = forward if masks_gated(forward) else tuple(step for step in forward if step != "Gate")
        masked = tuple(s for s in masked if s not in ("SkipGate", "Add", "AddNormalized") and not of_skip(s))
        leaving = OpSpec(masked, "PointwiseGrad", tuple(step for step in spec.epilogue if step != "BiasGrad"))
        found |= reference.run(leaving, {**operands, "dy": found["dx"]}, attributes)
    return found
