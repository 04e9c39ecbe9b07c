"""A loss that is not finite ends the run at once, and the first tensor that is not finite is named."""

from __future__ import annotations

import dataclasses
import types

import numpy as np
import pytest
import safetensors.numpy
from small_training import forward_model

import bnfuse
from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError, DivergedError
from bnfuse.runtime import SGD
from bnfuse.runtime.targets.target import CudaTarget
from bnfuse.training import replay, train_step
from bnfuse.training.checkpoints import read_saved


def spoilt(step, name: str, value: float = np.inf):
    """The step with one value of its state out of range."""
    state = step.state_dict()
    state[name].flat[0] = value
    step.load_state_dict(state)
    return step


@pytest.mark.parametrize(("rank", "same"), [(None, True), (0, True), (1, False)])
def test_random_values_are_those_of_the_rank(rank, same):
    random = types.SimpleNamespace(draw=lambda shape, dtype, *, seed, step, name: (shape, seed, step, name))
    step = types.SimpleNamespace(
        seed=3,
        steps=5,
        epoch=1,
        virtual_statistics=(np.zeros(1), np.ones(1)),
        world=None if rank is None else types.SimpleNamespace(rank=rank),
        sampling=types.SimpleNamespace(virtual=(), random={"noise": random}, offsets=lambda **_: {}),
        latest=types.SimpleNamespace(inputs={"noise": types.SimpleNamespace(shape=(4,), dtype="float32")}),
    )
    (shape, seed, at, name) = replay.drawn(step)["noise"]
    assert (shape, at, name) == ((4,), 5, "noise") and (seed == 3) is same


@pytest.fixture(scope="module")
def plain_step(new_step):
    """Of a graph that is not rewritten: operators have their own names."""
    model = build_training_graph(forward_model(dropout=0.0))
    return lambda **options: new_step(model=model, **options)


@pytest.mark.parametrize("make", ["new_step", "plain_step"])
def test_the_parameter_that_is_not_finite_is_named(make, request, data):
    step = spoilt(request.getfixturevalue(make)(), "conv2/weight", np.nan)
    with pytest.raises(
        BnfuseError, match=r"loss is nan in step 1 \(epoch 1\).*'conv2/weight', a parameter of node 'conv2"
    ):
        train_step(step, data, epochs=1, normalise=True)


@pytest.mark.parametrize("make", ["new_step", "plain_step"])
def test_the_layer_whose_map_overflows_is_named(make, request, data):
    """Weights of 1e38 are finite; what they give is not."""
    step = spoilt(request.getfixturevalue(make)(), "conv2/weight", 3e38)
    with pytest.raises(BnfuseError, match=r"loss is nan in step 1 .*'conv2/y', which node 'conv2' \(Conv\) gives"):
        train_step(step, data, epochs=1, normalise=True)


