"""DataLoaders of torch as data: fed as they come, drawn by the seed, told from what they cannot be."""

from __future__ import annotations

import numpy as np
import pytest
from small_training import forward_model

import bnfuse
from bnfuse.api import run
from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.data.loaders import loaders_in
from bnfuse.training.feeding import with_loaders
from bnfuse.training.loading import Loader

pytestmark = pytest.mark.torch

BATCH = 16


@pytest.fixture(scope="module")
def graph():
    return build_training_graph(forward_model(0.0))


@pytest.fixture(scope="module")
def step(graph):
    return bnfuse.compile(graph, optimizer=bnfuse.SGD(lr=0.05, momentum=0.9), threads=1)


def tensors(count=40, seed=0, shape=(1, 8, 8)):
    import torch

    rng = np.random.default_rng(seed)
    y = np.arange(count) % 10
    x = rng.standard_normal((count, *shape)) + y[:, None, None, None] / 5
    return torch.utils.data.TensorDataset(torch.from_numpy(x).float(), torch.from_numpy(y))


def loader(data=None, batch_size=BATCH, **how):
    import torch

    return torch.utils.data.DataLoader(tensors() if data is None else data, batch_size=batch_size, **how)


class Noisy:
    """A data set whose transforms draw, by torch and by Python."""

    def __init__(self):
        self.inner = tensors()

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        import random

        import torch

        x, y = self.inner[index]
        return x + torch.rand(()) * random.random(), y


def fed(graph, data, epochs=2, seed=5, **how):
    from bnfuse.graph.training_graph import open_graph

    made = Loader(with_loaders(open_graph(graph), data), BATCH, seed, **how)
    return [(batch.epoch, batch.index, batch.x, batch.y) for batch in made.batches(1, epochs)]


def same(a, b):
    return len(a) == len(b) and all(
        p[:2] == q[:2] and np.array_equal(p[2], q[2]) and np.array_equal(p[3], q[3]) for p, q in zip(a, b, strict=True)
    )


def test_batches_are_the_loaders_in_its_order(graph):
    data = loader(shuffle=False)
    found = fed(graph, data)
    assert [one[:2] for one in found] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    for (_, index, x, y), (images, labels) in zip(found[:2], list(data)[:2], strict=True):
        np.testing.assert_array_equal(x, images.numpy(), err_msg=str(index))
        np.testing.assert_array_equal(y, labels.numpy())
    assert [len(one[3]) for one in fed(graph, data, partial=True)] == [16, 16, 8] * 2


def test_what_it_draws_follows_from_the_seed_and_the_epoch(graph):
    import random

    import torch

    data = loader(Noisy(), shuffle=True)
    state = torch.get_rng_state(), random.getstate()
    first = fed(graph, data)
    torch.rand(3)
    assert same(fed(graph, data), first)
    assert not same(fed(graph, data, seed=6), first)
    assert not np.array_equal(first[0][2], first[2][2])
    torch.set_rng_state(state[0])
    fed(graph, data, epochs=1)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    later = Loader(with_loaders_of(graph, data), BATCH, 5).batches(2, 2, skip=1)
    np.testing.assert_array_equal(next(later).x, first[3][2])


def with_loaders_of(graph, data):
    from bnfuse.graph.training_graph import open_graph

    return with_loaders(open_graph(graph), data)


def test_training_with_them_is_that_of_a_loop_by_hand(graph, step, tmp_path):
    import torch

    data, held_out = loader(shuffle=False), loader(tensors(25, seed=1), batch_size=10)
    history = bnfuse.train(
        graph,
        (data, held_out),
        epochs=2,
        optimizer=bnfuse.SGD(lr=0.05, momentum=0.9),
        schedule="constant",
        threads=1,
        save_to=tmp_path / "end.safetensors",
    )
    for _ in range(2):
        for images, labels in list(data)[:2]:
            step(images, labels)
    end = bnfuse.compile(graph, optimizer=bnfuse.SGD(lr=0.05, momentum=0.9), threads=1)
    end.load(tmp_path / "end.safetensors")
    for name, value in step.state_dict().items():
        np.testing.assert_array_equal(end.state_dict()[name], value, err_msg=name)
    images, labels = (torch.cat(parts) for parts in zip(*held_out, strict=True))
    right = int((step.evaluate(images.numpy()).argmax(1) == labels.numpy()).sum())
    assert (history.held_out, history.accuracy) == (25, right / 25)
    score = bnfuse.evaluate(step, held_out)
    assert (score.images, score.right) == (25, right)
    parts = bnfuse.evaluate(step, {"train": data, "test": held_out}, part="train")
    assert parts.images == 40
    assert len(run(graph, data=data, steps=3)) == 3


