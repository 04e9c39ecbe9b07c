"""The yardstick in fewer bits: what is rounded, to what, and that a step in bf16 is judged by it."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import bnfuse
from bnfuse.build.named import build_model
from bnfuse.graph.training_graph import open_graph
from bnfuse.ort.oracle import OrtGraph
from bnfuse.verifying.rounded import BITS, is_operand, rounded

CONV = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[2,3,4,4] x, float[5,3,1,1] w, float[5] bias) => (float[2,5,4,4] z) {
        y = Conv(x, w, bias)
        s = Relu(y)
        z = Sigmoid(s)
    }"""


def conv() -> ir.Model:
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(CONV))
    return ir.from_proto(model)


def feeds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"x": (2, 3, 4, 4), "w": (5, 3, 1, 1), "bias": (5,)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def to_bits(value: np.ndarray, bits: int) -> np.ndarray:
    """To the nearest value with so many bits in its significand, computed in float64."""
    fraction, exponent = np.frexp(value.astype(np.float64))
    return np.ldexp(np.rint(np.ldexp(fraction, bits)), exponent - bits)


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return build_model("densenet40", zoo={"batch": 4, "image": 16, "growth": 4, "depth": 1}).model


@pytest.mark.parametrize("precision", sorted(BITS))
def test_operands_are_rounded_and_maps_where_they_are_stored(precision):
    given, bits = feeds(), BITS[precision]
    found = OrtGraph(rounded(conv(), precision), name="g").run(given, ["z"])["z"]
    x, w = to_bits(given["x"], bits), to_bits(given["w"].reshape(5, 3), bits)
    y = np.einsum("nchw,oc->nohw", x, w) + given["bias"].reshape(1, 5, 1, 1)
    stored = to_bits(y.astype(np.float32), bits) if precision != "tf32" else y
    assert found == pytest.approx(1 / (1 + np.exp(-np.maximum(stored, 0))), abs=1e-6 if precision == "tf32" else 2e-5)
    plain = OrtGraph(conv(), name="g").run(given, ["z"])["z"]
    assert np.abs(found - plain).max() > 2.0 ** -(bits + 4)


def test_the_model_stays_as_it_was_and_vectors_are_not_rounded():
    model = conv()
    before = ir.to_proto(model)
    changed = rounded(model, "bf16")
    assert ir.to_proto(model) == before
    written = [node.op_type for node in changed.graph]
    assert (written.count("Mul"), written.count("Sub")) == (3, 6)  # x, w and y; a Relu of y is as round as y
    node = next(node for node in changed.graph if node.op_type == "Conv")
    assert [value.name for value in node.inputs] == ["x/rounded", "w/rounded", "bias"]
    assert not is_operand(node.inputs[2])


def test_a_step_in_bf16_is_judged_by_the_same_network_rounded(model):
    """By tolerances that are neither so wide that all passes, nor narrower than what a right step is off by."""
    found = bnfuse.verify(model, bnfuse.rewrite(model, level="icf"), runtime="tvm", precision="bf16")
    assert found.equal, found
    gradients = [tensor for tensor in found.tensors if tensor.kind == "gradient"]
    assert max(tensor.tolerance for tensor in gradients) < 0.8
    assert 0.2 < np.median([tensor.error / tensor.tolerance for tensor in gradients]) < 1


def test_a_gradient_that_lacks_a_half_is_found_in_bf16(model):
    graph = open_graph(model)
    wrong = onnx.ModelProto()
    wrong.CopyFrom(model)
    name = next(iter(graph.signature.gradients.values()))
    halved(wrong, name)
    found = bnfuse.verify(model, wrong, runtime="tvm", precision="bf16")
    assert {tensor.tensor for tensor in found.tensors if not tensor.ok} == {name}


def halved(model: onnx.ModelProto, output: str) -> None:
    """Multiply a result of the graph by a half."""
    for node in model.graph.node:
        for index, name in enumerate(node.output):
            if name == output:
                node.output[index] = "whole"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.5, np.float32), "half"))
    model.graph.node.append(onnx.helper.make_node("Mul", ["whole", "half"], [output], name="halve"))
    shape = next(value for value in model.graph.output if value.name == output)
    added = model.graph.value_info.add()
    added.CopyFrom(shape)
    added.name = "whole"
