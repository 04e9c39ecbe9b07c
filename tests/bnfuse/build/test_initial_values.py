"""Values that the file has are kept; what it has none for is filled, and what is asked for is drawn anew."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from bnfuse.build import build
from bnfuse.core.errors import BnfuseError

BLUR = np.full((4, 1, 2, 2), 0.25, np.float32)


def values(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@pytest.fixture
def blurred(after_conv) -> onnx.ModelProto:
    """A blur with fixed filters, and a classifier that begins at zero."""
    nodes = [
        helper.make_node("Conv", ["c", "filt"], ["b"], name="blur", group=4),
        helper.make_node("GlobalAveragePool", ["b"], ["p"], name="pool"),
        helper.make_node("Flatten", ["p"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "fc"], ["y"], name="fc"),
    ]
    return after_conv(nodes, {"filt": BLUR, "fc": np.zeros((4, 5), np.float32)})


def test_weights_of_equal_values_are_kept_and_told(blurred):
    built = build(blurred, freeze=["filt"])
    np.testing.assert_array_equal(values(built.model)["filt"], BLUR)
    assert not values(built.model)["fc"].any()
    assert built.notes == ("kept 2 weights of equal values (filt, fc): --init NAME draws them anew",)


def test_init_draws_what_it_names(blurred):
    built = build(blurred, init=["f*"], seed=3)
    found = values(built.model)
    assert found["filt"].std() == pytest.approx(np.sqrt(2 / 4), rel=0.5) and found["fc"].std() > 0.1
    np.testing.assert_array_equal(found["w"], values(blurred)["w"])
    assert built.notes == ("drew 2 parameters anew (filt, fc; seed 3)",)
    again = values(build(blurred, init=["f*"], seed=4).model)
    assert not np.array_equal(found["fc"], again["fc"])


def test_init_resets_batch_norms_with_their_statistics(conv_norm):
    found = values(build(conv_norm(), init=["*"]).model)
    for name, value in (("scale", 1), ("bias", 0), ("mean", 0), ("var", 1)):
        assert (found[name] == value).all()


def test_init_that_matches_nothing(blurred):
    with pytest.raises(BnfuseError, match=r"^--init 'head\.\*' matches no parameter that can be drawn \(there are w, "):
        build(blurred, init=["head.*"])


def test_constants_in_place_of_weights_are_filled_and_named(forward):
    size = {"size": np.array([4, 3, 3, 3], np.int64)}
    nodes = [
        helper.make_node("ConstantOfShape", ["size"], ["w"], name="make"),
        helper.make_node("Conv", ["x", "w"], ["y"], name="conv"),
    ]
    built = build(forward(nodes, size), seed=2)
    assert built.notes == ("filled 1 parameters that the file has no values for (w; seed 2)",)
    assert values(built.model)["w"].std() > 0.1
