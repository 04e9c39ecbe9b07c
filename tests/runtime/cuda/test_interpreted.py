"""Whole steps of small networks for a GPU, their kernels interpreted, against the CPU's."""

from __future__ import annotations

import pathlib

import numpy as np
import onnx
import onnx.helper as h
import pytest
from fake_cuda import FakeCuda, install
from gpu_step import interpreted_step
from source_files import load

from bnfuse.build import build_training_graph
from bnfuse.graph.feeds import draw_feeds
from bnfuse.graph.training_graph import TrainingGraph, open_graph
from bnfuse.passes import rewrite
from bnfuse.runtime import SGD, AdamW, Step, compile_step
from bnfuse.runtime.targets.target import CudaTarget
from bnfuse.verifying.noise import Reference
from bnfuse.verifying.runners import CompiledRunner, OrtRunner, Where
from bnfuse.verifying.verdict import is_right

nets = load(pathlib.Path(__file__).parents[1] / "test_session.py")
perceptrons = load(pathlib.Path(__file__).parents[1] / "test_artifact.py")

STEPS = 2  # the second one shows the update


def gpu(precision: str) -> CudaTarget:
    """With few multiprocessors, so that few blocks are interpreted."""
    return CudaTarget("sm_90", 4, precision)


def dense_layers() -> onnx.ModelProto:
    """A dense block between strided convolutions, and a classifier over 2x2 pixels."""
    net = nets.Net()
    x = net.op("Relu", net.bn(net.conv("image", 3, 16, 3, 2), 16))
    y = net.conv(net.op("Relu", net.bn(x, 16)), 16, 8, 3)
    both = net.op("Concat", x, y, axis=1)
    z = net.conv(net.op("Relu", net.bn(both, 24)), 24, 16, 1, 2)
    flat = net.op("Flatten", net.op("Relu", net.bn(z, 16)))
    w, b = net.weight(net.rng.standard_normal((nets.CLASSES, 64)) / 8), net.weight(np.zeros(nets.CLASSES))
    logits = net.op("Gemm", flat, w, b, transB=1)
    image = h.make_tensor_value_info("image", onnx.TensorProto.FLOAT, [nets.BATCH, 3, nets.SIDE, nets.SIDE])
    out = h.make_tensor_value_info(logits, onnx.TensorProto.FLOAT, [nets.BATCH, nets.CLASSES])
    graph = h.make_graph(net.nodes, "net", [image], [out], net.weights)
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)


def gated_layers() -> onnx.ModelProto:
    """Squeeze-excitation behind a depthwise convolution, and a residual branch whose samples have factors."""
    net = nets.Net()
    x = net.op("Relu", net.bn(net.conv("image", 3, 12, 3, 2), 12))
    weight = net.weight(net.rng.standard_normal((12, 1, 3, 3)) / 2)
    window = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "group": 12}
    y = net.op("HardSwish", net.bn(net.op("Conv", x, weight, **window), 12))
    squeezed = net.op("Relu", net.conv(net.op("GlobalAveragePool", y), 12, 4))
    y = net.op("Mul", y, net.op("Sigmoid", net.conv(squeezed, 4, 12)))
    y = net.bn(net.conv(y, 12, 12), 12)
    kept = np.linspace(0.5, 1.5, nets.BATCH, dtype=np.float32).reshape(nets.BATCH, 1, 1, 1)
    factors = net.op("Constant", value=onnx.numpy_helper.from_array(kept))
    return net.model(net.op("Add", x, net.op("Mul", y, factors)), 12)


def grouped_layers() -> onnx.ModelProto:
    """Two bottlenecks of ResNeXt, the second strided, with groups of four and of six channels."""
    net = nets.Net()
    x = net.op("Relu", net.bn(net.conv("image", 3, 16, 3, 2), 16))
    for count, each, stride in ((6, 4, 1), (4, 6, 2)):
        width = count * each
        y = net.op("Relu", net.bn(net.conv(x, 16, width), width))
        weight = net.weight(net.rng.standard_normal((width, each, 3, 3)) / 6)
        window = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [stride] * 2, "group": count}
        y = net.op("Relu", net.bn(net.op("Conv", y, weight, **window), width))
        y = net.bn(net.conv(y, width, 16), 16)
        x = net.op("Relu", net.op("Add", x if stride == 1 else net.bn(net.conv(x, 16, 16, 1, 2), 16), y))
    return net.model(x, 16)


def graph_of(level: str) -> TrainingGraph:
    model = build_training_graph(dense_layers())
    return open_graph(model if level == "none" else rewrite(open_graph(model).model, level=level))


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-3))


@pytest.mark.parametrize("optimizer", [SGD(0.1, momentum=0.9, weight_decay=0.01), AdamW(0.01)])
def test_a_perceptron_follows_the_cpu(monkeypatch, optimizer):
    fake = install(monkeypatch, FakeCuda(seed=1))
    graph = open_graph(build_training_graph(perceptrons.perceptron()))
    cpu = compile_step(graph, optimizer=optimizer, threads=1)
    mine = interpreted_step(graph, gpu("fp32"), fake, optimizer)
    for i in range(5):
        assert mine(*perceptrons.batch(i)) == pytest.approx(cpu(*perceptrons.batch(i)), rel=1e-5)
    for name, value in cpu.state_dict().items():
        assert distance(mine.state_dict()[name], value) < 1e-5, name


