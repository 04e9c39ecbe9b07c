"""Activations as graphs have them: operators of standard ONNX, or our own.

("", "LeakyRelu", {"alpha": 0.1})                  ->  LeakyRelu, alpha 0.1
("", "Gelu", {"approximate": "tanh"})              ->  GeluTanh
("com.microsoft", "QuickGelu", {}), Swish of "")   ->  QuickGelu, alpha 1.702, 1
("ai.bnfuse", "QuickGeluPointwise", {"alpha": 1})  ->  QuickGelu, alpha 1
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bnfuse.opset.activations import ACTIVATIONS, Activation
from bnfuse.opset.spec import DOMAIN, OpSpec


def forward_of(activation: Activation) -> OpSpec:
    """Give our operator that is the activation alone, for maps of any rank."""
    return OpSpec((activation.name,), "Pointwise")


def gradient_of(activation: Activation) -> OpSpec:
    """Give our operator that is its gradient: dy and the activation's operand x make dx, of any rank."""
    return OpSpec((), "PointwiseGrad", (f"{activation.name}Grad",))


# (domain, operator) -> activation, and the values of attributes that the operator has other defaults of. Gelu is told
# apart by its attribute; a Clip of several operands is none of these.
SOURCES: dict[tuple[str, str], tuple[Activation, dict[str, float]]] = {
    **{("", name): (each, {}) for name, each in ACTIVATIONS.items() if not each.operator},
    ("", "Swish"): (ACTIVATIONS["QuickGelu"], {"alpha": 1.0}),
    **{(DOMAIN, forward_of(each).name): (each, {}) for each in ACTIVATIONS.values()},
}


def activation_of(
    domain: str, op_type: str, attributes: Mapping[str, Any], operands: int = 1
) -> tuple[Activation, dict[str, float]] | None:
    """Tell which activation a node with so many operands is, and its attributes, as float32 has them; None where it is
    none."""
    found = SOURCES.get(("" if domain == "ai.onnx" else domain, op_type))
    if found is None or operands != 1:
        return None
    activation, defaults = found
    if activation.chosen and text(attributes.get("approximate", "none")) == "tanh":
        activation = ACTIVATIONS["GeluTanh"]
    known = {**dict(activation.defaults), **defaults}
    return activation, {name: float(np.float32(attributes.get(name, default))) for name, default in known.items()}


def text(value: Any) -> str:
    """Give an attribute that is a string, which protobuf has as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def standard_node(
    activation: Activation, attributes: Mapping[str, float], opset: int
) -> tuple[str, dict[str, Any]] | None:
    """Give the operator and the attributes of a node of standard ONNX that is the activation; None where that opset has
    none (the numbers of a Clip are no attributes)."""
    if activation.operator is None or opset < activation.since:
        return None
    chosen = {name: value for name, value in activation.chosen if value != "none"}
    return activation.operator or activation.name, {**attributes, **chosen}
