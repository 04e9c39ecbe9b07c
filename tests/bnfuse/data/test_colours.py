"""Changes of colours by their formulas in float64; and as torchvision's transforms give them, where it is installed."""

from __future__ import annotations

import colorsys
import math

import numpy as np
import pytest
from PIL import Image

from bnfuse.data import colours
from bnfuse.data.colours import OPERATIONS, Jitter, jittered, rand_augmented
from bnfuse.data.draws import Draw

RNG = np.random.default_rng(0)
COLOUR = Image.fromarray(RNG.integers(0, 256, (24, 30, 3), np.uint8))
SMOOTH = Image.fromarray(RNG.integers(40, 200, (4, 5, 3), np.uint8)).resize((30, 24), Image.Resampling.BICUBIC)
GREY = COLOUR.convert("L")
PICTURES = (COLOUR, SMOOTH, GREY)
FACTORS = (0.0, 0.3, 1.0, 1.7)


def values(picture) -> np.ndarray:
    return np.asarray(picture, np.float64)


def luminance(picture) -> np.ndarray:
    wide = values(picture)
    return wide if wide.ndim == 2 else wide @ [0.299, 0.587, 0.114]


def blend(picture, other, factor):
    return np.clip(factor * values(picture) + (1 - factor) * other, 0, 255)


@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("factor", FACTORS)
def test_blends(picture, factor):
    shape = values(picture).shape
    grey = np.broadcast_to(luminance(picture).reshape(*shape[:2], *([1] * (len(shape) - 2))), shape)
    for change, other in (
        (colours.brightened, np.zeros(shape)),
        (colours.contrasted, np.full(shape, luminance(picture).mean())),
        (colours.saturated, grey),
    ):
        found = values(change(picture, factor))
        assert np.abs(found - blend(picture, other, factor)).max() <= 2  # of which Pillow rounds each part


def test_hues_turn():
    found = values(colours.turned_hue(SMOOTH, 0.25)).reshape(-1, 3) / 255
    before = values(SMOOTH).reshape(-1, 3) / 255
    turns, weights = [], []
    for one, other in zip(before, found, strict=True):
        (h, s, _), (h2, _, _) = colorsys.rgb_to_hsv(*one), colorsys.rgb_to_hsv(*other)
        if s > 0.3:
            turns.append((h2 - h) % 1)
            weights.append(s)
    assert len(turns) > 100 and abs(np.median(turns) - 0.25) < 0.01
    assert colours.turned_hue(GREY, 0.3) is GREY
    assert np.abs(values(colours.turned_hue(SMOOTH, 0.0)) - values(SMOOTH)).max() <= 8  # hues of 8 bits


def test_pixels_move_where_they_should():
    source = np.asarray(GREY)
    height, width = source.shape
    rows, columns = np.mgrid[:height, :width]

    def expected(x, y):
        x, y = np.floor(x).astype(int), np.floor(y).astype(int)
        inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
        return np.where(inside, source[np.clip(y, 0, height - 1), np.clip(x, 0, width - 1)], 0)

    x, y = columns + 0.5, rows + 0.5
    assert np.array_equal(colours.sheared_x(GREY, 0.31), expected(x + 0.31 * y, y))
    assert np.array_equal(colours.sheared_y(GREY, -0.17), expected(x, y - 0.17 * x))
    assert np.array_equal(colours.shifted_x(GREY, 0.2), expected(x - 6, y))
    assert np.array_equal(colours.shifted_y(GREY, -0.2), expected(x, y + 4))
    angle = math.radians(20)
    dx, dy = x - width / 2, y - height / 2
    turned = expected(
        math.cos(angle) * dx - math.sin(angle) * dy + width / 2,
        math.sin(angle) * dx + math.cos(angle) * dy + height / 2,
    )
    assert (np.asarray(colours.turned(GREY, 20)) == turned).mean() > 0.99  # fixed-point steps at the edges of pixels


