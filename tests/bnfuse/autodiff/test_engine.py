"""The sweep: what is emitted, under which names, how contributions add up, and what is left out."""

from __future__ import annotations

import collections

import numpy as np
import onnx_ir as ir
import pytest
from differentiated import check_by_differences, differentiated, floats, forward_model, node

from bnfuse.autodiff import differentiate
from bnfuse.core.errors import BnfuseError


def added(found):
    """The nodes of the gradient, by name."""
    forward = {"a", "b", "c", "d", "e"}
    return {str(n.name): n for n in found.model.graph if n.name not in forward}


def names(found):
    """Of all values and nodes."""
    graph = found.model.graph
    values = [*graph.inputs, *graph.initializers.values(), *(v for n in graph for v in n.outputs if v.name)]
    return [str(v.name) for v in dict.fromkeys(values)], [str(n.name) for n in graph]


def test_one_reader_needs_no_sum():
    found = differentiated([node("Exp", "x", "h", name="a"), node("Sin", "h", "y", name="b")], {"x": floats(3)})
    assert found.operators() == ["Cos", "Mul", "Mul"]


def test_contributions_of_several_readers_are_summed_once():
    nodes = [node("Exp", "x", "h", name="a")]
    nodes += [node("Sin", "h", f"y{i}", name=name) for i, name in enumerate("bcd")]
    found = check_by_differences(nodes, {"x": floats(3)}, outputs=("y0", "y1", "y2"))
    sums = [n for n in added(found).values() if n.op_type == "Sum"]
    assert [len(n.inputs) for n in sums] == [3]
    assert sums[0].outputs[0].name == "h_grad"


def test_an_operand_that_is_read_twice_by_one_node():
    found = check_by_differences([node("Div", "x x", "y", name="a")], {"x": floats(3, low=0.5)})
    assert found.operators().count("Sum") == 1


def test_a_square_is_one_product():
    found = check_by_differences([node("Mul", "x x", "y", name="a")], {"x": floats(3)})
    assert found.operators() == ["Mul", "Mul"]


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (1, 2, 3, 4)])
def test_what_broadcasting_does_by_itself_is_not_written(shape):
    """The gradient of a mean is small until it meets a tensor of the operand's shape; maps are summed whole."""
    nodes = [
        node("Mul", "x x", "h", name="a"),
        node("ReduceMean", "h last", "y", name="b"),
        node("Exp", "x", "z", name="c"),
    ]
    constants = {"last": np.array([-1])}
    found = check_by_differences(nodes, {"x": floats(*shape)}, constants=constants, outputs=("y", "z"))
    assert "Expand" not in found.operators()
    sums = [node("ReduceSum", "x last", "y", name="a"), node("Exp", "x", "z", name="c")]
    found = check_by_differences(sums, {"x": floats(*shape)}, constants=constants, outputs=("y", "z"))
    assert ("Expand" in found.operators()) == (len(shape) == 4)


def test_gradients_that_are_all_broadcast_are_summed_and_broadcast():
    nodes = [node("ReduceSum", "x last", "y", name="a"), node("ReduceMean", "x last", "z", name="b")]
    constants = {"last": np.array([-1])}
    check_by_differences(nodes, {"x": floats(2, 3)}, constants=constants, outputs=("y", "z"))
    nodes = [
        node("Neg", "x", "h", name="a"),
        node("Sub", "h x", "g", name="b"),
        node("ReduceSum", "g last", "y", name="c"),
    ]
    check_by_differences(nodes, {"x": floats(2, 3)}, constants=constants)


def slices(*bounds, axis=1):
    """A function of each slice: outputs y0, ..."""
    constants, nodes = {"axis": np.array([axis])}, []
    for i, (start, end) in enumerate(bounds):
        constants |= {f"s{i}": np.array([start]), f"e{i}": np.array([end])}
        nodes.append(node("Slice", f"x s{i} e{i} axis", f"h{i}", name=f"slice{i}"))
        nodes.append(node("Exp", f"h{i}", f"y{i}", name=f"exp{i}"))
    return nodes, constants, [f"y{i}" for i in range(len(bounds))]


@pytest.mark.parametrize(
    ("bounds", "operators"),
    [
        ([(2, 4), (0, 2), (4, 6)], ["Concat"]),
        ([(4, 6), (1, 3)], ["Concat", "ConstantOfShape", "ConstantOfShape"]),
        ([(0, 3), (2, 6)], ["Pad", "Pad", "Sum"]),
        ([(0, 3), (3, 6), (1, 4)], ["Concat", "Pad", "Sum"]),
        ([(0, 3), (3, 6), (0, 6)], ["Concat", "Sum"]),
    ],
    ids=str,
)
def test_gradients_of_slices_side_by_side_are_concatenated(bounds, operators):
    nodes, constants, outputs = slices(*bounds)
    found = check_by_differences(nodes, {"x": floats(2, 6)}, constants=constants, outputs=outputs)
    added_here = [n.op_type for n in found.model.graph if not str(n.name).startswith(("slice", "exp"))]
    made = [n.op_type for n in found.model.graph if str(n.name).startswith("slice") and "/grad" in str(n.name)]
    assert sorted([*added_here, *made]) == operators


