"""Whole sampled steps of a small network for a GPU, their kernels interpreted, against the CPU's."""

from __future__ import annotations

import pathlib

import cuda_kernels
import pytest
from fake_cuda import FakeCuda, install
from gpu_step import interpreted_step
from source_files import load

from bnfuse.build import build_training_graph
from bnfuse.graph.training_graph import TrainingGraph, open_graph
from bnfuse.passes import rewrite
from bnfuse.runtime import compile_step
from bnfuse.runtime.compile import lower_graph

plain = load(pathlib.Path(__file__).parent / "test_interpreted.py")


MIXTURE = "fs:1/8+vdn:1@0.3"


def sampled(sample: str | None = None, local_bn: int | None = None) -> TrainingGraph:
    model = open_graph(build_training_graph(plain.dense_layers())).model
    return open_graph(rewrite(model, level="icf", sample=sample, local_bn=local_bn).model)


@pytest.mark.parametrize(("sample", "local_bn"), [(MIXTURE, None), ("vdn:1", 2)])
def test_gradients_are_the_cpu_s(monkeypatch, sample, local_bn):
    """A mixture of a sample and a virtual one; groups of two samples, each with a virtual one of its own."""
    fake = install(monkeypatch, FakeCuda(seed=5))
    graph = sampled(sample, local_bn)
    cpu, mine = compile_step(graph, threads=1), interpreted_step(graph, plain.gpu("fp32"), fake)
    errors = plain.gradient_errors(mine, cpu, plain.nets.batch())
    assert max(errors.values()) < 2e-5, errors
    images = plain.nets.batch()[0]
    assert plain.distance(mine.evaluate(images), cpu.evaluate(images)) < 2e-5


def test_another_epoch_samples_other_points_with_the_same_kernels(monkeypatch):
    fake = install(monkeypatch, FakeCuda(seed=7))
    graph = sampled("frs:1/4")
    cpu, mine = compile_step(graph, threads=1), interpreted_step(graph, plain.gpu("fp32"), fake)
    loaded, seen = [], []
    for epoch in (0, 3):
        cpu.epoch = mine.epoch = epoch
        errors = plain.gradient_errors(mine, cpu, plain.nets.batch())
        assert max(errors.values()) < 2e-5, errors
        seen.append(mine.gradients())
        loaded.append(fake.count("cuModuleLoadData"))
    assert 0 < loaded[0] == loaded[1]
    assert any(plain.distance(value, seen[1][name]) > 1e-3 for name, value in seen[0].items())


def test_gradients_in_bf16_are_the_cpu_s(monkeypatch):
    """One batch of four, for the reason that test_interpreted.py gives."""
    fake = install(monkeypatch, FakeCuda(seed=6))
    graph = sampled(MIXTURE)
    cpu, mine = compile_step(graph, threads=1), interpreted_step(graph, plain.gpu("bf16"), fake)
    worst = []
    for i in range(4):
        worst.append(max(plain.gradient_errors(mine, cpu, plain.nets.batch(i)).values()))
        if worst[-1] < 0.03:
            break
    assert worst[-1] < 0.03, worst


def test_what_sampling_adds_to_a_step_compiles():
    training, _ = lower_graph(sampled("fs:1/4,*7=frs:1/4,*10=bn"), plain.gpu("bf16"), None)
    kernels = [request.kernel() for request in training.requests]
    own = [
        kernel
        for kernel in kernels
        if any(part in kernel.name for part in ("Sample", "PointStatistics", "AtPoints", "Scale"))
    ]
    assert own
    for kernel in own:
        cuda_kernels.assert_no_spills(kernel)
