"""Whole steps on a CPU whose maps are in 16 bits: beside the float32 step, bit for bit again, in half of the memory."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from halves import HALVES
from source_files import load

from bnfuse.build.named import build_model
from bnfuse.graph.training_graph import TrainingGraph, open_graph
from bnfuse.passes import rewrite
from bnfuse.runtime import SGD, Step, compile_step, load_step
from bnfuse.runtime.compile import lower_graph
from bnfuse.runtime.program.program import ARENA
from bnfuse.runtime.targets.target import CpuTarget

gpu = load(pathlib.Path(__file__).parent / "cuda" / "test_interpreted.py")
nets = gpu.nets

OPTIMIZER = SGD(0.02, momentum=0.9)
TOLERANCE = 0.03  # as on a GPU


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    return gpu.graph_of("icf")


@pytest.fixture(scope="module")
def step(graph) -> Step:
    return compile_step(graph, optimizer=OPTIMIZER, target=HALVES)


@pytest.mark.parametrize("level", ["none", "icf"])
def test_gradients_are_those_of_float32_within_rounding(level, step):
    """Of one batch in four: on others a ReLU that is open here is closed there (cuda/test_interpreted.py)."""
    graph = gpu.graph_of(level)
    narrow = step if level == "icf" else compile_step(graph, target=HALVES)
    wide = compile_step(graph, threads=2)
    errors = [max(gpu.gradient_errors(narrow, wide, nets.batch(i)).values()) for i in range(4)]
    assert 1e-4 < min(errors) < TOLERANCE, errors


def gradients(step: Step, batch: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
    step.forward(*batch)
    step.backward()
    return step.gradients()


def test_two_runs_give_the_same_bits(step):
    first, second = (gradients(step, nets.batch()) for _ in range(2))
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)


def test_a_compiled_file_keeps_the_precision_and_trains(step, tmp_path):
    step.export(tmp_path / "step.bnf")
    loaded = load_step(tmp_path / "step.bnf")
    assert loaded.target == step.target and loaded.target.precision == "bf16"
    losses = [loaded(*nets.batch()) for _ in range(8)]
    assert losses[-1] < losses[0]
    assert losses[0] == step(*nets.batch())


@pytest.mark.parametrize("name", ["densenet40", "resnet20"])
def test_maps_take_half_of_the_memory_and_no_further_launch_or_copy(name):
    """Of the arena the rest are statistics, coefficients and what lies in the file's layout."""
    fused = rewrite(
        open_graph(
            build_model(name, zoo={"batch": 32, "image": 32, **({"depth": 4} if name == "densenet40" else {})}).model
        ).model
    ).model
    wide, narrow = (
        lower_graph(open_graph(fused), CpuTarget("haswell", 8, 2, precision), OPTIMIZER)[0].program
        for precision in ("fp32", "bf16")
    )
    assert narrow.regions[ARENA] <= 0.55 * wide.regions[ARENA]
    assert narrow.report.stashed_bytes <= 0.55 * wide.report.stashed_bytes
    assert narrow.report.launches == wide.report.launches
    assert narrow.report.copies == wide.report.copies
    assert {s.dtype for s in narrow.storages if s.region != ARENA} == {
        s.dtype for s in wide.storages if s.region != ARENA
    }
