"""A training over several ranks is that of one process at the batch of all of them, and goes on over other numbers."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_results import on_ranks
from small_training import plain_graph, small_data

from bnfuse import api
from bnfuse.core.errors import BnfuseError
from bnfuse.core.tensor_files import read_safetensors
from bnfuse.data import Dataset
from bnfuse.runtime import SGD, compile_step
from bnfuse.training import train_step

WHOLE = 16  # images of a step
RUN: dict[str, Any] = {"epochs": 2, "seed": 5, "augment": "flip,pad-crop:1", "checkpoint_every": 2, "normalise": True}
TIMES = ("seconds", "images_per_second", "waited")


@pytest.fixture(scope="module")
def data() -> Dataset:
    return small_data(train=3 * WHOLE + 3, test=41)


def trained(data: Dataset, folder: Path, world=None, stop: int | None = None, spoil=None, accumulate=1, **options: Any):
    """One rank's run, with a checkpoint in `folder`; `stop`: in this forward phase there is a Ctrl-C."""
    size = 1 if world is None else world.size
    optimizer = SGD(lr=0.1, momentum=0.9, accumulate=accumulate)
    step = compile_step(plain_graph(WHOLE // size), optimizer=optimizer, threads=1, world=world)
    forward, calls = step.forward, 0

    def counted(*inputs):
        nonlocal calls
        calls += 1
        if calls == stop:
            raise KeyboardInterrupt
        if spoil is not None and calls == 2:
            spoil(step)
        return forward(*inputs)

    step.forward = counted
    places = {"save_to": folder / "run", "metrics": folder / "run.jsonl", "log_every": 1, "resume": "auto"}
    try:
        return train_step(step, data, **{**RUN, **places, **options})
    except KeyboardInterrupt:
        return step


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return dict(read_safetensors(folder / "run" / "last.safetensors")[0])


def lines_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def require_close(ours: Path, theirs: Path) -> None:
    """Weights and moments to float32's rounding, over six steps; metrics likewise."""
    a, b = tensors_of(ours), tensors_of(theirs)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=2e-6, err_msg=name)
    assert len(lines_of(ours)) == len(lines_of(theirs)) == 8
    for mine, other in zip(lines_of(ours), lines_of(theirs), strict=True):
        numbers = {name: value for name, value in other.items() if isinstance(value, int | float)}
        assert {name: mine[name] for name in numbers} == pytest.approx(numbers, rel=1e-5)
        assert all(mine[name] == value for name, value in other.items() if name not in numbers)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    trained(data, folder)
    return folder


@pytest.fixture(scope="module")
def by_two(data, tmp_path_factory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, on_ranks(2, lambda world: trained(data, folder, world))


def test_two_ranks_train_as_one_process_with_the_batch_of_both(whole, by_two):
    folder, histories = by_two
    require_close(folder, whole)
    first, second = ([dataclasses.replace(e, **dict.fromkeys(TIMES, 0.0)) for e in h.epochs] for h in histories)
    assert first == second and histories[0].ranks == 2 and histories[1].held_out == 41


@pytest.mark.parametrize("stop", [2, 6])
def test_a_run_of_two_ranks_goes_on_to_the_same_bits(stop, data, by_two, tmp_path):
    on_ranks(2, lambda world: trained(data, tmp_path, world, stop=stop))
    on_ranks(2, lambda world: trained(data, tmp_path, world))
    ours, theirs = tensors_of(tmp_path), tensors_of(by_two[0])
    assert {k: v.tobytes() for k, v in ours.items()} == {k: v.tobytes() for k, v in theirs.items()}
    assert lines_of(tmp_path) == lines_of(by_two[0])


def test_a_run_goes_on_over_other_numbers_of_ranks(data, whole, tmp_path, capsys):
    """Two ranks, then one process, then four ranks: the same batches in the same order."""
    said: list[str] = []
    on_ranks(2, lambda world: trained(data, tmp_path, world, stop=3))
    trained(data, tmp_path, stop=3, progress=said.append)
    results = on_ranks(4, lambda world: trained(data, tmp_path, world))
    assert not [error for error in results if isinstance(error, Exception)]
    require_close(tmp_path, whole)
    assert any("was of 2 ranks of 8 images and goes on with 1 rank of 16 images" in line for line in said), said


def test_gradients_that_one_process_had_added_up_count_on_several_ranks(data, tmp_path):
    options: dict[str, Any] = {"accumulate": 2, "checkpoint_every": 1}
    trained(data, tmp_path, stop=2, **options)  # between two updates
    (tmp_path / "whole").mkdir()
    trained(data, tmp_path / "whole", **options)
    on_ranks(2, lambda world: trained(data, tmp_path, world, **options))
    require_close(tmp_path, tmp_path / "whole")


def test_another_batch_of_all_ranks_is_refused_on_all(data, by_two, tmp_path):
    shutil.copytree(by_two[0] / "run", tmp_path / "run")

    def resumed(world):
        step = compile_step(plain_graph(4), optimizer=SGD(lr=0.1, momentum=0.9), threads=1, world=world)
        return train_step(step, data, **RUN, save_to=tmp_path / "run", resume="auto")

    for error in on_ranks(2, resumed):
        assert isinstance(error, BnfuseError) and error.everywhere and "a run with batch 16, not 8" in str(error)


def test_a_rank_that_computes_something_else_ends_the_run_and_nothing_is_kept(data, tmp_path):
    def spoil(step) -> None:
        step.load_state_dict({name: value + 1e-3 for name, value in step.state_dict().items()})

    results = on_ranks(2, lambda world: trained(data, tmp_path, world, spoil=spoil if world.rank == 1 else None))
    for error in results:
        assert "gone astray" in str(error) and "conv/weight" in str(error) and error.everywhere
    assert not (tmp_path / "run" / "last.safetensors").exists()


def test_an_image_that_is_not_finite_is_named_with_its_rank(data, tmp_path):
    order = np.random.default_rng([5, 1]).permutation(len(data.train_y))
    x = data.train_x.copy()
    x[order[12]] = np.nan  # of the second rank's part of the first batch
    spoilt = dataclasses.replace(data, train_x=x, mean=(0.3,), std=(0.4,))
    for error in on_ranks(2, lambda world: trained(spoilt, tmp_path, world)):
        assert str(error).startswith("rank 1: the loss is nan in step 1 (epoch 1)") and "batch of images" in str(error)


def test_ranks_with_other_data_or_rates_are_refused_before_the_first_step(data, tmp_path):
    other = dataclasses.replace(data, train_y=(data.train_y + 1) % 10)
    results = on_ranks(2, lambda world: trained(other if world.rank else data, tmp_path, world))
    assert all(str(error).startswith("rank 1 has the setting data") for error in results)
    results = on_ranks(2, lambda world: trained(data, tmp_path, world, epochs=2 + world.rank))
    assert all(str(error).startswith("rank 1 has the setting epochs 3, rank 0 2") for error in results)


def test_a_rank_that_runs_with_another_seed_is_refused():
    for error in on_ranks(2, lambda world: api.run(plain_graph(8), seed=world.rank, world=world)):
        assert str(error) == "rank 1 has the setting seed 1, rank 0 0: start all ranks with the same command"