@pytest.mark.parametrize("error", [BnfuseError("cannot be run"), ModuleNotFoundError("no onnxruntime")])
def test_without_onnxruntime_running_statistics_tell(error, plain_step, data, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(replay, "not_finite", fail)
    step = spoilt(plain_step(), "conv2/weight", 3e38)
    with pytest.raises(BnfuseError, match=r"'conv2/bn/(mean|var)' as the batch leaves it.*node 'conv2/bn'"):
        train_step(step, data, epochs=1, normalise=True)


def test_on_a_gpu_the_update_has_run_and_statistics_tell(plain_step, data):
    """The whole step in one call, as there; parameters are not asked, for all of them are spoilt."""
    step = spoilt(plain_step(), "conv2/weight", 3e38)
    step.target = CudaTarget("sm_90", 132)
    with pytest.raises(BnfuseError, match=r"'conv2/bn/(mean|var)' as the batch leaves it.*node 'conv2/bn'"):
        train_step(step, data, epochs=1, normalise=True)


def test_behind_the_last_batch_norm_maps_are_named_too(plain_step, data):
    step = plain_step()
    state = step.state_dict()
    state["head/weight"][:] = 3e38
    state["head/weight"][1] = -3e38
    step.load_state_dict(state)
    with pytest.raises(BnfuseError, match=r"'logits', which node 'head' \(Gemm\) gives"):
        train_step(step, data, epochs=1, normalise=True)


def test_images_that_are_not_finite_are_blamed_themselves(plain_step, new_step, data):
    x = data.train_x.copy()
    x[5, 0, 0, 0] = np.nan
    with pytest.raises(BnfuseError, match=r"the batch of images itself\. Check the data"):
        train_step(plain_step(), dataclasses.replace(data, train_x=x), epochs=1)
    with pytest.raises(
        BnfuseError, match=r"digits: holds images that are not finite"
    ):  # to draw virtual ones like them
        train_step(new_step(), dataclasses.replace(data, train_x=x), epochs=1)


def test_a_rate_that_is_too_high_is_told_with_the_step_and_a_remedy(plain_step, data):
    step = plain_step(lr=1e30)
    with pytest.raises(BnfuseError, match=r"in step [23] \(epoch 1\) at a learning rate of 1e\+30: .* smaller --lr"):
        train_step(step, data, epochs=1, schedule="constant")


@pytest.fixture
def diverging(data):
    """A step and the data of one batch: the loss is finite, what the update leaves is not."""
    model = build_training_graph(forward_model(dropout=0.0))
    step = bnfuse.compile(model, optimizer=SGD(lr=3e38, weight_decay=1000), threads=1)
    return step, dataclasses.replace(data, train_x=data.train_x[:16], train_y=data.train_y[:16])


@pytest.mark.parametrize("place", ["run", "state.safetensors"])
def test_a_divergence_in_the_last_update_is_told_and_nothing_is_kept(diverging, place, tmp_path):
    step, few = diverging
    said = r"is not finite after step 1 \(epoch 1\) at a learning rate of 3e\+38\. Use a smaller --lr or a --warm-up\."
    with pytest.raises(DivergedError, match=said):
        train_step(step, few, epochs=1, save_to=tmp_path / place)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_finite_weights_that_give_no_finite_logits_have_diverged_too(plain_step, data, tmp_path):
    few = dataclasses.replace(data, train_x=data.train_x[:16], train_y=data.train_y[:16])
    with pytest.raises(
        DivergedError, match=r"gives numbers that are not finite for held-out images\. Use a smaller --lr"
    ):
        train_step(plain_step(lr=3e38), few, epochs=1, save_to=tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    bad = dataclasses.replace(few, test_x=few.test_x * np.float32(np.nan))
    with pytest.raises(BnfuseError, match=r"the held-out images hold values that are not finite\. Check the data"):
        train_step(plain_step(), bad, epochs=1)


@pytest.mark.parametrize("name", ["conv1/weight", "conv1/bn/mean", "optimizer.momentum.head/bias"])
def test_parameters_statistics_and_moments_are_all_looked_at(name, plain_step, tmp_path):
    step = plain_step()
    assert step.not_finite() is None
    step.save(tmp_path / "a.safetensors")
    tensors = dict(safetensors.numpy.load_file(tmp_path / "a.safetensors"))
    tensors[name] = np.full_like(tensors[name], np.inf)
    safetensors.numpy.save_file(tensors, tmp_path / "a.safetensors", {"optimizer.step": "1"})
    step.load(tmp_path / "a.safetensors")
    assert step.not_finite() == name


def test_a_checkpoint_within_an_epoch_is_finite_too(plain_step, data, tmp_path, monkeypatch):
    step = plain_step()
    names = iter([None, "conv1/weight"])  # asked before the checkpoints behind steps 2 and 4
    monkeypatch.setattr(step, "not_finite", lambda: next(names))
    with pytest.raises(DivergedError, match=r"'conv1/weight' is not finite after step 4 \(epoch 1\)"):
        train_step(step, data, epochs=1, save_to=tmp_path, checkpoint_every=2)
    assert read_saved(tmp_path / "last.safetensors").position.step == 2


def test_a_state_that_is_not_finite_is_not_exported(plain_step, tmp_path):
    step = spoilt(plain_step(), "head/weight", np.nan)
    with pytest.raises(BnfuseError, match="'head/weight' is not finite: the training diverged, so there is nothing to"):
        bnfuse.export_inference(step, tmp_path / "a.onnx")
    assert not (tmp_path / "a.onnx").exists()


def test_the_state_stays_as_it_was_before_the_step(plain_step, data, tmp_path):
    """No parameter is updated by a gradient of nan, and the checkpoint before it stays."""
    step = plain_step()
    train_step(step, data, epochs=1, schedule="constant", save_to=tmp_path)
    before = (tmp_path / "last.safetensors").read_bytes()
    x = np.full_like(data.train_x, np.inf)
    state = step.state_dict()
    with pytest.raises(BnfuseError, match="not finite"):
        train_step(step, dataclasses.replace(data, train_x=x), epochs=2)
    assert all(np.array_equal(state[name], value) for name, value in step.state_dict().items())
    assert (tmp_path / "last.safetensors").read_bytes() == before
