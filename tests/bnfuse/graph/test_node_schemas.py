"""A node that is not what its operator's schema says is refused where the file is read, by every command alike."""

import json

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper

from bnfuse import api
from bnfuse.build.named import build_model
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.io import read_proto

Model = onnx.ModelProto


@pytest.fixture(scope="module")
def train() -> Model:
    return build_model("densenet40", zoo={"batch": 2, "image": 8, "growth": 4, "depth": 2}).model


@pytest.fixture(scope="module")
def fused(train: Model) -> Model:
    import onnx_ir as ir

    return ir.to_proto(api.rewrite(train, level="icf").model)


def refusal(model: Model, tmp_path) -> str:
    (tmp_path / "t.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(BnfuseError) as caught:
        read_proto(tmp_path / "t.onnx")
    return str(caught.value).removeprefix(f"{tmp_path}/")


def changed(model: Model, op: str) -> tuple[Model, onnx.NodeProto]:
    """A copy, and its first node of the operator."""
    copy = Model()
    copy.CopyFrom(model)
    return copy, next(node for node in copy.graph.node if node.op_type == op)


def attribute(node: onnx.NodeProto, name: str) -> AttributeProto:
    return next(found for found in node.attribute if found.name == name)


def test_graphs_as_they_are_made_are_read(train, fused, tmp_path):
    for model in (train, fused):
        onnx.save(model, tmp_path / "t.onnx")
        assert read_proto(tmp_path / "t.onnx").graph.node


@pytest.mark.parametrize(("op", "name", "value", "type"), [
    ("Conv", "kernel_shape", [1.0, 1.0], "FLOATS: it must be INTS"),
    ("Conv", "group", [1], "INTS: it must be INT"),
    ("BatchNorm", "epsilon", "small", "STRING: it must be FLOAT"),
    ("SoftmaxCrossEntropyLoss", "reduction", 1, "INT: it must be STRING"),
])  # fmt: skip
def test_an_attribute_of_another_type(train, tmp_path, op, name, value, type):
    model, node = changed(train, op)
    kept = [found for found in node.attribute if found.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])
    assert refusal(model, tmp_path) == (
        f"t.onnx: node '{node.name}' ({op}) has the attribute '{name}' of type {type}. Export it anew."
    )


def test_an_attribute_of_one_of_our_operators(fused, tmp_path):
    model, node = changed(fused, "BatchNormFinalize")
    attribute(node, "epsilon").CopyFrom(helper.make_attribute("epsilon", [1e-5]))
    assert "'epsilon' of type FLOATS: it must be FLOAT" in refusal(model, tmp_path)


def test_an_attribute_without_a_type_twice_or_of_a_function(train, tmp_path):
    for change, said in (
        (lambda node: setattr(attribute(node, "pads"), "type", AttributeProto.UNDEFINED), "of type UNDEFINED"),
        (lambda node: node.attribute.add().CopyFrom(attribute(node, "pads")), "'pads' twice"),
        (lambda node: setattr(attribute(node, "pads"), "ref_attr_name", "outer"), "'pads' from a function"),
    ):
        model, node = changed(train, "Conv")
        change(node)
        assert said in refusal(model, tmp_path)


@pytest.mark.parametrize(("op", "count", "said"), [
    ("Conv", 0, "has 0 operands: it must have at least 2"),
    ("Conv", 1, "has 1 operands: it must have at least 2"),
    ("Relu", 3, "has 3 operands: it must have 1"),
    ("BatchNorm", 4, "has 4 operands: it must have 5"),
    ("ConvGrad", 2, "has 2 operands: it must have 3"),
])  # fmt: skip
def test_too_few_operands_and_too_many(train, tmp_path, op, count, said):
    model, node = changed(train, op)
    node.input[:] = [*node.input, *[node.input[0]] * 5][:count]
    assert f"'{node.name}' ({op}) {said}" in refusal(model, tmp_path)


def test_our_operators_have_all_their_operands_and_results(fused, tmp_path):
    model, node = changed(fused, "BatchNormFinalize")
    wanted = len(node.input)
    del node.input[-1]
    assert f"has {wanted - 1} operands: it must have {wanted}" in refusal(model, tmp_path)
    model, node = changed(fused, "BatchNormFinalize")
    node.output.append("more")
    assert f"results: it must have {len(node.output) - 1}" in refusal(model, tmp_path)


def test_an_operand_that_is_left_out(train, tmp_path):
    model, node = changed(train, "ConvGrad")
    node.input[1] = ""
    assert "lacks its operand 2" in refusal(model, tmp_path)


@pytest.mark.parametrize("version", [0, -1, 9999, 2**63 - 1])
def test_a_version_that_there_is_not(train, tmp_path, version):
    model, _ = changed(train, "Conv")
    next(opset for opset in model.opset_import if opset.domain == "").version = version
    assert f"imports version {version} of the operators of 'ai.onnx'" in refusal(model, tmp_path)


def test_a_domain_that_is_not_imported(train, tmp_path):
    model, _ = changed(train, "Conv")
    kept = [opset for opset in model.opset_import if opset.domain != ""]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    assert "of the domain 'ai.onnx', of which the file imports no version" in refusal(model, tmp_path)


def test_a_tensor_of_text(train, tmp_path):
    model, _ = changed(train, "Conv")
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_type, tensor.string_data[:] = TensorProto.STRING, [b"a"] * int(np.prod(tensor.dims))
    assert refusal(model, tmp_path).startswith(f"t.onnx: tensor '{tensor.name}' is of type STRING")


