"""GroupNorms in the exported network: as an InstanceNormalization between Reshapes, which is how torch writes one.

    GroupNorm(x, scale, bias)            y = Reshape(InstanceNormalization(Reshape(x; [0, groups, -1]), 1, 0); Shape(x))
    NormalizePointwise(x, a, b)    ->    y*scale + bias
      of its GroupNormFinalize

With one channel a group it is the InstanceNormalization itself. Where coefficients are put together with others on the
way, across a Concat, the halves are written as they are in the function bodies, and a*x + b as Mul and Add. Statistics
that an operator takes of what it writes (ImageStatistics) are those of a half behind it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from bnfuse.analysis.provenance import channels
from bnfuse.opset.functions import function_for
from bnfuse.opset.plain import PlainOp
from bnfuse.opset.spec import DOMAIN, find

HALVES = ("GroupNormStatistics", "GroupNormFinalize")


@dataclasses.dataclass(frozen=True)
class GroupNorm:
    """One GroupNorm: of which map it is, its parameters, and how it is cut into groups."""

    x: ir.Value
    scale: ir.Value
    bias: ir.Value
    epsilon: float
    groups: int


def group_norm_of(a: ir.Value, b: ir.Value) -> GroupNorm | None:
    """Find the GroupNorm whose coefficients these are; None where they are another's, or several ones'."""
    finalize = a.producer()
    if finalize is None or finalize.domain != DOMAIN or finalize.op_type != "GroupNormFinalize":
        return None
    scale, bias, mean = finalize.inputs[:3]
    x = summed_of(mean)
    if [*finalize.outputs[:2]] != [a, b] or x is None:
        return None
    assert scale is not None and bias is not None
    return whole(finalize, x, scale, bias)


def summed_of(mean: ir.Value | None) -> ir.Value | None:
    """Find the map that a mean of images is of: what a half reads, or what the operator writes that sums on its way
    out; None where it is put together of several."""
    node = mean.producer() if mean is not None else None
    op = find(node.op_type) if node is not None and node.domain == DOMAIN else None
    if node is None or op is None:
        return None
    if op.name == "GroupNormStatistics":
        return node.inputs[0]
    results = dict(zip(op.results, node.outputs, strict=True))
    return results["y"] if results.get("image_mean") is mean else None


def whole(node: ir.Node, x: ir.Value, scale: ir.Value, bias: ir.Value) -> GroupNorm:
    """Describe a GroupNorm by the node that has its attributes."""
    epsilon, groups = (node.attributes[name].value for name in ("epsilon", "groups"))
    return GroupNorm(x, scale, bias, float(epsilon), int(groups))


def written(
    norm: GroupNorm, operands: Sequence[str], write: Callable[..., str], constant: Callable[[np.ndarray, str], str]
) -> str:
    """Write a GroupNorm; gives the name of its result. `operands` are the names of x, scale and bias, `write` and
    `constant` make a node and an initializer, or give one that is there already."""
    x, scale, bias = operands
    if norm.groups == channels(norm.x):
        return write("InstanceNormalization", x, scale, bias, epsilon=norm.epsilon)
    grouped = write("Reshape", x, constant(np.array([0, norm.groups, -1]), f"{x}/groups"))
    one, zero = (constant(np.full(norm.groups, value, np.float32), f"{x}/{value}") for value in (1, 0))
    normal = write("InstanceNormalization", grouped, one, zero, epsilon=norm.epsilon)
    y, pixels = write("Reshape", normal, write("Shape", x)), constant(np.array([-2, -1]), "pixels")
    return write("Add", write("Mul", y, write("Unsqueeze", scale, pixels)), write("Unsqueeze", bias, pixels))


def inlined(
    op: PlainOp, node: ir.Node, names: Mapping[str, str], results: Mapping[str, str], prefix: str, opset: int
) -> list[onnx.NodeProto]:
    """Write the function body of a half; `names` are those of its operands, `results` those that its results get, and
    `node` has its attributes."""
    function = function_for(op, opset)
    known = {str(value.name): names[operand] for operand, value in zip(op.operands, function.inputs, strict=True)}
    known |= {str(value.name): results[name] for name, value in zip(op.results, function.outputs, strict=True)}
    made = []
    for inner in function:
        proto = ir.to_proto(inner)
        proto.name = f"{prefix}/{inner.outputs[0].name}"
        proto.input[:] = [known.get(name, f"{prefix}/{name}") if name else "" for name in proto.input]
        proto.output[:] = [known.get(name, f"{prefix}/{name}") if name else "" for name in proto.output]
        for attribute in proto.attribute:
            if attribute.ref_attr_name:
                value = node.attributes[attribute.ref_attr_name].value
                attribute.CopyFrom(onnx.helper.make_attribute(attribute.name, value))
        made.append(proto)
    return made
