"""When a runner on a CPU waits for an exchange: before the first launch that touches the bytes, and not earlier."""

from __future__ import annotations

import numpy as np
import pytest
from thread_ranks import ThreadWorld, together

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.backends.cpu.exchanging import Exchanges, waits_of
from bnfuse.runtime.backends.memory import Memory
from bnfuse.runtime.program import program as p

ARENA = (p.ARENA, 0), (p.ARENA, 64), (p.ARENA, 128), (p.ARENA, 64)  # the last lies where the second does


def program_of(*launches: tuple[str, int, dict[int, str]], storages=ARENA, elements: int = 4) -> p.Program:
    """Launches as phase, kernel, and the storages that they access."""
    made = [
        p.Launch(phase, kernel, f"{index}", tuple(p.Buffer(*pair) for pair in touched.items()))  # type: ignore[arg-type]
        for index, (phase, kernel, touched) in enumerate(launches)
    ]
    held = [p.Storage(region, offset, elements) for region, offset in storages]
    regions = {region: 256 for region, _ in storages}
    return p.Program(regions, held, ["k"], made, {}, {}, {}, {}, {}, {}, {}, p.Report(), ranks=2)


def test_a_reader_waits_and_others_do_not() -> None:
    program = program_of(
        ("forward", 0, {0: "out"}),
        ("forward", p.SUM, {0: "inout"}),
        ("forward", 0, {1: "in"}),
        ("backward", 0, {0: "in"}),
        ("backward", 0, {0: "inout"}),
    )
    assert waits_of(program) == {("backward", 0): (("forward", 1),)}


def test_what_was_given_the_same_bytes_waits_too() -> None:
    program = program_of(
        ("forward", p.GATHER, {1: "in", 2: "out"}),
        ("forward", 0, {3: "in"}),  # reading what is read is no matter
        ("forward", 0, {3: "out"}),
    )
    assert waits_of(program) == {("forward", 2): (("forward", 0),)}


def test_exchanges_of_one_buffer_wait_for_each_other() -> None:
    program = program_of(("forward", p.SUM, {0: "inout"}), ("update", p.SUM, {0: "inout"}))
    assert waits_of(program) == {("update", 0): (("forward", 0),)}


def test_exchanges_begin_at_their_place_and_end_where_they_must() -> None:
    program = program_of(
        ("forward", p.SUM, {0: "inout"}),
        ("forward", p.GATHER, {1: "in", 2: "out"}),
        ("forward", 0, {0: "in"}),
        storages=((p.ARENA, 0), (p.ARENA, 64), (p.OUTPUTS, 128)),
    )
    program.storages[2] = p.Storage(p.OUTPUTS, 128, 8)

    def work(world: ThreadWorld) -> tuple[np.ndarray, np.ndarray, list[tuple[str, str, int]]]:
        memory = Memory(program)
        exchanges = Exchanges(program, memory, world)
        memory.flat(0)[:] = [1, 2, 3, 4 + world.rank]
        memory.flat(1)[:] = world.rank
        for index in (0, 1):
            exchanges.before(("forward", index))
            exchanges.begin(("forward", index))
        exchanges.before(("forward", 2))
        first = memory.flat(0).copy()
        exchanges.finish()
        return first, memory.flat(2).copy(), world.log

    for first, everyone, log in together(2, work):
        assert first.tolist() == [2, 4, 6, 9]
        assert everyone.tolist() == [0] * 4 + [1] * 4
        assert [line[:2] for line in log[:2]] == [("begin", "sum"), ("begin", "gather")]


def test_without_a_world_nothing_is_exchanged() -> None:
    program = program_of(("forward", p.SUM, {0: "inout"}))
    with pytest.raises(BnfuseError, match="there is no world"):
        Exchanges(program, Memory(program), None).begin(("forward", 0))


@pytest.mark.parametrize(
    ("kernel", "touched"),
    [
        (p.SUM, {0: "in"}),
        (p.SUM, {}),
        (p.GATHER, {0: "in"}),
        (p.GATHER, {0: "in", 1: "out"}),
        (p.GATHER, {1: "out", 0: "in"}),
    ],
)
def test_a_program_with_an_exchange_that_cannot_be_is_refused(kernel: int, touched: dict[int, str]) -> None:
    with pytest.raises(ValueError, match="exchanges"):
        p.check(program_of(("forward", kernel, touched)))
