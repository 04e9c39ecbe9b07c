"""Repairs of what exporters leave in a forward graph, each with a line that says what was done.

    Conv -> BN -> Mul -> Add -> Relu -> ... -> Softmax   to   Conv -> BN(training) -> Relu -> ... -> logits

Order matters: constants are folded first (a repair then only meets initializers), what depends on the opset comes
before the conversion to a newer one, what depends on shapes after their inference.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from bnfuse.models.initial import kaiming

from .canonical import add_of_sum, explicit_dropout, explicit_windows, flatten_logits, flatten_of_reshape
from .forward import check_valid, convert_opset, fold_constants, infer_shapes
from .graph import Forward, attributes, fresh, set_attribute
from .rewrites import layer_norm_results, rewrite_operators
from .traps import check_operators


def repair(forward: Forward, *, train_bn: bool, loss: str, logits: str, seed: int) -> tuple[set[str], str]:
    """All repairs. Returns the initializers that were Constant nodes, and the name of the logits."""
    keep_output(forward, logits)
    constants, placeholders = fold_constants(forward)
    if loss == "cross-entropy":
        logits = drop_softmax(forward, logits)
    silent = predates_training_mode(forward)
    convert_opset(forward)
    train_batch_norms(forward, train_bn=train_bn, silent=silent)
    constants |= fold_constants(forward)[0]  # what the converter added
    remove_dead_nodes(forward)
    check_operators(forward)
    infer_shapes(forward)
    check_valid(forward)
    for known, found in zip((constants, placeholders), fold_constants(forward, forward.shapes()), strict=True):
        known |= found  # shape arithmetic
    drop_zero_bias(forward, constants)
    merge_affine(forward, placeholders)
    refill(forward, placeholders, seed)
    rewrite_operators(forward)
    infer_shapes(forward)
    for step in STEPS:
        step(forward)
    if loss == "cross-entropy":
        logits = flatten_logits(forward, logits)
    remove_dead_nodes(forward)
    infer_shapes(forward)
    return constants, logits


STEPS = (layer_norm_results, explicit_windows, explicit_dropout, add_of_sum, flatten_of_reshape)


def keep_output(forward: Forward, logits: str) -> None:
    """The loss reads one output; a training file has no place for others."""
    others = [value for value in forward.graph.output if value.name != logits]
    for value in others:
        forward.graph.output.remove(value)
    if others:
        forward.note(f"left out {', '.join(value.name for value in others)}: the loss reads {logits} alone")


def drop_softmax(forward: Forward, logits: str) -> str:
    """Cross-entropy takes logits: it has the softmax in it, and a LogSoftmax before it changes nothing."""
    node = forward.producers().get(logits)
    if node is None or node.op_type not in ("Softmax", "LogSoftmax") or forward.consumers().get(logits):
        return logits
    forward.remove_nodes([node])
    for value in forward.graph.output:
        if value.name == logits:
            value.name = node.input[0]
    forward.note(f"dropped the final {node.op_type} '{node.name}': cross-entropy takes logits")
    return node.input[0]


def predates_training_mode(forward: Forward) -> bool:
    """Below opset 14 BatchNormalization has no training_mode."""
    return all(opset.version < 14 for opset in forward.model.opset_import if opset.domain in ("", "ai.onnx"))


def train_batch_norms(forward: Forward, *, train_bn: bool, silent: bool) -> None:
    """Inference BNs become training BNs: on request, or where the file is too old (`silent`) to say which they are."""
    changed = 0
    if train_bn and not any(node.op_type == "BatchNormalization" for node in forward.graph.node):
        forward.note("--train-bn found no BatchNormalization: exporters for inference fold it into the convolutions")
    for node in forward.graph.node:
        if node.op_type != "BatchNormalization":
            continue
        if not attributes(node).get("training_mode"):
            if not (train_bn or silent):
                continue
            changed += 1
            set_attribute(node, "training_mode", 1)
        _name_running_outputs(forward, node)
    if changed:
        why = "--train-bn" if train_bn else "the file's opset has no training_mode that would freeze them"
        forward.note(f"{changed} BatchNormalization nodes made to train ({why})")


def _name_running_outputs(forward: Forward, node: onnx.NodeProto) -> None:
    if len(node.output) >= 3 and all(node.output[1:3]):
        return
    taken = forward.names()
    y = node.output[0]
    given = list(node.output[1:3]) + [""] * (3 - len(node.output))
    defaults = (f"{node.name}/new_running_mean", f"{node.name}/new_running_var")
    names = [name or fresh(default, taken) for name, default in zip(given, defaults, strict=True)]
    del node.output[:]
    node.output.extend([y, *names])


def remove_dead_nodes(forward: Forward) -> None:
    """Nodes that no output depends on: they would ask for gradients that nobody needs."""
    needed, dead = forward.output_names(), []
    for node in reversed(list(forward.graph.node)):
        if needed.intersection(node.output):
            needed.update(node.input)
        else:
            dead.append(node)
    forward.remove_nodes(dead)
    forward.remove_unread_initializers()


def drop_zero_bias(forward: Forward, constants: set[str]) -> None:
    """Some exporters give every convolution a bias of constant zeros, which would be trained."""
    known, dropped = forward.initializers(), 0
    for node in forward.graph.node:
        if node.op_type != "Conv" or len(node.input) < 3 or node.input[2] not in constants:
            continue
        tensor = known.get(node.input[2])
        if tensor is not None and not numpy_helper.to_array(tensor).any():
            del node.input[2]
            dropped += 1
    if dropped:
        forward.note(f"dropped {dropped} Conv biases of constant zeros")


def merge_affine(forward: Forward, placeholders: set[str]) -> None:
    """BN -> Mul -> Add by one value per channel (Caffe's Scale layer) becomes the BN's own scale and bias.

    z = g*(s*x + b) + h  =  (g*s)*x + (g*b + h): the same function, and the same set of functions to train.
    """
    consumers, outputs, shapes = forward.consumers(), forward.output_names(), forward.shapes()
    gone: list[onnx.NodeProto] = []
    merged = 0
    for norm in [node for node in forward.graph.node if node.op_type == "BatchNormalization"]:
        changed = False
        for op in ("Mul", "Add"):
            readers = consumers.get(norm.output[0], [])
            if len(readers) != 1 or readers[0].op_type != op or norm.output[0] in outputs:
                continue
            operand = _channel_operand(forward, readers[0], norm, len(shapes[norm.input[0]] or []))
            if operand is None or any(len(consumers.get(name, [])) != 1 for name in (operand, *norm.input[1:3])):
                continue
            _absorb(forward, norm, op, operand, placeholders)
            old = norm.output[0]
            norm.output[0] = readers[0].output[0]
            consumers.pop(old)
            gone.append(readers[0])
            changed = True
        merged += changed
    forward.remove_nodes(gone)
    if merged:
        forward.note(f"merged the Mul and Add after {merged} BatchNormalization nodes into their scale and bias")


def _channel_operand(forward: Forward, node: onnx.NodeProto, norm: onnx.NodeProto, rank: int) -> str | None:
    """The operand of `node` that is an initializer with one value per channel of the BN's output (or one for all)."""
    known = forward.initializers()
    others = [name for name in node.input if name != norm.output[0]]
    if len(others) != 1 or others[0] not in known:
        return None
    channels = known[norm.input[1]].dims[0] if norm.input[1] in known else 0
    dims = list(known[others[0]].dims)
    aligned = [1] * (rank - len(dims)) + dims
    if len(aligned) != rank or [d for axis, d in enumerate(aligned) if axis != 1 and d != 1]:
        return None
    return others[0] if aligned[1] in (1, channels) else None


def _absorb(forward: Forward, norm: onnx.NodeProto, op: str, operand: str, placeholders: set[str]) -> None:
    known = forward.initializers()
    scale, bias = (numpy_helper.to_array(known[name]) for name in norm.input[1:3])
    values = np.broadcast_to(numpy_helper.to_array(known[operand]).reshape(-1), scale.shape)
    if op == "Mul":
        forward.set_initializer(norm.input[1], scale * values)
        forward.set_initializer(norm.input[2], bias * values)
    else:
        forward.set_initializer(norm.input[2], bias + values)
    if operand in placeholders:
        placeholders.update(norm.input[1:3] if op == "Mul" else norm.input[2:3])


def refill(forward: Forward, placeholders: set[str], seed: int) -> None:
    """Weights that the file only holds as a constant get initial values: equal weights would stay equal for ever.

    Conv and Gemm weights Kaiming, biases 0, BN scale 1, bias 0, running mean 0, running variance 1.
    """
    known, filled = forward.initializers(), set()
    for node in forward.graph.node:
        for index, name in enumerate(node.input):
            tensor = known.get(name)
            if tensor is None or name in filled or tensor.data_type != TensorProto.FLOAT:
                continue
            if name not in placeholders and not _is_flat_weight(node, index, tensor):
                continue
            values = _initial(node, index, name, list(tensor.dims), seed)
            if values is not None:
                forward.set_initializer(name, values)
                filled.add(name)
    if filled:
        forward.note(f"filled {len(filled)} parameters that the file holds as constants only (seed {seed})")


def _is_flat_weight(node: onnx.NodeProto, index: int, tensor: onnx.TensorProto) -> bool:
    """A Conv or Gemm weight whose values are all the same."""
    if node.op_type not in ("Conv", "Gemm") or index != 1 or int(np.prod(tensor.dims)) < 2:
        return False
    values = numpy_helper.to_array(tensor)
    return bool((values == values.flat[0]).all())


def _initial(node: onnx.NodeProto, index: int, name: str, shape: list[int], seed: int) -> np.ndarray | None:
    if node.op_type == "BatchNormalization" and 1 <= index <= 4:
        return np.full(shape, 1.0 if index in (1, 4) else 0.0, np.float32)
    if node.op_type not in ("Conv", "Gemm") or index not in (1, 2):
        return None
    if index == 2:
        return np.zeros(shape, np.float32)
    if node.op_type == "Gemm" and not attributes(node).get("transB"):
        return np.ascontiguousarray(kaiming(name, shape[::-1], seed, gain=1.0).T)
    return kaiming(name, shape, seed) if node.op_type == "Conv" else kaiming(name, shape, seed, gain=1.0)
