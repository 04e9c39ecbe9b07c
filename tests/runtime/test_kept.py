"""Programs that are kept beside the kernels: the same step, read and not lowered; anew where anything differs."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from small_training import forward_model

import bnfuse
from bnfuse.build import build_training_graph
from bnfuse.graph.initial_values import Bare
from bnfuse.graph.training_graph import open_graph
from bnfuse.parallel.ranks import ONE
from bnfuse.runtime import compile as compiling
from bnfuse.runtime import compile_step, kept
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.codegen import tuning
from bnfuse.runtime.targets import cpus

SGD = bnfuse.SGD(lr=0.1, momentum=0.9)


@pytest.fixture(scope="module")
def graph() -> onnx.ModelProto:
    return build_training_graph(forward_model(dropout=0.0))


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the graphs that were lowered."""
    names: list[str] = []
    lower = compiling.lower_graph
    monkeypatch.setattr(
        compiling,
        "lower_graph",
        lambda graph, *args, **options: (names.append(graph.name), lower(graph, *args, **options))[1],
    )
    return names


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Where entries lie: in a folder of the test's own, while kernels are in that of all tests."""
    monkeypatch.setattr(kept, "place_of", lambda _, key: tmp_path / "kept" / f"{key}.bnf")
    return tmp_path / "kept"


def compiled(graph: onnx.ModelProto, **options: object) -> bnfuse.Step:
    return compile_step(graph, **{"optimizer": SGD, "threads": 1, **options})


def results(step: bnfuse.Step) -> dict[str, np.ndarray]:
    """All that two steps and an evaluation leave."""
    rng = np.random.default_rng(0)
    images, labels = rng.standard_normal((16, 1, 8, 8)).astype(np.float32), rng.integers(0, 10, 16)
    losses = [step(images, labels) for _ in range(2)]
    gradients = {f"gradient of {name}": value for name, value in step.gradients().items()}
    return {**step.state_dict(), **gradients, "losses": np.array(losses), "logits": step.evaluate(images)}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_was_compiled_is_read_and_computes_the_same(graph, lowered, precision):
    first = compiled(graph, precision=precision)
    second = compiled(graph, precision=precision)
    assert len(lowered) == 1
    ours, theirs = results(first), results(second)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(theirs[name], value, name)


def test_initial_values_are_those_of_the_graph_at_hand(graph, lowered):
    compiled(graph)
    other = onnx.ModelProto.FromString(graph.SerializeToString())
    for tensor in other.graph.initializer:
        if tensor.name == "head/weight":
            tensor.CopyFrom(numpy_helper.from_array(2 * numpy_helper.to_array(tensor), tensor.name))
    step, plain = compiled(other), compiled(graph)
    assert len(lowered) == 1
    np.testing.assert_array_equal(step.state_dict()["head/weight"], 2 * plain.state_dict()["head/weight"])


def test_anything_else_is_compiled_anew(graph, lowered):
    compiled(graph)
    others = [
        {"threads": 2},
        {"optimizer": bnfuse.AdamW(lr=0.1)},
        {"precision": "bf16"},
        {"batches": [7]},
        {"evaluates": False},
    ]
    for count, other in enumerate(others, 2):
        compiled(graph, **other)
        assert len(lowered) == count, other
    compiled(bnfuse.rewrite(graph, level="icf").model)
    assert len(lowered) == len(others) + 2


def test_a_rate_and_buckets_of_no_exchange_are_not_asked_for(graph, lowered):
    step = compiled(graph)
    other = compiled(graph, optimizer=bnfuse.SGD(lr=0.5, momentum=0.9), bucket=1 << 10)
    assert len(lowered) == 1
    rng = np.random.default_rng(0)
    batch = rng.standard_normal((16, 1, 8, 8)).astype(np.float32), rng.integers(0, 10, 16)
    for each in (step, other):
        each(*batch)
    assert other.optimizer.lr == 0.5
    assert not np.array_equal(step.state_dict()["head/weight"], other.state_dict()["head/weight"])


def test_entries_that_were_not_read_for_longest_go(graph, folder, monkeypatch):
    monkeypatch.setattr(kept, "MOST", 2)
    compiled(graph)
    (first,) = folder.iterdir()
    compiled(graph, batches=[7])
    (second,) = {*folder.iterdir()} - {first}
    os.utime(second, (1, 1))
    compiled(graph)  # reads the first
    compiled(graph, batches=[5])
    assert first.exists() and not second.exists()
    assert len([*folder.iterdir()]) == 2


def test_what_another_process_measures_meanwhile_is_not_kept(graph, lowered, monkeypatch):
    """Choices that are remembered after a compile has begun are not in what it keeps."""
    known = [True]
    monkeypatch.setattr(tuning.Memory, "is_empty", property(lambda memory: known.pop() if known else False))
    chosen = []
    choose = tuning.choose
    monkeypatch.setattr(tuning, "choose", lambda part, memory: (chosen.append(memory.folder), choose(part, memory))[1])
    compiled(graph)
    assert chosen and set(chosen) == {None}


def test_code_that_cannot_run_here_is_not_kept(graph, folder, monkeypatch):
    monkeypatch.setattr(cpus, "missing_features", lambda features: ["amx-fp16"])
    assert not kept.runs_here(resolve("cpu", 1))
    making = kept.Making(resolve("cpu", 1), SGD, True, ONE)
    assert len(compiling.compiled_pairs([Bare(open_graph(graph))], making, True, tune=False, progress=None)) == 1
    assert not folder.exists()


def test_each_batch_is_kept_by_itself(graph, lowered):
    compiled(graph, batches=[16, 7])
    assert compiled(graph, batches=[7, 5]).batches == (7, 5)
    assert len(lowered) == 3


def test_other_sources_are_another_key(graph, lowered, monkeypatch):
    compiled(graph)
    monkeypatch.setattr(kept, "programs_hash", lambda target: "changed")
    compiled(graph)
    assert len(lowered) == 2


@pytest.mark.parametrize("left", [0.0, 0.5, 0.9])
def test_a_damaged_entry_is_made_anew(graph, lowered, folder, left):
    compiled(graph)
    (entry,) = folder.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(whole[: int(left * len(whole))])
    compiled(graph)
    assert len(lowered) == 2
    assert entry.stat().st_size == len(whole)


def test_nothing_is_kept_where_measurements_are(graph, lowered, folder, monkeypatch):
    monkeypatch.setattr(tuning.Memory, "is_empty", False)
    compiled(graph)
    compiled(graph)
    assert len(lowered) == 2
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_to_keeps_nothing(graph, lowered, folder):
    folder.write_text("")
    compiled(graph)
    compiled(graph)
    assert len(lowered) == 2
