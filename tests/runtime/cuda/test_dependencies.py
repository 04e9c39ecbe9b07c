"""Dependencies of launches: small cases by hand, and random ones against the definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bnfuse.runtime.backends.cuda.dependencies import Access, Slot, accesses_of, dependencies, slot_of
from bnfuse.runtime.program import program as p


def read(start: int, stop: int, region: str = "arena") -> Access:
    return Access(region, start, stop, True, False)


def write(start: int, stop: int, region: str = "arena") -> Access:
    return Access(region, start, stop, False, True)


def test_reading_waits_for_the_writer_and_readers_not_for_each_other():
    assert dependencies([[write(0, 64)], [read(0, 64)], [read(0, 64)]]) == [(), (0,), (0,)]


def test_writing_waits_for_all_readers_and_for_the_writer():
    assert dependencies([[write(0, 64)], [read(0, 64)], [read(0, 32)], [write(0, 64)]]) == [(), (0,), (0,), (1, 2)]
    assert dependencies([[write(0, 64)], [write(0, 64)], [read(0, 64)]]) == [(), (0,), (1,)]


def test_bytes_that_do_not_meet_are_independent():
    assert dependencies([[write(0, 64)], [write(64, 128)], [read(64, 128)], [read(32, 96)]]) == [(), (), (1,), (0, 1)]
    assert dependencies([[write(0, 64)], [write(0, 64, "outputs")], [read(0, 64)]]) == [(), (), (0,)]


def test_memory_that_is_used_again_waits_for_its_former_owner():
    chain = [[write(0, 64)], [read(0, 64), write(64, 128)], [read(64, 128), write(0, 32)], [read(0, 32)]]
    assert dependencies(chain) == [(), (0,), (1,), (2,)]


def test_what_is_implied_is_left_out():
    launches = [[write(0, 64)], [read(0, 64), write(64, 128)], [read(0, 128)]]
    assert dependencies(launches) == [(), (0,), (1,)]


def test_a_launch_does_not_wait_for_itself():
    both = Access("arena", 0, 64, True, True)
    assert dependencies([[both], [both, both], [read(0, 64), write(0, 64)]]) == [(), (0,), (1,)]
    assert dependencies([[read(5, 5)], [write(5, 5)]]) == [(), ()]


def slot(start: int, stop: int, *, writes: bool, storage: int = 0) -> Access:
    return Access("arena", 0, 1024, not writes, writes, storage, Slot(start, stop, 256))


def test_slots_of_one_buffer_are_independent_where_their_channels_are():
    launches = [
        [slot(0, 32, writes=True)],
        [slot(32, 64, writes=True)],
        [slot(0, 64, writes=False)],
        [slot(64, 96, writes=True)],
        [slot(0, 96, writes=False)],
        [slot(32, 64, writes=True)],
    ]
    assert dependencies(launches) == [(), (), (0, 1), (), (0, 1, 3), (2, 4)]


def test_slots_of_different_storages_are_not_compared():
    launches = [[slot(0, 32, writes=True)], [slot(32, 64, writes=True, storage=1)], [write(0, 64)]]
    assert dependencies(launches) == [(), (0,), (1,)]


def test_a_slot_is_the_channels_from_its_offset_on():
    assert slot_of((32, 256), 64) == Slot(64, 96, 256)
    assert slot_of((256, 256), 0) is None and slot_of(None, 0) is None and slot_of((32, 256), None) is None
    assert slot_of((32, 256), 240) is None


def test_accesses_follow_the_arguments_by_name():
    storages = [p.Storage("arena", 64, 256), p.Storage("inputs", 0, 4, "int64")]
    buffers = {"x": p.Buffer(0, "inout"), "labels": p.Buffer(1, "in"), "other": p.Buffer(1, "out")}
    arguments = {**buffers, "x_offset": 8, "lr": p.Scalar("lr")}
    found = accesses_of(arguments, ["x", "labels", "x_offset", "lr"], storages, {"x": (8, 32)})
    assert found == [
        Access("arena", 64, 64 + 1024, True, True, 0, Slot(8, 16, 32)),
        Access("inputs", 0, 32, True, False, 1, None),
    ]


def random_launches(rng: np.random.Generator) -> list[list[Access]]:
    launches = []
    for _ in range(25):
        accesses = []
        for _ in range(rng.integers(1, 4)):
            mode = rng.integers(3)
            reads, writes = mode != 1, mode != 0
            if rng.random() < 0.5:  # a slot of one of two buffers that overlap
                storage = int(rng.integers(2))
                first, count = rng.integers(0, 6), rng.integers(1, 3)
                accesses.append(
                    Access(
                        "arena", 8 * storage, 8 * storage + 16, reads, writes, storage, Slot(first, first + count, 8)
                    )
                )
            else:
                start, size = rng.integers(0, 24), rng.integers(1, 10)
                accesses.append(Access("arena", int(start), int(start + size), reads, writes))
        launches.append(accesses)
    return launches


def conflict(a: Access, b: Access) -> bool:
    """The definition."""
    if a.region != b.region or a.stop <= b.start or b.stop <= a.start or not (a.writes or b.writes):
        return False
    if a.storage == b.storage and a.slot and b.slot and a.slot.stride == b.slot.stride:
        return not (a.slot.stop <= b.slot.start or b.slot.stop <= a.slot.start)
    return True


@pytest.mark.parametrize("seed", range(40))
def test_the_edges_order_exactly_what_has_to_be_ordered(seed):
    launches = random_launches(np.random.default_rng(seed))
    count = len(launches)
    wanted = [
        {i for i in range(j) if any(conflict(a, b) for a, b in itertools.product(launches[i], launches[j]))}
        for j in range(count)
    ]
    edges = dependencies(launches)
    assert all(set(found) <= needed for found, needed in zip(edges, wanted, strict=True)), "an edge without a reason"

    def reached(direct: list[set[int]]) -> list[set[int]]:
        closed: list[set[int]] = []
        for own in direct:
            closed.append(own.union(*(closed[i] for i in own)))
        return closed

    closed = reached([set(found) for found in edges])
    assert closed == reached(wanted)
    for found in edges:
        assert not any(a in closed[b] for a, b in itertools.permutations(found, 2)), "an edge that others imply"
