"""Gradients of reductions over any axes, with and without their dimensions kept, and of softmaxes."""

from __future__ import annotations

import numpy as np
import pytest
from differentiated import axes, check, differentiated, few, floats, ints, many, node, seeds, shapes
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.torch

REDUCTIONS = {
    "ReduceL1": lambda torch, x, at: x.abs().sum(at, True),
    "ReduceL2": lambda torch, x, at: torch.linalg.vector_norm(x, dim=at, keepdim=True),
    "ReduceLogSum": lambda torch, x, at: x.sum(at, True).log(),
    "ReduceLogSumExp": lambda torch, x, at: torch.logsumexp(x, at, True),
    "ReduceMax": lambda torch, x, at: x.amax(at, True),
    "ReduceMean": lambda torch, x, at: x.mean(at, True),
    "ReduceMin": lambda torch, x, at: x.amin(at, True),
    "ReduceProd": lambda torch, x, at: product(x, at),
    "ReduceSum": lambda torch, x, at: x.sum(at, True),
    "ReduceSumSquare": lambda torch, x, at: (x * x).sum(at, True),
}


def product(x, at):
    for axis in at:
        x = x.prod(axis, True)
    return x


def reduced(torch, x, op, at, keep):
    """By torch; an empty list of axes is all of them."""
    y = REDUCTIONS[op](torch, x, tuple(at) or tuple(range(x.ndim)))
    places = [axis % x.ndim for axis in at] or range(x.ndim)
    return y if keep else y.reshape([size for axis, size in enumerate(x.shape) if axis not in places])


@pytest.mark.parametrize("op", REDUCTIONS)
@few
@given(shapes(), st.booleans(), st.data())
def test_reductions(op, shape, keep, data):
    at = data.draw(axes(len(shape)))
    x = floats(*shape, seed=data.draw(seeds), low=0.1 if op == "ReduceLogSum" else -2)
    given_axes = data.draw(st.sampled_from(["operand", "none"])) if not at else "operand"
    constants = {"axes": np.array(at, np.int64)} if given_axes == "operand" else {}
    check(
        [node(op, f"x {' '.join(constants)}", "y", keepdims=int(keep))],
        {"x": x},
        lambda torch, x: reduced(torch, x, op, at, keep),
        constants=constants,
    )


NOTHING = {
    "ReduceMean": lambda torch, x: x * 1,
    "ReduceSum": lambda torch, x: x * 1,
    "ReduceMax": lambda torch, x: x * 1,
    "ReduceProd": lambda torch, x: x * 1,
    "ReduceSumSquare": lambda torch, x: x * x,
    "ReduceLogSum": lambda torch, x: x.log(),
    "ReduceLogSumExp": lambda torch, x: x * 1,
}


@pytest.mark.parametrize("op", NOTHING)
def test_no_axes_reduce_nothing_where_the_node_says_so(op):
    nodes = [node(op, "x axes", "y", noop_with_empty_axes=1, keepdims=0)]
    check(nodes, {"x": floats(2, 3, low=0.5)}, NOTHING[op], constants={"axes": ints()})


@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin"])
def test_ties_share_the_gradient_of_an_extreme_evenly(op):
    x = np.array([[1.0, 2.0, 2.0, -1.0], [3.0, 3.0, 3.0, 3.0], [0.0, -1.0, -1.0, 5.0]])
    nodes = [node(op, "x axes", "y", keepdims=0)]
    check(nodes, {"x": x}, lambda torch, x: reduced(torch, x, op, [1], False), constants={"axes": ints(1)})


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_products_of_zeros(zeros):
    x = floats(2, 3, 4)
    x[0, 1, :zeros] = 0.0
    for keep in (0, 1):
        nodes = [node("ReduceProd", "x axes", "y", keepdims=keep)]
        constants = {"axes": ints(-1)}
        check(nodes, {"x": x}, lambda torch, x, keep=keep: x.prod(-1, bool(keep)), constants=constants)


def test_the_norm_of_zeros_has_no_slope():
    nodes = [node("ReduceL2", "x axes", "y")]
    x = np.array([[0.0, 0.0], [3.0, 4.0]])
    check(nodes, {"x": x}, lambda torch, x: x.norm(dim=1, keepdim=True), constants={"axes": ints(1)})


def test_the_sum_of_logarithms_keeps_what_is_large():
    x = np.array([[800.0, 799.0], [-900.0, -900.0]])
    nodes = [node("ReduceSum", "x axes", "h"), node("ReduceLogSumExp", "x axes", "y", keepdims=1)]
    feeds = {"x": x / 10}
    check(nodes[1:], feeds, lambda torch, x: torch.logsumexp(x, 1, True), constants={"axes": ints(1)})


def test_a_mean_is_one_quotient_and_one_broadcast():
    found = differentiated([node("ReduceMean", "x axes", "y")], {"x": floats(2, 3, 4)}, constants={"axes": ints(1, 2)})
    assert found.operators() == ["Div", "Expand"]


@many
@given(st.sampled_from(["Softmax", "LogSoftmax"]), shapes(), seeds, st.data())
def test_softmax_along_any_axis(op, shape, seed, data):
    at = data.draw(st.integers(-len(shape), len(shape) - 1))

    def function(torch, x):
        return torch.softmax(x, at) if op == "Softmax" else torch.log_softmax(x, at)

    check([node(op, "x", "y", axis=at)], {"x": floats(*shape, seed=seed)}, function)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
def test_softmax_is_along_the_last_axis_unless_it_says_so(op):
    def function(torch, x):
        return torch.softmax(x, -1) if op == "Softmax" else torch.log_softmax(x, -1)

    check([node(op, "x", "y")], {"x": floats(2, 3, 4)}, function)


@many
@given(shapes(), st.booleans(), st.booleans(), seeds, st.data())
def test_cumulative_sums_from_either_end(shape, exclusive, backwards, seed, data):
    at = data.draw(st.integers(-len(shape), len(shape) - 1))

    def function(torch, x):
        x = x.flip(at) if backwards else x
        y = x.cumsum(at) - (x if exclusive else 0)
        return y.flip(at) if backwards else y

    nodes = [node("CumSum", "x axis", "y", exclusive=int(exclusive), reverse=int(backwards))]
    constants = {"axis": np.array(at % len(shape), np.int64)}
    check(nodes, {"x": floats(*shape, seed=seed)}, function, constants=constants)