def gradient_errors(mine: Step, cpu: Step, batch: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    """Of one forward and backward, by parameter: relative to the gradient, or to 5 % of the largest one. A scale
    between a BatchNorm and the ReLU in front of another one has nearly no gradient: there only rounding is left."""
    for step in (mine, cpu):
        step.forward(*batch)
        step.backward()
    own, wanted = mine.gradients(), cpu.gradients()
    floor = 0.05 * max(np.linalg.norm(value) for value in wanted.values())
    return {
        name: float(np.linalg.norm(own[name] - value) / max(np.linalg.norm(value), floor))
        for name, value in wanted.items()
    }


@pytest.mark.parametrize(
    ("level", "precision", "tolerance"),
    [
        ("none", "fp32", 2e-5),
        ("icf", "fp32", 2e-5),
        ("icf", "tf32", 4e-3),
        ("icf", "bf16", 0.03),
        ("icf", "fp16", 4e-3),
    ],
)
def test_gradients_of_a_dense_block_are_the_cpu_s(monkeypatch, level, precision, tolerance):
    """A ReLU whose input is zero but for rounding may be open here and closed there, which moves whole gradients by
    more than any tolerance that would find a mistake: in bf16 one element in some thousand. That is luck, of a batch in
    a few; a mistake shows on all of them. So one batch of four has to agree, and closely (as in verification.py)."""
    fake = install(monkeypatch, FakeCuda(seed=2))
    graph = graph_of(level)
    cpu = compile_step(graph, threads=1)
    mine = interpreted_step(graph, gpu(precision), fake)
    worst = []
    for i in range(4):
        errors = gradient_errors(mine, cpu, nets.batch(i))
        worst.append(max(errors.items(), key=lambda item: item[1]))
        if worst[-1][1] < tolerance:
            break
    assert worst[-1][1] < tolerance, worst
    images = nets.batch()[0]
    assert distance(mine.evaluate(images), cpu.evaluate(images)) < tolerance


@pytest.mark.parametrize(
    ("network", "precision", "tolerance"),
    [(gated_layers, "fp32", 2e-5), (gated_layers, "bf16", 0.05), (grouped_layers, "fp32", 2e-5)],
)
def test_gradients_behind_gates_and_of_groups_are_the_cpu_s(monkeypatch, network, precision, tolerance):
    fake = install(monkeypatch, FakeCuda(seed=5))
    fused = rewrite(open_graph(build_training_graph(network())).model)
    assert fused.report.unfused == ()
    graph = open_graph(fused.model)
    cpu = compile_step(graph, threads=1)
    mine = interpreted_step(graph, gpu(precision), fake)
    worst = []
    for i in range(4):
        worst.append(max(gradient_errors(mine, cpu, nets.batch(i)).items(), key=lambda item: item[1]))
        if worst[-1][1] < tolerance:
            break
    assert worst[-1][1] < tolerance, worst


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.05)])
def test_training_a_dense_block_follows_the_cpu(monkeypatch, precision, tolerance):
    fake = install(monkeypatch, FakeCuda(seed=3))
    graph, optimizer = graph_of("icf"), SGD(0.02, momentum=0.9)
    cpu = compile_step(graph, optimizer=optimizer, threads=1)
    mine = interpreted_step(graph, gpu(precision), fake, optimizer)
    losses = [(mine(*nets.batch(i)), cpu(*nets.batch(i))) for i in range(STEPS)]
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=tolerance)


def with_momentum(momentum: float) -> TrainingGraph:
    """Another network than `graph_of`: its running statistics move by other amounts."""
    model = onnx.ModelProto()
    model.CopyFrom(build_training_graph(dense_layers()))
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "BatchNorm" and attribute.name == "momentum":
                attribute.f = momentum
    return open_graph(model)


def test_verify_judges_by_the_step_s_precision(monkeypatch):
    """A fused step in fp16 is equal to its source by fp16's tolerance, not by float32's, and to no other graph."""
    fake = install(monkeypatch, FakeCuda(seed=4))
    monkeypatch.setattr(CompiledRunner, "compiled", lambda self, lr, state: interpreted_step(self.graph, target, fake))
    target, right = gpu("fp16"), graph_of("none")
    feeds, state = draw_feeds(right, np.random.default_rng(0)), right.state()
    found = CompiledRunner(graph_of("icf"), Where(1, "cuda:sm_90", "fp16")).evaluate(feeds, state)

    def equal(graph: TrainingGraph, precision: str) -> bool:
        where, rng = Where(1, precision=precision), np.random.default_rng(1)
        reference = Reference(graph, OrtRunner, where, feeds, state, 0.0, 0, rng)
        reference.draw(3)
        return is_right(*reference.judge(found, []))

    assert equal(right, "fp16")
    assert not equal(right, "fp32")
    assert not equal(with_momentum(0.8), "fp16")
