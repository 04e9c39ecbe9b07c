"""Constants in the place of parameters that the network does not train: affine=False and buffers."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from exported import called, norm_of_module, signed
from onnx import helper, numpy_helper

from bnfuse.build import build

ONES, ZEROS = np.ones(4, np.float32), np.zeros(4, np.float32)
STATISTICS = {"1.running_mean": ZEROS + 0.1, "1.running_var": ONES}


def signature(model: onnx.ModelProto) -> dict:
    return json.loads({entry.key: entry.value for entry in model.metadata_props}["bnfuse.roles"])


def constant(name: str, values: np.ndarray) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], name=f"node_{name}", value=numpy_helper.from_array(values))


def norm(scale: str, bias: str, statistics: tuple[str, ...] = tuple(STATISTICS)) -> onnx.NodeProto:
    return helper.make_node(
        "BatchNormalization", ["c", scale, bias, *statistics], ["y", "m", "v"], "bn", training_mode=1
    )


def test_scale_and_bias_of_constant_nodes_stay_as_they_are(after_conv, step):
    """As torch's older exporter writes affine=False."""
    source = after_conv([constant("k1", ONES), constant("k0", ZEROS), norm("k1", "k0")], STATISTICS)
    built = build(source)
    found = signature(built.model)
    assert (found["trainable"], found["frozen"]) == (["w"], ["k1", "k0"])
    (note,) = built.notes
    assert note.startswith("2 constants in the place of parameters stay as they are (k1, k0)") and "--train" in note
    results, _ = step(built.model)
    assert "k1_grad" not in results and results["w_grad"].any()


def test_train_by_name_trains_them(after_conv):
    source = after_conv([constant("k1", ONES), constant("k0", ZEROS), norm("k1", "k0")], STATISTICS)
    built = build(source, train=["*", "k?"])
    assert signature(built.model)["trainable"] == ["w", "k1", "k0"] and built.notes == ()


def test_a_new_batch_norm_with_names_trains(after_conv):
    built = build(after_conv([norm("1.weight", "1.bias")], {**STATISTICS, "1.weight": ONES, "1.bias": ZEROS}))
    assert signature(built.model)["trainable"] == ["w", "1.weight", "1.bias"] and built.notes == ()


@pytest.mark.parametrize("names", [("onnx::BatchNormalization_12", "onnx::BatchNormalization_13"), ("45", "46")])
def test_initializers_without_a_name_stay_as_they_are(after_conv, names):
    built = build(after_conv([norm(*names)], {**STATISTICS, names[0]: ONES, names[1]: ZEROS}))
    assert signature(built.model)["frozen"] == list(names)


def test_initializers_without_a_name_train_where_they_say_something(after_conv):
    built = build(after_conv([norm("45", "46")], {**STATISTICS, "45": ONES * 0.5, "46": ZEROS + 0.1}))
    assert signature(built.model)["trainable"] == ["w", "45", "46"]


def test_scale_and_bias_train_where_the_file_has_all_its_values_as_constants(after_conv):
    """Some exporters write no initializers at all."""
    names = ("s", "b", "m0", "v0")
    nodes = [constant(name, value) for name, value in zip(names, (ONES, ZEROS, ZEROS, ONES), strict=True)]
    built = build(after_conv([*nodes, norm("s", "b", ("m0", "v0"))]))
    assert signature(built.model)["trainable"] == ["w", "s", "b"]


def test_what_a_call_of_batch_norm_did_not_have_stays_as_it_is(after_conv):
    """As torch's exporter writes affine=False: the ones and zeros are computed from the map's shape."""
    computed = []
    for name, value in (("ones", 1.0), ("zeros", 0.0)):
        computed += [
            helper.make_node("Constant", [], [f"{name}_value"], value_floats=[value]),
            helper.make_node("Shape", ["c"], [f"{name}_size"], start=1, end=2),
            helper.make_node("Expand", [f"{name}_value", f"{name}_size"], [name]),
        ]
    last = norm_of_module("c", "y", ["ones", "zeros", "bn.running_mean", "bn.running_var"], "bn", affine=False)
    values = {"bn.running_mean": ZEROS, "bn.running_var": ONES}
    built = build(signed(after_conv([*computed, last], values), ["w"], list(values)), train_bn=True)
    assert signature(built.model)["frozen"] == ["ones", "zeros"]
    assert not any("filled" in note for note in built.notes)


def test_a_buffer_is_no_weight_by_the_word_of_torchs_exporter(after_conv):
    blur = helper.make_node("Conv", ["c", "blur.filt"], ["y"], name="blur", group=4)
    blur = called(blur, "conv2d_1", "aten.conv2d.default", ["%conv2d", "%b_blur_filt", "None"], "blur")
    filt = np.full((4, 1, 2, 2), 0.25, np.float32)
    built = build(signed(after_conv([blur], {"blur.filt": filt}), ["w"], ["blur.filt"]))
    assert signature(built.model)["frozen"] == ["blur.filt"]
    kept = {tensor.name: numpy_helper.to_array(tensor) for tensor in built.model.graph.initializer}["blur.filt"]
    np.testing.assert_array_equal(kept, filt)


def test_a_scale_behind_a_batch_norm_without_one_trains(after_conv):
    """Merged into the constant ones, the parameter stays a parameter."""
    nodes = [constant("k1", ONES), constant("k0", ZEROS), norm("k1", "k0")]
    nodes[-1].output[0] = "n"
    nodes.append(helper.make_node("Mul", ["n", "gain"], ["y"], name="mul"))
    gain = np.linspace(0.5, 2, 4, dtype=np.float32).reshape(4, 1, 1)
    built = build(after_conv(nodes, {**STATISTICS, "gain": gain}))
    assert signature(built.model)["trainable"] == ["w", "k1"] and signature(built.model)["frozen"] == ["k0"]
