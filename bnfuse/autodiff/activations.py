"""Activations: each of the table has one gradient operator, made of its formula (bnfuse/opset/activations.py)."""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.autodiff.emitter import Gradient
from bnfuse.autodiff.rules import Rule, rule
from bnfuse.opset.activations import ACTIVATIONS
from bnfuse.opset.sources import SOURCES, activation_of, gradient_of
from bnfuse.opset.spec import OpSpec


def own_pointwise(node: ir.Node) -> Rule | None:
    """Give the rule of an activation that is an operator of ours (`QuickGeluPointwise`); None for any other."""
    return tabled if (node.domain, node.op_type) in SOURCES else None


def tabled(g: Gradient) -> list[ir.Value | None]:
    """Emit the PointwiseGrad of an activation of the table, with the attributes of the node or their defaults.

    That of a Relu reads its result, which has the sign of its operand: the operand need not be kept for it.
    """
    given = {name: attribute.value for name, attribute in g.node.attributes.items()}
    found = activation_of(g.node.domain, g.node.op_type, given, len(g.node.inputs))
    if found is None:
        raise g.error("is no activation as it is: export it anew.")
    activation, attributes = found
    x = g.y if activation.name == "Relu" else g.x
    return [g.own(gradient_of(activation), {"dy": g.dy, "x": x}, attributes)["dx"]]


@rule("Clip")
def clip(g: Gradient) -> list[ir.Value | None]:
    """Let through what lies within the bounds; bounds that are computed are operands like the rest."""
    bounds = [g.optional(place) for place in (1, 2)]
    known = [g.known(bound) for bound in bounds]
    activation = ACTIVATIONS["Clip"]
    if all(bound is None or value is not None for bound, value in zip(bounds, known, strict=True)):
        given = dict(activation.defaults)
        for key, value in zip(given, known, strict=True):
            given[key] = given[key] if value is None else float(value.item())
        return [g.own(OpSpec((), "PointwiseGrad", ("ClipGrad",)), {"dy": g.dy, "x": g.x}, given)["dx"]]
    zero, gradient, sums = g.number(0.0, g.x), g.dy, []
    for bound, beyond in zip(bounds, ("Less", "Greater"), strict=True):
        outside = g.op(beyond, g.x, bound) if bound is not None else None
        sums.append(None if outside is None or bound is None else g.fit(g.where(outside, g.dy, zero), bound))
        gradient = gradient if outside is None else g.where(outside, zero, gradient)
    return [gradient, *sums]


for _domain, _name in SOURCES:
    if not _domain and _name != "Clip":
        rule(_name)(tabled)