def test_a_slice_that_is_taken_twice_counts_twice():
    nodes, constants, _ = slices((0, 3), (3, 6))
    nodes += [node("Slice", "x s0 e0 axis", "again", name="again"), node("Add", "again h0", "z", name="add")]
    check_by_differences(nodes, {"x": floats(2, 6)}, constants=constants, outputs=["y1", "z"])


def test_gradients_of_slices_of_several_axes_are_summed():
    rows, constants, outputs = slices((0, 1), (1, 2), axis=0)
    nodes = [*rows, node("Slice", "x s0 e1 axis2", "h2", name="columns"), node("Exp", "h2", "y2", name="exp2")]
    constants["axis2"] = np.array([1])
    check_by_differences(nodes, {"x": floats(2, 6)}, constants=constants, outputs=[*outputs, "y2"])


def test_a_parameter_that_several_nodes_share():
    nodes = [node("MatMul", "x w", "h", name="a"), node("MatMul", "h w", "y", name="b")]
    found = check_by_differences(nodes, {"x": floats(2, 3), "w": floats(3, 3, seed=1)}, wanted=["w"])
    assert sorted(found.operators()) == ["Gemm", "Gemm", "Gemm", "Sum"]


def test_nothing_is_emitted_for_what_is_frozen():
    nodes = [node("MatMul", "x v", "h", name="a"), node("MatMul", "h w", "y", name="b")]
    feeds = {"x": floats(2, 3), "v": floats(3, 4, seed=1), "w": floats(4, 2, seed=2)}
    assert differentiated(nodes, feeds, wanted=["w"]).operators() == ["Gemm"]
    assert len(differentiated(nodes, feeds, wanted=["v"]).operators()) == 2


def test_a_frozen_branch_is_not_walked():
    """Even where it has an operator without a gradient."""
    nodes = [node("Det", "frozen", "h", name="a"), node("Mul", "x h", "y", name="b")]
    found = differentiated(nodes, {"x": floats(3), "frozen": floats(2, 2)}, wanted=["x"])
    np.testing.assert_allclose(found.gradient("x"), found.values["seed_y"] * found.values["h"])


def test_no_dead_nodes_and_no_dead_constants_are_left():
    nodes = [node("Pow", "x e", "h", name="a"), node("Div", "h c", "y", name="b")]
    constants = {"e": np.array(3.5), "c": np.array(2.0)}
    found = differentiated(nodes, {"x": floats(3, low=0.5)}, constants=constants)
    graph = found.model.graph
    for each in graph:
        assert any(v.uses() or v.is_graph_output() for v in each.outputs), each.name
    for value in graph.initializers.values():
        assert value.uses(), value.name


def test_equal_constants_are_one():
    nodes = [node("Sqrt", "x", "h", name="a"), node("Sqrt", "h", "y", name="b")]
    found = differentiated(nodes, {"x": floats(3, low=0.5)})
    assert len(found.model.graph.initializers) == 1


def test_several_outputs_with_a_seed_each():
    nodes = [node("Exp", "x", "y", name="a"), node("Sin", "x", "z", name="b")]
    check_by_differences(nodes, {"x": floats(3)}, outputs=("y", "z"))


def test_an_output_that_others_read_has_its_own_seed_and_their_gradients():
    nodes = [node("Exp", "x", "y", name="a"), node("Sin", "y", "z", name="b")]
    found = check_by_differences(nodes, {"x": floats(3)}, outputs=("y", "z"))
    assert found.operators().count("Sum") == 1


def test_an_input_that_nothing_reads_has_a_gradient_of_zeros():
    feeds = {"x": floats(3), "unused": floats(2, 4)}
    found = differentiated([node("Exp", "x", "y", name="a")], feeds)
    np.testing.assert_array_equal(found.gradient("unused"), np.zeros((2, 4)))


def test_what_is_read_by_flat_operators_alone_has_a_gradient_of_zeros():
    nodes = [node("Sign", "z", "h", name="a"), node("Mul", "x h", "y", name="b")]
    found = differentiated(nodes, {"x": floats(3), "z": floats(3, seed=1)})
    np.testing.assert_array_equal(found.gradient("z"), np.zeros(3))
    np.testing.assert_array_equal(found.gradient("x"), found.values["seed_y"] * found.values["h"])


def test_the_gradient_of_a_value_between():
    nodes = [node("Exp", "x", "h", name="a"), node("Sin", "h", "y", name="b")]
    found = differentiated(nodes, {"x": floats(3)}, wanted=["h", "x"])
    slope = found.values["seed_y"] * np.cos(found.values["h"])
    np.testing.assert_allclose(found.gradient("h"), slope)
    np.testing.assert_allclose(found.gradient("x"), slope * found.values["h"])


