"""Mutations of nodes and their attributes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper

from .mutators import INTEGERS, mutator, value_names
from .values import NAMES, pick

OPERATORS = (
    *("Conv", "Relu", "Add", "Concat", "Gemm", "MatMul", "Reshape", "Transpose", "Range", "Tile", "Expand", "If"),
    *("ConstantOfShape", "Shape", "Slice", "Split", "Gather", "Pad", "Resize", "Cast", "Identity", "Sum", "Loop"),
    *("ConvGrad", "ReluGrad", "BatchNormInternal", "BatchNormalizationGrad", "SoftmaxCrossEntropyLossInternal"),
    *("BatchNormFinalize", "NormalizeConv", "ConvGradInput", "Pointwise", "Dropout", "MaxPool", "Wobble", "", "a b\n"),
)
DOMAINS = ("", "ai.onnx", "com.microsoft", "ai.bnfuse", "ai.onnx.ml", "org.example", "\n")


# Nodes


@mutator
def drop_node(model: onnx.ModelProto, rng: random.Random) -> None:
    if model.graph.node:
        del model.graph.node[rng.randrange(len(model.graph.node))]


@mutator
def duplicate_node(model: onnx.ModelProto, rng: random.Random) -> None:
    """With results of its own, or with the same."""
    if node := pick(rng, model.graph.node):
        copy = model.graph.node.add()
        copy.CopyFrom(node)
        if rng.random() < 0.5:
            copy.output[:] = [f"{name}_again" if name else "" for name in node.output]


@mutator
def reorder_nodes(model: onnx.ModelProto, rng: random.Random) -> None:
    nodes = list(model.graph.node)
    if rng.random() < 0.5:
        rng.shuffle(nodes)
    elif len(nodes) > 1:
        first, second = rng.sample(range(len(nodes)), 2)
        nodes[first], nodes[second] = nodes[second], nodes[first]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


@mutator
def swap_operands(model: onnx.ModelProto, rng: random.Random) -> None:
    if node := pick(rng, [node for node in model.graph.node if len(node.input) > 1]):
        first, second = rng.sample(range(len(node.input)), 2)
        node.input[first], node.input[second] = node.input[second], node.input[first]


@mutator
def change_operands(model: onnx.ModelProto, rng: random.Random) -> None:
    """Too few, too many, none, or one left out."""
    if (node := pick(rng, model.graph.node)) is None:
        return
    kind = rng.choice(("fewer", "more", "none", "gap"))
    if kind == "none" or not node.input:
        del node.input[:]
    elif kind == "fewer":
        del node.input[rng.randrange(len(node.input)) :]
    elif kind == "gap":
        node.input[rng.randrange(len(node.input))] = ""
    else:
        node.input.extend(rng.choice((node.input[0], node.input[-1], "")) for _ in range(rng.choice((1, 2, 9))))


@mutator
def read_another_value(model: onnx.ModelProto, rng: random.Random) -> None:
    names = value_names(model)
    if node := pick(rng, [node for node in model.graph.node if node.input]):
        node.input[rng.randrange(len(node.input))] = rng.choice(names)


@mutator
def change_results(model: onnx.ModelProto, rng: random.Random) -> None:
    if (node := pick(rng, [node for node in model.graph.node if node.output])) is None:
        return
    kind = rng.choice(("fewer", "more", "none", "gap", "swap"))
    if kind == "none":
        del node.output[:]
    elif kind == "fewer":
        del node.output[-1]
    elif kind == "gap":
        node.output[rng.randrange(len(node.output))] = ""
    elif kind == "swap":
        node.output[:] = list(node.output)[::-1]
    else:
        node.output.extend(f"more_{index}" for index in range(rng.choice((1, 6))))


@mutator
def change_operator(model: onnx.ModelProto, rng: random.Random) -> None:
    if node := pick(rng, model.graph.node):
        node.op_type = rng.choice((*OPERATORS, *(other.op_type for other in model.graph.node)))
        if rng.random() < 0.3:
            node.domain = rng.choice(DOMAINS)


@mutator
def change_domain(model: onnx.ModelProto, rng: random.Random) -> None:
    if node := pick(rng, model.graph.node):
        node.domain = rng.choice(DOMAINS)


@mutator
def rename_nodes(model: onnx.ModelProto, rng: random.Random) -> None:
    """One, or all alike."""
    name = rng.choice(NAMES)
    for node in model.graph.node if rng.random() < 0.3 else rng.choices(model.graph.node, k=1):
        node.name = name


@mutator
def rename_value(model: onnx.ModelProto, rng: random.Random) -> None:
    """Wherever it is named: the graph means the same, if the name is one."""
    old, new = rng.choice(value_names(model)), rng.choice(NAMES)
    graph = model.graph
    for item in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        if item.name == old:
            item.name = new
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]


# Attributes


@mutator
def drop_attribute(model: onnx.ModelProto, rng: random.Random) -> None:
    if node := pick(rng, [node for node in model.graph.node if node.attribute]):
        del node.attribute[rng.randrange(len(node.attribute))]


@mutator
def duplicate_attribute(model: onnx.ModelProto, rng: random.Random) -> None:
    if node := pick(rng, [node for node in model.graph.node if node.attribute]):
        node.attribute.add().CopyFrom(rng.choice(node.attribute))


@mutator
def retype_attribute(model: onnx.ModelProto, rng: random.Random) -> None:
    """The name with a value of another type."""
    if node := pick(rng, [node for node in model.graph.node if node.attribute]):
        attribute = rng.choice(node.attribute)
        attribute.CopyFrom(odd_attribute(attribute.name, rng))


@mutator
def lie_about_an_attributes_type(model: onnx.ModelProto, rng: random.Random) -> None:
    if node := pick(rng, [node for node in model.graph.node if node.attribute]):
        rng.choice(node.attribute).type = rng.choice(AttributeProto.AttributeType.values())


@mutator
def absurd_attribute(model: onnx.ModelProto, rng: random.Random) -> None:
    """The right type, a value that makes no sense."""
    if (node := pick(rng, [node for node in model.graph.node if node.attribute])) is None:
        return
    attribute = rng.choice(node.attribute)
    if attribute.type == AttributeProto.INT:
        attribute.i = rng.choice(INTEGERS)
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f = float(rng.choice((0.0, -1.0, 1e-45, 3e38, float("nan"), float("inf"), 0.999999)))
    elif attribute.type == AttributeProto.INTS:
        kind = rng.choice(("one", "all", "longer", "shorter", "none"))
        if kind == "one" and attribute.ints:
            attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(INTEGERS)
        elif kind == "all":
            attribute.ints[:] = [rng.choice(INTEGERS)] * len(attribute.ints)
        elif kind == "longer":
            attribute.ints.extend([1] * rng.choice((1, 2, 7)))
        else:
            attribute.ints[:] = attribute.ints[:1] if kind == "shorter" else []
    elif attribute.type == AttributeProto.STRING:
        attribute.s = rng.choice((b"", b"SAME_UPPER", b"none", b"sum", b"\xff\xfe", b"a\nb", b"x" * 10_000))


@mutator
def unknown_attribute(model: onnx.ModelProto, rng: random.Random) -> None:
    names = (
        "axis",
        "axes",
        "training_mode",
        "epsilon",
        "momentum",
        "transA",
        "group",
        "pads",
        "keepdims",
        "wobble",
        "",
    )
    if node := pick(rng, model.graph.node):
        node.attribute.add().CopyFrom(odd_attribute(rng.choice(names), rng))


@mutator
def attribute_reference(model: onnx.ModelProto, rng: random.Random) -> None:
    if node := pick(rng, model.graph.node):
        node.attribute.append(AttributeProto(name="axis", ref_attr_name="outer", type=AttributeProto.INT))


def odd_attribute(name: str, rng: random.Random) -> AttributeProto:
    kinds: dict[str, Any] = {
        "i": rng.choice(INTEGERS),
        "f": rng.choice((0.5, float("nan"), -1e30)),
        "s": rng.choice((b"text", b"", b"\xff")),
        "ints": [rng.choice(INTEGERS) for _ in range(rng.choice((0, 1, 4)))],
        "floats": [0.5] * rng.choice((0, 2)),
        "strings": [b"a", b"\xff"],
        "t": odd_tensor(rng),
        "g": onnx.GraphProto(name="inner", node=[helper.make_node("Identity", ["nowhere"], ["there"])]),
    }
    types = {"i": "INT", "f": "FLOAT", "s": "STRING", "ints": "INTS", "floats": "FLOATS", "strings": "STRINGS"}
    types |= {"t": "TENSOR", "g": "GRAPH"}
    field = rng.choice(list(kinds))
    return AttributeProto(name=name, type=types[field], **{field: kinds[field]})


def odd_tensor(rng: random.Random) -> TensorProto:
    kind = rng.choice(("strings", "empty", "huge", "negative", "undefined", "short", "nan"))
    tensor = TensorProto(name="odd", data_type=TensorProto.FLOAT, dims=[2])
    if kind == "strings":
        tensor.data_type, tensor.string_data[:] = TensorProto.STRING, [b"a", b"b"]
    elif kind == "huge":
        tensor.dims[:] = [2**40, 2**20]
    elif kind == "negative":
        tensor.dims[:] = [-2]
    elif kind == "undefined":
        tensor.data_type = rng.choice((0, 99, -1, 17, 23))
    elif kind == "short":
        tensor.float_data.append(1.0)
    elif kind == "nan":
        tensor.raw_data = np.array([float("nan")] * 2, "float32").tobytes()
    return tensor
