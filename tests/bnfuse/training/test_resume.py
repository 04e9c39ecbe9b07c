"""A run that is interrupted and goes on ends where the unbroken run does, bit by bit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from small_training import small_data, small_graph

import bnfuse
from bnfuse.core.errors import BnfuseError
from bnfuse.core.tensor_files import read_safetensors
from bnfuse.runtime import AdamW
from bnfuse.training import checkpoints, train_step
from bnfuse.training.checkpoints import KEY
from bnfuse.training.labelling import Labelling
from bnfuse.training.mixing import Mixing

TIMES = ("seconds", "images_per_second", "waited")
RUN = {
    "epochs": 3,
    "seed": 5,
    "augment": "flip,pad-crop:2",
    "schedule": "cosine",
    "warm_up": 0.5,
    "checkpoint_every": 2,
    "normalise": True,
}


def lines_of(path: Path) -> list[dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def history_of(history) -> list:
    return [dataclasses.replace(epoch, seconds=0.0, images_per_second=0.0, waited=0.0) for epoch in history.epochs]


def tensors_of(path: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in read_safetensors(path)[0].items()}


def interrupt_at(step, count: int) -> None:
    """Ctrl-C in the forward phase of a step, counted from 1."""
    forward, calls = step.forward, 0

    def counted(*inputs):
        nonlocal calls
        calls += 1
        if calls == count:
            raise KeyboardInterrupt
        return forward(*inputs)

    step.forward = counted


@pytest.fixture(scope="module")
def unbroken(new_step, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    history = train_step(new_step(), data, **RUN, save_to=folder / "run", metrics=folder / "run.jsonl", log_every=1)
    return folder, history


@pytest.mark.parametrize("count", [1, 2, 4, 6, 9, 15])
def test_a_run_that_is_interrupted_anywhere_goes_on_to_the_same_end(count, unbroken, new_step, data, tmp_path):
    folder, history = unbroken
    places = {"save_to": tmp_path / "run", "metrics": tmp_path / "run.jsonl", "log_every": 1}
    step = new_step()
    interrupt_at(step, count)
    with pytest.raises(KeyboardInterrupt):
        train_step(step, data, **RUN, **places)
    again = train_step(new_step(), data, **RUN, **places, resume="auto")
    for name in ("last.safetensors", "best.safetensors"):
        assert tensors_of(tmp_path / "run" / name) == tensors_of(folder / "run" / name), name
    assert lines_of(tmp_path / "run.jsonl") == lines_of(folder / "run.jsonl")
    assert history_of(again) == history_of(history)


def test_a_run_may_be_interrupted_many_times(unbroken, new_step, data, tmp_path):
    folder, _ = unbroken
    for count in (3, 4, 3, 5):
        step = new_step()
        interrupt_at(step, count)
        with pytest.raises(KeyboardInterrupt):
            train_step(step, data, **RUN, save_to=tmp_path, resume="auto")
    train_step(new_step(), data, **RUN, save_to=tmp_path, resume=True)
    assert tensors_of(tmp_path / "last.safetensors") == tensors_of(folder / "run" / "last.safetensors")


def test_the_unbroken_run_draws_at_random(unbroken, new_step, data, tmp_path):
    """Or else the tests above would show nothing: another seed ends elsewhere."""
    train_step(new_step(), data, **{**RUN, "seed": 6}, save_to=tmp_path)
    assert tensors_of(tmp_path / "last.safetensors") != tensors_of(unbroken[0] / "run" / "last.safetensors")


def test_a_finished_run_goes_on_to_nothing(unbroken, new_step, data, tmp_path):
    folder, history = unbroken
    shutil.copytree(folder / "run", tmp_path / "run")
    assert train_step(new_step(), data, **RUN, resume=tmp_path / "run") == history
    assert tensors_of(tmp_path / "run" / "last.safetensors") == tensors_of(folder / "run" / "last.safetensors")


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"seed": 6}, "seed 5, not 6"),
        ({"schedule": "constant"}, "epochs 3, not None|schedule cosine, not constant"),
        ({"epochs": 4}, "epochs 3, not 4"),
        ({"warm_up": 1.0}, "warm_up 0.5, not 1.0"),
        ({"augment": "flip"}, "augment flip,pad-crop:2, not flip"),
        ({"normalise": False}, "mean .*, not None|normalise True, not False"),
    ],
)
def test_a_run_with_other_settings_is_refused(changed, what, unbroken, new_step, data, tmp_path):
    shutil.copytree(unbroken[0] / "run", tmp_path / "run")
    with pytest.raises(BnfuseError, match=what):
        train_step(new_step(), data, **{**RUN, **changed}, save_to=tmp_path / "run", resume="auto")


def test_another_model_or_optimiser_or_other_data_are_refused(unbroken, new_step, data, tmp_path):
    shutil.copytree(unbroken[0] / "run", tmp_path / "run")
    with pytest.raises(BnfuseError, match=r"lr 0\.05, not 0\.1"):
        train_step(new_step(lr=0.1), data, **RUN, resume=tmp_path / "run")
    with pytest.raises(BnfuseError, match=r"optimizer SGD.*momentum=0\.9.*, not .*momentum=0\.5"):
        train_step(new_step(momentum=0.5), data, **RUN, resume=tmp_path / "run")
    with pytest.raises(BnfuseError, match="another data"):
        train_step(new_step(), small_data(test=41), **RUN, resume=tmp_path / "run")
    with pytest.raises(BnfuseError, match="another model"):
        step = new_step()
        step.model += b"\x12\x00"
        train_step(step, data, **RUN, resume=tmp_path / "run")


def test_a_constant_rate_may_go_on_for_longer(new_step, data, tmp_path):
    settings = {"schedule": "constant", "augment": "flip"}
    whole = new_step()
    train_step(whole, data, epochs=3, **settings)
    train_step(new_step(), data, epochs=1, **settings, save_to=tmp_path)
    step = new_step()
    history = train_step(step, data, epochs=3, **settings, resume=tmp_path)
    assert [epoch.epoch for epoch in history.epochs] == [1, 2, 3]
    assert all(
        np.array_equal(a, b) for a, b in zip(step.state_dict().values(), whole.state_dict().values(), strict=True)
    )


def test_a_folder_with_a_run_is_not_written_over(unbroken, new_step, data):
    with pytest.raises(BnfuseError, match="holds a run already: continue it by --resume auto"):
        train_step(new_step(), data, **RUN, save_to=unbroken[0] / "run")


def test_a_file_lends_its_state_to_a_new_run(unbroken, new_step, data, tmp_path):
    best = unbroken[0] / "run" / "last.safetensors"
    step = new_step()
    loaded = []
    forward = step.forward
    step.forward = lambda *inputs: loaded.append(step.steps) or forward(*inputs)
    history = train_step(step, data, epochs=1, resume=best, save_to=tmp_path / "state.safetensors")
    assert (loaded[0], len(history.epochs)) == (15, 1)
    assert KEY not in read_safetensors(tmp_path / "state.safetensors")[1]


def test_what_holds_no_run_is_told(new_step, data, tmp_path):
    with pytest.raises(BnfuseError, match="holds no run to continue"):
        train_step(new_step(), data, epochs=1, resume=tmp_path)
    step = new_step()
    step.save(tmp_path / "last.safetensors")
    with pytest.raises(BnfuseError, match="holds a state but no run"):
        train_step(step, data, epochs=1, resume=tmp_path)
    step.save(tmp_path / "last.safetensors", {KEY: '{"version": 1, "position": {}}'})
    with pytest.raises(BnfuseError, match="metadata is damaged"):
        train_step(step, data, epochs=1, resume=tmp_path)
    (tmp_path / "last.safetensors").write_bytes(b"\x08")
    with pytest.raises(BnfuseError, match="no checkpoint in safetensors form"):
        train_step(step, data, epochs=1, resume=tmp_path)


def test_a_run_needs_the_state_of_its_optimiser(unbroken, new_step, data, tmp_path):
    last = unbroken[0] / "run" / "last.safetensors"
    tensors, metadata = read_safetensors(last)
    left = {name: value for name, value in tensors.items() if not name.startswith("optimizer.")}
    safetensors.numpy.save_file(left, tmp_path / "last.safetensors", metadata)
    with pytest.raises(BnfuseError, match="lacks the optimiser's state, which a run needs to go on"):
        train_step(new_step(), data, **RUN, resume=tmp_path)


@pytest.mark.parametrize("kind", ["conv1/weight", "conv1/bn/var", "optimizer.momentum.conv1/weight"])
def test_a_state_that_is_not_finite_is_told_when_it_is_read(kind, unbroken, new_step, data, tmp_path):
    tensors, metadata = read_safetensors(unbroken[0] / "run" / "last.safetensors")
    tensors = {**tensors, kind: np.full_like(tensors[kind], np.inf)}
    file = tmp_path / "last.safetensors"
    safetensors.numpy.save_file(tensors, file, metadata)
    for place, run in ((tmp_path, RUN), (file, {"epochs": 1})):  # the run in it goes on, or a new one begins with it
        with pytest.raises(BnfuseError) as caught:
            train_step(new_step(), data, **run, resume=place)
        assert str(caught.value) == (f"{file}: its '{kind}' holds values that are not finite: begin with another state")


@pytest.mark.parametrize(
    ("where", "changed"),
    [
        ("position", {"epoch": float("inf")}),
        ("position", {"step": 2.5}),
        ("position", {"step": 10**30}),
        ("position", {"loss_sum": "1"}),
        ("position", {"seconds": None}),
        ("settings", None),
        ("settings", [1]),
        ("machine", 5),
        ("loss_scale", float("nan")),
    ],
)
def test_a_place_in_the_run_that_cannot_be_is_damage(where, changed, unbroken, new_step, data, tmp_path):
    step = new_step()
    last = unbroken[0] / "run" / "last.safetensors"
    saved = json.loads(read_safetensors(last)[1][KEY])
    saved[where] = {**saved[where], **changed} if where == "position" else changed
    step.save(tmp_path / "last.safetensors", {KEY: json.dumps(saved)})
    with pytest.raises(BnfuseError, match="metadata is damaged"):
        train_step(step, data, **RUN, resume=tmp_path)


def test_leftovers_of_a_killed_run_are_removed_and_others_stay(new_step, data, tmp_path):
    (tmp_path / ".last.safetensors.a_3bcd4e").write_bytes(b"half")
    (tmp_path / ".last.safetensors.old").write_bytes(b"mine")
    (tmp_path / "notes.txt").write_text("mine")
    train_step(new_step(), data, epochs=1, save_to=tmp_path)
    names = [".last.safetensors.old", ".lock", "best.safetensors", "last.safetensors", "notes.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_two_runs_do_not_share_a_folder(new_step, data, tmp_path):
    step, other = new_step(), new_step()
    seen = []

    def progress(text: str) -> None:
        with pytest.raises(BnfuseError, match="another run is writing there"):
            train_step(other, data, epochs=1, save_to=tmp_path, resume="auto")
        seen.append(text)

    train_step(step, data, epochs=1, save_to=tmp_path, progress=progress)
    assert seen


def test_best_is_the_epoch_of_the_best_accuracy(new_step, data, tmp_path):
    step = new_step()
    states = []
    history = train_step(step, data, epochs=4, save_to=tmp_path, progress=lambda _: states.append(step.state_dict()))
    best = states[history.best.epoch - 1]
    found, _ = read_safetensors(tmp_path / "best.safetensors")
    assert all(np.array_equal(found[name], value) for name, value in best.items())


def test_other_threads_are_noted_and_go_on(unbroken, new_step, data, tmp_path):
    shutil.copytree(unbroken[0] / "run", tmp_path / "run")
    step, said = new_step(), []
    step.target = dataclasses.replace(step.target, threads=2)
    train_step(step, data, **RUN, resume=tmp_path / "run", progress=said.append)
    assert any("1 threads and goes on with" in line for line in said)


def test_moments_and_the_count_of_adamw_go_on_too(graph, data, tmp_path):
    def step():
        return bnfuse.compile(graph, optimizer=AdamW(lr=0.01, weight_decay=0.01), threads=1)

    train_step(step(), data, epochs=2, save_to=tmp_path / "whole", checkpoint_every=3)
    begun = step()
    interrupt_at(begun, 9)
    with pytest.raises(KeyboardInterrupt):
        train_step(begun, data, epochs=2, save_to=tmp_path / "part", checkpoint_every=3)
    train_step(step(), data, epochs=2, resume=tmp_path / "part", checkpoint_every=3)
    whole, part = (tmp_path / name / "last.safetensors" for name in ("whole", "part"))
    assert tensors_of(part) == tensors_of(whole)
    assert any(name.startswith("optimizer.") for name in tensors_of(part))


@pytest.fixture(scope="module")
def whole_graph():
    """One whose batch can be another: nothing of it is drawn for the batch but Dropout's mask."""
    return small_graph(sample=None)


