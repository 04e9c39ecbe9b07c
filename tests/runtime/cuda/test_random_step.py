"""A step with random operators for a GPU, its kernels interpreted: what it draws is what the step on the CPU draws."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from fake_cuda import FakeCuda, install
from gpu_step import interpreted_step
from random_networks import DROP_PATH, batch, training_graph

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.training_graph import TrainingGraph, open_graph
from bnfuse.passes import rewrite
from bnfuse.runtime import compile_step
from bnfuse.runtime.compile import lower_graph
from bnfuse.runtime.targets.target import CudaTarget

NOISE = "u = RandomNormalLike(x) n = Mul(u, tenth) d = Add(x, n)"
WRITTEN_OUT = "u = RandomUniformLike(x) l = Greater(u, drop) m = Cast<to = 1>(l) b = Mul(x, m) d = Div(b, keep)"


def fused(body: str) -> TrainingGraph:
    return open_graph(rewrite(ir.from_proto(training_graph(body)), level="icf").model)


def gpu(precision: str) -> CudaTarget:
    return CudaTarget("sm_90", 4, precision)


def test_losses_are_the_cpu_s(monkeypatch):
    fake = install(monkeypatch, FakeCuda(seed=5))
    graph = fused(DROP_PATH)
    cpu, mine = compile_step(graph, threads=1), interpreted_step(graph, gpu("fp32"), fake)
    x, y = batch()
    losses = []
    for count in range(2):
        cpu.steps = mine.steps = count
        losses.append(float(mine.forward(x, y)))
        assert losses[-1] == pytest.approx(cpu.forward(x, y), rel=1e-5)
    assert losses[0] != losses[1]


def test_a_step_that_cannot_be_evaluated_loads(monkeypatch):
    mine = interpreted_step(fused(NOISE), gpu("fp32"), install(monkeypatch, FakeCuda(seed=5)))
    with pytest.raises(BnfuseError, match="draws at random what inference"):
        mine.evaluate(batch()[0])


@pytest.mark.parametrize("body", [DROP_PATH, WRITTEN_OUT], ids=["rows", "maps"])
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_masks_have_kernels_in_each_precision(body, precision):
    for request in lower_graph(fused(body), gpu(precision), None)[0].requests:
        request.kernel()
