"""Files of opsets that onnxruntime does not know yet, brought down to the newest that it does.

Most operators of opset 22 and later differ from those of 21 in the types alone that they take. What is new or means
something else is written by older operators before (bnfuse.build.decompose); what is left gives one line.
"""

from __future__ import annotations

import onnx
from onnx import helper

from bnfuse.graph.protos import attributes, remove_attributes

from ..forward import NEWEST
from ..graph import Forward

STANDARD = ("", "ai.onnx")


def lower_opset(forward: Forward) -> None:
    """Declare the newest opset that runs, where the file has a newer one and every operator means the same there."""
    version = forward.opset
    if version <= NEWEST:
        return
    for node in forward.graph.node:
        if node.domain in STANDARD:
            _lower(forward, node, version)
    for opset in forward.model.opset_import:
        if opset.domain in STANDARD:
            opset.version = NEWEST
    forward.note(f"converted from opset {version} to {NEWEST}")


def _lower(forward: Forward, node: onnx.NodeProto, version: int) -> None:
    if not onnx.defs.has(node.op_type, max_inclusive_version=NEWEST):
        raise forward.error_at(node, f"is an operator of opset {version} that no older one replaces here.")
    older, newer = (onnx.defs.get_schema(node.op_type, number) for number in (NEWEST, version))
    if older.since_version == newer.since_version:
        return
    for name, value in attributes(node).items():
        if name not in older.attributes:
            default = newer.attributes[name].default_value
            if not default.name or helper.get_attribute_value(default) != value:
                what = f"has the attribute {name} of opset {newer.since_version}, which opset {NEWEST} does not have."
                raise forward.error_at(node, f"{what} Export it with opset 18 to {NEWEST}.")
            remove_attributes(node, {name})
