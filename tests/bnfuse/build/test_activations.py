"""Activations: read, differentiated, fused and compiled by their entry in the table alone; and those written out."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import bnfuse
from bnfuse.opset import spec
from bnfuse.opset.activations import ACTIVATIONS
from bnfuse.opset.sources import SOURCES, activation_of, standard_node


@pytest.mark.parametrize(("name", "activation"), ACTIVATIONS.items(), ids=ACTIVATIONS)
def test_an_entry_is_a_step_of_the_grammar(name, activation):
    op = spec.parse(f"Normalize{name}ConvStatistics")
    assert op is not None and set(activation.attributes) <= set(op.attributes)
    assert spec.parse(f"PointwiseGrad{name}Grad") is not None


def test_no_name_begins_another_but_for_gelu():
    """Names of operators put steps one behind the other."""
    found = {(a, b) for a in ACTIVATIONS for b in ACTIVATIONS if a != b and b.startswith(a)}
    assert found == {("Gelu", "GeluTanh")}


@pytest.mark.parametrize(("domain", "name"), SOURCES, ids="::".join)
def test_attributes_of_a_standard_operator_have_the_defaults_of_onnx(domain, name):
    if domain or name == "Clip":  # whose numbers are operands
        return
    schema = onnx.defs.get_schema(name)
    found = activation_of(domain, name, {})
    assert found is not None
    activation, attributes = found
    for key, value in attributes.items():
        assert np.float32(helper.get_attribute_value(schema.attributes[key].default_value)) == np.float32(value)
    if activation.name == name:
        versions = [
            s.since_version for s in onnx.defs.get_all_schemas_with_history() if (s.name, s.domain) == (name, "")
        ]
        assert activation.since == min(versions)


def test_gelu_is_told_apart_by_its_attribute():
    assert activation_of("", "Gelu", {"approximate": b"tanh"}) == (ACTIVATIONS["GeluTanh"], {})
    assert activation_of("", "Gelu", {"approximate": "none"}) == (ACTIVATIONS["Gelu"], {})
    assert standard_node(ACTIVATIONS["GeluTanh"], {}, 20) == ("Gelu", {"approximate": "tanh"})
    assert standard_node(ACTIVATIONS["GeluTanh"], {}, 19) is None
    assert activation_of("", "Clip", {}, operands=3) is None


def layered_model(name: str, **attributes: float) -> onnx.ModelProto:
    """Two times Conv, BatchNorm and the activation, then a pooling and a classifier; x is [4, 3, 6, 6]."""
    rng, tensors = np.random.default_rng(0), {}

    def constant(key: str, *shape: int, low: float = -0.5, high: float = 0.5) -> str:
        tensors[key] = numpy_helper.from_array(rng.uniform(low, high, shape).astype(np.float32), key)
        return key

    bounds = [constant("low", low=-0.5, high=-0.5), constant("high", low=0.75, high=0.75)]
    given = bounds if name == "Clip" else []
    nodes, x, channels = [], "x", 3
    for i, out in enumerate((5, 4)):
        nodes.append(helper.make_node("Conv", [x, constant(f"w{i}", out, channels, 3, 3)], [f"c{i}"], pads=[1] * 4))
        norm = [constant(f"scale{i}", out), constant(f"bias{i}", out), constant(f"m{i}", out)]
        norm.append(constant(f"v{i}", out, low=0.5, high=1.5))
        nodes.append(helper.make_node("BatchNormalization", [f"c{i}", *norm], [f"n{i}"]))
        nodes.append(helper.make_node(name, [f"n{i}", *given], [f"a{i}"], **attributes))
        x, channels = f"a{i}", out
    nodes.append(helper.make_node("GlobalAveragePool", [x], ["p"]))
    nodes.append(helper.make_node("Flatten", ["p"], ["f"]))
    nodes.append(helper.make_node("Gemm", ["f", constant("wf", 3, channels), constant("bf", 3)], ["y"], transB=1))
    used = {key for node in nodes for key in node.input}
    value = helper.make_tensor_value_info
    inputs, outputs = [value("x", TensorProto.FLOAT, [4, 3, 6, 6])], [value("y", TensorProto.FLOAT, [4, 3])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [t for key, t in tensors.items() if key in used])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


FORMS = [
    *((name, {}) for (domain, name) in SOURCES if not domain and name not in ("Gelu", "Swish")),
    ("Gelu", {"approximate": "none"}),
    ("Gelu", {"approximate": "tanh"}),
]
COMPILED = ("HardSwish", "Gelu", "Mish")  # kernels of all are tried in tests/runtime/test_steps.py


@pytest.mark.parametrize(("name", "attributes"), FORMS, ids=str)
def test_every_activation_is_fused_forward_and_backward(name, attributes, tmp_path):
    onnx.save(layered_model(name, **attributes), tmp_path / "forward.onnx")
    training = bnfuse.build_training_graph(tmp_path / "forward.onnx", train_bn=True)
    fused = bnfuse.rewrite(training, level="bnff")
    names = {node.op_type for node in fused.model.graph if node.domain == "ai.bnfuse"}
    step = "GeluTanh" if attributes.get("approximate") == "tanh" else name
    assert not fused.report.unfused
    assert f"Normalize{step}ConvStatistics" in names
    assert any(f"ConvGrad{step}GradReduce" in name for name in names)
    assert bnfuse.verify(training, fused.model).equal
    if step in COMPILED:
        assert bnfuse.verify(training, fused.model, runtime="tvm").equal


def small_model(*middle: onnx.NodeProto, opset: int = 18, **numbers: float) -> onnx.ModelProto:
    """x [4, 3, 6, 6] -> Conv -> c -> middle -> y; numbers are Constant nodes."""
    value, rng = helper.make_tensor_value_info, np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.standard_normal((3, 3, 1, 1)).astype(np.float32), "w")
    constants = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(number, np.float32)))
        for name, number in numbers.items()
    ]
    nodes = [*constants, helper.make_node("Conv", ["x", "w"], ["c"], name="conv"), *middle]
    shape = [4, 3, 6, 6]
    inputs, outputs = [value("x", TensorProto.FLOAT, shape)], [value("y", TensorProto.FLOAT, shape)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def nodes_of(text: str) -> list[onnx.NodeProto]:
    """Nodes from lines such as `a = Add c one`."""
    split = [line.split() for line in text.strip().splitlines()]
    return [helper.make_node(op, operands, [name], name=name) for name, _, op, *operands in split]


ROOT, CUBIC = math.sqrt(2 / math.pi), 0.044715
WRITTEN = {  # text, numbers, what is read
    "silu": ("s = Sigmoid c\ny = Mul s c", {}, "QuickGeluPointwise"),
    "swish": ("a = Mul k c\ns = Sigmoid a\ny = Mul c s", {"k": 1.5}, "QuickGeluPointwise"),
    "mish": ("s = Softplus c\nt = Tanh s\ny = Mul c t", {}, "Mish"),
    "mish of logarithms": (
        "e = Exp c\na = Add one e\ns = Log a\nt = Tanh s\ny = Mul t c",
        {"one": 1.0},
        "Mish",
    ),
    "hard swish of torch": (
        "a = Add c three\nb = Clip a zero six\np = Mul c b\ny = Div p six",
        {"zero": 0, "three": 3, "six": 6},
        "HardSwish",
    ),
    "hard swish of mobilenet": (
        "a = Add c three\nb = Clip a zero six\nd = Div b six\ny = Mul c d",
        {"zero": 0, "three": 3, "six": 6},
        "HardSwish",
    ),
    "hard sigmoid of torch": (
        "a = Add c three\nb = Clip a zero six\ny = Mul b sixth",
        {"zero": 0, "three": 3, "six": 6, "sixth": 1 / 6},
        "HardSigmoid",
    ),
    "hard sigmoid of keras": (
        "a = Mul fifth c\nb = Add a half\ny = Clip b zero one",
        {"zero": 0, "fifth": 0.2, "half": 0.5, "one": 1},
        "HardSigmoid",
    ),
    "gelu of torch": (
        "a = Div c root\nb = Erf a\nd = Add b one\ne = Mul c d\ny = Mul e half",
        {"root": math.sqrt(2), "one": 1, "half": 0.5},
        "GeluPointwise",
    ),
    "gelu of others": (
        "a = Mul c root\nb = Erf a\nd = Add one b\nh = Mul half c\ny = Mul h d",
        {"root": math.sqrt(0.5), "one": 1, "half": 0.5},
        "GeluPointwise",
    ),
    "gelu by tanh": (
        "p = Pow c n\nq = Mul k p\na = Add c q\nb = Mul r a\nt = Tanh b\nd = Add t one\ne = Mul c d\ny = Mul half e",
        {"n": 3, "k": CUBIC, "r": ROOT, "one": 1, "half": 0.5},
        "GeluTanhPointwise",
    ),
    "leaky relu": ("a = Mul c k\ny = Max a c", {"k": 0.1}, "LeakyRelu"),
    "relu": ("y = Max c zero", {"zero": 0}, "Relu"),
    "softsign": ("a = Abs c\nb = Add one a\ny = Div c b", {"one": 1}, "Softsign"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_out_is_read_as_the_operator(name):
    text, numbers, wanted = WRITTEN[name]
    model = small_model(*nodes_of(text), **numbers)
    built = bnfuse.build_training_graph(model, loss="mse")
    whole = next(node for node in built.graph.node if "y" in node.output)
    assert whole.op_type == wanted
    assert not {node.op_type for node in built.graph.node} & {"Erf", "Tanh", "Sigmoid", "Clip", "Max", "Exp"}
    reference = onnx.reference.ReferenceEvaluator
    feeds = {"x": np.random.default_rng(1).standard_normal((4, 3, 6, 6)).astype(np.float32) * 3}
    values = {t.name: numpy_helper.to_array(t) for t in built.graph.initializer}
    forward = onnx.helper.make_model(
        helper.make_graph(
            [node for node in built.graph.node if node.name in ("conv", "y")],
            "f",
            model.graph.input,
            model.graph.output,
            [numpy_helper.from_array(v, k) for k, v in values.items() if k == "w"],
        ),
        opset_imports=built.opset_import,
        functions=built.functions,
    )
    np.testing.assert_allclose(reference(forward).run(None, feeds)[0], reference(model).run(None, feeds)[0], atol=3e-6)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("a = Mul c k\ny = Max a c", {"k": 1.5}),  # the larger one is another than of a leaky ReLU
        ("s = Sigmoid x\ny = Mul s c", {}),
        (
            "a = Div c root\nb = Erf a\nd = Add b one\ne = Mul c d\ny = Mul e half",
            {"root": 1.41, "one": 1, "half": 0.5},
        ),
        ("a = Add c three\nb = Clip a zero six\ny = Div b six", {"zero": 0, "three": 2, "six": 6}),
    ],
)
def test_what_is_written_otherwise_stays(text, numbers):
    built = bnfuse.build_training_graph(small_model(*nodes_of(text), **numbers), loss="mse")
    last = text.splitlines()[-1].split()[2]
    assert next(node for node in built.graph.node if "y" in node.output).op_type == last


def test_the_operator_of_a_newer_opset_is_ours():
    built = bnfuse.build_training_graph(
        small_model(helper.make_node("Swish", ["c"], ["y"], alpha=1.25), opset=24), loss="mse"
    )
    (node,) = [node for node in built.graph.node if "y" in node.output]
    assert (node.op_type, node.attribute[0].f) == ("QuickGeluPointwise", 1.25)


def test_an_unknown_operator_is_still_refused():
    with pytest.raises(bnfuse.BnfuseError, match="bend"):
        bnfuse.build_training_graph(small_model(helper.make_node("Bent", ["c"], ["y"], name="bend")))