def test_the_gradient_of_an_output_itself_is_its_seed():
    found = differentiated([node("Exp", "x", "y", name="a")], {"x": floats(3)}, wanted=["y"])
    np.testing.assert_array_equal(found.gradient("y"), found.values["seed_y"])


def test_gradients_are_named_after_what_they_are_of():
    nodes = [node("Add", "x z", "h", name="a"), node("Mul", "h h", "y", name="b")]
    found = differentiated(nodes, {"x": floats(3), "z": floats(3, seed=1)})
    assert found.gradients == {"x": "x_grad", "z": "z_grad"}
    assert all(name.startswith(("a/grad", "b/grad")) or name.endswith("_grad") for name in added(found))


def test_names_that_are_taken_are_left_to_those_who_have_them():
    nodes = [node("Exp", "x", "x_grad", name="a"), node("Sin", "x_grad", "y", name="a/grad/mul")]
    found = differentiated(nodes, {"x": floats(3)}, wanted=["x"])
    assert found.gradients["x"] != "x_grad"
    for each in names(found):
        assert [name for name, count in collections.Counter(each).items() if count > 1] == []


def test_two_gradients_that_are_equal_are_two_values():
    found = differentiated([node("Add", "x z", "y", name="a")], {"x": floats(3), "z": floats(3, seed=1)})
    assert len({*found.gradients.values(), "seed_y"}) == 3


def test_an_operator_without_a_rule_is_named_in_one_line():
    nodes = [node("Exp", "x", "h", name="a"), node("Det", "h", "y", name="volume")]
    with pytest.raises(BnfuseError) as error:
        differentiated(nodes, {"x": floats(2, 2)})
    line = str(error.value)
    assert line.startswith("model.onnx: node 'volume' (Det) has no gradient. Freeze the parameters in front of it")
    assert "\n" not in line


def forward(nodes, feeds, outputs, opset=21):
    return ir.from_proto(forward_model(nodes, feeds, {}, outputs, opset))


def test_a_loss_is_seeded_with_one():
    nodes = [node("Exp", "x", "h", name="a"), node("ReduceSum", "h", "loss", name="b", keepdims=0)]
    model = forward(nodes, {"x": floats(3)}, ["loss"])
    found = differentiate(model, ["x"], {"loss": None})
    assert found["x"].name == "x_grad"
    assert "loss_grad" in model.graph.initializers


def test_a_loss_of_more_than_a_number_is_refused():
    model = forward([node("Exp", "x", "y", name="a")], {"x": floats(3)}, ["y"])
    with pytest.raises(BnfuseError, match=r"file.onnx: 'y' is \[3\]: a loss is a single number"):
        differentiate(model, ["x"], {"y": None}, file="file.onnx")


def test_an_old_opset_is_refused():
    model = forward([node("Exp", "x", "y", name="a")], {"x": floats(3)}, ["y"], opset=17)
    with pytest.raises(BnfuseError, match="gradients need opset 18, this is 17"):
        differentiate(model, ["x"], {"y": None})


def test_a_name_that_the_graph_has_not_is_refused():
    model = forward([node("Exp", "x", "y", name="a")], {"x": floats(3)}, ["y"])
    with pytest.raises(BnfuseError, match="has no value 'w' to differentiate"):
        differentiate(model, ["w"], {"y": None})


def test_a_value_without_a_static_shape_is_named():
    model = forward([node("Reshape", "x s", "y", name="a")], {"x": floats(3), "s": np.array([3])}, ["y"])
    model.graph.inputs[0].shape = ir.Shape(["N"])
    seed = ir.Value(name="seed", shape=ir.Shape([3]), type=ir.TensorType(ir.DataType.DOUBLE))
    model.graph.inputs.append(seed)
    with pytest.raises(BnfuseError, match=r"node 'a' \(Reshape\) has a value without a static shape \('x'\)"):
        differentiate(model, ["x"], {"y": seed})


def test_axes_computed_from_static_shapes_are_constants():
    nodes = [
        node("Shape", "x", "shape", name="a"),
        node("Size", "x", "size", name="b"),
        node("Sub", "size shape", "axes", name="c"),  # 2 - [1, 2]
        node("ReduceSum", "x axes", "y", name="e"),
    ]
    found = check_by_differences(nodes, {"x": floats(1, 2)})
    assert found.operators() == ["Expand"]


def test_a_variable_with_a_value_is_no_constant():
    nodes = [node("Pow", "x p", "y", name="a")]
    model = ir.from_proto(forward_model(nodes, {"x": floats(3, low=0.5)}, {"p": np.array(3.0)}, ["y"], 21))
    seed = ir.Value(name="seed", shape=ir.Shape([3]), type=ir.TensorType(ir.DataType.DOUBLE))
    model.graph.inputs.append(seed)
    found = differentiate(model, ["p"], {"y": seed})
    assert "Log" in [each.op_type for each in model.graph]
    assert found["p"].producer().op_type == "ReduceSum"
