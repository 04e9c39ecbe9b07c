"""Mutations of tensors, of what is declared of values, and of the inputs and outputs of a graph."""

from __future__ import annotations

import random

import numpy as np
import onnx
from onnx import TensorProto, ValueInfoProto, helper

from .mutators import INTEGERS, all_tensors, mutator, value_names
from .values import NAMES, pick

# Tensors


@mutator
def tensor_length(model: onnx.ModelProto, rng: random.Random) -> None:
    """More or less than its dimensions say: as bytes, as numbers, as both, as none."""
    if (tensor := pick(rng, all_tensors(model))) is None:
        return
    kind = rng.choice(("short", "long", "none", "numbers", "few numbers", "both", "others"))
    if kind == "short":
        tensor.raw_data = tensor.raw_data[: rng.randrange(len(tensor.raw_data) + 1)]
    elif kind == "long":
        tensor.raw_data += b"\0" * rng.choice((1, 4, 8, 4096))
    elif kind == "both":
        tensor.float_data.extend([1.0] * 3)
    else:
        tensor.ClearField("raw_data")
        elements = np.prod(tensor.dims, dtype=float) if len(tensor.dims) else 1
        count = int(max(0, min(elements, 10_000)))
        if kind == "numbers":
            tensor.float_data.extend([0.5] * count)
        elif kind == "few numbers":
            tensor.float_data.extend([0.5] * (count // 2))
        elif kind == "others":
            tensor.int64_data.extend([1] * count)


@mutator
def tensor_type(model: onnx.ModelProto, rng: random.Random) -> None:
    if tensor := pick(rng, all_tensors(model)):
        tensor.data_type = rng.choice((*TensorProto.DataType.values(), 99, -1))


@mutator
def string_tensor(model: onnx.ModelProto, rng: random.Random) -> None:
    if tensor := pick(rng, all_tensors(model)):
        tensor.ClearField("raw_data")
        tensor.data_type = TensorProto.STRING
        tensor.string_data[:] = [b"text"] * rng.choice((0, 1, 8))


@mutator
def tensor_shape(model: onnx.ModelProto, rng: random.Random) -> None:
    if tensor := pick(rng, all_tensors(model)):
        kind = rng.choice(("one", "more", "fewer", "none", "swap"))
        if kind == "one" and tensor.dims:
            tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(INTEGERS)
        elif kind == "more":
            tensor.dims.append(1)
        elif kind == "swap":
            tensor.dims[:] = list(tensor.dims)[::-1]
        else:
            tensor.dims[:] = tensor.dims[1:] if kind == "fewer" else []


@mutator
def tensor_name(model: onnx.ModelProto, rng: random.Random) -> None:
    if tensor := pick(rng, model.graph.initializer):
        tensor.name = rng.choice((*NAMES, *(other.name for other in model.graph.initializer)))


@mutator
def tensor_values(model: onnx.ModelProto, rng: random.Random) -> None:
    """Nothing is wrong with the form; the numbers are not finite, huge or all alike."""
    if tensor := pick(rng, [t for t in all_tensors(model) if t.data_type == TensorProto.FLOAT and t.raw_data]):
        value = rng.choice((float("nan"), float("inf"), 3e38, 0.0, -1.0, 1e-40))
        tensor.raw_data = np.full(len(tensor.raw_data) // 4, value, "float32").tobytes()


@mutator
def external_data(model: onnx.ModelProto, rng: random.Random) -> None:
    if tensor := pick(rng, all_tensors(model)):
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, values in (
            (
                "location",
                ("gone.bin", "../secret.bin", "/etc/passwd", "", ".", "secret\0.bin", "m.onnx", "a\nb", "x" * 5000),
            ),
            ("offset", ("0", "-1", "nine", str(2**70), "4096")),
            ("length", ("0", "-1", "", str(2**70))),
        ):
            if rng.random() < 0.7:
                tensor.external_data.add(key=key, value=rng.choice(values))


@mutator
def drop_tensor(model: onnx.ModelProto, rng: random.Random) -> None:
    if model.graph.initializer:
        del model.graph.initializer[rng.randrange(len(model.graph.initializer))]


@mutator
def sparse_tensor(model: onnx.ModelProto, rng: random.Random) -> None:
    if tensor := pick(rng, model.graph.initializer):
        sparse = model.graph.sparse_initializer.add()
        sparse.values.CopyFrom(tensor)
        sparse.indices.name, sparse.indices.data_type = "at", TensorProto.INT64
        sparse.dims.extend(tensor.dims)
        if rng.random() < 0.5:
            model.graph.initializer.remove(tensor)


# Shapes and types of values


def values_of(model: onnx.ModelProto) -> list[ValueInfoProto]:
    return [*model.graph.input, *model.graph.output, *model.graph.value_info]


@mutator
def value_shape(model: onnx.ModelProto, rng: random.Random) -> None:
    """One dimension of one value: negative, zero, huge, a name, unknown, another."""
    if value := pick(rng, [v for v in values_of(model) if v.type.tensor_type.shape.dim]):
        dim = rng.choice(value.type.tensor_type.shape.dim)
        if rng.random() < 0.3:
            dim.dim_param = rng.choice(NAMES)
        elif rng.random() < 0.2:
            dim.Clear()
        else:
            dim.dim_value = rng.choice((dim.dim_value + 1, dim.dim_value * 2, *INTEGERS))


@mutator
def value_rank(model: onnx.ModelProto, rng: random.Random) -> None:
    if value := pick(rng, values_of(model)):
        shape = value.type.tensor_type.shape
        if rng.random() < 0.5 and shape.dim:
            del shape.dim[rng.randrange(len(shape.dim))]
        else:
            shape.dim.add(dim_value=rng.choice((1, 2, 0)))


@mutator
def value_type(model: onnx.ModelProto, rng: random.Random) -> None:
    if value := pick(rng, values_of(model)):
        kind = rng.choice(("element", "none", "sequence", "map", "no shape", "unknown"))
        if kind == "element":
            value.type.tensor_type.elem_type = rng.choice((*TensorProto.DataType.values(), 99, -1))
        elif kind == "none":
            value.ClearField("type")
        elif kind == "sequence":
            value.type.CopyFrom(helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, [2])))
        elif kind == "map":
            value.type.map_type.key_type = TensorProto.STRING
        elif kind == "no shape":
            value.type.tensor_type.ClearField("shape")
        else:
            value.type.denotation = "\n"


@mutator
def drop_value_info(model: onnx.ModelProto, rng: random.Random) -> None:
    if rng.random() < 0.5:
        del model.graph.value_info[:]
    elif model.graph.value_info:
        del model.graph.value_info[rng.randrange(len(model.graph.value_info))]


@mutator
def duplicate_value_info(model: onnx.ModelProto, rng: random.Random) -> None:
    """A second declaration that says something else, perhaps of an input."""
    if value := pick(rng, values_of(model)):
        copy = model.graph.value_info.add()
        copy.CopyFrom(value)
        if copy.type.tensor_type.shape.dim:
            rng.choice(copy.type.tensor_type.shape.dim).dim_value = rng.choice((1, 3, 77))


# Inputs and outputs of the graph


@mutator
def drop_interface(model: onnx.ModelProto, rng: random.Random) -> None:
    values = rng.choice((model.graph.input, model.graph.output))
    if rng.random() < 0.1:
        del values[:]
    elif values:
        del values[rng.randrange(len(values))]


@mutator
def duplicate_interface(model: onnx.ModelProto, rng: random.Random) -> None:
    values = rng.choice((model.graph.input, model.graph.output))
    if value := pick(rng, values):
        values.add().CopyFrom(value)


@mutator
def rename_interface(model: onnx.ModelProto, rng: random.Random) -> None:
    if value := pick(rng, [*model.graph.input, *model.graph.output]):
        value.name = rng.choice((*NAMES, *value_names(model)))


@mutator
def expose_value(model: onnx.ModelProto, rng: random.Random) -> None:
    """A value in between, or an input, becomes an output."""
    model.graph.output.add(name=rng.choice(value_names(model)))


@mutator
def add_input(model: onnx.ModelProto, rng: random.Random) -> None:
    name = rng.choice(NAMES)
    model.graph.input.append(helper.make_tensor_value_info(name, rng.choice((1, 7, 8, 9)), [rng.choice((0, 2))]))
