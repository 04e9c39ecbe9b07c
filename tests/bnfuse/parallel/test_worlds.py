"""Worlds of MPI and gloo: sums against float64, the same bits on all ranks, and what happens when a rank is gone."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types
from typing import Any

import launched_ranks
import numpy as np
import pytest
from launched_ranks import arrays_of, by_mpirun, by_variables
from thread_ranks import together

from bnfuse.core.errors import BnfuseError, LostRankError
from bnfuse.parallel import Launched, mpi, open_world, peers, waiting
from bnfuse.parallel.mpi import check_same
from bnfuse.parallel.packing import packed, sum_in_order, unpack
from bnfuse.parallel.waiting import patience, wait_until
from bnfuse.parallel.world import kind_for, opened

LIMIT = 2.0  # seconds, of the tests in which a rank is gone


def results(folder: pathlib.Path, world: str, what: object, size: int) -> list[dict[str, np.ndarray]]:
    return [dict(np.load(folder / f"{world}-{what}-{rank}.npz")) for rank in range(size)]


def check_exchanged(found: list[dict[str, np.ndarray]], deterministic: bool) -> None:
    """Sums are those of float64 to rounding, or exactly those in the order of ranks; all ranks have the same bits."""
    size = len(found)
    given = [arrays_of(rank) for rank in range(size)]
    for name, index in (("large", 0), ("small", 1), ("other", 2)):
        rows = np.stack([arrays[index] for arrays in given])
        for one in found:
            assert np.array_equal(one[name], found[0][name])
            if deterministic:
                assert np.array_equal(one[name], sum_in_order(rows))
            else:
                np.testing.assert_allclose(one[name], rows.astype(np.float64).sum(0), atol=2e-6)
    again = np.stack([arrays[0] for arrays in given]).astype(np.float64)
    for rank, one in enumerate(found):
        np.testing.assert_allclose(one["again"][:9], again[:, :9].sum(0), atol=2e-6)
        assert one["again"][9] == given[rank][0][9], "what is not exchanged stays"
        np.testing.assert_allclose(one["again"][10:], again[:, 10:].sum(0), atol=2e-6)
        assert one["everyone"].tolist() == [float(r) for r in range(size) for _ in range(5)]


@pytest.mark.mpi
def test_exchanges_by_mpi(tmp_path: pathlib.Path) -> None:
    status, output, _ = by_mpirun(3, "exchange", str(tmp_path))
    assert status == 0, output
    for deterministic in (False, True):
        check_exchanged(results(tmp_path, "MPI", deterministic, 3), deterministic)


@pytest.mark.mpi
def test_a_step_under_mpirun_is_that_of_threads_bit_by_bit(tmp_path: pathlib.Path) -> None:
    """Where sums are taken in the order of ranks."""
    status, output, _ = by_mpirun(2, "train", str(tmp_path))
    assert status == 0, output
    wanted = together(2, launched_ranks.train)
    for found, one in zip(results(tmp_path, "MPI", "train", 2), wanted, strict=True):
        assert found.keys() == one.keys()
        for name, value in one.items():
            assert np.array_equal(found[name], value), name


@pytest.mark.torch
def test_exchanges_by_gloo_and_a_rank_that_is_gone_ends_the_others(tmp_path: pathlib.Path) -> None:
    ended = by_variables(3, "exchange", str(tmp_path), "die", f"{LIMIT}")
    for deterministic in (False, True):
        check_exchanged(results(tmp_path, "gloo", deterministic, 3), deterministic)
    assert ended[1][0] == -9
    for rank in (0, 2):
        assert ended[rank][0] == 1 and f"LostRankError: rank {rank} of 3" in ended[rank][1], ended[rank][1]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("how", "says", "expected"),
    [
        ("stop", f"of 3 has waited {LIMIT:g} s for the others", 1),
        ("raise", "ValueError: what went wrong", 1),
        ("end", "bnfuse: it is over", 7),
        ("die", "Killed", 9),
    ],
)
def test_when_a_rank_is_gone_all_end(how: str, says: str, expected: int, tmp_path: pathlib.Path) -> None:
    status, output, seconds = by_mpirun(3, "leave", str(tmp_path), how, f"{LIMIT}")
    assert status == expected, output
    assert says in output
    assert seconds < LIMIT + 10
    if how == "stop":
        assert "LostRankError: rank 0" in output or "LostRankError: rank 2" in output
        assert "Go on from the last checkpoint" in output


@pytest.mark.mpi
def test_a_rank_that_is_stopped_before_it_begins_is_not_waited_for_longer_than_the_limit(tmp_path):
    """MPI itself would wait for ever, and keep Python's lock."""
    status, output, seconds = by_mpirun(3, "leave", str(tmp_path), "begin", f"{LIMIT}")
    assert status != 0, output  # the launcher's own, for it ends the others by a signal
    lines = [line for line in output.splitlines() if line.startswith("bnfuse: ")]
    assert len(lines) == 1, output
    told = rf"bnfuse: rank 0 has waited {LIMIT:g} s for the others to begin: process [0-9]+ is stopped"
    assert re.fullmatch(told, lines[0])
    assert seconds < LIMIT + 10


