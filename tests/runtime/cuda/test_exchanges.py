"""Exchanges between GPUs in a step's graph: what they wait for, what waits for them, and what two ranks get of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import thread_ranks
from cuda.bindings.driver import CUresult
from fake_cuda import FakeCuda, FakeKernel, floats, install
from fake_nccl import FakeNccl
from thread_ranks import Meeting, ThreadWorld

from bnfuse.core.errors import BnfuseError, LostRankError
from bnfuse.parallel.nccl import NcclWorld
from bnfuse.runtime.backends.cuda import driver as own
from bnfuse.runtime.backends.cuda.driver import Driver
from bnfuse.runtime.backends.cuda.runner import CudaRunner
from bnfuse.runtime.backends.execution import Compiled
from bnfuse.runtime.kernels.cuda.container import Code, Stage, pack
from bnfuse.runtime.program import program as p
from bnfuse.runtime.targets.target import CudaTarget

TARGET = CudaTarget("sm_90", 132)
STORAGES = [
    p.Storage(p.GRADIENTS, 0, 10),
    p.Storage(p.GRADIENTS, 64, 16),
    p.Storage(p.GRADIENTS, 128, 8),
    p.Storage(p.ARENA, 0, 4),
    p.Storage(p.ARENA, 64, 8),
    p.Storage(p.PARAMETERS, 0, 48),
    p.Storage(p.GRADIENTS, 0, 48),
]
KERNELS = ["late", "early", "busy", "more", "apply"]


def program(ranks: int = 2) -> p.Program:
    """Gradients of two messages, statistics that are gathered between them, and an update."""

    def launch(kernel: int, *buffers: tuple[int, Any], phase: p.Phase = "backward") -> p.Launch:
        return p.Launch(phase, kernel, "node", tuple(p.Buffer(storage, access) for storage, access in buffers))

    launches = [
        launch(0, (2, "out")),
        launch(1, (0, "out"), (1, "out")),
        launch(p.SUM, (1, "inout"), (0, "inout")),
        launch(2, (3, "out")),
        launch(p.GATHER, (3, "in"), (4, "out")),
        launch(3, (2, "inout"), (3, "out")),
        launch(p.SUM, (2, "inout")),
        launch(4, (5, "inout"), (6, "in"), (4, "in"), phase="update"),
    ]
    regions = {p.GRADIENTS: 192, p.ARENA: 128, p.PARAMETERS: 192}
    made = p.Program(
        regions,
        STORAGES,
        KERNELS,
        launches,
        {},
        {},
        {},
        {},
        {},
        {},
        {"data": [], "labels": []},
        p.Report(),
        ranks=ranks,
    )
    p.check(made)
    return made


def codes(made: p.Program) -> list[bytes]:
    found = {}
    for launch in made.launches:
        if not launch.exchanges:
            names = tuple(f"a{place}" for place in range(len(launch.arguments)))
            stage = Stage(KERNELS[launch.kernel], (1, 1, 1), 32, 0, names)
            found[launch.kernel] = pack(Code((stage,), tuple((name, "buffer") for name in names), "sm_90", b"code"))
    return [found[kernel] for kernel in range(len(KERNELS))]


def serve(fake: FakeCuda, rank: int) -> None:
    """Kernels of a rank: what it writes tells which rank it was."""

    def fill(address: int, count: int, value: float) -> None:
        floats(address, count)[...] = value + np.arange(count)

    def more(g2: int, x: int) -> None:
        floats(g2, 8)[...] *= 2
        floats(x, 4)[...] = -1000

    def apply(parameters: int, gradients: int, everyones: int) -> None:
        floats(parameters, 48)[...] -= floats(gradients, 48)
        floats(parameters, 48)[40:] += floats(everyones, 8)

    def early(g0: int, g1: int) -> None:
        fill(g0, 10, 10 * (rank + 1))
        fill(g1, 16, 100 * (rank + 1))

    buffer = "buffer"
    fake.kernels = {
        "late": FakeKernel((buffer,), lambda g2: fill(g2, 8, rank + 1)),
        "early": FakeKernel((buffer,) * 2, early),
        "busy": FakeKernel((buffer,), lambda x: fill(x, 4, 7 * (rank + 1))),
        "more": FakeKernel((buffer,) * 2, more),
        "apply": FakeKernel((buffer,) * 3, apply),
    }


def expected() -> np.ndarray:
    """What parameters are after one step of both ranks, from zero on."""
    total = np.zeros(48, np.float32)
    for rank in range(2):
        total[:10] -= 10 * (rank + 1) + np.arange(10)
        total[16:32] -= 100 * (rank + 1) + np.arange(16)
        total[32:40] -= 2 * (rank + 1 + np.arange(8))
    total[40:] += [7, 8, 9, 10, 14, 15, 16, 17]
    return total


class Rank:
    """A runner of the program in the memory of a stand-in."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.fake = FakeCuda(seed=rank)
        serve(self.fake, rank)
        world = ThreadWorld(meeting, rank)
        self.nccl = FakeNccl(world, self.fake)
        self.world = NcclWorld(world, self.nccl, "communicator", rank)
        made = program()
        self.runner = CudaRunner(Compiled(made, codes(made)), TARGET, world=self.world)

    def step(self, *, graph: bool = True) -> np.ndarray:
        if graph:
            self.runner.run([p.Part("backward"), p.Part("update")], {})
        else:
            self.times = self.runner.profile(["backward", "update"], {})
        return self.runner.memory.load(STORAGES[5])


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Rank]:
    """Two ranks, each with a GPU of its own."""
    meeting = Meeting(2)
    made = [Rank(meeting, rank) for rank in range(2)]
    drivers = [Driver(rank.fake, ordinal) for ordinal, rank in enumerate(made)]
    monkeypatch.setattr(own, "_driver", lambda ordinal: drivers[ordinal])
    return made


