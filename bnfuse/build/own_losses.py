"""Losses that come with the user: the one that the file ends in (`own`), or one in a file of its own (loss_files.py).

    own           data, labels -> network and loss -> a single number, which is the loss
    own@NAME      the same, where several outputs are single numbers

Labels are the inputs of integers and those that are named. Scores, which evaluation gives, are an output beside the
loss, or else the last tensor through which all goes that the loss reads of the network. Constants of a loss (weights
of classes, say) are no parameters.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from bnfuse.core.text import some
from bnfuse.graph.protos import element_count, fresh, static_shape

from .exporters import PARAMETER, signature_of
from .forward import FLOATS, infer_shapes
from .graph import Forward
from .loss_files import LossFile, bind, read_loss_file
from .losses import Term, parse_loss
from .repair import Repaired
from .training import Ends
from .traps import choose_outputs
from .variables import ALWAYS, matches

OWN = "own"
INTEGERS = (TensorProto.INT64, TensorProto.INT32)

_OWN = re.compile(rf"\s*{OWN}\s*(?:@(?P<output>.+?))?\s*")


@dataclasses.dataclass(frozen=True)
class Ending:
    """What a network ends in: terms of a loss, or a loss that comes as a graph; without either gradients come in."""

    outputs: tuple[str, ...]  # that are kept: those that the loss reads, and that which is the loss
    terms: tuple[Term, ...] = ()
    loss: str | None = None  # the output that is the loss, once it is there
    labels: tuple[str, ...] = ()  # inputs of the network's file
    file: LossFile | None = None


def read_ending(
    forward: Forward,
    loss: str | Path | Sequence[Term] | onnx.ModelProto,
    labels: Sequence[str],
    logits: str | None,
) -> Ending:
    """Read what is asked for as a loss. Raises BnfuseError where the file has no such loss, labels or scores."""
    if isinstance(loss, onnx.ModelProto | Path) or (isinstance(loss, str) and loss.strip().endswith(".onnx")):
        file = bind(forward, read_loss_file(loss), labels, logits)
        return Ending(file.outputs, file=file)
    if isinstance(loss, str) and (match := _OWN.fullmatch(loss)):
        return own_ending(forward, match["output"], labels, logits)
    if labels:
        raise forward.error(
            f"--labels {labels[0]} is for losses that have inputs: --loss {OWN} and --loss FILE.onnx. For all others "
            "build adds an input with the labels"
        )
    if not isinstance(loss, str | Sequence):
        raise forward.error(
            f"loss is a {type(loss).__name__}: write it as text (cross-entropy, mse, ...), or export it and give that "
            "(docs/training-file.md, A loss of your own)"
        )
    terms = parse_loss(loss) if isinstance(loss, str) else tuple(loss)
    return Ending(choose_outputs(forward, terms, logits), terms)


def own_ending(forward: Forward, wanted: str | None, labels: Sequence[str], logits: str | None) -> Ending:
    """Find the loss that the file ends in, its labels, and the scores where they are an output or are named."""
    loss = own_loss(forward, wanted)
    inputs = {value.name: value.type.tensor_type.elem_type for value in forward.graph.input}
    require_inputs(forward, labels, inputs)
    chosen = tuple(name for name, kind in inputs.items() if kind in INTEGERS or name in labels)
    if not chosen and len(inputs) > 1:
        forward.warn(f"the inputs {some(list(inputs))} are all taken as data: --labels NAME says which are labels")
    scores = own_scores(forward, loss, logits)
    return Ending((loss, *scores), loss=loss, labels=chosen)


def require_inputs(forward: Forward, labels: Sequence[str], inputs: Iterable[str]) -> None:
    """Raise where --labels names no input."""
    there = list(inputs)
    for name in labels:
        if name not in there:
            raise forward.error(f"--labels {name}: there is no such input, there are {some(there)}")


def own_loss(forward: Forward, wanted: str | None) -> str:
    """Give the output that is the loss: a single number, or the only output where the file says no shape."""
    names = [value.name for value in forward.graph.output]
    if wanted is not None:
        if wanted not in names:
            raise forward.error(f"--loss {OWN}@{wanted}: there is no such output, there are {some(names)}")
        return wanted
    single = [v.name for v in forward.graph.output if (shape := static_shape(v)) is not None and is_number(shape)]
    if len(single) != 1 and len(names) == 1 and not forward.graph.output[0].type.tensor_type.HasField("shape"):
        single = names
    if len(single) > 1:
        raise forward.error(
            f"the outputs {some(single)} are single numbers: say which one is the loss (--loss {OWN}@NAME)"
        )
    if not single:
        raise forward.error(
            f"none of its outputs ({some(names)}) is a single number: it does not end in a loss. Name another --loss, "
            f"or say which output is the loss (--loss {OWN}@NAME)"
        )
    return single[0]


def is_number(shape: Sequence[int]) -> bool:
    """Tell whether a shape is that of a single number."""
    return len(shape) <= 1 and element_count(shape) == 1


def own_scores(forward: Forward, loss: str, wanted: str | None) -> tuple[str, ...]:
    """Give the scores that evaluation is to give, as an output; nothing where they are yet to be found."""
    outputs = [value.name for value in forward.graph.output if value.name != loss]
    if wanted is None:
        floats = [v.name for v in forward.graph.output if v.name != loss and may_be_scores(v)]
        return ("logits",) if "logits" in floats else tuple(floats if len(floats) == 1 else ())
    if wanted not in outputs:
        if wanted == loss or wanted not in forward.producers():
            raise forward.error(f"--logits {wanted}: there is no such output or result")
        forward.graph.output.append(helper.make_tensor_value_info(wanted, TensorProto.FLOAT, None))
    return (wanted,)


def may_be_scores(output: onnx.ValueInfoProto) -> bool:
    """Tell whether an output is of floats, and more than a single number, as far as the file says."""
    shape = static_shape(output)
    return output.type.tensor_type.elem_type in (0, TensorProto.FLOAT) and (shape is None or not is_number(shape))


def require_number(forward: Forward, loss: str) -> None:
    """Raise where the loss is no single number; shapes must be known."""
    shape = forward.shapes()[loss] or []
    kind = next(value.type.tensor_type.elem_type for value in forward.graph.output if value.name == loss)
    if kind != TensorProto.FLOAT:
        raise forward.error(f"output '{loss}' is {TensorProto.DataType.Name(kind).lower()}: a loss is float32")
    if not is_number(shape):
        raise forward.error(f"output '{loss}' has shape {shape}: a loss is a single number, a mean or a sum")


def scores_of(forward: Forward, loss: str, labels: Sequence[str]) -> str | None:
    """Find the last tensor through which all goes that the loss reads of the network, None where there is none.

    The way back begins at what is read together with the labels, and ends where a node has a weight.
    """
    data = from_inputs(forward, [value.name for value in forward.graph.input if value.name not in labels])
    labelled, producers = from_inputs(forward, labels), forward.producers()
    places = {name: index for index, node in enumerate(forward.graph.node) for name in node.output}
    nodes = needed_by(forward, loss)
    loss_nodes = [node for node in nodes if labelled.intersection(node.output)]
    found = {name for node in loss_nodes for name in node.input if name in data and name not in labelled}
    weights = {t.name for t in forward.graph.initializer if t.data_type in FLOATS and t.dims}
    while len(found) > 1:
        last = max(found, key=lambda name: places.get(name, -1))
        maker = producers.get(last)
        if maker is None or any(maker.input[i] in weights for i in weighted(maker)):
            return None
        found.remove(last)
        found.update(name for name in maker.input if name in data)
    scores = next(iter(found), "")
    maker = producers.get(scores)
    if maker is not None and maker.op_type == "LogSoftmax":
        scores = maker.input[0]
    return scores if scores in producers else None


def weighted(node: onnx.NodeProto) -> list[int]:
    """List the operands of a node that may be weights."""
    return [index for index in ALWAYS.get(node.op_type, ()) if index < len(node.input)]


def from_inputs(forward: Forward, names: Iterable[str]) -> set[str]:
    """List these tensors and all that is computed of them."""
    found = set(names)
    for node in forward.graph.node:
        if found.intersection(node.input):
            found.update(filter(None, node.output))
    return found


def needed_by(forward: Forward, name: str) -> list[onnx.NodeProto]:
    """List the nodes that a tensor is computed by, in order."""
    needed, found = {name}, []
    for node in reversed(list(forward.graph.node)):
        if needed.intersection(node.output):
            needed.update(node.input)
            found.append(node)
    return found[::-1]


def constants_of_loss(forward: Forward, labels: Sequence[str], scores: str | None) -> set[str]:
    """List the initializers that nothing but the loss reads, elementwise: weights of classes, margins, tables.

    Weights of its layers are not among them, and nothing that torch's exporter says to be a parameter.
    """
    behind = from_inputs(forward, [*labels, *only(scores)]) - {scores}
    parameters = {tensor.target for tensor in signature_of(forward.model).values() if tensor.kind == PARAMETER}
    of_loss: set[str] = set()
    of_network: set[str] = set()
    for node in forward.graph.node:
        layers = {node.input[index] for index in weighted(node)}
        inside = behind.intersection(node.output)
        of_loss.update({*node.input} - layers if inside else ())
        of_network.update(layers if inside else node.input)
    return {name for name in forward.initializers() if name in of_loss - of_network - parameters}


@dataclasses.dataclass(frozen=True)
class GraphLoss:
    """A loss that is part of the graph: its output, its labels, what evaluation gives, constants that do not train."""

    loss: str
    labels: tuple[str, ...]
    scores: tuple[str, ...]
    constants: set[str]

    def untrained(self, forward: Forward, train: Sequence[str]) -> set[str]:
        """Give the constants that no pattern of --train names, and tell which of them could train."""
        named = [pattern for pattern in train if pattern != "*"]
        kept = {name for name in self.constants if not matches(name, named)}
        known = forward.initializers()
        could = sorted(
            name
            for name in kept
            if known[name].data_type == TensorProto.FLOAT and (known[name].dims or name in forward.numbers)
        )
        if could:
            forward.note(f"constants of the loss stay as they are: {some(could)}. --train '*' --train NAME trains them")
        return kept

    def ends(self, forward: Forward) -> Ends:
        """Make the loss the first output, a scalar, and the scores those behind it."""
        loss = self.loss
        if forward.shapes()[loss]:
            loss = as_scalar(forward, loss)
        del forward.graph.output[:]
        for name in (loss, *self.scores):
            forward.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
        infer_shapes(forward)
        return Ends(self.scores, loss, self.labels)


def loss_in_graph(forward: Forward, ending: Ending, found: Repaired) -> GraphLoss | None:
    """Give the loss that the graph has by now; None where it is yet to be added, or comes from elsewhere."""
    if found.attached is not None:
        scores = found.outputs
        made = GraphLoss(found.attached.loss, found.attached.labels, scores, {*found.attached.initializers})
    elif ending.loss is not None:
        scores = found.outputs[1:] or only(scores_of(forward, ending.loss, ending.labels))
        constants = constants_of_loss(forward, ending.labels, scores[0] if scores else None)
        made = GraphLoss(found.outputs[0], ending.labels, scores, constants)
    else:
        return None
    require_number(forward, made.loss)
    shapes, outputs = forward.shapes(), forward.output_names()
    for name in set(scores) - outputs:  # what is an output stays what it is
        forward.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes[name]))
    return made


def only(name: str | None) -> tuple[str, ...]:
    """Give what is there."""
    return () if name is None else (name,)


def as_scalar(forward: Forward, loss: str) -> str:
    """Append a Reshape of a loss of shape [1]."""
    shape, nodes = fresh("loss/shape", forward.names()), {node.name for node in forward.graph.node}
    forward.graph.initializer.append(helper.make_tensor(shape, TensorProto.INT64, [0], []))
    scalar = fresh("loss", forward.names())
    forward.graph.node.append(helper.make_node("Reshape", [loss, shape], [scalar], name=fresh("loss", nodes)))
    return scalar
