"""Order of layers: depth first to the joins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_workloads import step, workload

from bnfuse.core.errors import BnfuseError
from bnfuse.estimating.order import arranged, dependencies


def names(layers) -> list[str]:
    return [layer.name for layer in layers]


def two_branches():
    steps = [
        step("stem", 1, "data", "x"),
        step("left1", 1, "x", "l1"),
        step("right1", 1, "x", "r1"),
        step("left2", 1, "l1", "l2"),
        step("right2", 1, "r1", "r2"),
        step("join", 1, "l2 r2", "y"),
        step("last", 1, "y", "z"),
    ]
    return workload(dict.fromkeys(["data", "x", "l1", "r1", "l2", "r2", "y", "z"], 1), steps).layers


def test_a_branch_runs_to_the_join_before_the_next_branch_begins():
    assert names(arranged(two_branches(), "dfs")) == ["stem", "left1", "left2", "right1", "right2", "join", "last"]


def test_the_order_of_the_file_stays():
    assert arranged(two_branches(), "file") == two_branches()


def test_an_unknown_order_is_refused():
    with pytest.raises(BnfuseError, match="order 'bfs' is unknown: it is file or dfs"):
        arranged(two_branches(), "bfs")


def test_a_value_is_not_written_over_before_its_readers_ran():
    steps = [
        step("make", 1, "data", "x"),
        step("other", 1, "data", "y"),
        step("read", 1, "x y", "z"),
        step("again", 1, "data", "x"),  # no value of `read` is needed here, but its operand is written over
    ]
    layers = workload(dict.fromkeys(["data", "x", "y", "z"], 1), steps).layers
    assert dependencies(layers)[3] == [0, 2]
    assert names(arranged(layers, "dfs")).index("again") > names(arranged(layers, "dfs")).index("read")


@st.composite
def any_layers(draw):
    tensors = [f"t{i}" for i in range(draw(st.integers(1, 8)))]
    some = st.lists(st.sampled_from(tensors), max_size=3, unique=True).map(" ".join)
    steps = [step(f"s{i}", 1, draw(some), draw(some)) for i in range(draw(st.integers(0, 14)))]
    return workload(dict.fromkeys(tensors, 1), steps).layers


@given(any_layers())
def test_every_layer_runs_once_and_after_what_it_waits_for(layers):
    found = names(arranged(layers, "dfs"))
    assert sorted(found) == sorted(names(layers))
    for layer, before in zip(layers, dependencies(layers), strict=True):
        assert all(found.index(layers[index].name) < found.index(layer.name) for index in before)


@given(any_layers())
def test_every_read_finds_the_value_that_it_found_in_the_order_of_the_file(layers):
    def seen(order):
        version: dict[int, str] = {}
        found = {}
        for layer in order:
            found[layer.name] = [version.get(access.tensor) for access in layer.reads]
            version.update((access.tensor, layer.name) for access in layer.writes)
        return found, version

    assert seen(layers) == seen(arranged(layers, "dfs"))