def together(ranks: list[Rank], work: Any) -> list[Any]:
    return thread_ranks.together(len(ranks), lambda world: work(ranks[world.rank]))


def test_two_ranks_get_the_sum_of_both_in_the_graph_and_outside_of_it(ranks):
    for index, graph in enumerate((True, True, False), 1):
        for found in together(ranks, lambda rank, graph=graph: rank.step(graph=graph)):
            np.testing.assert_array_equal(found, index * expected())
    for rank in ranks:
        assert (
            rank.nccl.log == [[("sum", 16), ("sum", 10)], [("gather", 4)], [("sum", 8)]] * 2
        )  # once captured, once by `profile`
        assert rank.fake.count("cuGraphLaunch") == 2 and rank.fake.count("cuStreamBeginCapture") == 1
        lines = [
            (line.kernel, line.work and (line.work.kind, line.work.bytes))
            for line in rank.times
            if not line.work or line.work.kind == "exchange"
        ]
        assert [line for line in lines if line[1]] == [
            ("sum", ("exchange", 104)),
            ("gather", ("exchange", 16)),
            ("sum", ("exchange", 32)),
        ]


def test_an_exchange_waits_for_its_writers_and_for_the_one_before_it_and_only_readers_wait_for_it(ranks):
    together(ranks, Rank.step)
    (nodes,) = ranks[0].fake.executables.values()
    names = [f"{node.symbol}{index}" for index, node in enumerate(nodes)]
    edges = {name: {names[before] for before in node.after} for name, node in zip(names, nodes, strict=True)}
    assert edges == {
        "late0": set(),
        "early1": set(),
        "sum+sum2": {"early1"},
        "busy3": set(),
        "gather4": {"sum+sum2", "busy3"},
        "more5": {"late0", "gather4"},  # it writes over what was gathered
        "sum6": {"more5"},
        "apply7": {"sum6"},
    }


def test_exchanges_go_into_a_graph_that_the_caller_captures(ranks):
    def work(rank: Rank) -> np.ndarray:
        stream = 77
        rank.runner.stream = stream
        rank.fake.begin_capture(stream)
        rank.runner.run([p.Part("backward"), p.Part("update")], {})
        replay = rank.fake.end_capture(stream)
        rank.fake.contexts.append(7)
        replay()
        replay()
        rank.fake.contexts.pop()
        return rank.runner.memory.load(STORAGES[5])

    for found in together(ranks, work):
        np.testing.assert_array_equal(found, 2 * expected())


def test_waiting_for_the_gpu_has_a_limit(ranks):
    together(ranks, Rank.step)
    first = ranks[0]
    first.world.limit = 0.02
    first.fake.fail["cuStreamQuery"] = CUresult.CUDA_ERROR_NOT_READY
    first.fake.log.clear()
    with pytest.raises(LostRankError, match=r"^rank 0 of 2 has waited 0.02 s for the other GPUs: a rank has ended"):
        first.runner.memory.load(STORAGES[5])
    assert first.nccl.aborted and not {"cuMemcpyDtoHAsync", "cuStreamSynchronize"} & {*first.fake.log}  # they wait on
    first.fake.fail.clear()
    first.fake.log.clear()
    with pytest.raises(LostRankError):
        first.runner.memory.load(STORAGES[5])
    with pytest.raises(LostRankError):
        first.runner.memory.store(STORAGES[5], np.zeros(48, np.float32))
    assert not [name for name in first.fake.log if name.startswith("cuMemcpy")]


def test_a_failure_while_the_graph_is_made_leaves_the_stream_usable(ranks):
    for rank in ranks:
        rank.nccl.fail = "InvalidUsage (5)"
        with pytest.raises(BnfuseError, match=r"^NCCL fails in an exchange: InvalidUsage"):
            rank.step()
        assert not rank.fake.captures
        rank.nccl.fail = ""
    for found in together(ranks, Rank.step):
        np.testing.assert_array_equal(found, expected())


def test_a_step_of_several_ranks_needs_their_world_and_one_of_gpus(monkeypatch):
    fake = install(monkeypatch, FakeCuda())
    serve(fake, 0)
    made = program()
    alone = CudaRunner(Compiled(made, codes(made)), TARGET)
    with pytest.raises(BnfuseError, match=r"compiled for 2 ranks: start them with torchrun or mpirun"):
        alone.run([p.Part("backward")], {})
    with pytest.raises(BnfuseError, match=r"this world is threads: open it with open_world\(target='cuda'\)"):
        CudaRunner(Compiled(made, codes(made)), TARGET, world=ThreadWorld(Meeting(2), 0))
