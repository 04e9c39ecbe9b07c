"""The world of GPUs: how ranks find each other, what NCCL is called with, and how waiting for a lost rank ends."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda.bindings.driver import CUresult
from fake_cuda import FakeCuda, floats
from fake_nccl import FakeNccl, Result
from thread_ranks import Meeting, ThreadWorld, together

from bnfuse.core import nvidia
from bnfuse.core.errors import BnfuseError, LostRankError
from bnfuse.parallel import nccl
from bnfuse.parallel.nccl import NcclWorld, Piece, gpu_world, local_gpu, open_nccl, within


class Machine:
    """GPUs of one machine and ranks on it: what the bindings are in the thread of each rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int = 2, gpus: int = 2) -> None:
        meeting = Meeting(ranks)
        self.worlds = [ThreadWorld(meeting, rank) for rank in range(ranks)]
        self.fakes = [FakeCuda(gpus=gpus) for _ in range(ranks)]
        self.nccls = [FakeNccl(world, fake) for world, fake in zip(self.worlds, self.fakes, strict=True)]
        self._mine = threading.local()
        monkeypatch.setattr(nvidia, "bindings", lambda: self.fakes[self._mine.rank])
        monkeypatch.setattr(nccl, "bindings", lambda: self.nccls[self._mine.rank])
        monkeypatch.setattr(nccl, "within", lambda limit, call, what: call())  # in the rank's own thread

    def run(self, work: Callable[[ThreadWorld], Any]) -> list[Any]:
        """On each rank."""

        def one(world: ThreadWorld) -> Any:
            self._mine.rank = world.rank
            return work(self.worlds[world.rank])

        return together(len(self.worlds), one)

    def open(self) -> list[NcclWorld]:
        return self.run(open_nccl)

    def refusals(self) -> list[str]:
        """What each rank says."""

        def one(world: ThreadWorld) -> str:
            with pytest.raises(BnfuseError) as caught:
                open_nccl(world)
            return str(caught.value)

        return self.run(one)


def test_each_rank_gets_the_gpu_of_its_place_on_the_machine(monkeypatch):
    machine = Machine(monkeypatch)
    worlds = machine.open()
    assert [(world.rank, world.size, world.device, world.name) for world in worlds] == [
        (0, 2, 0, "NCCL"),
        (1, 2, 1, "NCCL"),
    ]
    assert [fake.contexts for fake in machine.fakes] == [[7], [8]]  # current: whatever comes later takes that GPU


def test_a_gpu_that_the_script_has_chosen_is_kept(monkeypatch):
    fake = FakeCuda(gpus=4)
    monkeypatch.setattr(nvidia, "bindings", lambda: fake)
    fake.contexts.append(7 + 3)
    assert (local_gpu(1).ordinal, fake.contexts) == (3, [10])
    fake.contexts.clear()
    assert (local_gpu(6).ordinal, fake.contexts) == (2, [9])  # a second machine's ranks, or one GPU shown to each


def test_all_ranks_are_told_of_one_that_cannot_take_part(monkeypatch):
    machine = Machine(monkeypatch)
    machine.fakes[1].fail["cuInit"] = CUresult.CUDA_ERROR_NO_DEVICE
    first, second = machine.refusals()
    assert (
        first
        == second
        == "rank 1: there is no NVIDIA GPU here: compile for cpu, or run the exported step on a GPU machine"
    )


def test_two_ranks_on_one_gpu_and_two_versions_of_nccl_are_refused_on_both(monkeypatch):
    for found in Machine(monkeypatch, gpus=1).refusals():
        assert found.startswith("ranks 0 and 1 have the same GPU: start one rank a GPU")
    machine = Machine(monkeypatch)
    machine.nccls[1].version = 22700
    for found in machine.refusals():
        assert found == "rank 0 has NCCL 22809, rank 1 has 22700: install the same on all machines"


def test_what_is_missing_is_one_line(monkeypatch):
    nccl.bindings.cache_clear()
    monkeypatch.setitem(sys.modules, "nccl.bindings.nccl", None)
    with pytest.raises(BnfuseError, match=r"need the package nccl4py .*: install bnfuse\[nccl\]"):
        nccl.bindings()

    class NoLibrary:
        def get_version(self) -> int:
            raise RuntimeError('Failure finding "libnccl.so.2"\nand more')

    monkeypatch.setitem(sys.modules, "nccl.bindings.nccl", NoLibrary())
    with pytest.raises(BnfuseError, match=r"^NCCL's library cannot be used .*libnccl.so.2.*\[nccl\]$") as caught:
        nccl.bindings()
    assert "\n" not in str(caught.value)
    nccl.bindings.cache_clear()