def test_an_initial_value_of_another_type_than_its_input(train, tmp_path):
    model, _ = changed(train, "Conv")
    inputs = {value.name for value in model.graph.input}
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name in inputs)
    values = onnx.numpy_helper.to_array(tensor).astype(np.int32)
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    assert f"input '{tensor.name}' is FLOAT, its initial value INT32" in refusal(model, tmp_path)


def test_a_graph_within_a_node_that_reads_what_is_not_there(train, tmp_path):
    inner = helper.make_graph([helper.make_node("Identity", ["nowhere"], ["there"])], "inner", [], [])
    model, node = changed(train, "Relu")
    node.attribute.append(helper.make_attribute("then_branch", inner))
    assert f"node '{node.name}' (Relu) holds a graph that reads 'nowhere'" in refusal(model, tmp_path)
    inner.node[0].input[0] = node.input[0]
    inner.output.add(name="lost")
    node.attribute[-1].g.CopyFrom(inner)
    assert "reads 'lost'" in refusal(model, tmp_path)


def test_a_function_that_reads_what_is_not_there(fused, tmp_path):
    model, _ = changed(fused, "BatchNormFinalize")
    model.functions[0].node[0].input[0] = "nowhere"
    assert f"function '{model.functions[0].name}' reads 'nowhere'" in refusal(model, tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"loss": ' + "9" * 5000 + "}"], ids=["deep", "digits"])
def test_roles_that_no_parser_reads(train, tmp_path, text):
    model, _ = changed(train, "Conv")
    next(entry for entry in model.metadata_props if entry.key == "bnfuse.roles").value = text
    with pytest.raises(BnfuseError, match=r"bnfuse\.roles metadata is damaged"):
        api.rewrite(model)


def test_a_sparse_tensor(train, tmp_path):
    model, _ = changed(train, "Conv")
    model.graph.sparse_initializer.add().values.CopyFrom(model.graph.initializer[0])
    del model.graph.initializer[0]
    name = model.graph.sparse_initializer[0].values.name
    assert refusal(model, tmp_path) == f"t.onnx: tensor '{name}' is sparse, which is not read: store it as a whole"


@pytest.mark.parametrize(("name", "numbers", "said"), [
    ("pads", [0], "has pads=[0], for 2 dimensions: it must be 4 numbers"),
    ("strides", [1, 1, 1], "has strides=[1, 1, 1], for 2 dimensions: it must be 2 numbers"),
    ("strides", [0, 2], "has strides=[0, 2]: it must be at least 1"),
])  # fmt: skip
def test_a_window_of_one_of_our_operators(fused, tmp_path, name, numbers, said):
    model = Model()
    model.CopyFrom(fused)
    node = next(node for node in model.graph.node if node.domain == "ai.bnfuse" and "Conv" in node.op_type)
    attribute(node, name).ints[:] = numbers
    assert said in refusal(model, tmp_path)


@pytest.mark.parametrize(
    ("op", "name"), [("AveragePool", "kernel_shape"), ("AveragePoolGrad", "kernel_shape"), ("Concat", "axis")]
)
def test_an_attribute_that_is_missing(train, tmp_path, op, name):
    model, node = changed(train, op)
    node.attribute.remove(attribute(node, name))
    assert f"'{node.name}' ({op}) lacks the attribute '{name}'" in refusal(model, tmp_path)


def test_a_list_of_operands_with_one_left_out(train, tmp_path):
    model, node = changed(train, "Concat")
    node.input[0] = ""
    assert f"'{node.name}' (Concat) lacks its operand 1" in refusal(model, tmp_path)


@pytest.mark.parametrize(
    ("op", "domain", "remedy"),
    [
        ("BatchNormInternal", "", "it is one of 'com.microsoft'. Write the file anew."),
        ("BatchNormWobble", "ai.bnfuse", "files of another version are rewritten anew."),
    ],
)
def test_an_operator_of_another_domain(fused, train, tmp_path, op, domain, remedy):
    model, node = changed(fused, "BatchNormFinalize") if domain else changed(train, "BatchNorm")
    node.op_type, node.domain = op, domain
    assert f"'{node.name}' ({op}) is no operator of '{domain or 'ai.onnx'}': {remedy}" in refusal(model, tmp_path)


@pytest.mark.parametrize("inner", [False, True])
def test_a_function_that_is_given_more_than_it_takes(train, tmp_path, inner):
    model, node = changed(train, "Relu")
    call = helper.make_node("F", [node.input[0]] * 2, node.output, node.name, domain="local")
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    relu = helper.make_node("Relu", ["x"], ["y"])
    model.functions.append(helper.make_function("local", "F", ["x"], ["y"], [relu], imports))
    if inner:
        twice = helper.make_node("F", ["x", "x"], ["y"], node.name, domain="local")
        model.functions.append(helper.make_function("local", "G", ["x"], ["y"], [twice], imports))
        call.op_type, call.input[:] = "G", call.input[:1]
    model.opset_import.add(domain="local", version=1)
    node.CopyFrom(call)
    assert f"node '{node.name}' (F) has 2 operands: it must have at most 1" in refusal(model, tmp_path)


def test_a_gradient_of_another_shape_than_its_parameter(train):
    model, _ = changed(train, "Conv")
    entry = next(entry for entry in model.metadata_props if entry.key == "bnfuse.roles")
    signature = json.loads(entry.value)
    first, *_, last = signature["gradients"]
    signature["gradients"][first] = signature["gradients"][last]
    entry.value = json.dumps(signature)
    with pytest.raises(BnfuseError, match=rf"output '{last}_grad' is .*, the input '{first}' that it is of "):
        api.rewrite(model)
