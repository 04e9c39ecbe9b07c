"""The planner: lifetimes, tight packing, and no two living storages in one place."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from bnfuse.runtime.program.plan import Interval, lifetimes, lower_bound, place, tightest_gap
from bnfuse.runtime.program.program import Buffer, Launch


def launch(*storages: int) -> Launch:
    return Launch("forward", 0, "node", tuple(Buffer(s, "in") for s in storages))


def test_a_storage_lives_from_its_first_to_its_last_launch():
    found = lifetimes([launch(0, 1), launch(1), launch(0, 2)], {0: 64, 1: 128, 2: 64})
    assert found == [Interval(0, 64, 0, 2), Interval(1, 128, 0, 1), Interval(2, 64, 2, 2)]


def test_a_storage_of_another_region_and_an_unused_one_are_not_placed():
    assert lifetimes([launch(0, 5)], {0: 64, 1: 64}) == [Interval(0, 64, 0, 0)]


def test_a_chain_of_layers_needs_room_for_two():
    chain = [Interval(i, 1024, i, i + 1) for i in range(19)]
    placed = place(chain)
    assert placed.bytes == 2048
    assert {placed.offsets[i] for i in range(19)} == {0, 1024}


def test_offsets_are_aligned():
    placed = place([Interval(0, 4, 0, 1), Interval(1, 4, 0, 1)])
    assert placed.offsets == {0: 0, 1: 64}
    assert placed.bytes == 128


def test_the_tightest_gap_wins():
    assert tightest_gap(np.array([0, 256, 384]), np.array([64, 320, 448]), 64) == 320
    assert tightest_gap(np.array([0, 128]), np.array([64, 192]), 128) == 192
    assert tightest_gap(np.array([0, 64]), np.array([256, 128]), 64) == 256
    assert tightest_gap(np.array([], np.int64), np.array([], np.int64), 64) == 0


intervals = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(0, 20), st.integers(0, 10)).map(lambda t: (t[0], t[1], t[1] + t[2])),
    max_size=30,
).map(lambda items: [Interval(i, *item) for i, item in enumerate(items)])


@given(intervals)
@settings(max_examples=100, deadline=None)
def test_living_storages_never_overlap(items):
    placed = place(items)
    for i, a in enumerate(items):
        assert placed.offsets[a.storage] % 64 == 0
        for b in items[i + 1 :]:
            if a.first <= b.last and b.first <= a.last:
                apart_below = placed.offsets[a.storage] + a.bytes <= placed.offsets[b.storage]
                apart_above = placed.offsets[b.storage] + b.bytes <= placed.offsets[a.storage]
                assert apart_below or apart_above
    assert placed.bytes >= lower_bound(items, 32)
