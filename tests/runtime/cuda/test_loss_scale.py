"""At fp16 gradients begin with the loss scale, whatever the loss is, and the update takes it out again."""

from __future__ import annotations

import numpy as np
import pytest
from fake_cuda import FakeCuda, install
from gpu_step import interpreted, interpreted_step
from two_layers import graph_of

from bnfuse.graph.batches import with_batch
from bnfuse.graph.feeds import draw_feeds
from bnfuse.runtime import SGD, Step
from bnfuse.runtime.compile import lower_graph
from bnfuse.runtime.targets.target import CudaTarget

LOSSES = ("l1@b + 0.5*cross-entropy@a", "none")


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_and_updates_are_those_without_a_scale(monkeypatch, loss):
    fake, graph = install(monkeypatch, FakeCuda()), graph_of(loss)
    feeds = draw_feeds(graph, np.random.default_rng(1))
    came_in = [feeds[name] for name in graph.signature.output_gradients.values()]

    def step_of(precision: str) -> Step:
        return interpreted_step(graph, CudaTarget("sm_90", 4, precision), fake, SGD(0.1))

    def one(step: Step) -> None:
        step.forward(*(feeds[name] for name in step.inputs))
        step.backward(*(step.loss_scale * gradient for gradient in came_in))

    def close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], factor: float = 1.0) -> None:
        for name, value in found.items():  # matrices are multiplied in 16 bits
            np.testing.assert_allclose(value, factor * wanted[name], rtol=2e-3, atol=2e-3 * factor, err_msg=name)

    plain, scaled = step_of("fp32"), step_of("fp16")
    for step in (plain, scaled):
        one(step)
    wanted, memory = plain.gradients(), scaled._train.memory
    close({name: memory.read(tensor) for name, tensor in scaled.program.gradients.items()}, wanted, 1024.0)
    close(scaled.gradients(), wanted)
    for step in (plain, scaled):
        step.update()
    close(scaled.state_dict(), plain.state_dict())
    scaled.loss_scale = 64.0
    for step in (plain, scaled):
        one(step)
    close({name: memory.read(tensor) for name, tensor in scaled.program.gradients.items()}, plain.gradients(), 64.0)


def test_each_batch_size_begins_with_it(monkeypatch):
    fake, graph, target = install(monkeypatch, FakeCuda()), graph_of(LOSSES[0]), CudaTarget("sm_90", 4, "fp16")
    smaller = with_batch(graph, 4)
    step = interpreted_step(graph, target, fake)
    step.add(*(interpreted(made, fake) for made in lower_graph(smaller, target, None)))
    found = {}
    for each in (graph, smaller):
        feeds = draw_feeds(each, np.random.default_rng(1))
        step.forward(*(feeds[name] for name in step.inputs))
        step.backward()
        found[each.batch] = step.gradients()
    alone = interpreted_step(smaller, target, fake)
    alone.forward(*(feeds[name] for name in alone.inputs))
    alone.backward()
    for name, value in alone.gradients().items():
        assert np.abs(value).max() > 1e-3
        np.testing.assert_allclose(found[4][name], value, rtol=1e-6, err_msg=name)
