"""Whether a node is what its operator's schema says: counts of operands and results, types of attributes.

Everything behind the reading of a file takes these for granted. Operators that onnx does not know, and functions of the
model, have no schema here: what is said of them is that each attribute has one value.
"""

from __future__ import annotations

import dataclasses
import functools

import onnx
from onnx import AttributeProto

from bnfuse.core.errors import BnfuseError, at_node
from bnfuse.opset.schemas import register, register_training_ops
from bnfuse.opset.spec import DOMAIN, find
from bnfuse.opset.training_ops import TRAINING_OPS

STANDARD = ("", "ai.onnx")
OWN_DOMAINS = {op.name: op.domain for op in TRAINING_OPS}
Types = AttributeProto.AttributeType


@dataclasses.dataclass(frozen=True)
class Signature:
    """What a schema says of a node: how many operands and results, and which attributes."""

    operands: tuple[int, int]  # least and most
    results: tuple[int, int]
    required: tuple[int, ...]  # places of operands that may not be left out
    listed: int | None  # where a list of operands begins, of which none may be left out
    attributes: dict[str, int]  # name -> type
    needed: tuple[str, ...]  # attributes without which it says nothing


@functools.cache
def signature(domain: str, operator: str, version: int) -> Signature | None:
    """Read what a schema says of a node; None for an operator that is not known in that version."""
    register_training_ops()
    if domain == DOMAIN and find(operator) is not None:
        register([operator])
    try:
        schema = onnx.defs.get_schema(operator, version, domain)
    except onnx.defs.SchemaError:
        return None
    single, variadic = (getattr(onnx.defs.OpSchema.FormalParameterOption, name) for name in ("Single", "Variadic"))
    lists = (i for i, operand in enumerate(schema.inputs) if operand.option == variadic and operand.is_homogeneous)
    return Signature(
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        tuple(place for place, operand in enumerate(schema.inputs) if operand.option == single),
        next(lists, None),
        {name: int(kind.type) for name, kind in schema.attributes.items()},  # type: ignore[call-overload]
        tuple(name for name, kind in schema.attributes.items() if kind.required),
    )


def call_of(function: onnx.FunctionProto) -> Signature:
    """Tell what a node that calls a function of the model may have: it may leave out the last."""
    return Signature((0, len(function.input)), (0, len(function.output)), (), None, {}, ())


def check_versions(model: onnx.ModelProto, file: str | None) -> dict[str, int]:
    """Give the version of each domain that the model imports: one each, of numbers that there are."""
    versions: dict[str, int] = {}
    for opset in model.opset_import:
        domain = "" if opset.domain in STANDARD else opset.domain
        newest = onnx.defs.onnx_opset_version() if domain == "" else (1 << 31) - 1
        if not 1 <= opset.version <= newest or versions.get(domain, opset.version) != opset.version:
            what = f"imports version {opset.version} of the operators of '{domain or 'ai.onnx'}'"
            raise BnfuseError(f"{file or model.graph.name}: {what}, which there is not: export it with another opset")
        versions[domain] = opset.version
    return versions


def check_nodes(model: onnx.ModelProto, file: str | None) -> None:
    """Raise for the first node of the graph that is not as its schema says."""
    versions = check_versions(model, file)
    local = {("" if f.domain in STANDARD else f.domain, f.name): call_of(f) for f in model.functions}
    for node in (node for function in model.functions for node in function.node):
        called = local.get(("" if node.domain in STANDARD else node.domain, node.op_type))
        if called is not None and (what := _wrong_count(node, called)):
            raise at_node(node.name, node.op_type, f"{what}. Export it anew.", file=file)
    for node in model.graph.node:
        domain = "" if node.domain in STANDARD else node.domain
        if domain not in versions:
            what = f"is of the domain '{domain or 'ai.onnx'}', of which the file imports no version. Export it anew."
            raise at_node(node.name, node.op_type, what, file=file)
        known = local.get((domain, node.op_type))
        if domain == DOMAIN or known is None:  # functions of ours say what the schema does
            known = signature(domain, node.op_type, versions[domain])
            if known is None and (domain == DOMAIN or OWN_DOMAINS.get(node.op_type, domain) != domain):
                owner = OWN_DOMAINS.get(node.op_type, domain)
                remedy = (
                    f"it is one of '{owner or 'ai.onnx'}'. Write the file anew."
                    if owner != domain
                    else "files of another version are rewritten anew."
                )
                what = f"is no operator of '{domain or 'ai.onnx'}': {remedy}"
                raise at_node(node.name, node.op_type, what, file=file)
        if what := _wrong_attribute(node, known) or (known and _wrong_count(node, known)) or "":
            raise at_node(node.name, node.op_type, f"{what}. Export it anew.", file=file)


def _wrong_attribute(node: onnx.NodeProto, known: Signature | None) -> str | None:
    seen: set[str] = set()
    for attribute in node.attribute:
        if attribute.name in seen:
            return f"has the attribute '{attribute.name}' twice"
        seen.add(attribute.name)
        if attribute.ref_attr_name:
            return f"takes '{attribute.name}' from a function, but is in none"
        declared = known.attributes.get(attribute.name) if known else None
        if attribute.type == AttributeProto.UNDEFINED or declared not in (None, attribute.type):
            given = Types.Name(attribute.type)
            return f"has the attribute '{attribute.name}' of type {given}" + (
                f": it must be {Types.Name(declared)}" if declared else ""
            )
    missing = next((name for name in known.needed if name not in seen), None) if known else None
    return f"lacks the attribute '{missing}'" if missing else None


def _wrong_count(node: onnx.NodeProto, known: Signature) -> str | None:
    for what, names, (least, most) in (
        ("operand", node.input, known.operands),
        ("result", node.output, known.results),
    ):
        if not least <= len(names) <= most:
            wanted = f"{least}" if least == most else f"at least {least}" if len(names) < least else f"at most {most}"
            return f"has {len(names)} {what}s: it must have {wanted}"
    for place, name in enumerate(node.input):
        if not name and (place in known.required or (known.listed is not None and place >= known.listed)):
            return f"lacks its operand {place + 1}"
    return None
