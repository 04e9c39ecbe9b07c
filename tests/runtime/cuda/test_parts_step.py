"""A step that reduces over parts of the channels for a GPU, its kernels interpreted, beside the CPU's."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from gpu_step import check_both_targets
from hand_made import Network

from bnfuse.build import build_training_graph
from bnfuse.graph.training_graph import TrainingGraph, open_graph
from bnfuse.passes import rewrite
from bnfuse.runtime import compile_step
from bnfuse.verifying.interpreter import run, wide, widened


def stage(net: Network, x: str, width: int, around: int, *, first: bool) -> str:
    """Write a cross-stage part whose last sum is one of the operands of a Concat."""
    block = lambda x, width: net.activate(net.norm(net.conv(x, width, 3)), "LeakyRelu")  # noqa: E731
    a, b = block(x, width), block(x, around)
    summed = net.put("Add", a, block(a, width))
    return block(net.cat(*((summed, b) if first else (b, summed))), 8)


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    """Parts that begin with the first channel, in the middle, on no cache line."""
    net = Network()
    x = stage(net, "x", 5, 3, first=True)
    x = stage(net, x, 8, 16, first=False)
    result = rewrite(ir.from_proto(build_training_graph(net.classified(x))), level="icf")
    assert result.report.unfused == ()
    found = [node for node in result.model.graph if "PartReduceLeakyReluGrad" in node.op_type]
    assert sorted(node.attributes["start_1"].as_int() for node in found) == [0, 16]
    return open_graph(result.model)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.15)])
def test_a_step_of_both_targets_is_the_same(graph, precision, tolerance, monkeypatch):
    check_both_targets(graph, (2, 3, 8, 8), precision, tolerance, monkeypatch)


def test_the_sums_are_the_interpreters_whatever_lies_around_a_map(graph):
    """In the second step it is what the first one left."""
    step = compile_step(graph, threads=1)
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, 3, 8, 8)).astype(np.float32), rng.integers(0, 5, 2)
    expected = run(widened(ir.to_proto(graph.model)), wide({**graph.state(), "x": x, "labels": y}))
    for _ in range(2):
        step.forward(x, y)
        step.backward()
        for name, found in step.gradients().items():
            wanted = expected[graph.signature.gradients[name]]
            assert np.linalg.norm(found - wanted) <= 1e-4 * np.linalg.norm(wanted) + 1e-6, name
