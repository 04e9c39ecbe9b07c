"""Repairs of what exporters leave in a forward graph, each with a line that says what was done.

    Conv -> BN -> Mul -> Add -> Relu -> ... -> Softmax   to   Conv -> BN(training) -> Relu -> ... -> logits

Order matters: constants are folded first (a repair then only meets initializers), what depends on the opset comes
before the conversion to a newer one, what depends on shapes after their inference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import numpy_helper

from bnfuse.core.text import some
from bnfuse.graph.protos import attributes, fresh, set_attribute

from .canonical import (
    add_of_sum,
    explicit_dropout,
    explicit_transpose,
    explicit_windows,
    flatten_logits,
    flatten_of_reshape,
)
from .folded import refuse_lost_batch_norms, warn_of_lost_dropout
from .forward import Constants, check_valid, convert_opset, fold_constants, infer_shapes, settle_shapes
from .graph import Forward
from .initial_values import fill
from .losses import LOSSES, Term
from .merged import separate_merged
from .old_batch_norms import simplify_old_batch_norms
from .traps import check_operators, refuse_own_loss
from .variables import fixed_by_exporter, fixed_by_form
from .written_out import join_written_out


@dataclasses.dataclass(frozen=True)
class Repaired:
    """Initializers that were Constant nodes, those of them that stay as they are, and the outputs' names now."""

    constants: Constants
    fixed: set[str]
    outputs: tuple[str, ...]


def repair(
    forward: Forward,
    *,
    train_bn: bool,
    terms: Sequence[Term],
    outputs: Sequence[str],
    seed: int,
    init: Sequence[str] = (),
    allow_folded_bn: bool = False,
) -> Repaired:
    """Make all repairs."""
    keep_outputs(forward, outputs)
    if terms:
        refuse_own_loss(forward, outputs)
    refuse_lost_batch_norms(forward, allowed=allow_folded_bn)
    warn_of_lost_dropout(forward)
    constants = fold_constants(forward)
    constants.adopt(separate_merged(forward))
    fixed = fixed_by_exporter(forward)
    outputs = renamed(outputs, terms, lambda name, term: drop_activation(forward, name, term.kind))
    trained = simplify_old_batch_norms(forward)
    forward.remove_dead_nodes()
    check_operators(forward)
    convert_opset(forward)
    train_batch_norms(forward, trained, train_bn=train_bn)
    constants |= fold_constants(forward)  # what the converter added
    constants = settle_shapes(forward, constants)
    fixed |= fixed_by_form(forward, constants.names)
    check_valid(forward)
    drop_zero_bias(forward, constants.names)
    merge_affine(forward, constants.placeholders, fixed)
    fill(forward, constants.placeholders, fixed, init, seed)
    join_written_out(forward)
    make_canonical(forward)
    outputs = renamed(outputs, terms, lambda name, term: flattened(forward, name, term))
    infer_shapes(forward)
    return Repaired(constants, fixed, outputs)


STEPS = (explicit_windows, explicit_dropout, explicit_transpose, add_of_sum, flatten_of_reshape)


def make_canonical(forward: Forward) -> None:
    """Bring the nodes to the one spelling (canonical.py); shapes must be known."""
    for step in STEPS:
        step(forward)
    forward.remove_dead_nodes()


def renamed(outputs: Sequence[str], terms: Sequence[Term], change: Callable[[str, Term], str]) -> tuple[str, ...]:
    """Give the outputs as `change` leaves them, each changed once, by the first term that reads it."""
    found = {name: name for name in outputs}
    for term, name in zip(terms, outputs, strict=False):
        if found[name] == name:
            found[name] = change(name, term)
    return tuple(found[name] for name in outputs)


