"""benchmarks/gpu_kernels.py without a GPU: what is built, and what of measured times is remembered for whom."""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import zipfile
from typing import Any

import pytest
from source_files import load

from bnfuse.runtime.codegen import tuning
from bnfuse.runtime.codegen.cache import Cache
from bnfuse.runtime.codegen.sources import sources_hash
from bnfuse.runtime.kernels.cuda import container
from bnfuse.runtime.kernels.registry import CONV_BACKWARD

script = load(pathlib.Path(__file__).parents[2] / "benchmarks" / "gpu_kernels.py")

SMALL = ["--batch", "2", "--image", "32"]


def options(**others: Any) -> argparse.Namespace:
    given = {"networks": ["resnet20"], "batch": 2, "image": 32, "target": "cuda:sm_90", "precision": "bf16"}
    return argparse.Namespace(**{**given, "choices": 100, "only": None, "several": True, **others})


@pytest.fixture(scope="module")
def problems() -> list[tuple[tuning.Task, dict[str, Any]]]:
    return list(script.problems(options()))


@pytest.fixture(scope="module")
def task(problems) -> tuning.Task:
    """Of a convolution's gradients: a choice is a pair of plans, and there are several of either."""
    several = (task for task, _ in problems if task.request.kind == CONV_BACKWARD)
    return next(task for task in several if all(len({c.plan[part] for c in task.choices}) > 2 for part in (0, 1)))


def rows(task: tuning.Task, times: dict[int, float], **changed: Any) -> list[dict[str, Any]]:
    """As `run` writes them: microseconds by the index of the choice, 100 of the others."""
    return [
        {
            "key": task.key,
            "sources": sources_hash("cuda"),
            "choice": repr(choice),
            "parts": [repr(part) for part in tuning.parts_of(choice)],
            "rule": index == 0,
            "kernel": task.candidate(choice).kernel().name,
            "total_us": times.get(index, 100.0),
            "distances": {"dx": 1e-3},
            **changed,
        }
        for index, choice in enumerate(task.choices)
    ]


def remembered(results: list[dict[str, Any]], task: tuning.Task, folder: pathlib.Path) -> Any:
    """What a later compile with the cache finds."""
    (folder / "times.json").write_text(json.dumps(results))
    script.main(["remember", str(folder / "times.json"), "--cache", str(folder / "cache")])
    return tuning.Memory(Cache(folder / "cache")).choice(task)


# -- building ------------------------------------------------------------------------------------------------------


def test_a_problem_is_built_once_whatever_network_has_it(problems):
    keys = [fixed["key"] for _, fixed in problems]
    assert len(set(keys)) == len(keys) > 3
    assert all(len(task.choices) > 1 and task.key == fixed["key"] for task, fixed in problems)
    twice = list(script.problems(options(networks=["resnet20", "resnet20"])))
    assert [fixed["key"] for _, fixed in twice] == keys
    assert len(list(script.problems(options(several=False)))) > len(keys)


