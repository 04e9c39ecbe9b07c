"""What would train wrongly in silence, or fail without saying where: refused here, in one line."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx
from onnx import TensorProto

from bnfuse.autodiff import differentiable
from bnfuse.core.windows import POOLS
from bnfuse.graph.protos import attributes, element_count, static_shape
from bnfuse.graph.signature import LOSSES

from .batch_norms import is_training
from .graph import Forward
from .losses import Term
from .pools import fault_of

WITHOUT_LOSS = (
    "build adds the loss: take the file's own (--loss own), or export the network without it, so that its output is "
    "what the loss reads, or name that output (--logits NAME)."
)
Shapes = dict[str, list[int] | None]
FLOATS = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
LABELS = (TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT)


def choose_logits(forward: Forward, wanted: str | None) -> str:
    """Give the output that the loss reads."""
    names = [value.name for value in forward.graph.output]
    if wanted is not None:
        if wanted not in names:
            raise forward.error(f"has no output '{wanted}': there are {', '.join(names)}")
        return wanted
    if len(names) > 1 and "logits" not in names:
        raise forward.error(
            f"has {len(names)} outputs ({', '.join(names[:5])}): say which one the loss reads (--logits NAME)"
        )
    return "logits" if len(names) > 1 else names[0]


def choose_outputs(forward: Forward, terms: Sequence[Term], wanted: str | None) -> tuple[str, ...]:
    """Give the output that each term of the loss reads; without terms all whose gradients come in."""
    if terms:
        return tuple(choose_logits(forward, term.output or wanted) for term in terms)
    if wanted is not None:
        return (choose_logits(forward, wanted),)
    floats = [v.name for v in forward.graph.output if v.type.tensor_type.elem_type in (0, TensorProto.FLOAT)]
    if not floats:
        raise forward.error("has no output of floats: there is nothing to differentiate")
    return tuple(floats)


def refuse_own_loss(forward: Forward, outputs: Sequence[str]) -> None:
    """Refuse a file that ends in a loss: what the loss here would read is that loss."""
    needed = {*outputs}
    for node in reversed(list(forward.graph.node)):
        if needed.isdisjoint(node.output):
            continue
        if node.op_type in LOSSES:
            raise forward.error_at(node, f"is a loss of the file's own. {WITHOUT_LOSS}")
        needed.update(node.input)
    for value in forward.graph.output:
        if value.name in outputs and static_shape(value) == []:
            raise forward.error(
                f"output '{value.name}' is a single number, as of a loss of the file's own. {WITHOUT_LOSS}"
            )


def check_forward(forward: Forward) -> None:
    """Refuse what would train wrongly."""
    shapes = forward.shapes()
    for node in forward.graph.node:
        for op, check in CHECKS:
            if node.op_type == op:
                check(forward, node, shapes)


def check_operators(forward: Forward, labels: Collection[str] = ()) -> None:
    """Refuse what cannot be trained for its type or operator, before shape inference stumbles over it.

    `labels` are inputs with labels of a loss that the graph has; all other inputs are data.
    """
    read = forward.consumers().keys() | forward.output_names()
    for value in forward.graph.input:
        kind = value.type.tensor_type.elem_type
        if value.name not in read:
            continue
        if value.name in labels:
            if kind not in LABELS:
                given = TensorProto.DataType.Name(kind).lower()
                raise forward.error(
                    f"labels input '{value.name}' is {given}: it must be int64, int32 or float (float32)"
                )
        elif kind != TensorProto.FLOAT:
            name = TensorProto.DataType.Name(kind).lower()
            remedy = "convert the model to float32" if kind in FLOATS else f"networks take float32 here. {WITHOUT_LOSS}"
            raise forward.error(f"input '{value.name}' is {name}: {remedy}")
    known = set(forward.initializers()) | {value.name for value in forward.graph.input}
    version = forward.opset
    for node in forward.graph.node:
        if node.domain not in ("", "ai.onnx"):
            raise forward.error_at(node, f"is of the domain {node.domain}: only standard operators can be trained.")
        if not onnx.defs.has(node.op_type, max_inclusive_version=version):
            raise forward.error_at(node, f"is no operator of opset {version}. {supported()}")
        lost = next((name for name in node.input if name and name not in known), None)
        if lost is not None:
            raise forward.error_at(node, f"reads '{lost}', which nothing before it computes: the graph is damaged.")
        known.update(node.output)


def drop_unread_inputs(forward: Forward, labels: Collection[str] = ()) -> None:
    """Leave out data inputs that nothing reads, and say so; raises for labels, and where no input is left."""
    consumers, outputs = forward.consumers(), forward.output_names()
    unread = [value for value in forward.graph.input if value.name not in consumers and value.name not in outputs]
    lost = [value.name for value in unread if value.name in labels]
    if lost:
        raise forward.error(f"labels input '{lost[0]}' is read by nothing: the loss does not depend on it")
    if not unread:
        return
    names = ", ".join(value.name for value in unread)
    if len(unread) == len(forward.graph.input):
        raise forward.error(f"nothing that the loss depends on reads its input ({names}): export the network anew")
    for value in unread:
        forward.graph.input.remove(value)
    forward.warn(f"nothing reads the values of the input {names}: the training file does not have it")


def check_batch_norm(forward: Forward, node: onnx.NodeProto, shapes: Shapes) -> None:
    """Refuse a training BN without its operands, and statistics of one value, which are none."""
    if not is_training(node):
        return
    if len(node.input) < 5 or not all(node.input[1:5]):
        raise forward.error_at(node, "lacks its scale, bias or running statistics: export it with all five operands.")
    shape = shapes[node.input[0]] or []
    if len(shape) < 2 or element_count(shape) // shape[1] == 1:
        raise forward.error_at(
            node, f"has one value per channel ({shape}): it has no variance. Use a larger --batch or --image."
        )


def check_conv(forward: Forward, node: onnx.NodeProto, shapes: Shapes) -> None:
    """Compare the channels, which shape inference does not."""
    x, weight = shapes[node.input[0]] or [], shapes[node.input[1]] or []
    group = int(attributes(node).get("group", 1))
    if x[1] != weight[1] * group or weight[0] % group:
        what = f"reads {x[1]} channels, but its weight is {weight} in {group} groups: they do not fit."
        raise forward.error_at(node, what)


def check_pool(forward: Forward, node: onnx.NodeProto, shapes: Shapes) -> None:
    """Refuse a pooling at which onnxruntime gives NaN, reads beyond the map, or does not load the file."""
    if reason := fault_of(node, (shapes[node.input[0]] or [])[2:]):
        raise forward.error_at(node, reason)


def check_celu(forward: Forward, node: onnx.NodeProto, shapes: Shapes) -> None:
    """Refuse a Celu that divides by zero."""
    if attributes(node).get("alpha", 1.0) == 0:
        raise forward.error_at(node, "has alpha 0, by which its formula divides: its limit is Relu, so write that.")


CHECKS = [
    ("BatchNormalization", check_batch_norm),
    ("Conv", check_conv),
    ("Celu", check_celu),
    *((op, check_pool) for op in POOLS),
]


def supported() -> str:
    """List the operators that can be trained, as the end of a message."""
    return f"Supported: {', '.join(differentiable())}."
