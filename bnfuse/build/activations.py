"""Gradients of activations that onnxruntime's builder does not know: it sees a QuickGelu in the place of each.

    y = Softsign(x)   ->   y = QuickGelu(x; alpha = its number)
    the builder       ->   dx = QuickGeluGrad(dy, x; alpha = its number)
    and back          ->   y = Softsign(x), dx = ai.bnfuse::PointwiseGradSoftsignGrad(dy, x)

The number is above all that a QuickGelu may have, so what it stands for is known wherever its gradient turns up.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx import helper

from bnfuse.graph.protos import attributes
from bnfuse.opset import DOMAIN, VERSION, function_for
from bnfuse.opset.activations import ACTIVATIONS, MICROSOFT
from bnfuse.opset.spec import OpSpec

FIRST = 1 << 20  # the alpha of the first stand-in; all integers from here to 2**24 are float32

StandIns = dict[int, onnx.NodeProto]  # what the graph had, by number


def makes_gradient(node: onnx.NodeProto) -> bool:
    """Tell whether the gradient of a node is made here."""
    activation = ACTIVATIONS.get(node.op_type)
    return activation is not None and not activation.built and node.domain in (activation.domain, "ai.onnx")


def put_stand_ins(model: onnx.ModelProto) -> StandIns:
    """Replace the activations; gives what they were."""
    replaced: StandIns = {}
    for node in model.graph.node:
        if makes_gradient(node):
            number = FIRST + len(replaced)
            replaced[number] = onnx.NodeProto()
            replaced[number].CopyFrom(node)
            node.op_type, node.domain = "QuickGelu", MICROSOFT
            del node.attribute[:]
            node.attribute.append(helper.make_attribute("alpha", float(number)))
    if replaced and MICROSOFT not in {entry.domain for entry in model.opset_import}:
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    return replaced


def take_stand_ins(built: onnx.ModelProto, replaced: StandIns) -> None:
    """Put the activations back, and their gradients where the builder made one, with the bodies of these."""
    steps = set()
    for node in built.graph.node:
        found = replaced.get(int(attributes(node).get("alpha", 0))) if node.op_type.startswith("QuickGelu") else None
        if found is None:
            continue
        activation = ACTIVATIONS[found.op_type]
        del node.attribute[:]
        if node.op_type == "QuickGelu":
            node.op_type, node.domain = found.op_type, found.domain
            node.attribute.extend(found.attribute)
            continue
        given = attributes(found)
        node.op_type, node.domain = OpSpec((), "PointwiseGrad", (f"{activation.name}Grad",)).name, DOMAIN
        for name, default in activation.defaults:
            node.attribute.append(helper.make_attribute(name, float(given.get(name, default))))
        steps.add(activation.name)
    if steps:
        built.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))
    opset = next(entry.version for entry in built.opset_import if entry.domain in ("", "ai.onnx"))
    for name in sorted(steps):
        body = function_for(OpSpec((), "PointwiseGrad", (f"{name}Grad",)), opset)
        built.functions.append(ir.to_proto(body))
