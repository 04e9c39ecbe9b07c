"""Gradients of reading and writing at indices, constant or computed, from the front or from the back."""

from __future__ import annotations

import numpy as np
import pytest
from differentiated import apart, check, differentiated, few, floats, ints, many, node, seeds, shapes
from hypothesis import given
from hypothesis import strategies as st

from bnfuse.core.errors import BnfuseError

pytestmark = pytest.mark.torch


def anywhere(size: int) -> st.SearchStrategy[int]:
    return st.integers(-size, size - 1)


@many
@given(shapes(), st.booleans(), seeds, st.data())
def test_gather_along_any_axis(shape, constant, seed, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    sizes = data.draw(shapes(0, 2, 3))
    count = int(np.prod(sizes))
    chosen = data.draw(st.lists(anywhere(shape[axis]), min_size=count, max_size=count))
    indices = np.array(chosen, data.draw(st.sampled_from([np.int64, np.int32]))).reshape(sizes)

    def function(torch, x, *_):
        flat = torch.tensor(indices.reshape(-1).astype(np.int64) % shape[axis])
        at = axis % len(shape)
        return x.index_select(at, flat).reshape((*shape[:at], *sizes, *shape[at + 1 :]))

    feeds = {"x": floats(*shape, seed=seed), **({} if constant else {"i": indices})}
    constants = {"i": indices} if constant else {}
    check([node("Gather", "x i", "y", axis=axis)], feeds, function, constants=constants)


@pytest.mark.parametrize(
    ("indices", "operators"),
    [
        ([2, 0, 1, 3], ["Gather"]),
        ([1, 2], ["Pad"]),
        ([0, 1, 2, 3], ["Identity"]),
        ([3, 0], ["Pad", "Gather"]),
        (-1, ["Reshape", "Pad"]),
        ([1, 1], ["ConstantOfShape", "ScatterND"]),
    ],
    ids=str,
)
def test_constant_indices_without_repeats_take_no_sums(indices, operators):
    constants = {"i": np.array(indices, np.int64)}
    found = check([node("Gather", "x i", "y")], {"x": floats(4, 3)}, lambda torch, x: x[indices], constants=constants)
    assert sorted({*found.operators()} - ({"Reshape"} if "ScatterND" in operators else set())) == sorted(operators)


@few
@given(seeds, st.integers(-3, 2), st.data())
def test_gather_elements(seed, axis, data):
    shape, taken = (3, 4, 2), [2, 3, 2]
    taken[axis] = 5
    count = int(np.prod(taken))
    chosen = data.draw(st.lists(anywhere(shape[axis]), min_size=count, max_size=count))
    indices = np.array(chosen, np.int64).reshape(taken)

    def function(torch, x, i):
        return torch.gather(x, axis, i % shape[axis])

    feeds = {"x": floats(*shape, seed=seed), "i": indices}
    check([node("GatherElements", "x i", "y", axis=axis)], feeds, function)


@few
@given(st.integers(1, 3), seeds, st.data())
def test_gather_slices(depth, seed, data):
    shape = (3, 2, 4)
    rows = data.draw(st.lists(st.tuples(*[anywhere(size) for size in shape[:depth]]), min_size=1, max_size=6))
    feeds = {"x": floats(*shape, seed=seed), "i": np.array(rows, np.int64)}

    def function(torch, x, i):
        return x[tuple(i[:, place] for place in range(depth))]

    check([node("GatherND", "x i", "y")], feeds, function)


@pytest.mark.parametrize("kind", [np.int64, np.int32])
def test_gather_slices_of_each_sample(kind):
    indices = np.array([[[0], [2], [0]], [[1], [1], [3]]], kind)

    def function(torch, x, i):
        return torch.stack([x[n, i[n, :, 0].long()] for n in range(2)])

    feeds = {"x": floats(2, 4, 3), "i": indices}
    check([node("GatherND", "x i", "y", batch_dims=1)], feeds, function)


def test_gather_slices_of_each_pair_of_a_batch():
    indices = np.random.default_rng(0).integers(0, 4, (2, 3, 1))

    def function(torch, x, i):
        return torch.stack([torch.stack([x[n, m, i[n, m, 0]] for m in range(3)]) for n in range(2)])

    feeds = {"x": floats(2, 3, 4, 2), "i": indices}
    check([node("GatherND", "x i", "y", batch_dims=2)], feeds, function)


@pytest.mark.parametrize("reduction", ["none", "add"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scatter_elements(reduction, axis):
    shape, taken = (4, 5), [2, 3]
    rng = np.random.default_rng(axis + 1)
    if reduction == "none":  # each place once
        rows = [rng.permutation(shape[axis])[: taken[axis]] for _ in range(taken[1 - axis % 2])]
        indices = np.stack(rows, axis=1 - axis % 2).astype(np.int64)
    else:
        indices = rng.integers(-shape[axis], shape[axis], taken)
    feeds = {"x": floats(*shape), "i": indices, "u": floats(*indices.shape, seed=1)}

    def function(torch, x, i, u):
        return (x.scatter if reduction == "none" else x.scatter_add)(axis, i % shape[axis], u)

    check([node("ScatterElements", "x i u", "y", axis=axis, reduction=reduction)], feeds, function)


@pytest.mark.parametrize("reduction", ["none", "add"])
def test_scatter_slices(reduction):
    rows = [[0, 1], [3, 2], [1, 0]] if reduction == "none" else [[0, 1], [3, -1], [0, 1]]
    feeds = {"x": floats(4, 3, 2), "i": np.array(rows, np.int64), "u": floats(3, 2, seed=1)}

    def function(torch, x, i, u):
        return x.index_put((i[:, 0], i[:, 1]), u, accumulate=reduction == "add")

    check([node("ScatterND", "x i u", "y", reduction=reduction)], feeds, function)


@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
@pytest.mark.parametrize("reduction", ["mul", "max", "min"])
def test_other_reductions_are_refused_in_one_line(op, reduction):
    indices = np.array([[0], [1]], np.int64)
    updates = floats(2, 1) if op == "ScatterElements" else floats(2, 3)
    feeds = {"x": floats(2, 3), "i": indices, "u": updates}
    with pytest.raises(BnfuseError, match=rf"model.onnx: node 'write' \({op}\) scatters with reduction='{reduction}'"):
        differentiated([node(op, "x i u", "y", name="write", reduction=reduction)], feeds)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("places", ["i", "-"])
def test_the_greatest_elements(axis, largest, places):
    def function(torch, x):
        return torch.topk(x, 2, axis, bool(largest)).values

    nodes, constants = [node("TopK", "x k", f"y {places}", axis=axis, largest=largest)], {"k": ints(2)}
    check(nodes, {"x": apart(3, 4)}, function, constants=constants)
