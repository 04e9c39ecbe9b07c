"""Parts of pictures, by their definitions; and as torchvision's transforms give them, where that is installed."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from bnfuse.data.draws import Draw
from bnfuse.data.geometry import around, fitted, middle, middle_within, random_box, resized

SIZES = ((100, 60), (61, 97), (64, 64), (33, 200), (7, 5))


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(width * height)
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return Image.fromarray(rng.integers(0, 256, shape, np.uint8))


def triangle(old: int, new: int, low: float = 0.0) -> np.ndarray:
    """Weights of Pillow's bilinear filter, by its definition."""
    scale = max(old / new, 1.0)
    weights = np.zeros((new, old))
    for row in range(new):
        centre = low + (row + 0.5) * old / new
        weights[row] = np.maximum(0, 1 - np.abs(np.arange(old) + 0.5 - centre) / scale)
    return weights / weights.sum(1, keepdims=True)


@pytest.mark.parametrize("size", SIZES)
def test_the_whole_picture_is_squashed(size):
    source = picture(*size, "L")
    found = np.asarray(fitted(source, (16, 16)))
    expected = triangle(size[1], 16) @ np.asarray(source, np.float64) @ triangle(size[0], 16).T
    assert np.abs(found - expected).max() <= 1.01  # two roundings
    same = picture(16, 16)
    assert fitted(same, (16, 16)) is same


@pytest.mark.parametrize("size", SIZES)
def test_the_middle_is_a_share_of_the_shorter_side(size):
    source = picture(*size, "L")
    found = np.asarray(fitted(source, (28, 28), 0.875))
    width, height = around(*size, 32)
    assert min(width, height) == 32
    assert max(width, height) == math.floor(32 * Fraction(max(size), min(size)))
    whole = triangle(size[1], height) @ np.asarray(source, np.float64) @ triangle(size[0], width).T
    top, left = round((height - 28) / 2), round((width - 28) / 2)
    assert np.abs(found - whole[top : top + 28, left : left + 28]).max() <= 1.01


def test_pixels_around_a_part_do_not_count():
    values = np.zeros((40, 40), np.uint8)
    values[10:20, 10:20] = 200
    assert (np.asarray(resized(Image.fromarray(values), (10, 10, 20, 20), (6, 6))) == 200).all()


def test_random_parts_have_the_areas_and_the_proportions_they_should():
    """Ten thousand of them: means by the definition, to four standard errors."""
    boxes = np.array([random_box(400, 400, Draw(1, 1, index), 0.08) for index in range(10_000)])
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert boxes.min() >= 0 and boxes.max() <= 400
    area = width * height / 400**2
    ratio = np.log(width / height)
    assert area.min() > 0.078 and np.abs(ratio).max() < math.log(4 / 3) + 0.02
    fits = area < 0.7  # larger ones with a far ratio do not fit, and are drawn anew
    assert abs(area[fits].mean() - 0.39) < 4 * 0.179 / math.sqrt(fits.sum())
    assert abs(ratio.mean()) < 4 * 0.166 / 100
    free = 400 - width
    assert abs((boxes[:, 0] / np.maximum(free, 1))[free > 20].mean() - 0.5) < 0.02


def test_a_picture_far_too_long_gives_its_middle():
    assert random_box(1000, 10, Draw(0, 1, 0), 0.9) == middle_within(1000, 10) == (493, 0, 506, 10)
    assert middle_within(10, 1000) == (0, 493, 10, 506)
    assert middle_within(30, 31) == (0, 0, 30, 31)
    assert middle(33, 28, 28) == (2, 0, 30, 28)  # round to even, as torchvision


@pytest.mark.torchvision
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_as_torchvision(size, mode):
    from torchvision import transforms as T
    from torchvision.transforms import functional as F

    source = picture(*size, mode)
    theirs = T.Compose([T.Resize(int(28 / 0.875)), T.CenterCrop(28)])(source)
    assert np.array_equal(fitted(source, (28, 28), 0.875), theirs)
    assert np.array_equal(fitted(source, (28, 28)), T.Resize((28, 28))(source))
    for index in range(8):
        left, top, right, bottom = box = random_box(*size, Draw(0, 1, index), 0.08)
        crop = F.resized_crop(source, top, left, bottom - top, right - left, [28, 28])
        assert np.array_equal(resized(source, box, (28, 28)), crop)
    limits = T.RandomResizedCrop(28).get_params(source, (9.0, 9.0), (3 / 4, 4 / 3))  # none fits: the middle
    left, top, right, bottom = middle_within(*size)
    assert limits == (top, left, bottom - top, right - left)
