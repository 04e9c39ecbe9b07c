"""Small helpers on onnx protobufs that the build shares."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from bnfuse.core.errors import BnfuseError, at_node
from bnfuse.graph.drawing import FED, LIKE


@dataclasses.dataclass
class Forward:
    """A forward model on its way to a training graph, with what was repaired in it."""

    model: onnx.ModelProto
    file: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)

    @property
    def graph(self) -> onnx.GraphProto:
        return self.model.graph

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        """Says what is likely to be wrong with the file, where a note says what was repaired."""
        self.warnings.append(text)

    def error(self, what: str) -> BnfuseError:
        return BnfuseError(f"{self.file}: {what}" if self.file else what)

    def error_at(self, node: onnx.NodeProto, what: str) -> BnfuseError:
        return at_node(node.name or (node.output[0] if node.output else ""), node.op_type, what, file=self.file)

    @property
    def opset(self) -> int:
        """Of the standard domain; 1 where the file names none."""
        return next((o.version for o in self.model.opset_import if o.domain in ("", "ai.onnx")), 1)

    def initializers(self) -> dict[str, onnx.TensorProto]:
        return {tensor.name: tensor for tensor in self.graph.initializer}

    def producers(self) -> dict[str, onnx.NodeProto]:
        return {name: node for node in self.graph.node for name in node.output if name}

    def consumers(self) -> dict[str, list[onnx.NodeProto]]:
        """Readers of each tensor, a node once for each time it reads it."""
        readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.graph.node:
            for name in node.input:
                readers.setdefault(name, []).append(node)
        return readers

    def output_names(self) -> set[str]:
        return {value.name for value in self.graph.output}

    def random_names(self) -> set[str]:
        """Tensors that follow from what is drawn at random and from constants alone."""
        known: set[str] = {*self.initializers(), ""}
        found: set[str] = set()
        for node in self.graph.node:
            drawn = node.op_type in LIKE or all(name in known or name in found for name in node.input)
            if drawn and (node.op_type in FED or found.intersection(node.input)):
                found.update(node.output)
        return found

    def shapes(self) -> dict[str, list[int] | None]:
        return shapes_of(self.graph)

    def names(self) -> set[str]:
        """Every tensor name in use."""
        graph = self.graph
        taken = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
        return taken | {name for node in graph.node for name in (*node.input, *node.output)}

    def fresh(self, name: str) -> str:
        """`name`, or with a number where it is taken."""
        return fresh(name, self.names())

    def remove_nodes(self, nodes: Iterable[onnx.NodeProto]) -> None:
        gone = {id(node) for node in nodes}
        kept = [node for node in self.graph.node if id(node) not in gone]
        del self.graph.node[:]
        self.graph.node.extend(kept)

    def remove_unread_initializers(self) -> None:
        read = {name for node in self.graph.node for name in node.input} | self.output_names()
        for index in reversed(range(len(self.graph.initializer))):  # in place: weights are large
            if self.graph.initializer[index].name not in read:
                del self.graph.initializer[index]

    def set_initializer(self, name: str, values: np.ndarray) -> None:
        """Adds the initializer, or replaces the one of that name."""
        tensor = numpy_helper.from_array(values, name)
        for existing in self.graph.initializer:
            if existing.name == name:
                existing.CopyFrom(tensor)
                return
        self.graph.initializer.append(tensor)


LARGE = 1 << 12  # elements; shape arithmetic never needs the values of a tensor that large


def without_large_values(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which large initializers are graph inputs: what inference and conversion see of them is their shape."""
    light = onnx.ModelProto()
    for field, value in model.ListFields():
        if field.name != "graph":
            _copy_field(light, field.name, value)
    for field, value in model.graph.ListFields():
        if field.name != "initializer":
            _copy_field(light.graph, field.name, value)
    for tensor in model.graph.initializer:
        if element_count(tensor.dims) < LARGE:
            light.graph.initializer.append(tensor)
        else:
            light.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return light


def _copy_field(message, name: str, value) -> None:
    target = getattr(message, name)
    if hasattr(target, "extend"):
        target.extend(value)
    elif hasattr(target, "CopyFrom"):
        target.CopyFrom(value)
    else:
        setattr(message, name, value)


def adopt_graph(model: onnx.ModelProto, light: onnx.ModelProto) -> None:
    """Everything of `light`, with the large initializers that the model has and `light` lists as inputs."""
    large = [tensor for tensor in model.graph.initializer if element_count(tensor.dims) >= LARGE]
    names = {tensor.name for tensor in large}
    inputs = [value for value in light.graph.input if value.name not in names]
    del light.graph.input[:]
    light.graph.input.extend(inputs)
    light.graph.initializer.extend(large)
    model.CopyFrom(light)


def fresh(name: str, taken: set[str]) -> str:
    candidate, number = name, 0
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attr.name: onnx.helper.get_attribute_value(attr) for attr in node.attribute}


def set_attribute(node: onnx.NodeProto, name: str, value: object) -> None:
    remove_attributes(node, {name})
    node.attribute.append(onnx.helper.make_attribute(name, value))


def remove_attributes(node: onnx.NodeProto, names: set[str]) -> None:
    kept = [attr for attr in node.attribute if attr.name not in names]
    del node.attribute[:]
    node.attribute.extend(kept)


def static_shape(value: onnx.ValueInfoProto) -> list[int] | None:
    """The shape where every dimension is a number, else None."""
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
        return None
    dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim]
    return None if any(dim < 0 for dim in dims) else dims


def typed_values(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    yield from graph.input
    yield from graph.value_info
    yield from graph.output


def shapes_of(graph: onnx.GraphProto) -> dict[str, list[int] | None]:
    """Static shapes by tensor name; None where a dimension is unknown."""
    shapes: dict[str, list[int] | None] = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    for value in typed_values(graph):
        shape = static_shape(value)
        if shape is not None or value.name not in shapes:
            shapes[value.name] = shape
    return shapes


def element_count(shape: Iterable[int]) -> int:
    return math.prod(shape)
