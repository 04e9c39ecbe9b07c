"""`bnfuse train` under mpirun and torchrun: one run, whoever of its ranks dies or stops."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from small_training import plain_graph, save_npz, small_data
from thread_ranks import ThreadWorld, together

import bnfuse
from bnfuse.core.tensor_files import read_safetensors
from bnfuse.runtime import SGD

WHOLE, EPOCHS, LIMIT = 16, 20, 90.0  # images of a step; epochs; seconds that a run may take
TIMES = ("seconds", "images_per_second", "waited")
RUN = {"epochs": EPOCHS, "augment": "flip", "checkpoint_every": 2, "log_every": 1, "threads": 1, "seed": 2}
OPTIONS = [word for name, value in RUN.items() for word in (f"--{name.replace('_', '-')}", str(value))]
MARK = "BNFUSE_TEST_RUN"
MPIRUN = [str(Path(sys.executable).parent / "mpirun"), "-n", "2", sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]


class Launched:
    """A run of two ranks."""

    def __init__(self, launcher: list[str], folder: Path, *arguments: str) -> None:
        self.mark = uuid.uuid4().hex
        command = [*launcher, "-m", "bnfuse", "train", "train2.onnx", *OPTIONS, *arguments]
        own = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "SLURM", "MPI_LOCAL"))}
        environment = {**own, "OMP_NUM_THREADS": "1", MARK: self.mark}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)

    @property
    def ranks(self) -> list[int]:
        """The processes of the ranks that there are, by rank."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words, variables = ((entry / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
            except OSError:
                continue
            rank = next((v for v in variables if v.startswith((b"PMI_RANK=", b"RANK="))), None)
            if rank is not None and f"{MARK}={self.mark}".encode() in variables and b"train" in words[:6]:
                found[int(rank.partition(b"=")[2])] = int(entry.name)
        return [found[rank] for rank in sorted(found)]

    def ended(self, within: float = LIMIT) -> tuple[int, str, list[str]]:
        """Exit status, what was printed, and what bnfuse said of the end; no rank is left."""
        try:
            printed, said = self.process.communicate(timeout=within)
        finally:
            end = time.monotonic() + 3  # the launcher may return before what it has ended
            while (left := self.ranks) and self.process.poll() is not None and time.monotonic() < end:
                time.sleep(0.01)
            for process in (*left, *([self.process.pid] if self.process.poll() is None else [])):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        assert not left
        return self.process.returncode, printed, [line for line in said.splitlines() if "bnfuse: " in line] or [said]

    def struck_after(self, path: Path, lines: int, rank: int, number: signal.Signals) -> int:
        """Send a signal to a rank when the run has written so many lines. Gives its process."""
        end = time.monotonic() + LIMIT
        while not (path.exists() and path.read_bytes().count(b"\n") >= lines):
            assert self.process.poll() is None and time.monotonic() < end, self.process.communicate()
            time.sleep(0.002)
        process = self.ranks[rank]
        os.kill(process, number)
        return process


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Graphs for one and two ranks, data of 3 batches, the run of one process, and that of two ranks that are threads:
    two numbers have one sum, whoever makes it."""
    folder = tmp_path_factory.mktemp("launched")
    for ranks in (1, 2):
        onnx.save(plain_graph(WHOLE // ranks), folder / f"train{ranks}.onnx")
    save_npz(folder / "data.npz", small_data(train=3 * WHOLE, test=20))

    def train(name: str, graph: str, world: ThreadWorld | None = None) -> None:
        places: dict[str, Any] = {"save_to": folder / name, "metrics": folder / f"{name}.jsonl", "world": world}
        optimizer = SGD(lr=0.1, momentum=0.9)
        bnfuse.train(folder / graph, str(folder / "data.npz"), optimizer=optimizer, **RUN, **places)

    train("one", "train1.onnx")
    together(2, lambda world: train("two", "train2.onnx", world))
    return folder


def saved(name: str) -> tuple[str, ...]:
    return ("--data", "data.npz", "--save", name, "--metrics", f"{name}.jsonl", "--resume", "auto")


def lines_of(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def state_of(path: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in read_safetensors(path / "last.safetensors")[0].items()}


def require_close(ours: Path, theirs: Path) -> None:
    """Weights and moments of two runs, to float32's rounding over 60 steps."""
    a, b = (read_safetensors(path / "last.safetensors")[0] for path in (ours, theirs))
    for name in b:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_a_rank_that_is_stopped_ends_the_run_which_goes_on_to_the_bits_of_the_unbroken_one(files):
    run = Launched(MPIRUN, files, *saved("struck"), "--world-timeout", "5")
    process = run.struck_after(files / "struck.jsonl", 30, 1, signal.SIGSTOP)
    status, _, said = run.ended(within=30)
    assert status != 0 and len(said) == 1
    assert said[0].startswith("bnfuse: rank 0 of 2 has waited 5 s for the others: ")
    assert f"rank 1 (process {process}) is stopped" in said[0]
    read_safetensors(files / "struck" / "last.safetensors")  # whole

    status, printed, said = Launched(MPIRUN, files, *saved("struck"), "--json").ended()
    assert status == 0, said
    found = json.loads(printed)
    assert found["ranks"] == 2 and len(found["epochs"]) == EPOCHS
    assert state_of(files / "struck") == state_of(files / "two")
    assert lines_of(files / "struck.jsonl") == lines_of(files / "two.jsonl")
    assert not list((files / "struck").glob(".*.safetensors.*"))
    require_close(files / "struck", files / "one")


@pytest.mark.mpi
@pytest.mark.timeout(120)
def test_what_is_wrong_for_all_ranks_is_one_line(files):
    status, printed, said = Launched(MPIRUN, files, *saved("never"), "--data", "nowhere/").ended()
    assert (status, printed) == (2, "") and len(said) == 1
    assert said[0].startswith("bnfuse: nowhere/: ")


@pytest.mark.torch
@pytest.mark.timeout(200)
def test_under_torchrun_a_killed_rank_is_started_again_and_goes_on(files):
    run = Launched([*TORCHRUN, "--max-restarts=1"], files, *saved("again"))
    run.struck_after(files / "again.jsonl", 40, 1, signal.SIGKILL)
    status, _, said = run.ended()
    assert status == 0, said
    require_close(files / "again", files / "one")
    assert len(lines_of(files / "again.jsonl")) == 4 * EPOCHS


def test_a_process_that_has_a_launchers_variables_may_train_alone(files, monkeypatch, capsys):
    from bnfuse.cli import main

    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.chdir(files)
    words = ["train", "train1.onnx", "--data", "data.npz", "--epochs", "1", "--threads", "1", "--world", "none"]
    assert main(words) == 0
    assert "Trained on 48 images" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--world", "nccl"], "cannot serve a step on 'cpu'"),
        (["--deterministic", "--target", "cuda"], "deterministic is for ranks on CPUs"),
    ],
)
def test_what_all_ranks_know_to_be_wrong_the_first_one_says(words, what, monkeypatch, capsys):
    from bnfuse.cli import main

    monkeypatch.setenv("PMI_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("PMI_RANK", rank)
        assert main(["train", "train1.onnx", "--data", "data.npz", *words]) == 2
        said = capsys.readouterr().err
        assert (what in said and said.count("\n") == 1) if rank == "0" else not said
