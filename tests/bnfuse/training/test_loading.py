"""Batches made ahead: the same as without a thread, no more ahead than the queue holds, and no thread left behind."""

import itertools
import threading
import time

import numpy as np
import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.data import batches
from bnfuse.training import Loader, parse_augment, prefetched


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name == "bnfuse-loader"]


@pytest.fixture
def loader(data):
    return Loader(data, 16, seed=3, augment=parse_augment("flip,pad-crop:2"), normalise=True)


def test_prefetching_changes_nothing(loader):
    plain = list(loader.batches(1, 2))
    with prefetched(loader.batches(1, 2), depth=2) as ahead:
        made = list(ahead)
    assert [(b.epoch, b.index) for b in made] == list(itertools.product((1, 2), range(loader.steps)))
    for a, b in zip(plain, made, strict=True):
        assert np.array_equal(a.x, b.x)
        assert np.array_equal(a.y, b.y)


def test_batches_from_the_middle_are_those_of_the_whole(loader):
    whole = [b for b in loader.batches(1, 3) if (b.epoch, b.index) >= (2, 3)]
    part = list(loader.batches(2, 3, skip=3))
    assert [(b.epoch, b.index) for b in part] == [(b.epoch, b.index) for b in whole]
    assert all(np.array_equal(a.x, b.x) for a, b in zip(whole, part, strict=True))


def test_without_augmentation_batches_are_those_of_the_data(data):
    mine = Loader(data.normalised(), 16, seed=1).batches(4, 4)
    theirs = batches(data.normalised().train_x, data.train_y, 16, seed=1, epoch=4)
    for batch, (x, y) in zip(mine, theirs, strict=True):
        assert np.array_equal(batch.x, x)
        assert np.array_equal(batch.y, y)


def test_normalising_on_the_way_is_normalising_before(data):
    before = Loader(data.normalised(), 16, augment=parse_augment("pad-crop:1"))
    on_the_way = Loader(data, 16, augment=parse_augment("pad-crop:1"), normalise=True)
    pairs = zip(before.batches(1, 1), on_the_way.batches(1, 1), strict=True)
    assert all(np.array_equal(a.x, b.x) and a.x.dtype == b.x.dtype == np.float32 for a, b in pairs)


def test_no_more_is_made_ahead_than_the_queue_holds():
    made = []

    def source():
        for index in range(100):
            made.append(index)
            yield index

    with prefetched(source(), depth=3) as ahead:
        assert next(ahead) == 0
        time.sleep(0.3)
        assert 3 <= len(made) <= 6  # one taken, three waiting, one in hand
    assert not loader_threads()


def test_an_error_in_the_thread_arrives_in_its_place():
    def source():
        yield 1
        raise BnfuseError("no more")

    with pytest.raises(BnfuseError, match="no more"), prefetched(source()) as ahead:
        assert next(ahead) == 1
        next(ahead)
    assert not loader_threads()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, GeneratorExit])
def test_whatever_ends_the_consumer_ends_the_thread(error):
    with pytest.raises(error), prefetched(itertools.count(), depth=2) as ahead:
        next(ahead)
        raise error
    assert not loader_threads()


def test_a_batch_larger_than_the_data_is_refused(data):
    with pytest.raises(BnfuseError, match="83 images do not fill a batch of 84"):
        Loader(data, 84)
