"""What onnxruntime-training gets wrong in silence, or fails at without saying where: refused here, in one line.

Each check says what happens without it.
"""

from __future__ import annotations

import re

import onnx
from onnx import TensorProto

from bnfuse.core.errors import BnfuseError
from bnfuse.core.windows import POOLS
from bnfuse.graph.protos import attributes, element_count, static_shape
from bnfuse.graph.signature import LOSSES

from .graph import Forward
from .pools import fault_of

SUPPORTED = (
    "Abs Add And AveragePool BatchNormalization Cast Celu Clip Concat Conv Cos Div Dropout Elu Equal Erf "
    "Exp Expand Flatten Gather Gelu Gemm GlobalAveragePool GlobalMaxPool HardSigmoid HardSwish Identity "
    "LayerNormalization LeakyRelu Log LogSoftmax MatMul Max MaxPool Min Mish Mul Neg PRelu Pad Pow "
    "ReduceMax ReduceMean ReduceSum Relu Reshape Selu Sigmoid Sin Slice Softmax Softplus Softsign Split "
    "Sqrt Squeeze Sub Sum Tanh Transpose Unsqueeze Where "
)
WITHOUT_LOSS = (
    "build adds the loss (--loss): export the network without it, so that its output is what the loss reads, or name "
    "that output (--logits NAME)."
)
Shapes = dict[str, list[int] | None]
FLOATS = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
NO_KERNEL = {"ConvTranspose": "ConvTransposeGrad", "Resize": "ResizeGrad", "Upsample": "ResizeGrad"}


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


def refuse_own_loss(forward: Forward, logits: str) -> None:
    """Refuse a file that ends in a loss: what the loss here would read is that loss."""
    needed = {logits}
    for node in reversed(list(forward.graph.node)):
        if needed.isdisjoint(node.output):
            continue
        if node.op_type in LOSSES:
            raise forward.error_at(node, f"is a loss of the file's own. {WITHOUT_LOSS}")
        needed.update(node.input)
    for value in forward.graph.output:
        if value.name == logits and static_shape(value) == []:
            raise forward.error(f"output '{logits}' is a single number, as of a loss of the file's own. {WITHOUT_LOSS}")


def check_forward(forward: Forward) -> None:
    """Refuse what would train wrongly."""
    shapes = forward.shapes()
    for node in forward.graph.node:
        for op, check in CHECKS:
            if node.op_type == op:
                check(forward, node, shapes)


def check_operators(forward: Forward) -> None:
    """Refuse what cannot be trained for its type or operator, before shape inference stumbles over it."""
    for value in forward.graph.input:
        kind = value.type.tensor_type.elem_type
        if kind != TensorProto.FLOAT:
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


def check_batch_norm(forward: Forward, node: onnx.NodeProto, shapes: Shapes) -> None:
    """Refuse a frozen BN, which would silently become a training BN, and statistics of one value, which are none."""
    if not attributes(node).get("training_mode"):
        raise forward.error_at(
            node,
            "has training_mode=0: its statistics are frozen, so there is nothing to split. "
            "Pass --train-bn to train it.",
        )
    if len(node.input) < 5 or not all(node.input[1:5]):
        raise forward.error_at(node, "lacks its scale, bias or running statistics: export it with all five operands.")
    shape = shapes[node.input[0]] or []
    if len(shape) < 2 or element_count(shape) // shape[1] == 1:
        raise forward.error_at(
            node, f"has one value per channel ({shape}): it has no variance. Use a larger --batch or --image."
        )


def check_conv(forward: Forward, node: onnx.NodeProto, shapes: Shapes) -> None:
    """Compare the channels, which neither shape inference nor the gradient builder does."""
    x, weight = shapes[node.input[0]] or [], shapes[node.input[1]] or []
    group = int(attributes(node).get("group", 1))
    if x[1] != weight[1] * group or weight[0] % group:
        what = f"reads {x[1]} channels, but its weight is {weight} in {group} groups: they do not fit."
        raise forward.error_at(node, what)


def check_pool(forward: Forward, node: onnx.NodeProto, shapes: Shapes) -> None:
    """Refuse a pooling at which onnxruntime gives NaN, reads beyond the map, or does not load the file."""
    if reason := fault_of(node, (shapes[node.input[0]] or [])[2:]):
        raise forward.error_at(node, reason)


def check_pad(forward: Forward, node: onnx.NodeProto, shapes: Shapes) -> None:
    """Refuse a padding that is not constant: it has no gradient."""
    mode = attributes(node).get("mode", b"constant")
    if mode != b"constant":
        raise forward.error_at(node, f"pads by '{mode.decode()}': only constant padding has a gradient.")


def check_no_kernel(forward: Forward, node: onnx.NodeProto, shapes: Shapes) -> None:
    """Refuse an operator whose gradient node exists, but no kernel that runs it."""
    raise forward.error_at(node, f"has no gradient here ({NO_KERNEL[node.op_type]} has no CPU kernel). {supported()}")


CHECKS = [
    ("BatchNormalization", check_batch_norm),
    ("Conv", check_conv),
    *((op, check_pool) for op in POOLS),
    ("Pad", check_pad),
    *((op, check_no_kernel) for op in NO_KERNEL),
]


def supported() -> str:
    """List the operators that can be trained, as the end of a message."""
    return f"Supported: {', '.join(SUPPORTED.split())}."


_NO_BUILDER = re.compile(r"The gradient builder has not been registered: (\w+)(?: for node (\S+))?")


def builder_error(forward: Forward, error: Exception) -> BnfuseError:
    """Tell what the gradient builder said, in terms of the user's graph."""
    text = " ".join(str(error).split())
    if "OutputDefs" in text or "InputDefs" in text:
        text = f"an operator lacks an operand or a result that its gradient reads ({text[-120:]})"
    if match := _NO_BUILDER.search(text):
        op, name = match.groups()
        for node in forward.graph.node:
            if node.op_type == op and (name is None or node.name == name or node.name in text):
                return forward.error_at(node, f"has no gradient. {supported()}")
        return forward.error(f"operator {op} has no gradient. {supported()}")
    said = text.rpartition("Error:")[2].strip() or text  # after where in onnxruntime's source it was said
    return forward.error(f"onnxruntime cannot build the gradients: {said[:300]}")
