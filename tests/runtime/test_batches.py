"""A step of several batch sizes: one state, each batch as torch has it in float64."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from small_training import forward_model, small_graph

import bnfuse
from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.backends.cpu.library import Library

SGD = bnfuse.SGD(lr=0.1, momentum=0.9)
ORDER = (16, 7, 7, 16)


@pytest.fixture(scope="module")
def graph():
    return bnfuse.rewrite(build_training_graph(forward_model(dropout=0.0)), level="icf").model


@pytest.fixture(scope="module")
def step(graph):
    made = bnfuse.compile(graph, optimizer=SGD, threads=1)
    bnfuse.add_batch(made, 7)
    return made


def drawn(batch: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, batch])
    return rng.standard_normal((batch, 1, 8, 8)).astype(np.float32), rng.integers(0, 10, batch)


class Torch:
    """The network, its optimiser and running statistics as ONNX defines them: of the biased variance."""

    def __init__(self, state: dict[str, np.ndarray]) -> None:
        import torch

        self.torch, self.functional = torch, torch.nn.functional
        self.values = {name: torch.tensor(value.astype(np.float64)) for name, value in state.items()}
        self.weights = [v.requires_grad_() for k, v in self.values.items() if not re.search(r"/(mean|var)$", k)]
        self.optimizer = torch.optim.SGD(self.weights, lr=0.1, momentum=0.9)

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        torch, functional = self.torch, self.functional
        maps = torch.tensor(x.astype(np.float64))
        for layer, stride in (("conv1", 1), ("conv2", 2)):
            v = {what: self.values[f"{layer}/bn/{what}"] for what in ("scale", "bias", "mean", "var")}
            maps = functional.conv2d(maps, self.values[f"{layer}/weight"], stride=stride, padding=1)
            count, mean, var = maps.numel() // maps.shape[1], v["mean"].clone(), v["var"].clone()
            maps = functional.relu(functional.batch_norm(maps, mean, var, v["scale"], v["bias"], True, 0.1, 1e-5))
            v["mean"].copy_(mean)
            v["var"].copy_(0.9 * v["var"] + (var - 0.9 * v["var"]) * (count - 1) / count)
        logits = functional.linear(maps.mean((2, 3)), self.values["head/weight"], self.values["head/bias"])
        loss = functional.cross_entropy(logits, torch.tensor(y))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss)


@pytest.mark.torch
def test_steps_of_several_batches_train_one_state_as_torch_does(step):
    assert step.batches == (16, 7)
    oracle = Torch(step.state_dict())
    for place, batch in enumerate(ORDER):
        x, y = drawn(batch, place)
        assert np.isclose(step(x, y), oracle.step(x, y), rtol=1e-5)
    assert step.steps == len(ORDER)
    for name, value in step.state_dict().items():
        wanted = oracle.values[name].detach().numpy()
        assert np.linalg.norm(value - wanted) <= 1e-5 * max(np.linalg.norm(wanted), 1e-2), name


@pytest.mark.torch
def test_gradients_and_outputs_are_those_of_the_batch_of_the_last_call(step):
    x, y = drawn(7)
    step.forward(x, y)
    step.backward()
    assert step.outputs[step.program.signature["logits"]].shape == (7, 10)
    oracle = Torch(step.state_dict())
    oracle.step(x, y)
    for name, value in step.gradients().items():
        wanted = oracle.values[name].grad.numpy()
        assert np.linalg.norm(value - wanted) <= 1e-5 * max(np.linalg.norm(wanted), 1e-2), name


def test_any_number_of_samples_is_evaluated(step):
    x, _ = drawn(40)
    each = np.concatenate([step.evaluate(x[i : i + 1]) for i in range(40)])
    for count in (1, 7, 10, 16, 30, 40):
        assert np.allclose(step.evaluate(x[:count]), each[:count], atol=1e-5)


def test_a_checkpoint_and_a_file_hold_one_state_for_all_batches(step, tmp_path):
    step.export(tmp_path / "step.bnf")
    step.save(tmp_path / "state.safetensors")
    again = bnfuse.open_step(tmp_path / "step.bnf")
    again.load(tmp_path / "state.safetensors")
    again.lr = step.lr
    assert again.batches == step.batches
    for batch in (7, 16):
        assert again(*drawn(batch)) == step(*drawn(batch))


def test_a_batch_that_it_is_not_compiled_for_says_what_to_do(step):
    with pytest.raises(BnfuseError, match=r"\[5, 1, 8, 8\].*bnfuse.add_batch\(step, 5\)"):
        step(*drawn(5))


def test_a_backward_follows_the_forward_of_its_own_batch_alone(step):
    step.forward(*drawn(16))
    step.evaluate(drawn(9)[0])
    with pytest.raises(BnfuseError, match="backward needs a forward"):
        step.backward()


def test_batches_may_be_given_at_once_and_the_first_is_that_of_the_program(graph, step):
    other = bnfuse.compile(graph, optimizer=SGD, threads=1, batches=(7, 16))
    assert other.batches == (7, 16)
    assert other.program.inputs["image"].shape[0] == 7
    other.load_state_dict(step.state_dict())
    x = drawn(16)[0]
    assert np.array_equal(other.evaluate(x), step.evaluate(x))


def test_samples_that_are_drawn_for_a_batch_have_no_other():
    sampled = small_graph()
    with pytest.raises(BnfuseError, match="build and rewrite the graph anew with the other --batch"):
        bnfuse.compile(sampled, batches=(16, 7))


def test_a_gradient_that_is_constant_is_that_of_its_batch(own_loss):
    """Of the bias of a sum: the count of samples, which is there from the start on."""
    step = bnfuse.compile(build_training_graph(own_loss, loss="own"), threads=1)
    bnfuse.add_batch(step, 7)
    x = np.ones((16, 3), np.float32)
    for batch in (16, 7, 16):
        step(x[:batch])
        np.testing.assert_array_equal(step.gradients()["bias"], np.full(5, batch, np.float32))


@pytest.fixture
def own_loss() -> onnx.ModelProto:
    """x [16, 3] -> Gemm with a bias -> the sum of all."""
    nodes = [
        helper.make_node("Gemm", ["x", "w", "bias"], ["z"], name="layer"),
        helper.make_node("ReduceSum", ["z"], ["loss"], name="sum", keepdims=0),
    ]
    tensors = [numpy_helper.from_array(np.ones(shape, np.float32), n) for n, shape in (("w", (3, 5)), ("bias", (5,)))]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "net", [info("x", 1, [16, 3])], [info("loss", 1, [])], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_rows_that_are_no_samples_are_not_cut():
    """Scores of each pixel, as rows."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], name="turn", perm=[0, 2, 3, 1]),
        helper.make_node("Reshape", ["t", "shape"], ["r"], name="rows"),
        helper.make_node("Gemm", ["r", "w"], ["scores"], name="layer"),
    ]
    tensors = [
        numpy_helper.from_array(np.array([-1, 3]), "shape"),
        numpy_helper.from_array(np.ones((3, 5), np.float32), "w"),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "net", [info("x", 1, [8, 3, 2, 2])], [info("scores", 1, [32, 5])], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    step = bnfuse.compile(build_training_graph(model), threads=1)
    assert step.evaluate(np.ones((8, 3, 2, 2), np.float32)).shape == (32, 5)
    with pytest.raises(BnfuseError, match="no row for each sample: give a batch of 8"):
        step.evaluate(np.ones((5, 3, 2, 2), np.float32))


def test_evaluation_is_loaded_when_it_is_first_asked_for(graph, monkeypatch):
    loaded = []
    load = Library._load
    monkeypatch.setattr(
        Library, "_load", lambda self, names, codes: (loaded.append(len(names)), load(self, names, codes))
    )
    step = bnfuse.compile(graph, optimizer=SGD, threads=1)
    step(*drawn(16))
    assert len(loaded) == 1
    first = step.evaluate(drawn(16)[0])
    np.testing.assert_array_equal(step.evaluate(drawn(16)[0]), first)
    assert len(loaded) == 2
