"""Weights of classes, mixup and cutmix: what is read, what is drawn, and how a run takes it."""

from __future__ import annotations

import dataclasses
import importlib.util
import types
from pathlib import Path

import numpy as np
import pytest
from small_training import forward_model, small_graph
from source_files import load

import bnfuse
from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.training_graph import open_graph
from bnfuse.training import Batch, Options, run_steps, train_step, with_soft_labels
from bnfuse.training.labelling import Labelling, Recipe, balanced_weights, read_weights
from bnfuse.training.mixing import STREAM, Mix, Mixing

RNG = np.random.default_rng(0)
X = RNG.standard_normal((8, 3, 10, 12)).astype(np.float32)
Y = np.array([0, 1, 2, 3, 0, 1, 2, 3])


def drawn(mixing: Mixing, count: int = 200) -> list[Mix]:
    return [mixing.drawn(X.shape, seed=1, epoch=1 + i // 50, index=i % 50) for i in range(count)]


def test_mixup_adds_each_image_to_its_partner_and_its_label_alike():
    mix = Mixing(mixup=0.4).drawn(X.shape, seed=0, epoch=1, index=0)
    assert mix.box is None and 0 < mix.share < 1
    np.testing.assert_allclose(mix.images(X), mix.share * X + (1 - mix.share) * X[::-1], rtol=1e-5, atol=1e-6)
    rows = Labelling(4, mixing=Mixing(mixup=0.4)).rows(Y, mix)
    np.testing.assert_allclose(rows.sum(1), 1, rtol=1e-6)
    assert np.isclose(rows[0, 0], mix.share) and np.isclose(rows[0, 3], 1 - mix.share)


def test_cutmix_takes_a_rectangle_of_the_partner_and_the_label_by_its_area():
    for mix in drawn(Mixing(cutmix=1.0), 20):
        mixed = mix.images(X)
        own, partner = mixed == X, mixed == X[::-1]
        assert (own | partner).all()
        assert np.isclose(own[0, 0].mean(), mix.share)
        if mix.box is not None:
            top, bottom, left, right = mix.box
            assert partner[:, :, top:bottom, left:right].all()


def test_what_is_drawn_follows_from_seed_epoch_and_place_alone():
    mixing = Mixing(mixup=0.2, cutmix=1.0)
    assert drawn(mixing) == drawn(mixing)
    assert len({(mix.share, mix.box) for mix in drawn(mixing)}) > 190
    assert mixing.drawn(X.shape, seed=2, epoch=1, index=0) != mixing.drawn(X.shape, seed=1, epoch=1, index=0)


def test_kinds_are_drawn_as_often_as_is_asked():
    mixes = drawn(Mixing(mixup=1.0, cutmix=1.0, prob=0.5, switch_prob=0.25), 1000)
    untouched, cut = (sum(map(condition, mixes)) for condition in (lambda m: m == Mix(), lambda m: m.box is not None))
    assert abs(untouched - 500) < 60 and abs(cut - 125) < 40
    shares = [mix.share for mix in drawn(Mixing(mixup=0.2), 1000)]
    assert abs(np.mean(shares) - 0.5) < 0.05
    assert abs(np.var(shares) - 1 / (4 * (2 * 0.2 + 1))) < 0.02  # of Beta(a, a)


def test_after_its_last_epoch_nothing_is_mixed():
    mixing = Mixing(mixup=1.0, off_epoch=2)
    assert all(mix.share < 1 for mix in drawn(mixing)[:100])
    assert all(mix == Mix() for mix in drawn(mixing)[100:])


@pytest.mark.torch
@pytest.mark.timm
def test_batches_are_timms(monkeypatch):
    """timm draws from numpy's global generator: here it is given what we draw."""
    import torch

    place = Path(importlib.util.find_spec("timm").submodule_search_locations[0]) / "data" / "mixup.py"
    mixup = load(place)  # alone: the package imports all networks
    ours = Mixing(mixup=0.3, cutmix=0.8, prob=0.8, switch_prob=0.4)
    theirs = mixup.Mixup(0.3, 0.8, prob=0.8, switch_prob=0.4, label_smoothing=0.1, num_classes=4)
    for index in range(12):
        with monkeypatch.context() as patched:
            patched.setattr(mixup, "np", numpy_that_draws(np.random.default_rng([5, 1, index, STREAM])))
            x, y = theirs(torch.tensor(X), torch.tensor(Y))
        batch = next(Labelling(4, 0.1, mixing=ours).fed([Batch(1, index, X, Y)], seed=5))
        np.testing.assert_allclose(batch.x, x.numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(batch.y, y.numpy(), rtol=1e-5, atol=1e-6)


def numpy_that_draws(rng):
    """numpy, as far as timm needs it, with another generator."""
    draws = types.SimpleNamespace(
        rand=rng.random, beta=rng.beta, randint=lambda low, high, size: rng.integers(low, high)
    )
    return types.SimpleNamespace(random=draws, sqrt=np.sqrt, clip=np.clip)


def test_weights_of_classes_are_read(tmp_path):
    np.save(tmp_path / "w.npy", np.array([1, 2], np.float32))
    (tmp_path / "w.txt").write_text("1, 2\n0.5")
    assert read_weights(tmp_path / "w.npy").tolist() == [1, 2]
    assert read_weights(tmp_path / "w.txt").tolist() == [1, 2, 0.5]
    assert read_weights([1, 2]).tolist() == [1, 2]
    np.testing.assert_allclose(balanced_weights(3, np.array([0, 0, 0, 1, 2, 2])), [6 / 9, 2, 1])


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "a number for each class"), ("1 two", "cannot be read"), ("1 -1", "none negative"), ("nan", "a number for")],
)
def test_what_are_no_weights_is_told(text, message, tmp_path):
    (tmp_path / "w.txt").write_text(text)
    with pytest.raises(BnfuseError, match=message) as caught:
        Options(1, class_weights=tmp_path / "w.txt").check()
    assert str(tmp_path / "w.txt") in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"class_weights": "no.txt"}, "no.txt: cannot be read: No such file"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"mixup": -1}, "mixup"),
        ({"cutmix": 1, "mixup_prob": 2}, "mixup_prob"),
        ({"mixup_off_epoch": 3}, "need --mixup or --cutmix"),
    ],
)
def test_options_are_checked_before_any_work(asked, message):
    with pytest.raises(BnfuseError, match=message):
        Options(1, **asked).check()