@pytest.mark.skipif(sys.platform != "linux", reason="wants /proc")
def test_what_is_stopped_beside_a_rank_is_a_rank_only_if_it_runs_the_same_program(monkeypatch):
    """A shell from which ranks were started may have an editor that is stopped."""
    monkeypatch.setattr(os, "getppid", os.getpid)
    programs = [[os.path.realpath(sys.executable), "-c", "import time; time.sleep(60)"], ["sleep", "60"]]
    children = [subprocess.Popen(program) for program in programs]
    try:
        for child in children:
            while peers.program_of(child.pid) == peers.program_of(os.getpid()) and child is children[1]:
                time.sleep(0.01)  # it has not begun yet
            child.send_signal(signal.SIGSTOP)
        end = time.monotonic() + 20
        while any(peers.status_of(child.pid)[0] != "T" for child in children) and time.monotonic() < end:
            time.sleep(0.01)
        assert peers.stopped_beside() == [f"process {children[0].pid} is stopped"]
    finally:
        for child in children:
            child.kill()
            child.wait()


class Waiting:
    """A rank that waits."""

    rank, size, limit = 0, 2, 0.05


def test_patience_is_with_ranks_that_work_not_with_one_that_is_stopped(monkeypatch):
    monkeypatch.setattr(waiting, "LOOK", 0.01)
    monkeypatch.setattr(waiting, "stopped_beside", list)
    world, end = Waiting(), time.monotonic() + 0.3
    with patience(world, 60):
        wait_until(lambda: time.monotonic() > end, world, "what takes long")
    assert world.limit == 0.05
    monkeypatch.setattr(waiting, "stopped_beside", lambda: ["process 7 is stopped"])
    with patience(world, 60), pytest.raises(LostRankError, match=r"has waited 0 s .*, and process 7 is stopped"):
        wait_until(lambda: False, world, "what takes long")
    with pytest.raises(LostRankError, match=r"has waited 0.05 s for the others \(what is short\): a rank has ended"):
        wait_until(lambda: False, world, "what is short")


# -- which world ----------------------------------------------------------------------------------------------------

MPIRUN, TORCHRUN, SLURM = (Launched(0, 2, 0, 2, launcher) for launcher in ("mpirun", "torchrun", "slurm"))


@pytest.mark.parametrize(
    ("launched", "target", "environ", "kind"),
    [
        (MPIRUN, "cpu", {}, "mpi"),
        (TORCHRUN, "cpu:znver3", {}, "gloo"),
        (SLURM, "cpu", {}, "gloo"),
        (SLURM, "cpu", {"PMIX_RANK": "0"}, "mpi"),
        (MPIRUN, "cuda:sm_90", {}, "nccl"),
        (TORCHRUN, "cuda", {}, "nccl"),
    ],
)
def test_what_carries_exchanges(launched: Launched, target: str, environ: dict[str, str], kind: str) -> None:
    assert kind_for(launched, target, environ) == kind


def test_one_process_opens_no_world_and_cannot_be_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert open_world() is None
    with pytest.raises(BnfuseError, match="world 'mpi' is of several processes: start them with mpirun"):
        open_world("mpi")
    with pytest.raises(BnfuseError, match="world 'tcp' is unknown: it is one of mpi, gloo, nccl"):
        open_world("tcp")
    with pytest.raises(BnfuseError, match="limit"):
        open_world(limit=-1.0)


@pytest.mark.parametrize(("kind", "target"), [("nccl", "cpu"), ("mpi", "cuda"), ("gloo", "cuda:sm_90")])
def test_a_world_that_does_not_reach_the_target_is_refused(kind: str, target: str) -> None:
    with pytest.raises(BnfuseError, match="nccl is for cuda, mpi and gloo for cpu"):
        opened(kind, MPIRUN, target, 1.0, False)


def test_the_mpirun_of_another_mpi_is_refused() -> None:
    with pytest.raises(
        BnfuseError, match=r"started rank 0 of 2, and MPI \(MPICH 9\) says rank 0 of 1: start the ranks"
    ):
        check_same(MPIRUN, 0, 1, "MPICH 9\nof some day\0")
    check_same(MPIRUN, 0, 2, "")


def test_mpi_that_does_not_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.SimpleNamespace(MPI_Init_thread=lambda *arguments: 16)
    monkeypatch.setattr(mpi, "library_of", lambda mpi: library)
    with pytest.raises(BnfuseError, match=r"MPI does not start \(error 16\): start the ranks with its own mpirun"):
        mpi.initialize(types.SimpleNamespace(THREAD_SERIALIZED=2), Launched(0, 2, 0, 2, "mpirun"), 1e30)


def test_packed_arrays_come_back() -> None:
    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(5, dtype=np.float32)]
    message = packed(arrays, 4)
    assert message.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 0]
    into: list[Any] = [np.zeros((2, 3), np.float32), np.zeros(5, np.float32)]
    unpack(message, into)
    assert all(map(np.array_equal, arrays, into))
