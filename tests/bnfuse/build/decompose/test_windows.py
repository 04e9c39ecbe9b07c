"""Convolutions and poolings of any rank are those of rank 4."""

from __future__ import annotations

import pytest
from decomposed import by_onnxruntime, by_reference, check_same, floats, model_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import helper

window = st.fixed_dictionaries(
    {
        "kernel": st.lists(st.integers(1, 3), min_size=3, max_size=3),
        "strides": st.lists(st.integers(1, 3), min_size=3, max_size=3),
        "dilations": st.lists(st.integers(1, 2), min_size=3, max_size=3),
        "pads": st.lists(st.integers(0, 1), min_size=6, max_size=6),
    }
)
SIZES = (5, 6, 7)


def axes(case: dict, rank: int) -> dict:
    pads = case["pads"]
    return {
        "kernel_shape": case["kernel"][:rank],
        "strides": case["strides"][:rank],
        "dilations": case["dilations"][:rank],
        "pads": [*pads[:rank], *pads[3 : 3 + rank]],
    }


@given(case=window, rank=st.sampled_from([1, 3]), groups=st.sampled_from([1, 2]), bias=st.booleans())
@settings(max_examples=30, deadline=None)
def test_conv(case, rank, groups, bias):
    feeds = {"x": floats(2, 4, *SIZES[:rank])}
    values = {"w": floats(6, 4 // groups, *case["kernel"][:rank], seed=1), "b": floats(6, seed=2)}
    names = ["x", "w", "b"][: 2 + bias]
    node = helper.make_node("Conv", names, ["y"], group=groups, **axes(case, rank))
    kept = {name: value for name, value in values.items() if name in names}
    made = check_same(model_of([node], feeds, kept), feeds, variables=["w", "b"], gone=[])
    weights = {tensor.name: list(tensor.dims) for tensor in made.graph.initializer}
    assert weights["w"] == list(values["w"].shape)
    assert all(len(attr.ints) == 2 for n in made.graph.node for attr in n.attribute if attr.name == "kernel_shape")


@given(
    case=window, rank=st.sampled_from([1, 2, 3]), groups=st.sampled_from([1, 2]), bias=st.booleans(), more=st.booleans()
)
@settings(max_examples=30, deadline=None)
def test_conv_transpose(case, rank, groups, bias, more):
    feeds = {"x": floats(2, 4, *(3, 4, 2)[:rank])}
    values = {"w": floats(4, 3, *case["kernel"][:rank], seed=1), "b": floats(3 * groups, seed=2)}
    given_axes = axes(case, rank)
    reach = [d * (k - 1) + 1 for k, d in zip(given_axes["kernel_shape"], given_axes["dilations"], strict=True)]
    assume(all(r > 2 or not any(given_axes["pads"]) for r in reach))
    extra = [min(1, stride - 1) * more for stride in given_axes["strides"]]
    names = ["x", "w", "b"][: 2 + bias]
    node = helper.make_node("ConvTranspose", names, ["y"], group=groups, output_padding=extra, **given_axes)
    kept = {name: value for name, value in values.items() if name in names}
    made = check_same(model_of([node], feeds, kept), feeds, variables=["w", "b"], gone=[])
    assert all(len(attr.ints) == 2 for n in made.graph.node for attr in n.attribute if attr.name == "kernel_shape")


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(
    "attrs", [{"auto_pad": "SAME_UPPER"}, {"auto_pad": "SAME_LOWER"}, {"auto_pad": "VALID"}, {"output_shape": 9}]
)
def test_conv_transpose_whose_padding_follows_from_its_result(rank, attrs):
    feeds, values = {"x": floats(1, 2, *[4] * rank)}, {"w": floats(2, 3, *[4] * rank, seed=1)}
    attrs = {key: [value] * rank if key == "output_shape" else value for key, value in attrs.items()}
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[2] * rank, **attrs)
    made = check_same(model_of([node], feeds, values), feeds, variables=["w"], gone=[])
    assert not {"auto_pad", "output_shape"} & {attr.name for n in made.graph.node for attr in n.attribute}


@given(
    case=window,
    rank=st.sampled_from([1, 3]),
    kind=st.sampled_from(["MaxPool", "AveragePool", "AveragePool counted"]),
)
@settings(max_examples=40, deadline=None)
def test_pool(case, rank, kind):
    op, _, counted = kind.partition(" ")
    given_axes = axes(case, rank)
    reach = [d * (k - 1) + 1 for k, d in zip(given_axes["kernel_shape"], given_axes["dilations"], strict=True)]
    assume(all(r > 2 or not any(given_axes["pads"]) for r in reach))
    extra = {"count_include_pad": 1} if counted else {}
    feeds = {"x": floats(2, 3, *SIZES[:rank])}
    made = check_same(
        model_of([helper.make_node(op, ["x"], ["y"], **given_axes, **extra)], feeds),
        feeds,
        before=by_reference if op == "AveragePool" else by_onnxruntime,
        gone=[],
    )
    assert all(len(attr.ints) == 2 for n in made.graph.node for attr in n.attribute if attr.name == "kernel_shape")


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 4, 5), (2, 3, 4, 5, 2)])
@pytest.mark.parametrize("op", ["GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"])
def test_global_pools(shape, op):
    feeds = {"x": floats(*shape)}
    check_same(model_of([helper.make_node(op, ["x"], ["y"])], feeds), feeds, gone=[])


@given(case=window, rank=st.sampled_from([1, 2, 3]), p=st.sampled_from([1, 2, 3]))
@settings(max_examples=25, deadline=None)
def test_lp_pool(case, rank, p):
    given_axes = axes(case, rank)
    given_axes["dilations"] = [1] * rank
    assume(all(k > 2 for k in given_axes["kernel_shape"]) or not any(given_axes["pads"]))
    feeds = {"x": floats(2, 3, *SIZES[:rank])}
    model = model_of([helper.make_node("LpPool", ["x"], ["y"], p=p, **given_axes)], feeds)
    check_same(model, feeds, tolerance=1e-5)