def test_weights_that_do_not_fit_to_the_data_are_refused():
    with pytest.raises(BnfuseError, match="has 2 weights, the network has 3 classes"):
        Recipe(weights=[1.0, 2.0]).labelling(3, np.array([0, 1]))
    with pytest.raises(BnfuseError, match="class 2 has no training image"):
        Recipe(weights="balanced").labelling(3, np.array([0, 1]))
    with pytest.raises(BnfuseError, match="a weight of 0"):
        Recipe(weights=[0.0, 2.0]).labelling(2, np.array([0, 0]))
    assert Recipe(weights=[0.0, 2.0]).labelling(2, None).weights.tolist() == [0, 2]  # labels that are yet to come
    with pytest.raises(BnfuseError, match="balanced counts labels"):
        Recipe(weights="balanced").labelling(2, None)


ASKED = {"label_smoothing": 0.1, "class_weights": "balanced", "mixup": 0.4, "cutmix": 1.0, "mixup_prob": 0.9}


def test_a_step_of_integer_labels_is_refused_with_the_remedy(new_step, data):
    with pytest.raises(BnfuseError, match=r"with_soft_labels\(graph\)"):
        train_step(new_step(), data, epochs=1, **ASKED)


def test_virtual_samples_are_refused_before_anything_is_compiled(graph, data):
    with pytest.raises(BnfuseError, match="label smoothing, class weights, mixup and cutmix need a plain one"):
        bnfuse.train(graph, data, epochs=1, label_smoothing=0.1)