def test_what_is_built_is_bounded_and_has_keys(problems, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BNFUSE_CACHE", str(tmp_path / "cache"))
    _, fixed = problems[0]
    only = f"{fixed['kind']} {fixed['shape']}"
    chosen = [task for task, other in problems if only in f"{other['kind']} {other['shape']}"]
    command = ["build", "resnet20", *SMALL, "--several", "--choices", "2", "--only", only]
    script.main([*command, "--list", "-o", str(tmp_path / "none.zip")])
    assert f"{2 * len(chosen)} kernels of {len(chosen)} problems" in capsys.readouterr().out
    assert not (tmp_path / "none.zip").exists()
    script.main([*command, "-o", str(tmp_path / "kernels.zip")])
    with zipfile.ZipFile(tmp_path / "kernels.zip") as file:
        entries = json.loads(file.read("entries.json"))
        codes = [container.unpack(file.read(f"{i}.bin"), str(i)) for i in range(len(entries))]
    assert [entry["key"] for entry in entries] == [task.key for task in chosen for _ in range(2)]
    assert [entry["rule"] for entry in entries] == [True, False] * len(chosen)
    assert [entry["choice"] for entry in entries] == [repr(c) for t in chosen for c in script.bounded(t.choices, 2)]
    for entry, code in zip(entries, codes, strict=True):
        assert [name for name, *_ in entry["params"]] == [name for name, kind in code.parameters if kind == "buffer"]


# -- remembering ---------------------------------------------------------------------------------------------------


def test_the_fastest_is_what_a_later_compile_uses(task, tmp_path, capsys):
    assert remembered(rows(task, {2: 50.0, 1: 60.0}), task, tmp_path) == task.choices[2]
    assert "1 problems remembered, 1 of them not by the rule" in capsys.readouterr().out
    kept = json.loads((tmp_path / "cache" / "tuned" / f"{task.key}.json").read_bytes())
    assert kept["seconds"][repr(task.choices[2])] == pytest.approx(50e-6)


def test_other_problems_know_nothing_of_it(problems, task, tmp_path):
    remembered(rows(task, {2: 50.0}), task, tmp_path)
    memory = tuning.Memory(Cache(tmp_path / "cache"))
    assert [memory.choice(other) for other, _ in problems if other.key != task.key] == [None] * (len(problems) - 1)


def test_what_two_plans_gain_adds_up(task, tmp_path):
    rule = task.choices[0].plan
    weight = next(i for i, c in enumerate(task.choices) if c.plan[0] == rule[0] and c.plan[1] != rule[1])
    source = next(i for i, c in enumerate(task.choices) if c.plan[0] != rule[0] and c.plan[1] == rule[1])
    found = remembered(rows(task, {weight: 80.0, source: 90.0}), task, tmp_path)
    assert found.plan == (task.choices[source].plan[0], task.choices[weight].plan[1])
    assert found not in task.choices and task.candidate(found).kernel().plan == found.plan


def test_bounds_leave_choices_of_each_part(task):
    rule, *some = script.bounded(task.choices, 5)
    assert rule == task.choices[0]
    assert [choice.plan[0] == rule.plan[0] for choice in some] in ([True, False] * 2, [False, True] * 2)
    assert sorted(map(repr, script.bounded(task.choices, 100))) == sorted(map(repr, task.choices))
    forward = [tuning.Choice("tile", i) for i in range(4)]
    assert script.bounded(forward, 3) == forward[:3]
    assert script.bounded((), 3) == []


@pytest.mark.parametrize(("time", "index"), [(98.0, 0), (96.0, 2)])
def test_a_small_gain_is_noise(task, tmp_path, time, index):
    assert remembered(rows(task, {2: time}), task, tmp_path) == task.choices[index]


def test_times_in_turns_come_before_those_of_stages(task, tmp_path):
    results = rows(task, {1: 50.0})
    for index, row in enumerate(results):
        row["turns_us"] = 40.0 if index == 3 else 80.0
    assert remembered(results, task, tmp_path) == task.choices[3]


@pytest.mark.parametrize(
    "fault",
    [{"error": "launch failed"}, {"distances": {"dx": 0.5}}, {"distances": {"dx": math.nan}}, {"total_us": 0.0}],
)
def test_a_choice_that_fails_or_computes_something_else_never_wins(task, tmp_path, fault):
    results = rows(task, {1: 50.0, 2: 60.0})
    results[1] |= fault
    assert remembered(results, task, tmp_path) == task.choices[2]
    results[0] |= fault
    (tmp_path / "other").mkdir()
    assert remembered(results, task, tmp_path / "other") is None, "nothing to compare with"


def test_choices_that_nobody_knows_and_problems_of_one_way_are_none(task, tmp_path):
    results = rows(task, {1: 50.0})
    place = [a != b for a, b in zip(results[0]["parts"], results[1]["parts"], strict=True)].index(True)
    results[1]["parts"][place] = "MagicPlan()"
    assert remembered(results, task, tmp_path) is None
    assert script.by_problem([{"key": "a", "choice": "None"}, {"key": "b", "choice": "Choice()"}]) == {}


def test_times_of_other_generators_are_refused(task, tmp_path):
    with pytest.raises(SystemExit, match="other generators than those here: build and run again"):
        remembered(rows(task, {1: 50.0}, sources="before"), task, tmp_path)
    assert not (tmp_path / "cache").exists()


@pytest.mark.torch
def test_results_are_compared_where_there_are_any():
    torch = pytest.importorskip("torch")
    rule = torch.tensor([3.0, math.nan, 4.0])
    assert script.distance(torch, rule.clone(), rule) == 0
    assert script.distance(torch, torch.tensor([3.0, math.nan, 4.5]), rule) == pytest.approx(0.1)
    assert script.distance(torch, torch.tensor([3.0, 0.0, 4.0]), rule) == math.inf
    assert script.distance(torch, torch.tensor([0.0, 2.0]), torch.zeros(2)) == 2
