"""Small helpers on onnx protobufs: static shapes, attributes, names, and copies without large values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import onnx

LARGE = 1 << 12  # elements; shape arithmetic never needs the values of a tensor that large


def without_large_values(model: onnx.ModelProto) -> onnx.ModelProto:
    """Copy with large initializers as graph inputs: what inference and conversion see of them is their shape."""
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
    """Take over everything of `light`, with the large initializers that the model has and `light` lists as inputs."""
    large = [tensor for tensor in model.graph.initializer if element_count(tensor.dims) >= LARGE]
    names = {tensor.name for tensor in large}
    inputs = [value for value in light.graph.input if value.name not in names]
    del light.graph.input[:]
    light.graph.input.extend(inputs)
    light.graph.initializer.extend(large)
    model.CopyFrom(light)


def fresh(name: str, taken: set[str]) -> str:
    """Give `name`, or `name_1`, `name_2`, ... where it is taken."""
    candidate, number = name, 0
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Give the attributes by name; text is bytes, as onnx holds it."""
    return {attr.name: onnx.helper.get_attribute_value(attr) for attr in node.attribute}


def set_attribute(node: onnx.NodeProto, name: str, value: object) -> None:
    """Add the attribute, or replace the one of that name."""
    remove_attributes(node, {name})
    node.attribute.append(onnx.helper.make_attribute(name, value))


def remove_attributes(node: onnx.NodeProto, names: set[str]) -> None:
    """Take out the attributes of these names, where they are there."""
    kept = [attr for attr in node.attribute if attr.name not in names]
    del node.attribute[:]
    node.attribute.extend(kept)


def static_shape(value: onnx.ValueInfoProto) -> list[int] | None:
    """Give the shape where every dimension is a number, else None."""
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
        return None
    dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim]
    return None if any(dim < 0 for dim in dims) else dims


def typed_values(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    """Go through all values that the graph declares a type of: inputs, inner values, outputs."""
    yield from graph.input
    yield from graph.value_info
    yield from graph.output


def shapes_of(graph: onnx.GraphProto) -> dict[str, list[int] | None]:
    """List static shapes by tensor name; None where a dimension is unknown."""
    shapes: dict[str, list[int] | None] = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    for value in typed_values(graph):
        shape = static_shape(value)
        if shape is not None or value.name not in shapes:
            shapes[value.name] = shape
    return shapes


def element_count(shape: Iterable[int]) -> int:
    """Count the elements of a tensor of this shape."""
    return math.prod(shape)