def keep_outputs(forward: Forward, outputs: Sequence[str]) -> None:
    """Take out all outputs but those that the loss reads, and the inputs that only those read: a training file has no
    place for them."""
    others = [value for value in forward.graph.output if value.name not in outputs]
    for value in others:
        forward.graph.output.remove(value)
    before = set(forward.consumers())
    forward.remove_dead_nodes()
    left = before - set(forward.consumers())
    unread = [value for value in forward.graph.input if value.name in left]
    for value in unread:
        forward.graph.input.remove(value)
    if others:
        gone = ", ".join(value.name for value in (*others, *unread))
        forward.note(f"left out {gone}: the loss reads {some(list(dict.fromkeys(outputs)))} alone")


def flattened(forward: Forward, name: str, term: Term) -> str:
    """Flatten scores of classes."""
    return flatten_logits(forward, name) if LOSSES[term.kind].classes else name


def drop_activation(forward: Forward, logits: str, loss: str) -> str:
    """Take out an activation that the loss has in it, a softmax before cross-entropy; a LogSoftmax changes nothing."""
    node = forward.producers().get(logits)
    if node is None or node.op_type not in LOSSES[loss].activation or forward.consumers().get(logits):
        return logits
    forward.remove_nodes([node])
    for value in forward.graph.output:
        if value.name == logits:
            value.name = node.input[0]
    forward.note(f"dropped the final {node.op_type} '{node.name}': {loss} takes logits")
    return node.input[0]


def train_batch_norms(forward: Forward, trained: set[str], *, train_bn: bool) -> None:
    """Turn BNs whose results are in `trained`, or on request all, into training BNs with new running statistics."""
    norms = [node for node in forward.graph.node if node.op_type == "BatchNormalization"]
    if train_bn and not norms:
        forward.note("--train-bn found no BatchNormalization: exporters for inference fold it into the convolutions")
    changed = 0
    training = [node for node in norms if train_bn or node.output[0] in trained]
    for node in training:
        if not attributes(node).get("training_mode"):
            changed += 1
            set_attribute(node, "training_mode", 1)
        _name_running_outputs(forward, node)
    if changed:
        why = "--train-bn" if train_bn else "the file's opset has no training_mode that would freeze them"
        forward.note(f"{changed} BatchNormalization nodes made to train ({why})")
    for momentum, what in ((1.0, "never move"), (0.0, "are those of the last batch alone")):
        odd = [node.name for node in training if attributes(node).get("momentum", 0.9) == momentum]
        if odd:
            forward.note(
                f"the running statistics of {some(odd)} {what}: momentum={momentum:g} in the file, which is what torch "
                "writes for momentum=None. `rewrite --decay A` sets another"
            )


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


def drop_zero_bias(forward: Forward, constants: set[str]) -> None:
    """Take out biases of constant zeros, which some exporters give every convolution, and which would be trained."""
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


def merge_affine(forward: Forward, placeholders: set[str], fixed: set[str]) -> None:
    """Merge BN -> Mul -> Add by one value per channel (Caffe's Scale layer) into the BN's own scale and bias.

    z = g*(s*x + b) + h  =  (g*s)*x + (g*b + h): the same function, and the same set of functions to train. A factor in
    front of a random mask makes up for what the mask drops and is left out with it in inference, so it stays.
    """
    consumers, outputs, shapes = forward.consumers(), forward.output_names(), forward.shapes()
    random = forward.random_names()
    gone: list[onnx.NodeProto] = []
    merged = 0
    for norm in [node for node in forward.graph.node if node.op_type == "BatchNormalization"]:
        changed = False
        for op in ("Mul", "Add"):
            readers = consumers.get(norm.output[0], [])
            if len(readers) != 1 or readers[0].op_type != op or norm.output[0] in outputs:
                continue
            if any(random & {*reader.input} for reader in consumers.get(readers[0].output[0], [])):
                continue
            operand = _channel_operand(forward, readers[0], norm, len(shapes[norm.input[0]] or []))
            if operand is None or any(len(consumers.get(name, [])) != 1 for name in (operand, *norm.input[1:3])):
                continue
            _absorb(forward, norm, op, operand, placeholders)
            if operand not in fixed:
                fixed.discard(norm.input[1 if op == "Mul" else 2])
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
    """Give the operand of `node` that is an initializer with one value per channel of the BN's output (or one for
    all)."""
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
