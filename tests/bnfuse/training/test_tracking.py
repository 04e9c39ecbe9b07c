"""Where the numbers of a run go: TensorBoard's files, and a table."""

from __future__ import annotations

import csv
import dataclasses
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.training import Options, train_step
from bnfuse.training.metrics import COLUMNS, Metrics, kept_rows


def scalars_in(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard shows of a folder, by tag and step: later files tell from which step on older ones are void."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("events.*")):
        for record in records(path.read_bytes()):
            event = Event.FromString(record)
            if event.session_log.status == SessionLog.START:
                for values in found.values():
                    for step in [step for step in values if step >= event.step]:
                        del values[step]
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def records(data: bytes) -> Iterator[bytes]:
    """The records of a file: length, its checksum, data, its checksum."""
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        yield data[at + 12 : at + 12 + size]
        at += size + 16


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_a_table_has_a_row_an_epoch_and_is_cut_where_a_run_goes_on(new_step, data, tmp_path):
    path = tmp_path / "run.csv"
    history = train_step(new_step(), data, epochs=2, metrics=path, log_every=2)
    found = rows(path)
    assert list(found[0]) == list(COLUMNS)
    assert [row["kind"] for row in found] == ["step", "step", "epoch", "step", "step", "step", "epoch"]
    for row, epoch in zip((row for row in found if row["kind"] == "epoch"), history.epochs, strict=True):
        told = {name: "" if value is None else str(value) for name, value in dataclasses.asdict(epoch).items()}
        assert {name: row[name] for name in told} == told
    assert found[0]["accuracy"] == ""
    lines = path.read_bytes().splitlines(keepends=True)
    assert kept_rows(path, 5) == b"".join(lines[:4])
    assert kept_rows(path, 0) == lines[0]
    path.write_bytes(b"".join(lines[:2]) + lines[2][:-5])  # cut short by a kill
    assert kept_rows(path, 9) == b"".join(lines[:2])
    with Metrics(path, keep=3) as metrics:
        metrics.write(kind="step", epoch=1, step=4, loss=float("nan"))
    assert [row["step"] for row in rows(path)] == ["2", "4"] and rows(path)[1]["loss"] == ""


def test_tensorboard_without_its_writer_is_refused_before_any_work(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(BnfuseError, match=r"pip install 'bnfuse\[tensorboard\]'"):
        Options(1, tensorboard=tmp_path / "runs").check()


@pytest.mark.tensorboard
def test_tensorboard_shows_the_run_and_of_one_that_goes_on_what_an_unbroken_one_shows(new_step, data, tmp_path):
    asked = {"log_every": 2, "checkpoint_every": 3}
    history = train_step(new_step(), data, epochs=3, tensorboard=tmp_path / "a/whole", save_to=tmp_path / "1", **asked)
    step, calls = new_step(), []
    forward = step.forward

    def broken(*inputs):
        calls.append(inputs)
        if len(calls) == 10:  # behind step 9 and the checkpoint of step 9: lines of steps 2 to 8 are there
            raise KeyboardInterrupt
        return forward(*inputs)

    step.forward = broken
    places = {"tensorboard": tmp_path / "board", "save_to": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        train_step(step, data, epochs=3, **places, **asked)
    train_step(new_step(), data, epochs=3, resume="auto", **places, **asked)
    whole, again = scalars_in(tmp_path / "a/whole"), scalars_in(tmp_path / "board")
    timed = ("images_per_second", "images_per_second_of_step", "waited")
    assert {t: v for t, v in again.items() if t not in timed} == {t: v for t, v in whole.items() if t not in timed}
    assert whole["accuracy/held_out"] == pytest.approx({5 * e.epoch: e.accuracy for e in history.epochs})
    assert sorted(whole["loss/train_of_step"]) == list(range(2, 16, 2))
