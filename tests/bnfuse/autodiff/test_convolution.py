"""Gradients of convolutions and transposed ones, with every attribute of their windows."""

from __future__ import annotations

import pytest
from differentiated import check, floats, many, node, seeds
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.torch

pair = st.lists(st.integers(1, 3), min_size=2, max_size=2)


@many
@given(st.integers(1, 3), st.integers(1, 2), pair, pair, pair, st.booleans(), seeds, st.data())
def test_convolutions(batch, group, kernel, strides, dilations, biased, seed, data):
    pads = [data.draw(st.integers(0, 2)) for _ in range(4)]
    size = [data.draw(st.integers(1, 3)) + dilations[i] * (kernel[i] - 1) for i in range(2)]
    feeds = {"x": floats(batch, 2 * group, *size, seed=seed), "w": floats(3 * group, 2, *kernel, seed=seed + 1)}
    feeds |= {"b": floats(3 * group, seed=seed + 2)} if biased else {}

    def function(torch, x, w, b=None):
        x = torch.nn.functional.pad(x, (pads[1], pads[3], pads[0], pads[2]))
        return torch.nn.functional.conv2d(x, w, b, strides, 0, dilations, group)

    attributes = {"strides": strides, "dilations": dilations, "pads": pads, "group": group}
    check([node("Conv", " ".join(feeds), "y", **attributes)], feeds, function)


@pytest.mark.parametrize("auto", ["SAME_UPPER", "SAME_LOWER", "VALID"])
def test_automatic_pads_of_a_convolution(auto):
    feeds = {"x": floats(1, 2, 5, 6), "w": floats(3, 2, 3, 2, seed=1)}

    def function(torch, x, w):
        pads = {"SAME_UPPER": (0, 0, 1, 1), "SAME_LOWER": (0, 0, 1, 1), "VALID": (0, 0, 0, 0)}[auto]
        return torch.nn.functional.conv2d(torch.nn.functional.pad(x, pads), w, None, 2)

    check([node("Conv", "x w", "y", strides=[2, 2], auto_pad=auto)], feeds, function)


@many
@given(st.integers(1, 2), st.integers(1, 2), pair, pair, pair, st.booleans(), seeds, st.data())
def test_transposed_convolutions(batch, group, kernel, strides, dilations, biased, seed, data):
    pads = [data.draw(st.integers(0, min(1, dilations[i % 2] * (kernel[i % 2] - 1)))) for i in range(4)]
    more = [data.draw(st.integers(0, strides[i] - 1)) for i in range(2)]
    feeds = {"x": floats(batch, 2 * group, 3, 2, seed=seed), "w": floats(2 * group, 3, *kernel, seed=seed + 1)}
    feeds |= {"b": floats(3 * group, seed=seed + 2)} if biased else {}

    def function(torch, x, w, b=None):
        y = torch.nn.functional.conv_transpose2d(x, w, None, strides, 0, 0, group, dilations)
        y = torch.nn.functional.pad(y, (-pads[1], more[1] - pads[3], -pads[0], more[0] - pads[2]))
        return y if b is None else y + b.reshape(-1, 1, 1)

    attributes = {"strides": strides, "dilations": dilations, "pads": pads, "group": group, "output_padding": more}
    check([node("ConvTranspose", " ".join(feeds), "y", **attributes)], feeds, function)


@pytest.mark.parametrize(
    ("trained", "operator"),
    [
        ("xwb", "ConvGradBiasGrad"),
        ("xw", "ConvGrad"),
        ("x", "ConvGradInput"),
        ("w", "ConvGradWeight"),
        ("wb", "ConvGradWeightBiasGrad"),
        ("b", "ReduceSum"),
    ],
)
def test_one_operator_gives_the_gradients_that_are_wanted(trained, operator):
    feeds = {"x": floats(2, 3, 4, 4), "w": floats(5, 3, 3, 3, seed=1), "b": floats(5, seed=2)}

    def function(torch, x, w, b):
        return torch.nn.functional.conv2d(x, w, b)

    found = check([node("Conv", "x w b", "y")], feeds, function, wanted=list(trained))
    assert found.operators() == [operator]


@pytest.mark.parametrize(
    ("trained", "operators"),
    [
        ("x", ["ConvTransposeGradInput"]),
        ("w", ["ConvTransposeGradWeight"]),
        ("wb", ["ConvTransposeGradWeightBiasGrad"]),
        ("b", ["ReduceSum"]),
        ("xwb", ["ConvTransposeGradInput", "ConvTransposeGradWeightBiasGrad"]),
    ],
)
def test_gradients_of_a_transposed_convolution_that_are_wanted(trained, operators):
    feeds = {"x": floats(2, 3, 4, 4), "w": floats(3, 5, 3, 3, seed=1), "b": floats(5, seed=2)}

    def function(torch, x, w, b):
        return torch.nn.functional.conv_transpose2d(x, w, b, stride=2)

    nodes = [node("ConvTranspose", "x w b", "y", strides=[2, 2])]
    assert sorted(check(nodes, feeds, function, wanted=list(trained)).operators()) == operators


def test_a_transposed_convolution_whose_output_is_padded_by_a_stride():
    feeds = {"x": floats(2, 3, 4, 4), "w": floats(3, 5, 3, 3, seed=1)}

    def function(torch, x, w):
        return torch.nn.functional.conv_transpose2d(x, w, dilation=2, output_padding=1)

    check([node("ConvTranspose", "x w", "y", dilations=[2, 2], output_padding=[1, 1])], feeds, function)


@pytest.mark.parametrize(
    ("given", "crop"),
    [
        ({"auto_pad": "SAME_UPPER"}, (0, 1)),
        ({"auto_pad": "SAME_LOWER"}, (1, 0)),
        ({"auto_pad": "VALID"}, (0, 0)),
        ({"output_shape": [6, 5]}, (0, 0)),
    ],
    ids=str,
)
def test_pads_of_a_transposed_convolution_that_follow_from_its_result(given, crop):
    """Of stride 2 and kernel 3 a map of 3 x 2 becomes one of 7 x 5: what is too much is cropped."""
    feeds = {"x": floats(1, 2, 3, 2), "w": floats(2, 3, 3, 3, seed=1)}

    def function(torch, x, w):
        y = torch.nn.functional.conv_transpose2d(x, w, stride=2)
        if "output_shape" in given:  # the larger part in front
            return y[:, :, 1:]
        return y[:, :, crop[0] : 7 - crop[1], crop[0] : 5 - crop[1]]

    check([node("ConvTranspose", "x w", "y", strides=[2, 2], **given)], feeds, function)
