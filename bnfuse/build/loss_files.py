"""A loss in an ONNX file of its own, put behind a network.

    y = network(data)            loss.onnx:  y, target -> l
    ->  data, target -> network -> y -> l

Inputs that are named like outputs of the network read those. Where none is, the only input of floats reads the only
output (or that of --logits). All other inputs are labels. Nodes, tensors and initializers are prefixed by `loss/`,
labels keep their names. Its initializers are constants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from bnfuse.core.errors import BnfuseError
from bnfuse.core.text import some
from bnfuse.graph.protos import fresh

from .forward import Constants, convert_opset, fold_constants, raise_opset, read_forward, set_batch, settle_shapes
from .graph import Forward
from .soft_labels import write_soft_labels
from .traps import check_operators

PREFIX = "loss/"


@dataclasses.dataclass(frozen=True)
class LossFile:
    """A loss as a model, and which output of the network each of its inputs reads; the others are labels."""

    forward: Forward
    reads: Mapping[str, str]

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs of the network that it reads."""
        return tuple(dict.fromkeys(self.reads.values()))


@dataclasses.dataclass(frozen=True)
class Attached:
    """A loss file that is part of the graph: its output, its labels, its initializers."""

    loss: str
    labels: tuple[str, ...]
    initializers: tuple[str, ...]


def read_loss_file(source: str | Path | onnx.ModelProto) -> Forward:
    """Read the model of a loss. Raises BnfuseError where it has no single output, or no input."""
    if not isinstance(source, onnx.ModelProto):
        source = str(source).strip()
        if not Path(source).is_file():
            raise BnfuseError(f"loss '{source}' is no file")
    theirs = read_forward(source, file=None if isinstance(source, str) else "the loss")
    outputs = [value.name for value in theirs.graph.output]
    if len(outputs) != 1:
        raise theirs.error(f"has {len(outputs)} outputs ({some(outputs)}): a loss has one, a single number")
    if not theirs.graph.input:
        raise theirs.error("has no input: a loss reads an output of the network")
    return theirs


def bind(forward: Forward, theirs: Forward, labels: Sequence[str], logits: str | None) -> LossFile:
    """Tell which input of the loss reads which output of the network."""
    inputs = {value.name: value.type.tensor_type.elem_type for value in theirs.graph.input}
    outputs = [value.name for value in forward.graph.output]
    if logits is not None and logits not in outputs:
        raise forward.error(f"has no output '{logits}': there are {some(outputs)}")
    for name in labels:
        if name not in inputs:
            raise theirs.error(f"--labels {name}: there is no such input, there are {some(list(inputs))}")
    reads = {name: name for name in inputs if name in outputs and name not in labels}
    if not reads:
        floats = [name for name, kind in inputs.items() if kind == TensorProto.FLOAT and name not in labels]
        candidates = outputs if logits is None else [logits]
        if len(floats) != 1 or len(candidates) != 1:
            raise theirs.error(
                f"none of its inputs ({some(list(inputs))}) is named like an output of the network ({some(outputs)}): "
                "give the input that reads it that name"
            )
        reads = {floats[0]: candidates[0]}
    if logits is not None:  # what evaluation gives comes first
        if logits not in reads.values():
            raise theirs.error(f"reads {some(list(reads.values()))} of the network, and not '{logits}' (--logits)")
        reads = dict(sorted(reads.items(), key=lambda pair: pair[1] != logits))
    return LossFile(theirs, reads)


def attach(forward: Forward, file: LossFile, constants: Constants) -> tuple[Attached, Constants]:
    """Put the loss behind the network, whose shapes must be known; the loss becomes the first output."""
    theirs = file.forward
    check_operators(theirs, [value.name for value in theirs.graph.input])
    convert_opset(theirs)
    raise_opset(theirs, forward.opset)
    raise_opset(forward, theirs.opset)
    fit_shapes(theirs, file.reads, {name: shape or [] for name, shape in forward.shapes().items()})
    write_soft_labels(theirs)
    new = names_in(forward, theirs, file.reads)
    renamed = [rename(node, new) for node in theirs.graph.node]
    taken = {node.name for node in forward.graph.node}
    for node in renamed:
        node.name = fresh(PREFIX + node.name, taken)
        taken.add(node.name)
    forward.graph.node.extend(renamed)
    for tensor in theirs.graph.initializer:
        tensor.name = new[tensor.name]
        forward.graph.initializer.append(tensor)
    labels = [value for value in theirs.graph.input if value.name not in file.reads]
    for value in labels:
        value.name = new[value.name]
        forward.graph.input.append(value)
    loss = new[theirs.graph.output[0].name]
    forward.graph.output.insert(0, helper.make_tensor_value_info(loss, TensorProto.FLOAT, None))
    initializers = tuple(tensor.name for tensor in theirs.graph.initializer)
    forward.notes += theirs.notes
    constants |= fold_constants(forward, constants)
    constants = settle_shapes(forward, constants)
    return Attached(loss, tuple(value.name for value in labels), initializers), constants


def names_in(forward: Forward, theirs: Forward, reads: Mapping[str, str]) -> dict[str, str]:
    """Map the names of a loss file to those in the network's graph; its output is `loss`."""
    taken, new = forward.names(), {"": "", **reads}
    for name in (value.name for value in theirs.graph.input):
        if name not in new:
            new[name] = fresh(name if name not in taken else PREFIX + name, taken)
            taken.add(new[name])
    output = theirs.graph.output[0].name
    if output in new or output in theirs.initializers():
        raise theirs.error(f"output '{output}' is computed of nothing: a loss depends on what the network gives")
    new[output] = fresh("loss", taken)
    taken.add(new[output])
    for name in theirs.names():
        if name not in new:
            new[name] = fresh(PREFIX + name, taken)
            taken.add(new[name])
    return new


def rename(node: onnx.NodeProto, new: Mapping[str, str]) -> onnx.NodeProto:
    """Copy a node with other names of operands and results."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [new[name] for name in node.input]
    copy.output[:] = [new[name] for name in node.output]
    return copy


def fit_shapes(theirs: Forward, reads: Mapping[str, str], shapes: Mapping[str, list[int]]) -> None:
    """Give the labels the sizes that the network has: those of its symbols, and the batch in front."""
    first = next(iter(reads))
    batch = shapes[reads[first]][:1]
    inputs = {value.name: value.type.tensor_type for value in theirs.graph.input}
    dims = inputs[first].shape.dim
    if batch and dims and dims[0].dim_value not in (0, *batch):
        set_batch(theirs, batch[0])
    sizes: dict[str, int] = {}
    for name, output in reads.items():
        if not inputs[name].HasField("shape"):
            continue
        dims, found = inputs[name].shape.dim, shapes[output]
        told = [dim.dim_value or dim.dim_param or "?" for dim in dims]
        if len(dims) != len(found) or any(d.dim_value not in (0, n) for d, n in zip(dims, found, strict=True)):
            raise theirs.error(f"input '{name}' is {told}, the output '{output}' of the network {found}")
        sizes.update({d.dim_param: n for d, n in zip(dims, found, strict=True) if d.dim_param})
    for name, kind in inputs.items():
        if name in reads:
            continue
        for index, dim in enumerate(kind.shape.dim):
            size = sizes.get(dim.dim_param) or (batch[0] if index == 0 and batch and not dim.dim_value else None)
            if size is not None:
                dim.dim_value = size