def test_levels():
    source = np.asarray(COLOUR)
    assert np.array_equal(colours.posterized(COLOUR, 3), source & 0xE0)
    assert np.array_equal(colours.solarized(COLOUR, 178.5), np.where(source < 178.5, source, 255 - source))
    assert np.array_equal(colours.solarized(COLOUR, 100), np.where(source < 100, source, 255 - source))
    low, high = values(SMOOTH).min((0, 1)), values(SMOOTH).max((0, 1))
    assert np.abs(values(colours.auto_contrasted(SMOOTH, 0)) - (values(SMOOTH) - low) * 255 / (high - low)).max() <= 1
    counts = np.bincount(np.asarray(GREY).ravel(), minlength=256)
    step = (counts.sum() - counts[np.flatnonzero(counts)[-1]]) // 255
    levels = (step // 2 + np.cumsum(counts) - counts) // step
    assert np.array_equal(colours.equalized(GREY, 0), np.minimum(levels, 255)[np.asarray(GREY)])


def test_a_jitter_stays_within_its_reach_and_is_drawn_once_for_each_image():
    jitter = Jitter(0.4, 0.0, 0.0)
    means = [values(jittered(SMOOTH, jitter, Draw(0, 1, index))).mean() for index in range(60)]
    ratio = np.array(means) / values(SMOOTH).mean()
    assert 0.58 < ratio.min() < 0.7 and 1.25 < ratio.max() < 1.41
    whole = Jitter(0.4, 0.4, 0.4, 0.1)
    again = [np.asarray(jittered(COLOUR, whole, Draw(0, epoch, 5))) for epoch in (1, 1, 2)]
    assert np.array_equal(again[0], again[1]) and not np.array_equal(again[0], again[2])
    assert jittered(GREY, whole, Draw(0, 1, 1)).mode == "L"


def test_every_operation_is_drawn_to_either_side():
    seen = {np.asarray(rand_augmented(SMOOTH, 1, 9, Draw(0, 1, index))).tobytes() for index in range(400)}
    one_sided = sum(not operation.signed for operation in OPERATIONS)
    assert len(seen) == 2 * (len(OPERATIONS) - one_sided) + one_sided
    assert rand_augmented(GREY, 3, 30, Draw(0, 1, 0)).mode == "L"


@pytest.mark.torchvision
@pytest.mark.parametrize("picture", PICTURES)
def test_as_torchvision(picture):
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as F
    from torchvision.transforms.autoaugment import _apply_op

    pairs = [
        *((colours.brightened(picture, f), F.adjust_brightness(picture, f)) for f in FACTORS),
        *((colours.contrasted(picture, f), F.adjust_contrast(picture, f)) for f in FACTORS),
        *((colours.saturated(picture, f), F.adjust_saturation(picture, f)) for f in FACTORS),
        *((colours.sharpened(picture, f), F.adjust_sharpness(picture, f)) for f in FACTORS),
        *((colours.turned_hue(picture, t), F.adjust_hue(picture, t)) for t in (-0.5, -0.13, 0.0, 0.2, 0.5)),
    ]
    moves = {
        "ShearX": colours.sheared_x,
        "ShearY": colours.sheared_y,
        "Rotate": colours.turned,
        "Posterize": colours.posterized,
        "Solarize": colours.solarized,
        "AutoContrast": colours.auto_contrasted,
        "Equalize": colours.equalized,
    }
    amounts = {"ShearX": (0.09, -0.3), "ShearY": (0.09, -0.3), "Rotate": (9.0, -30.0), "Posterize": (7, 4)}
    for name, change in moves.items():
        for amount in amounts.get(name, (178.5, 100.0)):
            theirs = _apply_op(picture, name, float(amount), InterpolationMode.NEAREST, None)
            pairs.append((change(picture, amount), theirs))
    for share in (0.2, -0.45):
        for name, change, side in (
            ("TranslateX", colours.shifted_x, picture.width),
            ("TranslateY", colours.shifted_y, picture.height),
        ):
            theirs = _apply_op(picture, name, share * side, InterpolationMode.NEAREST, None)
            pairs.append((change(picture, share), theirs))
    for place, (ours, theirs) in enumerate(pairs):
        assert np.array_equal(ours, theirs), place


@pytest.mark.torchvision
@pytest.mark.parametrize("magnitude", [0, 9, 15, 30])
def test_magnitudes_are_torchvisions(magnitude):
    from torchvision.transforms import RandAugment

    names = ("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast",
             "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize")  # fmt: skip
    space = RandAugment()._augmentation_space(31, (331, 331))
    assert tuple(space) == names
    for name, operation in zip(names, OPERATIONS, strict=True):
        magnitudes, signed = space[name]
        theirs = float(magnitudes[magnitude]) if magnitudes.ndim else 0.0
        ours = operation.amount(magnitude / 30) * (331 if name.startswith("Translate") else 1)
        assert (ours, operation.signed) == (pytest.approx(theirs, rel=1e-5, abs=1e-5), signed), name