def test_a_run_with_a_smaller_last_batch_goes_on_to_the_same_end(whole_graph, new_step, data, tmp_path):
    asked = {**RUN, "epochs": 2, "last_batch": "train"}
    step = new_step(model=whole_graph)
    history = train_step(step, data, **asked, save_to=tmp_path / "unbroken")
    assert (step.batches, step.steps) == ((16, 3), 12)
    broken = new_step(model=whole_graph)
    interrupt_at(broken, 8)
    with pytest.raises(KeyboardInterrupt):
        train_step(broken, data, **asked, save_to=tmp_path / "run")
    again = train_step(new_step(model=whole_graph), data, **asked, save_to=tmp_path / "run", resume="auto")
    for name in ("last.safetensors", "best.safetensors"):
        assert tensors_of(tmp_path / "run" / name) == tensors_of(tmp_path / "unbroken" / name)
    assert history_of(again) == history_of(history)
    with pytest.raises(BnfuseError, match="is a run with last_batch train, not None"):
        train_step(new_step(model=whole_graph), data, **{**asked, "last_batch": "drop"}, resume=tmp_path / "run")


def test_an_epoch_with_a_smaller_last_batch_sees_every_image(whole_graph, new_step, data):
    step, seen = new_step(model=whole_graph), []
    forward = step.forward

    def recorded(x, y):
        seen.append((len(y), float(forward(x, y)), sorted(map(float, x.sum((1, 2, 3))))))
        return seen[-1][1]

    step.forward = recorded
    history = train_step(step, data, epochs=1, last_batch="train")
    assert [count for count, *_ in seen] == [16] * 5 + [3]
    assert np.isclose(history.epochs[0].loss, sum(n * loss for n, loss, _ in seen) / 83)
    assert sorted(v for *_, values in seen for v in values) == sorted(map(float, data.train_x.sum((1, 2, 3))))


