"""A small residual network with drop path beside torch: training with the same masks, evaluation and export without."""

from __future__ import annotations

import io
import warnings

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import bnfuse
from bnfuse.build import build_training_graph

pytestmark = pytest.mark.torch

BATCH, KEEP, STEPS, LR = 4, (0.75, 0.5), 6, 0.05


def network(draws=None):
    """Two residual blocks, each with a drop path of its own; `draws()` gives the uniform values, or torch does."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index
            self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

        def forward(self, x):
            y = self.bn(self.conv(x))
            if self.training:
                keep = KEEP[self.index]
                u = draws()[self.index] if draws else torch.rand(BATCH, 1, 1, 1)
                y = y.div(keep) * (u < keep).to(y.dtype)
            return torch.relu(x + y)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks = nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(Block(0), Block(1))
            self.head = nn.Linear(8, 5)

        def forward(self, x):
            return self.head(self.blocks(self.stem(x)).mean((2, 3)))

    torch.manual_seed(0)
    return Network()


@pytest.fixture(scope="module")
def source():
    import torch

    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        images = torch.zeros(BATCH, 3, 8, 8)
        training = torch.onnx.TrainingMode.TRAINING
        torch.onnx.export(network(), images, file, training=training, do_constant_folding=False, dynamo=False)
    return build_training_graph(onnx.ModelProto.FromString(file.getvalue()))


@pytest.fixture(scope="module")
def graph(source):
    return bnfuse.rewrite(source)


def step_of(graph, lr: float = LR):
    return bnfuse.compile(graph, optimizer=bnfuse.SGD(lr=lr, momentum=0.9), threads=1)


def batches():
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((BATCH, 3, 8, 8), np.float32), rng.integers(0, 5, BATCH)) for _ in range(STEPS)]


def in_torch(state, draws=None, dtype: str = "float64"):
    import torch

    net = network(draws)
    net.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()}, strict=False)
    return net.to(getattr(torch, dtype))


def trained(state, masks, dtype: str) -> list[float]:
    import torch

    held: list = [None]
    net = in_torch(state, lambda: held[0], dtype).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    losses = []
    for (x, y), values in zip(batches(), masks, strict=True):
        held[0] = [torch.from_numpy(value) for value in values]
        optimizer.zero_grad()
        logits = net(torch.from_numpy(x).to(next(net.parameters())))
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_same_masks_give_torchs_losses(graph):
    step = step_of(graph)
    state, names = step.state_dict(), list(step.sampling.random)
    order = sorted(names, key=lambda name: "blocks.1" in name)
    rng = np.random.default_rng(1)
    masks = [[rng.random((BATCH, 1, 1, 1), np.float32) for _ in KEEP] for _ in range(STEPS)]
    ours = []
    for (x, y), values in zip(batches(), masks, strict=True):
        step.fix(dict(zip(order, values, strict=True)))
        ours.append(step(x, y))
    exact, single = (np.array(trained(state, masks, dtype)) for dtype in ("float64", "float32"))
    assert len(names) == len(KEEP)
    assert np.abs(ours - exact).max() <= max(8 * np.abs(single - exact).max(), 1e-6)


def test_evaluation_and_export_are_torchs(graph, tmp_path):
    import torch

    step = step_of(graph)
    for x, y in batches():
        step(x, y)
    x = batches()[0][0]
    with torch.no_grad():
        wanted = in_torch(step.state_dict()).eval()(torch.from_numpy(x).double()).numpy()
    np.testing.assert_allclose(step.evaluate(x), wanted, rtol=1e-5, atol=1e-6)
    bnfuse.export_inference(step, tmp_path / "net.onnx")
    session = ort.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x[:3]})
    np.testing.assert_allclose(found, wanted[:3], rtol=1e-5, atol=1e-6)


def test_masks_of_its_own_differ_and_follow_from_the_seed(graph):
    x, y = batches()[0]
    first, again = ([step(x, y) for _ in range(6)] for step in (step_of(graph, 0.0), step_of(graph, 0.0)))
    assert len(set(first)) > 3
    assert first == again


def test_the_torch_baseline_draws_too(source):
    import torch

    from bnfuse.baselines import torch_module
    from bnfuse.graph.training_graph import open_graph

    module, x = torch_module(open_graph(source)), torch.from_numpy(batches()[0][0])
    torch.manual_seed(0)
    found = [module(x) for _ in range(8)]
    assert len({float(value.detach().sum()) for value in found}) > 3
    found[0].sum().backward()
    torch.manual_seed(0)
    assert torch.equal(module(x), found[0])
