"""Gradients of poolings: every form of pads, ceil_mode, dilations, ties."""

from __future__ import annotations

import numpy as np
import pytest
from differentiated import apart, check, differentiated, floats, many, node, seeds
from hypothesis import assume, given
from hypothesis import strategies as st

from bnfuse.core.errors import BnfuseError
from bnfuse.core.windows import why_not

pytestmark = pytest.mark.torch


@st.composite
def windows(draw, rank: int, dilated: bool):
    kernel = [draw(st.integers(1, 3)) for _ in range(rank)]
    window = {
        "kernel_shape": kernel,
        "strides": [draw(st.integers(1, 3)) for _ in range(rank)],
        "pads": [draw(st.integers(0, size // 2)) for size in kernel] * 2,
        "ceil_mode": draw(st.integers(0, 1)),
    }
    if dilated:
        window["dilations"] = [draw(st.integers(1, 2)) for _ in range(rank)]
    size = [draw(st.integers(1, 7)) for _ in range(rank)]
    assume(why_not(window, size) is None)
    return window, (draw(st.integers(1, 2)), draw(st.integers(1, 3)), *size)


@pytest.mark.parametrize("rank", [1, 2])
@many
@given(st.data(), seeds)
def test_maxima(rank, data, seed):
    window, shape = data.draw(windows(rank, True))

    def function(torch, x):
        pool = torch.nn.functional.max_pool1d if rank == 1 else torch.nn.functional.max_pool2d
        pads = window["pads"][:rank]
        return pool(x, window["kernel_shape"], window["strides"], pads, window["dilations"], bool(window["ceil_mode"]))

    check([node("MaxPool", "x", "y", **window)], {"x": apart(*shape, seed=seed)}, function)


def test_the_first_of_equal_maxima_has_the_gradient():
    x = np.array([[1.0, 1, 0, 2], [1, 1, 2, 2], [0, 0, 0, 0], [0, 0, 0, 0]]).reshape(1, 1, 4, 4)
    nodes = [node("MaxPool", "x", "y", kernel_shape=[2, 2], strides=[2, 2])]
    check(nodes, {"x": x}, lambda torch, x: torch.nn.functional.max_pool2d(x, 2))


def test_the_forward_pooling_gives_the_indices():
    found = differentiated([node("MaxPool", "x", "y", kernel_shape=[2, 2])], {"x": apart(1, 1, 3, 3)})
    assert found.operators() == ["MaxPoolGrad"]
    assert [str(v.name) for v in found.model.graph[0].outputs] == ["y", "maxpool/indices"]


def test_indices_by_columns_are_refused_in_one_line():
    nodes = [node("MaxPool", "x", "y i", kernel_shape=[2, 2], storage_order=1)]
    with pytest.raises(BnfuseError, match=r"node 'maxpool' \(MaxPool\) has storage_order=1"):
        differentiated(nodes, {"x": apart(1, 1, 3, 3)})


@pytest.mark.parametrize("counted", [0, 1])
@many
@given(st.data(), seeds)
def test_means(counted, data, seed):
    window, shape = data.draw(windows(2, False))

    def function(torch, x):
        given = (
            window["kernel_shape"],
            window["strides"],
            window["pads"][:2],
            bool(window["ceil_mode"]),
            bool(counted),
        )
        return torch.nn.functional.avg_pool2d(x, *given)

    nodes = [node("AveragePool", "x", "y", count_include_pad=counted, **window)]
    check(nodes, {"x": floats(*shape, seed=seed)}, function)


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("counted", [0, 1])
@many
@given(st.data(), seeds)
def test_means_over_dilated_windows(rank, counted, data, seed):
    """By a depthwise convolution; an element of the padding counts where it is counted, one behind it never."""
    window, shape = data.draw(windows(rank, True))
    assume(not window["ceil_mode"])

    def function(torch, x):
        conv = torch.nn.functional.conv1d if rank == 1 else torch.nn.functional.conv2d
        ones = torch.ones(shape[1], 1, *window["kernel_shape"], dtype=torch.float64)
        given = (None, window["strides"], window["pads"][:rank], window["dilations"], shape[1])
        inside = conv(torch.ones_like(x), ones, *given)
        return conv(x, ones, *given) / (ones[0].numel() if counted else inside)

    nodes = [node("AveragePool", "x", "y", count_include_pad=counted, **window)]
    check(nodes, {"x": floats(*shape, seed=seed)}, function, forward=False)


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize("auto", ["SAME_UPPER", "SAME_LOWER", "VALID"])
def test_automatic_pads(op, auto):
    x = apart(1, 2, 4, 5)
    window = {"kernel_shape": [3, 2], "strides": [2, 2]}
    pads = {"SAME_UPPER": [0, 0, 1, 1], "SAME_LOWER": [1, 1, 0, 0], "VALID": [0] * 4}[auto]
    first = differentiated([node(op, "x", "y", pads=pads, **window)], {"x": x})
    model = [node(op, "x", "y", auto_pad=auto, **window)]
    explicit = differentiated([node(op, "x", "y", pads=pads, **window)], {"x": x})
    np.testing.assert_array_equal(first.gradient("x"), explicit.gradient("x"))
    assert model[0].attribute


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 2, 3), (2, 1, 3, 2, 2)])
def test_means_of_whole_maps(shape):
    at = tuple(range(2, len(shape)))
    found = check([node("GlobalAveragePool", "x", "y")], {"x": floats(*shape)}, lambda torch, x: x.mean(at, True))
    assert found.operators() == (["GlobalAveragePoolGrad"] if len(shape) == 4 else ["Div", "Expand"])
