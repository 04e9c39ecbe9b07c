"""BatchNorms of opsets 7 to 13, as torch and others wrote them then."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from bnfuse.build import build
from bnfuse.core.errors import BnfuseError

FIVE = ["n", "m1", "v1", "saved_mean", "saved_var"]


@pytest.fixture
def old(conv_norm):
    def make(opset: int, outputs: list[str], **attrs: int) -> onnx.ModelProto:
        model = conv_norm(momentum=0.8, epsilon=1e-3)
        model.opset_import[0].version = opset
        norm = model.graph.node[1]
        kept = [attr for attr in norm.attribute if attr.name != "training_mode"]
        del norm.attribute[:], norm.output[:]
        norm.attribute.extend([*kept, *(helper.make_attribute(key, value) for key, value in attrs.items())])
        norm.output.extend(outputs)
        return model

    return make


@pytest.mark.parametrize("opset", range(7, 14))
def test_five_results_train_as_one_does_in_newer_opsets(conv_norm, old, step, opset):
    """torch's training exports; loss, gradients and statistics are those of the same BatchNorm of opset 17."""
    expected, _ = step(build(conv_norm(momentum=0.8, epsilon=1e-3)).model)
    built = build(old(opset, FIVE, **({"spatial": 1} if opset < 9 else {})))
    found, feeds = step(built.model)
    signature = json.loads({entry.key: entry.value for entry in built.model.metadata_props}["bnfuse.roles"])
    for name in ("loss", "w_grad", "scale_grad", "bias_grad"):
        np.testing.assert_array_equal(found[name], expected[name])
    for statistic, output in (("mean", "new_mean"), ("var", "new_var")):
        np.testing.assert_array_equal(found[signature["running"][statistic]], expected[output])
    kept = {tensor.name: numpy_helper.to_array(tensor) for tensor in built.model.graph.initializer}
    maps = convolved(feeds["x"], kept["w"])
    mean = 0.8 * kept["mean"] + 0.2 * maps.mean((0, 2, 3))
    np.testing.assert_allclose(found[signature["running"]["mean"]], mean, rtol=1e-4, atol=1e-5)


def convolved(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    return np.einsum("nchwij,ocij->nohw", windows, w)


def test_of_batch_norms_with_and_without_further_results_those_without_are_frozen(old):
    model = old(13, FIVE)
    model.graph.node[2].CopyFrom(
        helper.make_node("BatchNormalization", ["n", "scale2", "bias2", "mean2", "var2"], ["y"], "frozen")
    )
    for name in ("scale", "bias", "mean", "var"):
        model.graph.initializer.append(numpy_helper.from_array(np.full(4, 0.5, np.float32), f"{name}2"))
    assert any(note.startswith("1 BatchNormalization nodes stay frozen (frozen)") for note in build(model).notes)
    assert len(build(model, train_bn=True).model.graph.output) == 2 + 4 + 5


def test_statistics_for_each_pixel_are_refused(old):
    with pytest.raises(BnfuseError, match=r"^node 'bn' \(BatchNormalization\) has spatial=0"):
        build(old(8, ["n"], spatial=0))


@pytest.mark.parametrize(("momentum", "said"), [(1.0, "never move"), (0.0, "are those of the last batch alone")])
def test_a_momentum_that_keeps_nothing_or_all_is_told(conv_norm, momentum, said):
    (note,) = build(conv_norm(momentum=momentum)).notes
    assert note.startswith(f"the running statistics of bn {said}: momentum={momentum:g} in the file")
