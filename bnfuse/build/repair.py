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

from .batch_norms import (
    chain_running_statistics,
    copied_statistics,
    join_copied_statistics,
    stand_in_for_statistics,
    tell_none,
    train_batch_norms,
)
from .canonical import (
    add_of_sum,
    drop_copies,
    explicit_dropout,
    explicit_transpose,
    explicit_windows,
    flatten_logits,
    flatten_of_reshape,
    pads_of_windows,
)
from .folded import refuse_constant_masks, refuse_lost_batch_norms, warn_of_lost_dropout
from .forward import Constants, check_valid, convert_opset, fold_constants, infer_shapes, settle_shapes
from .graph import Forward
from .initial_values import fill
from .loss_files import Attached, LossFile, attach
from .losses import LOSSES, Term
from .merged import separate_merged
from .old_batch_norms import simplify_old_batch_norms
from .soft_labels import write_soft_labels
from .transposes import cancel_transposes
from .traps import check_operators, refuse_own_loss
from .variables import fixed_by_exporter, fixed_by_form, warn_of_lost_parameters
from .written_norms import join_written_norms
from .written_out import join_written_out


@dataclasses.dataclass(frozen=True)
class Repaired:
    """What the repairs tell of the initializers, and the outputs' names now."""

    constants: Constants  # those that were Constant nodes
    fixed: set[str]  # constants in the place of parameters, which stay as they are
    untracked: set[str]  # in the place of running statistics that the network does not have
    outputs: tuple[str, ...]
    attached: Attached | None = None  # a loss file that is part of the graph now


def repair(
    forward: Forward,
    *,
    train_bn: bool,
    terms: Sequence[Term],
    outputs: Sequence[str],
    seed: int,
    init: Sequence[str] = (),
    allow_folded_bn: bool = False,
    frozen_bn: bool = False,
    freeze_bn: Sequence[str] = (),
    own_loss: str | None = None,
    labels: Sequence[str] = (),
    file: LossFile | None = None,
) -> Repaired:
    """Make all repairs.

    Where the graph ends in a loss of its own, `own_loss` is that output and `labels` are the inputs with labels; a loss
    in a `file` is put behind the network.
    """
    keep_outputs(forward, outputs, own_loss)
    if terms:
        refuse_own_loss(forward, outputs)
    refuse_lost_batch_norms(forward, allowed=allow_folded_bn)
    warn_of_lost_dropout(forward)
    refuse_constant_masks(forward)
    copied = copied_statistics(forward)
    constants = fold_constants(forward)
    constants.adopt(separate_merged(forward))
    forward.lost -= set(forward.initializers())
    warn_of_lost_parameters(forward)
    join_copied_statistics(forward, copied)
    fixed = fixed_by_exporter(forward)
    outputs = renamed(outputs, terms, lambda name, term: drop_activation(forward, name, term.kind))
    trained = simplify_old_batch_norms(forward, frozen=frozen_bn)
    forward.remove_dead_nodes()
    check_operators(forward, labels)
    convert_opset(forward)
    write_soft_labels(forward)
    train_batch_norms(forward, trained, train_bn=train_bn, frozen_bn=frozen_bn, freeze_bn=freeze_bn)
    chain_running_statistics(forward)
    constants |= fold_constants(forward)  # what the converter added
    constants = settle_shapes(forward, constants)
    attached = None
    if file is not None:
        attached, constants = attach(forward, file, constants)
        fixed.update(attached.initializers)
    untracked = stand_in_for_statistics(forward)
    constants.names.update(untracked)
    fixed |= fixed_by_form(forward, constants.names)
    check_valid(forward)
    fixed |= join_written_norms(forward)
    if train_bn:
        tell_none(forward)
    cancel_transposes(forward, constants, keep=(*outputs, *labels))
    drop_zero_bias(forward, constants.names)
    merge_affine(forward, constants.placeholders, fixed)
    fill(forward, constants.placeholders, fixed, init, seed)
    join_written_out(forward, constants.names)
    make_canonical(forward)
    outputs = renamed(outputs, terms, lambda name, term: flattened(forward, name, term))
    infer_shapes(forward)
    return Repaired(constants, fixed, untracked, outputs, attached)


STEPS = (
    drop_copies,
    explicit_windows,
    pads_of_windows,
    explicit_dropout,
    explicit_transpose,
    add_of_sum,
    flatten_of_reshape,
)


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


def keep_outputs(forward: Forward, outputs: Sequence[str], own_loss: str | None = None) -> None:
    """Take out all outputs but those that the loss reads, and the inputs that only those read: a training file has no
    place for them."""
    others = [value for value in forward.graph.output if value.name not in outputs]
    for value in others:
        forward.graph.output.remove(value)
    before = set(forward.consumers())
    forward.remove_dead_nodes()
    left = before - set(forward.consumers())
    unread = [value for value in forward.graph.input if value.name in left and others]
    for value in unread:
        forward.graph.input.remove(value)
    if others:
        gone = ", ".join(value.name for value in (*others, *unread))
        read = some(list(dict.fromkeys(outputs)))
        forward.note(f"left out {gone}: the loss {f'is {own_loss}' if own_loss else f'reads {read} alone'}")


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
            aligned = _channel_operand(forward, readers[0], norm, shapes)
            operand = _whole(forward, aligned)
            if operand is None or any(len(consumers.get(n, [])) != 1 for n in (operand, aligned, *norm.input[1:3])):
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


def _channel_operand(
    forward: Forward, node: onnx.NodeProto, norm: onnx.NodeProto, shapes: dict[str, list[int] | None]
) -> str | None:
    """Give the operand of `node` that has one value per channel of the BN's output (or one for all)."""
    known, rank = forward.initializers(), len(shapes[norm.input[0]] or [])
    others = [name for name in node.input if name != norm.output[0]]
    if len(others) != 1 or shapes.get(others[0]) is None or norm.input[1] not in known:
        return None
    channels, dims = known[norm.input[1]].dims[0], shapes[others[0]] or []
    aligned = [1] * (rank - len(dims)) + dims
    if len(aligned) != rank or [d for axis, d in enumerate(aligned) if axis != 1 and d != 1]:
        return None
    return others[0] if aligned[1] in (1, channels) else None


def _whole(forward: Forward, name: str | None) -> str | None:
    """Give the initializer that a tensor is, or is but for axes of size 1."""
    known, makers = forward.initializers(), forward.producers()
    while name is not None and name not in known:
        maker = makers.get(name)
        name = maker.input[0] if maker is not None and maker.op_type in ("Reshape", "Squeeze", "Unsqueeze") else None
    return name


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