def test_messages_of_several_pieces_are_one_and_types_are_those_of_the_pieces(monkeypatch):
    machine = Machine(monkeypatch)
    worlds = machine.open()

    def work(given: ThreadWorld) -> list[np.ndarray]:
        rank = given.rank
        fake, world = machine.fakes[rank], worlds[rank]
        _, address = fake.cuMemAlloc(1024)
        floats(address, 4)[...] = [1, 2, 3, 4 + rank]
        floats(address + 64, 3, "bfloat16")[...] = [0.5, 100, 1 + rank]
        floats(address + 128, 2)[...] = [rank, 10 + rank]
        own, all_ = Piece(address + 128, 2), Piece(address + 192, 4)
        world.enqueue_sums([Piece(address, 4), Piece(address + 64, 3, "bfloat16")], 0)
        world.enqueue_gathers([(own, all_)], 0)
        with pytest.raises(BnfuseError, match="2 ranks do not give 3 elements of 2 each"):
            world.enqueue_gathers([(own, Piece(address + 192, 3))], 0)
        return [floats(address, 4), floats(address + 64, 3, "bfloat16"), floats(address + 192, 4)]

    for sums, halves, everyones in machine.run(work):
        np.testing.assert_array_equal(sums, [2, 4, 6, 9])
        np.testing.assert_array_equal(halves.astype(float), [1, 200, 3])
        np.testing.assert_array_equal(everyones, [0, 10, 1, 11])
    assert machine.nccls[0].log == [[("sum", 4), ("sum", 3)], [("gather", 2)]]


def made(monkeypatch: pytest.MonkeyPatch, limit: float = 0.05) -> tuple[NcclWorld, FakeNccl]:
    world = ThreadWorld(Meeting(1), 0)
    world.limit = limit
    fake = FakeNccl(world, FakeCuda())
    return NcclWorld(world, fake, "communicator", 0), fake


def test_waiting_ends_when_the_gpu_is_done_and_at_the_limit(monkeypatch):
    world, fake = made(monkeypatch)
    answers = iter([False] * 3 + [True])
    world.watch(lambda: next(answers))
    start = time.monotonic()
    with pytest.raises(LostRankError, match=r"rank 0 of 1 has waited 0.05 s for the other GPUs: a rank has ended"):
        world.watch(lambda: False)
    assert time.monotonic() - start < 2
    assert fake.aborted
    with pytest.raises(LostRankError):  # nothing is enqueued, and nothing waited for, after that
        world.enqueue_sums([Piece(64, 4)], 0)
    with pytest.raises(LostRankError):
        world.watch(lambda: True)


def test_an_error_that_nccl_meets_ends_the_waiting_before_the_limit(monkeypatch):
    world, fake = made(monkeypatch, limit=60)
    fake.async_error = Result.InProgress
    answers = iter([False] * 200 + [True])
    world.watch(lambda: next(answers))
    fake.async_error = Result.RemoteError
    with pytest.raises(LostRankError, match=r"rank 0 of 1 has lost another one .NCCL: remote process exited"):
        world.watch(lambda: False)
    assert fake.aborted


def test_what_has_no_limit_of_its_own_gets_one():
    def fails() -> Any:
        raise ValueError("as it is")

    assert within(5, lambda: 3, "meet") == 3
    with pytest.raises(ValueError, match="as it is"):
        within(5, fails, "meet")
    late = threading.Event()
    with pytest.raises(LostRankError, match=r"the ranks did not meet within 0.01 s: one of them is gone, or stopped"):
        within(0.01, lambda: late.wait(5), "meet")
    late.set()


def test_a_world_of_gpus_is_told_from_one_of_hosts(monkeypatch):
    world, _ = made(monkeypatch)
    assert gpu_world(world) is world and gpu_world(None) is None
    with pytest.raises(BnfuseError, match="this world is threads"):
        gpu_world(ThreadWorld(Meeting(1), 0))


# -- memory that other ranks' kernels write to ---------------------------------------------------------------------


def test_each_rank_sees_the_memory_of_all_and_its_kernels_hear_that_it_has_given_up(monkeypatch):
    machine = Machine(monkeypatch)
    worlds = machine.open()
    assert all(world.maps for world in worlds)

    def share(world: ThreadWorld) -> tuple[int, list[int]]:
        _, block = machine.fakes[world.rank].cuMemAlloc(16)
        floats(block, 2, "uint64")[:] = world.rank, 0
        return block, worlds[world.rank].share(block, block + 8, machine)

    shared = machine.run(share)
    blocks = [block for block, _ in shared]
    assert [seen for _, seen in shared] == [blocks, blocks]

    def wait(world: ThreadWorld) -> None:
        if world.rank == 1:
            worlds[1].limit = 0.05
            with pytest.raises(LostRankError):
                worlds[1].watch(lambda: False)

    machine.run(wait)
    assert [floats(block, 2, "uint64").tolist() for block in blocks] == [[0, 0], [1, 1]]


@pytest.mark.parametrize("call", ["cuMemAlloc", "cuIpcGetMemHandle", "cuIpcOpenMemHandle"])
def test_gpus_of_which_one_does_not_reach_another_exchange_by_nccl_alone(monkeypatch, call):
    machine = Machine(monkeypatch)
    machine.fakes[1].fail[call] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    worlds = machine.open()
    assert [world.maps for world in worlds] == [False, False]
    with pytest.raises(BnfuseError, match="these do not: compile it again here"):
        worlds[0].share(64, 72, machine)
