"""Steps for a GPU, interpreted, whose updates have a recipe in them: they change what a CPU's change."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fake_cuda import FakeCuda, install
from gpu_step import interpreted_step
from two_layers import graph_of

from bnfuse.graph.feeds import draw_feeds
from bnfuse.runtime import EMA, SGD, AdamW, Group, Step, compile_step
from bnfuse.runtime.targets.target import CudaTarget

LOSS = "l1@b + 0.5*cross-entropy@a"
GROUPS = (Group("u", lr=2.0, weight_decay=0.0),)
RECIPES = {
    "accumulated": SGD(0.1, 0.9, weight_decay=0.01, groups=GROUPS, clip_norm=0.1, accumulate=2, ema=EMA(0.9, True)),
    "plain": AdamW(0.01, weight_decay=0.1, layer_decay=0.5, clip_norm=math.inf, ema=0.9),
}


def run(step: Step, graph, count: int = 3) -> list[dict[str, np.ndarray]]:
    for seed in range(count):
        feeds = draw_feeds(graph, np.random.default_rng(seed))
        step(*(feeds[name] for name in step.inputs))
    step.flush()
    return [step.state_dict(), step.state_dict(ema=True)]


@pytest.mark.parametrize(("recipe", "precision"), [("plain", "fp32"), ("accumulated", "fp16")])
def test_they_change_what_those_of_a_cpu_change(monkeypatch, recipe, precision):
    fake, graph, optimizer = install(monkeypatch, FakeCuda(seed=3)), graph_of(LOSS), RECIPES[recipe]
    mine = interpreted_step(graph, CudaTarget("sm_90", 4, precision), fake, optimizer)
    cpu, before = compile_step(graph, threads=1, optimizer=optimizer), graph.state()
    tolerance = 1e-4 if precision == "fp32" else 2e-2  # matrices are multiplied in 16 bits
    for found, wanted in zip(run(mine, graph), run(cpu, graph), strict=True):
        for name, value in wanted.items():
            change = np.abs(value - before[name]).max()
            assert change > 1e-4
            assert np.abs(found[name] - value).max() < tolerance * change + 1e-6, name
    assert mine.gradient_norm == pytest.approx(cpu.gradient_norm, rel=tolerance)
    assert (mine.steps, mine.pending) == (cpu.steps, cpu.pending)
    if recipe == "plain":
        data = draw_feeds(graph, np.random.default_rng(9))[graph.signature.data[0]]
        expected, ours = cpu.evaluate(data, ema=True), np.asarray(mine.evaluate(data, ema=True))
        np.testing.assert_allclose(ours, expected, rtol=tolerance, atol=tolerance)


def test_added_gradients_that_overflow_skip_the_update_of_all(monkeypatch):
    fake, graph = install(monkeypatch, FakeCuda()), graph_of(LOSS)
    step = interpreted_step(graph, CudaTarget("sm_90", 4, "fp16"), fake, RECIPES["accumulated"])
    feeds = draw_feeds(graph, np.random.default_rng(1))
    given, before = [feeds[name] for name in step.inputs], step.state_dict()
    step.loss_scale = 1e30
    step(*given)
    step.loss_scale = 1024.0
    step(*given)
    assert step.skipped
    for name, value in step.state_dict().items():
        np.testing.assert_array_equal(value, before[name])
    for _ in range(2):
        step(*given)
    assert not step.skipped
    assert not np.array_equal(step.state_dict()["w"], before["w"])
