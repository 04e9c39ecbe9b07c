"""BatchNorms that an exporter took away before the file was written, for inference.

    Conv(x, w) -> BN    to    Conv(x, w*scale/deviation, bias - mean*scale/deviation)

Nothing brings them back: the file has neither their scale nor their statistics. What proves it is refused, unless asked
for; what only looks like it is told: a network may well have convolutions with biases and no BatchNorm.
"""

from __future__ import annotations

import re

import onnx

from bnfuse.core.text import some

from .exporters import Call, call_of, is_generated
from .graph import Forward

CARRIERS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "FusedConv")  # what a BatchNorm is folded into
DECOMPOSED = ("Add", "Div", "Mul", "Sub")  # what it is written as
NORMS = ("BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "LRN")
REMEDY = (
    'torch.onnx.export(net.train(), (images,), "net.onnx", dynamo=True, optimize=False) keeps them, with all weights '
    "and statistics, and build --train-bn trains them"
)
REMEDIES = {
    "tf2onnx": "tf2onnx.convert.from_function of tf.function(lambda x: net(x, training=True)) keeps them, with all "
    "weights and without the running statistics"
}
_ITEM = re.compile(r"getitem(_\d+)?$")
_BATCH_NORM = re.compile(r"batch_?norm|fused?_?bn|bn_?fus", re.IGNORECASE)


def refuse_lost_batch_norms(forward: Forward, *, allowed: bool) -> None:
    """Raise where BatchNorms are known to be gone, warns where they are allowed to be, or may be."""
    lost = lost_batch_norms(forward)
    if lost and not allowed:
        raise forward.error(
            f"{_number(len(lost))} folded away by its exporter ({some(lost)}), and nothing brings them back. "
            f"{_remedy(forward)}; "
            "--allow-folded-bn builds the file as it is"
        )
    if lost:
        forward.warn(f"{_number(len(lost))} folded away by the exporter ({some(lost)}) and will not be trained")
    elif not allowed and (why := looks_folded(forward)):
        forward.warn(f"{why}. If the network has BatchNorms, they are lost here: {_remedy(forward)}")


def _remedy(forward: Forward) -> str:
    return REMEDIES.get(forward.model.producer_name, REMEDY)


def _number(lost: int) -> str:
    return "a BatchNorm was" if lost == 1 else f"{lost} BatchNorms were"


def warn_of_lost_dropout(forward: Forward) -> None:
    """Warn of copies, as which torch's exporter writes a Dropout of a module in evaluation mode."""
    calls = [(node, call) for node in forward.graph.node if (call := call_of(node))]
    evaluated = any("no_training" in call.operator for _, call in calls)
    lost = [
        call.module or node.name
        for node, call in calls
        if node.op_type == "Identity" and call.kind.startswith("torch.nn.modules.dropout.")
    ]
    if evaluated and lost:
        forward.warn(
            f"the network was exported in evaluation mode, without its Dropouts ({some(lost)}): export net.train() to "
            "have them trained with"
        )


def refuse_constant_masks(forward: Forward) -> None:
    """Refuse Dropouts whose masks tf2onnx has drawn, once and for all, and which would be parameters."""
    if forward.model.producer_name != "tf2onnx":
        return
    masks = [
        tensor.name
        for tensor in forward.graph.initializer
        if tensor.data_type == onnx.TensorProto.BOOL and "dropout" in tensor.name.lower()
    ]
    if masks:
        raise forward.error(
            f"the masks of its Dropouts are constants ({some(masks)}), the same in every step: export the network with "
            "their rates set to 0"
        )


def lost_batch_norms(forward: Forward) -> list[str]:
    """List the names of the BatchNorms that exporters say to have folded or decomposed, by module where that is
    known."""
    norms = [node for node in forward.graph.node if node.op_type == "BatchNormalization"]
    calls = [call for node in norms if (call := call_of(node))]
    kept = {call.name for call in calls} | {call.module for call in calls if call.module}
    operands = {name for node in norms for name in node.input}
    lost: dict[str, None] = {}
    for node in forward.graph.node:
        call = call_of(node)
        if call is not None and node.op_type in (*CARRIERS, *DECOMPOSED):
            if (_takes_statistics(call) and not kept & {call.name, call.module}) or _says_fused(node):
                lost[call.module or call.name] = None
        elif node.op_type in CARRIERS and (
            _says_fused(node) or _named_after_batch_norm(node, operands) or _renamed_by_torch(forward, node)
        ):
            lost[node.name] = None
    return list(lost)


def _takes_statistics(call: Call) -> bool:
    """Tell whether it is a call of batch_norm, or a step of one; without running statistics (no_stats) there is nothing
    to lose."""
    named = _BATCH_NORM.search(call.operator) is not None or call.kind.startswith("torch.nn.modules.batchnorm.")
    return named and "no_stats" not in call.operator


def _says_fused(node: onnx.NodeProto) -> bool:
    return any(entry.key.endswith("rule_name") and "BatchNorm" in entry.value for entry in node.metadata_props)


def _named_after_batch_norm(node: onnx.NodeProto, operands: set[str]) -> bool:
    """Its result or its own operands carry the name of a BatchNorm that is not there."""
    names = [node.output[0], *(name for name in node.input[1:] if name not in operands)]
    return any(_BATCH_NORM.search("/".join(re.split(r"[/.]", name)[-2:])) for name in names)


def _renamed_by_torch(forward: Forward, node: onnx.NodeProto) -> bool:
    """Its weight is no parameter of the module any more, and its bias is not its own: only folding makes both anew.

    Weight normalisation, too, makes the weight anew, and leaves the bias its name. The newer exporter keeps both names;
    there the result is called an item of several, as batch_norm gives them and no convolution does.
    """
    if forward.model.producer_name != "pytorch":
        return False
    if _ITEM.match(node.output[0]):
        return True
    if node.op_type not in CARRIERS[:2] or len(node.input) < 3 or not is_generated(node.input[1]):
        return False
    scope = node.name.split("/")[-2] if node.name.count("/") > 1 else ""
    return is_generated(node.input[2]) or (bool(scope) and not node.input[2].endswith(f"{scope}.bias"))


def looks_folded(forward: Forward) -> str | None:
    """Tell what makes it likely that there were BatchNorms."""
    graph = forward.graph
    if forward.model.producer_name == "bnfuse" or any(node.op_type in NORMS for node in graph.node):
        return None
    affine = _scaled_convolutions(forward)
    if affine:
        return f"{affine} convolutions are multiplied and added to by channel, as BatchNorms are written for inference"
    convolutions = [node for node in graph.node if node.op_type in CARRIERS[:2]]
    biased = [node for node in convolutions if len(node.input) > 2 and node.input[2]]
    if len(convolutions) < 2 or len(biased) < len(convolutions) or all(map(_biased_by_module, biased)):
        return None
    return f"the file has no BatchNorm, and a bias in all {len(biased)} convolutions, as folding leaves them"


def _biased_by_module(node: onnx.NodeProto) -> bool:
    """Tell whether the exporter says that the convolution has this bias in the module."""
    if call_of(node) is not None:
        return True
    weight, bias = node.input[1:3]
    return weight.endswith(".weight") and bias == f"{weight.removesuffix('weight')}bias"


def _scaled_convolutions(forward: Forward) -> int:
    """Convolutions behind which a Mul and an Add have one constant a channel."""
    consumers, shapes = forward.consumers(), {t.name: list(t.dims) for t in forward.graph.initializer}
    found = 0
    for node in forward.graph.node:
        if node.op_type not in CARRIERS[:2]:
            continue
        steps = []
        output = node.output[0]
        for _ in range(2):
            readers = consumers.get(output, [])
            if len(readers) != 1 or readers[0].op_type not in DECOMPOSED:
                break
            others = [shapes.get(name, []) for name in readers[0].input if name != output]
            if len(others) != 1 or max(others[0], default=1) == 1:
                break
            steps.append(readers[0].op_type)
            output = readers[0].output[0]
        found += len(steps) == 2 and steps[0] in ("Mul", "Div") and steps[1] in ("Add", "Sub")
    return found