def test_a_run_over_a_loader_goes_on_as_the_unbroken_one(graph, tmp_path):
    how = {"optimizer": bnfuse.SGD(lr=0.05), "schedule": "constant", "threads": 1, "resume": "auto"}
    data = loader(Noisy(), shuffle=True)
    whole = bnfuse.train(graph, data, epochs=3, save_to=tmp_path / "whole", **how)
    bnfuse.train(graph, data, epochs=1, save_to=tmp_path / "parts", **how)
    parts = bnfuse.train(graph, data, epochs=3, save_to=tmp_path / "parts", **how)
    assert [one.loss for one in parts.epochs] == [one.loss for one in whole.epochs]
    other = loader(tensors(48), shuffle=True)
    with pytest.raises(BnfuseError, match="data"):
        bnfuse.train(graph, other, epochs=4, save_to=tmp_path / "parts", **how)


def wrong(kind):
    import torch

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(tensors())

    pairs = [(torch.zeros(1, 8, 8), 3, 4)] * 16
    return {
        "batch": lambda: loader(batch_size=8),
        "size": lambda: loader(tensors(shape=(1, 9, 9))),
        "bytes": lambda: loader([(torch.zeros(1, 8, 8, dtype=torch.uint8), 3)] * 16),
        "three": lambda: loader(pairs),
        "dict": lambda: loader([{"x": torch.zeros(1, 8, 8), "y": 3}] * 16),
        "stream": lambda: loader(Stream()),
        "class": lambda: loader([(torch.zeros(1, 8, 8), 10)] * 16),
        "few": lambda: loader(tensors(10)),
    }[kind]()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("batch", r"the DataLoader: gives batches of 8, the graph takes 16: give it batch_size=16"),
        ("size", r"the DataLoader: gives images float32 \[1, 1, 9, 9\], the graph takes float32 \[N, 1, 8, 8\]"),
        ("bytes", "the DataLoader: gives images uint8"),
        ("three", r"gives 3 things at a time: it must give \(images, labels\)"),
        ("dict", r"gives a dict at a time: it must give \(images, labels\)"),
        ("stream", "is of an IterableDataset, whose length nothing says"),
        ("class", "the DataLoader: its labels"),
        ("few", "10 images do not fill a batch of 16"),
    ],
)
def test_loaders_that_do_not_fit_are_one_line(graph, kind, message):
    with pytest.raises(BnfuseError, match=message) as caught:  # before anything is compiled
        with_loaders_of(graph, wrong(kind))
        Loader(with_loaders_of(graph, wrong(kind)), BATCH)
    assert "\n" not in str(caught.value)


def test_options_that_are_the_loaders_own_are_refused(graph, tmp_path):
    import torch

    data = loader()
    with pytest.raises(BnfuseError, match="its own transforms change images: leave --augment flip out"):
        bnfuse.train(graph, data, augment="flip")
    with pytest.raises(BnfuseError, match=r"has workers of its own \(num_workers\)"):
        bnfuse.train(graph, data, workers=2)
    with pytest.raises(BnfuseError, match="its labels are not known beforehand: give class weights as numbers"):
        bnfuse.train(graph, data, class_weights="balanced")
    own = loader(shuffle=True, generator=torch.Generator())
    with pytest.raises(BnfuseError, match="cannot go on exactly with a generator of its own"):
        bnfuse.train(graph, own, save_to=tmp_path / "run", resume="auto")
    with pytest.raises(BnfuseError, match="4 DataLoaders are given"):
        loaders_in((data,) * 4)
    with pytest.raises(BnfuseError, match="given as val: they are train, and val and test"):
        loaders_in({"val": data})
    with pytest.raises(BnfuseError, match="data is a TensorDataset: give a name, a path, DataLoaders"):
        bnfuse.train(graph, data.dataset)
