"""Training graphs that contradict themselves are refused when they are read, with the node."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from bnfuse.build import build_training_graph
from bnfuse.build.named import build_model
from bnfuse.core.errors import BnfuseError
from bnfuse.graph import io
from bnfuse.passes import rewrite
from bnfuse.runtime import compile_step


@pytest.fixture(scope="module")
def source() -> onnx.ModelProto:
    return build_model("densenet40", zoo={"batch": 2, "image": 16, "growth": 4, "depth": 2}).model


@pytest.fixture
def graph(source) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(source)
    return copy


def nodes(model: onnx.ModelProto, op: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == op]


def set_ints(node: onnx.NodeProto, name: str, values: list[int]) -> None:
    next(attr for attr in node.attribute if attr.name == name).ints[:] = values


def message_of(model: onnx.ModelProto) -> str:
    with pytest.raises(BnfuseError) as caught:
        io.load(model)
    text = str(caught.value)
    assert "\n" not in text and "the graph is damaged. Build it anew." in text
    return text


def test_what_was_built_agrees_with_itself(source):
    io.load(source)


def test_a_fused_graph_whose_declared_shapes_no_operator_gives(graph):
    fused = ir.to_proto(rewrite(ir.from_proto(graph)).model)
    io.load(fused)
    conv = next(n for n in fused.graph.node if n.domain == "ai.bnfuse" and n.op_type.endswith("ConvStatistics"))
    declared = next(v for v in fused.graph.value_info if v.name == conv.output[0])
    declared.type.tensor_type.shape.dim[1].dim_value += 1
    assert conv.output[0] in message_of(fused) or conv.name in message_of(fused)


def test_a_reshape_that_declares_other_elements_than_it_reads():
    """Where no reader has looked at the graph, or none can infer the shape, lowering says so."""
    graph = build_model("resnet20", zoo={"batch": 2, "image": 16}).model
    reshape = next(node for node in graph.graph.node if node.op_type == "Reshape" and len(node.input) == 2)
    reshape.input[0] = graph.graph.input[-1].name
    declared = [v for v in graph.graph.value_info if v.name == reshape.output[0]]
    assert declared
    with pytest.raises(BnfuseError, match=f"node '{reshape.name}' \\(Reshape\\) makes "):
        compile_step(ir.from_proto(graph))


def test_scale_and_running_mean_exchanged(graph):
    norm = nodes(graph, "BatchNorm")[1]
    norm.input[1], norm.input[3] = norm.input[3], norm.input[1]
    assert f"as the scale, and its BatchNorm '{norm.name}' has '{norm.input[1]}'" in message_of(graph)


@pytest.mark.parametrize(("place", "what"), [(1, "the map"), (2, "the scale"), (3, "the mean")])
def test_a_gradient_with_an_operand_of_another_batch_norm(graph, place, what):
    here, there = nodes(graph, "BatchNormGrad")[:2]
    here.input[place] = there.input[place]
    text = message_of(graph)
    assert f"node '{here.name}' (BatchNormGrad) " in text
    assert "differ" in text or f"as {what}, and its BatchNorm" in text


def test_declared_shapes_that_no_operator_gives(graph):
    value = next(v for v in graph.graph.value_info if v.name == nodes(graph, "Relu")[0].output[0])
    value.type.tensor_type.shape.dim[2].dim_value = 3
    text = message_of(graph)
    assert "(Relu) gives another result than the file declares (inferred shape and existing shape differ" in text


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("pads", [0, 0, 1 << 31, 0], "has a window that makes"),
        ("strides", [3, 1], "has a window that makes"),
        ("dilations", [7, 1], "has a window that makes"),
        ("kernel_shape", [2, 2], "has kernel_shape=[2, 2], and its weight is"),
    ],
)
def test_the_window_of_a_gradient_that_is_not_its_convolutions(graph, name, values, said):
    node = nodes(graph, "ConvGrad")[0]
    set_ints(node, name, values)
    assert f"node '{node.name}' (ConvGrad) {said}" in message_of(graph)


@pytest.fixture(scope="module")
def transposed() -> onnx.ModelProto:
    """A ConvTranspose of dilation 3 whose result is padded by 2, and what trains its weight and what it reads."""
    text = """<ir_version: 9, opset_import: ["": 18]>
    g (float[2, 3, 4, 4] image) => (float[2, 4] logits) {
        c = Conv<kernel_shape = [1, 1]>(image, v)
        y = ConvTranspose<kernel_shape = [3, 3], dilations = [3, 3], output_padding = [2, 1]>(c, w)
        p = GlobalAveragePool(y)
        logits = Flatten(p)
    }"""
    model = onnx.parser.parse_model(text)
    shapes = {"v": (6, 3, 1, 1), "w": (6, 4, 3, 3)}
    values = (onnx.numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in shapes.items())
    model.graph.initializer.extend(values)
    return build_training_graph(model)


@pytest.mark.parametrize("core", ["ConvTransposeGradInput", "ConvTransposeGradWeight"])
@pytest.mark.parametrize(
    ("name", "values"),
    [("pads", [0, 0, 1 << 31, 0]), ("pads", [1, 1, 1, 1]), ("strides", [2, 1]), ("dilations", [1, 1])],
)
def test_the_window_of_a_transposed_convolutions_gradient(transposed, core, name, values):
    graph = onnx.ModelProto()
    graph.CopyFrom(transposed)
    io.load(graph)
    (node,) = nodes(graph, core)
    set_ints(node, name, values)
    assert f"node '{node.name}' ({core}) has a window that makes" in message_of(graph)


def test_groups_that_do_not_divide_the_channels(graph):
    node = nodes(graph, "ConvGrad")[0]
    next(attr for attr in node.attribute if attr.name == "group").i = 5
    assert "in 5 groups" in message_of(graph)


def lengths_of(graph: onnx.ModelProto, split: onnx.NodeProto) -> onnx.TensorProto:
    return next(tensor for tensor in graph.graph.initializer if tensor.name == split.input[1])


def test_pieces_of_another_concatenation(graph):
    split = nodes(graph, "Split")[0]
    other = next(n for n in nodes(graph, "Split") if n.input[1] != split.input[1])
    split.input[1] = other.input[1]
    text = message_of(graph)
    assert f"node '{split.name}' (Split) gives " in text or f"'{split.name}' (Split)" in text


def test_pieces_that_are_longer_together_than_the_whole(graph):
    """Where every piece declares what its length makes."""
    split = nodes(graph, "Split")[0]
    lengths = lengths_of(graph, split)
    sizes = onnx.numpy_helper.to_array(lengths).copy()
    sizes[0] += 1
    lengths.CopyFrom(onnx.numpy_helper.from_array(sizes, lengths.name))
    piece = next(v for v in graph.graph.value_info if v.name == split.output[0])
    piece.type.tensor_type.shape.dim[1].dim_value += 1
    assert f"node '{split.name}' (Split) " in message_of(graph)


def test_pieces_along_another_axis(graph):
    split = nodes(graph, "Split")[0]
    next(attr for attr in split.attribute if attr.name == "axis").i = 2
    assert f"node '{split.name}' (Split) " in message_of(graph)


def test_a_scale_of_other_channels(graph):
    norm = nodes(graph, "BatchNorm")[-1]
    norm.input[2] = next(n for n in nodes(graph, "BatchNorm")).input[2]
    assert f"node '{norm.name}' (BatchNorm) reads '{norm.input[2]}' of the shape" in message_of(graph)


def test_a_fused_operator_whose_windows_do_not_move(source):
    model = ir.to_proto(rewrite(ir.from_proto(source)).model)
    node = next(
        n for n in model.graph.node if n.domain == "ai.bnfuse" and any(a.name == "strides" for a in n.attribute)
    )
    set_ints(node, "strides", [0, 1])
    with pytest.raises(BnfuseError, match=r"has strides=\[0, 1\]: it must be at least 1"):
        io.load(model)


def test_a_matrix_product_whose_inner_sizes_differ(graph):
    gemm = next(node for node in nodes(graph, "Gemm") if any(a.name == "transA" and a.i for a in node.attribute))
    next(attr for attr in gemm.attribute if attr.name == "transA").i = 0
    text = message_of(graph)
    assert f"node '{gemm.name}' (Gemm) multiplies [" in text and "], whose inner sizes are " in text


def test_outputs_without_shapes_get_those_that_follow(graph, source):
    """As in files whose maker left them out: the rewritten file is the same."""
    for value in graph.graph.output:
        value.type.tensor_type.ClearField("shape")
    assert ir.to_proto(rewrite(io.load(graph)).model) == ir.to_proto(rewrite(io.load(source)).model)