@pytest.fixture(scope="module")
def soft_graph():
    return with_soft_labels(open_graph(small_graph(sample="fs:1/4")))


def test_an_interrupted_run_with_all_of_it_goes_on_to_the_same_end(soft_graph, data, tmp_path):
    """And `bnfuse.train`, given the graph with integer labels, is the same run."""
    asked = {"epochs": 2, "seed": 3, "augment": "flip", "checkpoint_every": 2, "normalise": True, **ASKED}
    asked |= {"schedule": "cosine", "min_lr": 1e-3, "warm_up": 0.5, "warm_up_lr": 0.01}
    sgd = bnfuse.SGD(lr=0.05, momentum=0.9, clip_norm=1.0, accumulate=2, ema=0.9)

    def new_step():
        return bnfuse.compile(soft_graph, optimizer=sgd, threads=1)

    whole = train_step(new_step(), data, **asked, save_to=tmp_path / "whole")
    step = new_step()
    forward, calls = step.forward, []

    def broken(*inputs):
        calls.append(inputs)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return forward(*inputs)

    step.forward = broken
    with pytest.raises(KeyboardInterrupt):
        train_step(step, data, **asked, save_to=tmp_path / "run")
    again = train_step(new_step(), data, **asked, save_to=tmp_path / "run", resume="auto")
    last = [bnfuse.core.tensor_files.read_safetensors(tmp_path / n / "last.safetensors")[0] for n in ("whole", "run")]
    assert all(last[0][name].tobytes() == value.tobytes() for name, value in last[1].items())
    told = [[(e.loss, e.accuracy, e.top5, e.ema_accuracy, e.lr) for e in run.epochs] for run in (whole, again)]
    assert told[0] == told[1] and told[0][0][3] is not None
    other = {**asked, "mixup": 0.5}
    with pytest.raises(BnfuseError, match=r"mixup 0\.4.*, not .*mixup 0\.5"):
        train_step(new_step(), data, **other, save_to=tmp_path / "run", resume="auto")
    del asked["normalise"], asked["checkpoint_every"]
    fed = dataclasses.replace(data.normalised(), mean=(), std=())
    same = bnfuse.train(small_graph(sample="fs:1/4"), fed, optimizer=sgd, threads=1, **asked)
    assert [e.loss for e in same.epochs] == [e.loss for e in whole.epochs]


@pytest.mark.parametrize("loss", ["bce", "soft-cross-entropy"])
def test_a_graph_that_takes_numbers_for_classes_is_fed_with_rows(loss, data):
    """Without a recipe they are ones and zeros: the loss of the first step tells."""
    graph = build_training_graph(forward_model(dropout=0.0), loss=loss)
    step = bnfuse.compile(graph, optimizer=bnfuse.SGD(lr=0.05), threads=1)
    before, x = step.state_dict(), data.train_x[:16]
    history = train_step(step, dataclasses.replace(data, train_x=x, train_y=data.train_y[:16]), epochs=1)
    step.load_state_dict(before)
    step.forward(x, np.zeros((16, 10), np.float32))
    logits = np.asarray(step.outputs["logits"], np.float64)
    one = np.eye(10)[data.train_y[:16]]
    if loss == "bce":
        expected = (np.logaddexp(0, logits) - one * logits).mean()
    else:
        expected = -(one * (logits - np.log(np.exp(logits).sum(1, keepdims=True)))).sum(1).mean()
    assert history.epochs[0].loss == pytest.approx(expected, rel=1e-5)
    assert run_steps(step, data, steps=1)[0] > 0
    with pytest.raises(BnfuseError, match="class weights are those of a cross-entropy of classes"):
        train_step(step, data, epochs=1, class_weights="balanced")
