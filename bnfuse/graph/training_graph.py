"""A training graph with its name and its roles: what every command works on."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError
from bnfuse.graph import io
from bnfuse.graph.labels import classes_of
from bnfuse.graph.signature import METADATA_KEY, GraphSignature, signature_of

DROPOUTS = {"Dropout": 1, "DropoutGrad": 2, "BiasDropout": 3, "BitmaskDropout": 1}  # op -> input that is the ratio


@dataclasses.dataclass(frozen=True)
class TrainingGraph:
    """A training graph, the roles of its inputs and outputs, and what messages call it."""

    model: ir.Model
    signature: GraphSignature
    name: str  # the file, or what else to call it in messages

    def state(self) -> dict[str, np.ndarray]:
        """Give the initial values of parameters and running statistics."""
        found = {}
        for name in (*self.signature.trainable, *self.signature.frozen, *self.signature.running):
            value = self.model.graph.initializers.get(name)
            if value is None or value.const_value is None:
                raise BnfuseError(
                    f"{self.name}: input '{name}' has no initial value. Pass --checkpoint with its values"
                    " (`bnfuse rewrite` writes them into the file)."
                )
            found[name] = value.const_value.numpy()
        return found

    def input(self, name: str) -> ir.Value:
        """Find an input by its name."""
        return next(value for value in self.model.graph.inputs if value.name == name)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Give the static shape of an input. Raises BnfuseError where a dimension is symbolic."""
        shape = self.input(name).shape
        if shape is None or not all(isinstance(d, int) for d in shape):
            raise BnfuseError(f"{self.name}: input '{name}' has no fixed shape ({shape}). Build it with --batch.")
        return tuple(int(d) for d in shape)  # type: ignore[arg-type]

    def dtype_of(self, name: str) -> np.dtype[Any]:
        """Give the type of an input, float32 where the file names none."""
        dtype = self.input(name).dtype
        return np.dtype((dtype or ir.DataType.FLOAT).numpy())

    @property
    def loss(self) -> str:
        """The name of the loss. Raises BnfuseError where the graph has none."""
        if self.signature.loss is None:
            raise BnfuseError(
                f"{self.name}: has no loss, the gradients of its outputs come in: build it with --loss for this"
            )
        return self.signature.loss

    @property
    def batch(self) -> int:
        """The first dimension of the images."""
        return self.shape_of(self.signature.data[0])[0]

    def classes(self, label: str | None = None) -> int:
        """Tell how many classes integer labels run over: as what reads the input `label` says, or else the second
        dimension of the logits."""
        if label is not None and (found := classes_of(self.model.graph, [label])):
            return found[label].count
        logits = next((v for v in self.model.graph.outputs if v.name == self.signature.logits), None)
        for value in filter(None, [logits, *loss_inputs(self.model, self.signature.loss)]):
            if value.shape is not None and len(value.shape) >= 2 and isinstance(value.shape[1], int):
                return value.shape[1]
        raise BnfuseError(f"{self.name}: the number of classes is not known: no shape of the logits")


def loss_inputs(model: ir.Model, loss: str | None) -> list[ir.Value]:
    """List the first input of the node that computes the loss, if there is one."""
    return [node.inputs[0] for node in model.graph for out in node.outputs if out.name == loss and node.inputs[0]]


def dropouts(model: ir.Model) -> list[str]:
    """List the names of the nodes that drop at random."""
    return [node.name or "" for node in model.graph if node.op_type in ("Dropout", "BiasDropout", "BitmaskDropout")]


def without_dropout(model: ir.Model) -> ir.Model:
    """Copy the model with every dropout ratio at 0 (the model itself, where there is none)."""
    if not dropouts(model):
        return model
    copy = model.clone()
    zeros: dict[Any, ir.Value] = {}
    for node in copy.graph:
        position = DROPOUTS.get(node.op_type)
        if position is None or len(node.inputs) <= position:
            continue
        ratio = node.inputs[position]
        dtype = ratio.dtype if ratio is not None and ratio.dtype is not None else ir.DataType.FLOAT
        if dtype not in zeros:
            zeros[dtype] = zero(dtype, copy.graph)
        for reader, place in list(ratio.uses()) if ratio is not None else ():
            if reader.op_type == "Sub" and place == 1:  # 1 - ratio, by which its gradient is divided
                reader.replace_input_with(place, zeros[dtype])
        node.replace_input_with(position, zeros[dtype])
    return copy


def put_in_place(old: ir.Value, new: ir.Value) -> None:
    """Let all that reads `old` read `new`. Where `old` is an output of the graph, `new` becomes it, under its name."""
    if old.is_graph_output():
        old.name, new.name = new.name, old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def zero(dtype: ir.DataType, graph: ir.Graph) -> ir.Value:
    """Add a scalar initializer of 0 with a name that nothing else has."""
    taken = {*graph.initializers, *(v.name for v in graph.inputs), *(v.name for n in graph for v in n.outputs)}
    name = "no_dropout"
    while name in taken:
        name += "_"
    value = ir.Value(
        name=name,
        shape=ir.Shape([]),
        type=ir.TensorType(dtype),
        const_value=ir.tensor(np.zeros((), dtype.numpy()), name=name),
    )
    graph.initializers[name] = value
    return value


def open_graph(
    source: Any,
    *,
    name: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    data_input: Sequence[str] | None = None,
    labels_input: Sequence[str] | None = None,
) -> TrainingGraph:
    """Open a training graph from any form of a model. `name` is for messages, where the source is no file."""
    if isinstance(source, TrainingGraph):
        return source
    if "report" in getattr(source, "__dict__", ()):  # what `rewrite` returned
        source = source.model
    model = io.load(source, checkpoint=checkpoint)
    signature = signature_of(model, data_input=data_input, labels_input=labels_input)
    if model is not source:  # ours: everything that follows sees the same roles
        model.metadata_props[METADATA_KEY] = signature.to_json()
    if isinstance(source, str | os.PathLike):
        name = str(source)
    return TrainingGraph(model, signature, name or io.file_of(model))