def test_another_mean_is_another_run_and_a_refused_one_leaves_its_recipe(
    unbroken, new_step, data, tmp_path, monkeypatch
):
    train_step(new_step(), data, **{**RUN, "epochs": 1}, save_to=tmp_path, recorded="epochs = 1")
    for name in ("mean", "std"):
        other = dataclasses.replace(data, **{name: tuple(value + 1e-4 for value in getattr(data, name))})
        with pytest.raises(BnfuseError, match=f"is a run with {name} "):
            train_step(new_step(), other, **{**RUN, "epochs": 1}, save_to=tmp_path, resume="auto", recorded="other")
    assert (tmp_path / "recipe.toml").read_text() == "epochs = 1\n"
    saved = checkpoints.read_saved(tmp_path / "last.safetensors")
    without = {name: value for name, value in saved.settings.items() if name not in ("mean", "std")}
    monkeypatch.setattr(checkpoints, "read_saved", lambda path: dataclasses.replace(saved, settings=without))
    with pytest.raises(BnfuseError, match=r"of an earlier version.*with its state \(--resume .*safetensors"):
        train_step(new_step(), data, **{**RUN, "epochs": 1}, save_to=tmp_path, resume="auto")


def test_numbers_beyond_the_sixth_digit_are_compared(new_step, data, tmp_path):
    settings = {"epochs": 1, "schedule": "exp:0.9", "augment": "random-erasing:0.1"}
    train_step(new_step(), data, **settings, save_to=tmp_path)
    with pytest.raises(BnfuseError, match=r"schedule exp:0\.9, not exp:0\.90000001"):
        train_step(new_step(), data, **{**settings, "schedule": "exp:0.90000001"}, resume=tmp_path)
    with pytest.raises(BnfuseError, match=r"augment random-erasing:0\.1, not random-erasing:0\.10000001"):
        train_step(new_step(), data, **{**settings, "augment": "random-erasing:0.10000001"}, resume=tmp_path)
    assert str(Labelling(3, 0.10000001, mixing=Mixing(mixup=0.20000001, prob=0.30000001))) == (
        "3 classes, smoothing 0.10000001, weights none, mixup 0.20000001, cutmix 0 of 0.30000001 switched 0.5"
    )
