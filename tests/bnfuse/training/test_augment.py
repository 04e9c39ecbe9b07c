"""Flips and crops: what they do, and that only seed, epoch and index decide it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from bnfuse.core.errors import BnfuseError
from bnfuse.data.colours import Jitter
from bnfuse.data.draws import Draw, drawn
from bnfuse.training import Augment, parse_augment

IMAGES = np.random.default_rng(0).standard_normal((64, 2, 6, 5)).astype(np.float32)
INDICES = np.arange(64)


def test_a_flipped_image_is_mirrored_and_about_half_are():
    found = Augment(flip=True)(IMAGES, INDICES, seed=0, epoch=1)
    mirrored = [np.array_equal(y, x[..., ::-1]) for x, y in zip(IMAGES, found, strict=True)]
    same = [np.array_equal(y, x) for x, y in zip(IMAGES, found, strict=True)]
    assert all(a or b for a, b in zip(mirrored, same, strict=True))
    assert 16 < sum(mirrored) < 48


def test_a_crop_is_a_window_of_the_padded_image():
    found = Augment(crop=2)(IMAGES, INDICES, seed=0, epoch=1)
    padded = np.pad(IMAGES, ((0, 0), (0, 0), (2, 2), (2, 2)))
    places = set()
    for image, result in zip(padded, found, strict=True):
        fits = [(r, c) for r in range(5) for c in range(5) if np.array_equal(image[:, r : r + 6, c : c + 5], result)]
        assert len(fits) == 1
        places.add(fits[0])
    assert len(places) > 15


@given(st.permutations(range(16)), st.integers(0, 1 << 40), st.integers(1, 500))
def test_an_image_changes_alike_in_every_batch(order, seed, epoch):
    augment = parse_augment("flip,pad-crop:1")
    together = augment(IMAGES[:16], INDICES[:16], seed=seed, epoch=epoch)
    chosen = np.array(order)
    assert np.array_equal(augment(IMAGES[chosen], chosen, seed=seed, epoch=epoch), together[chosen])
    alone = augment(IMAGES[3:4], INDICES[3:4], seed=seed, epoch=epoch)
    assert np.array_equal(alone[0], together[3])


def test_epochs_and_seeds_differ():
    augment = parse_augment("flip,pad-crop")
    found = [augment(IMAGES, INDICES, seed=s, epoch=e) for s, e in ((0, 1), (0, 2), (1, 1), (1, 2))]
    assert not any(np.array_equal(a, b) for i, a in enumerate(found) for b in found[:i])


def test_draws_are_uniform_and_independent():
    """Mean and correlation of 2^16 draws, as far from the expected as four standard errors allow."""
    indices = np.arange(1 << 16)
    a, b = (drawn(3, 4, indices, stream).astype(np.float64) / 2**64 for stream in (1, 2))
    next_epoch = drawn(3, 5, indices, 1).astype(np.float64) / 2**64
    bound = 4 / 256
    assert abs(a.mean() - 0.5) < bound * 0.289
    for other in (b, next_epoch, np.roll(a, 1)):
        assert abs(np.corrcoef(a, other)[0, 1]) < bound


def test_the_source_stays_as_it_was():
    before = IMAGES.copy()
    parse_augment("flip,pad-crop:2")(IMAGES, INDICES, seed=0, epoch=1)
    assert np.array_equal(IMAGES, before)


@pytest.mark.parametrize(
    "text",
    [
        "none",
        "flip",
        "pad-crop:4",
        "flip,pad-crop:1",
        "random-resized-crop:0.25,flip",
        "jitter:0.4,0.3,0.2,0.1",
        "rand-augment:3,12,jitter:0.4,0.4,0.4,0,random-erasing:0.1",
    ],
)
def test_an_augmentation_is_spelt_as_it_is_read(text):
    assert str(parse_augment(text)) == text


def test_the_default_crop_is_by_four_pixels():
    assert parse_augment("pad-crop") == Augment(crop=4)
    assert parse_augment(None) == Augment()


@pytest.mark.parametrize(
    "text",
    [
        *("rotate", "flip:2", "pad-crop:", "pad-crop:0", "pad-crop:x", "none:1", "flip,,", "pad-crop:999", "0.4"),
        *("random-resized-crop:0", "random-resized-crop:2", "random-resized-crop:0.1,0.2", "jitter", "jitter:0.4,0.4"),
        *("jitter:0.4,0.4,0.4,0.6", "jitter:0", "jitter:-1", "jitter:nan", "rand-augment:2", "rand-augment:2,31"),
        *("rand-augment:2.5,9", "random-erasing:1.5", "random-erasing:", "flip,flip", "pad-crop:4,5", "jitter:0x1"),
    ],
)
def test_what_is_no_augmentation_is_refused(text):
    with pytest.raises(BnfuseError, match=r"pad-crop\[:pixels\]"):
        parse_augment(text)


def test_what_is_left_out_of_an_augmentation_is_the_usual():
    found = parse_augment("random-resized-crop, rand-augment ,random-erasing,jitter:0.4")
    assert found == Augment(scale=0.08, rand=(2, 9), erasing=0.5, jitter=Jitter(0.4, 0.4, 0.4))
    assert found.changes_pictures and found.changes_colours
    assert not parse_augment("flip,pad-crop,random-erasing").changes_pictures


def test_rectangles_are_erased_as_often_and_as_large_as_they_should():
    """By torchvision's definition: shares from 0.02 to 0.33, ratios from 0.3 to 3.3, anywhere."""
    images = np.ones((4000, 2, 40, 30), np.float32)
    found = Augment(erasing=0.25)(images, np.arange(4000), seed=0, epoch=1)
    gone = found[:, 0] == 0
    assert np.array_equal(found[:, 0], found[:, 1])
    touched = gone.any((1, 2))
    assert abs(touched.mean() - 0.25) < 4 * 0.433 / 63
    for one in gone[touched]:
        rows, columns = np.flatnonzero(one.any(1)), np.flatnonzero(one.any(0))
        height, width = rows[-1] - rows[0] + 1, columns[-1] - columns[0] + 1
        assert one.sum() == height * width and height < 40 and width < 30
        assert 0.015 < one.mean() < 0.35 and 0.22 < height / width < 4
    assert abs(gone[touched].mean() - 0.175) < 0.015
    assert gone[:, 0, 0].any() and gone[:, -1, -1].any() and np.array_equal(images, np.ones_like(images))


def test_a_picture_is_changed_alike_whoever_asks():
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8))
    augment = parse_augment("random-resized-crop,jitter:0.4,rand-augment")
    found = [
        np.asarray(augment.on_picture(picture, (8, 8), Draw(1, e, i))) for e, i in ((1, 1), (1, 1), (1, 2), (2, 1))
    ]
    assert np.array_equal(found[0], found[1]) and found[0].shape == (8, 8, 3)
    assert not any(np.array_equal(found[0], other) for other in found[2:])
    deep = Image.fromarray(np.linspace(0, 1, 600, dtype=np.float32).reshape(20, 30))
    assert augment.on_picture(deep, (8, 8), Draw(1, 1, 1)).mode == "L"
    assert parse_augment("random-resized-crop").on_picture(deep, (8, 8), Draw(1, 1, 1)).mode == "F"
