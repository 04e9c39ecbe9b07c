"""Sample specs in words, and the parts of a batch that they take."""

import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.sampling import Box, Points
from bnfuse.passes.sampling.parts import parts_of, rectangle
from bnfuse.passes.sampling.spec import LayerSample, parse_plan


@pytest.mark.parametrize(
    "text, expected",
    [
        ("ns:4", LayerSample("ns:4", "ns", 4)),
        ("bs:1/8", LayerSample("bs:1/8", "bs", Fraction(1, 8))),
        ("fs:1/32", LayerSample("fs:1/32", "fs", Fraction(1, 32))),
        ("fs:0.03", LayerSample("fs:0.03", "fs", Fraction(3, 100))),
        ("frs:1", LayerSample("frs:1", "frs", Fraction(1))),
        ("vdn:2", LayerSample("vdn:2", None, None, 2)),
        ("fs:1/64+vdn:2@0.25", LayerSample("fs:1/64+vdn:2@0.25", "fs", Fraction(1, 64), 2, 0.25)),
        ("vdn:1+bn", LayerSample("vdn:1+bn", "bn", None, 1, 0.5)),
        ("rbn", LayerSample("rbn", "rbn")),
    ],
)
def test_a_spec_for_all_layers(text, expected):
    plan = parse_plan(text)
    assert plan.of("any") == expected
    assert plan.virtual == expected.virtual


def test_the_last_glob_that_matches_counts():
    plan = parse_plan("fs:1/32, layer*=bs:2, layer3/*=bn")
    assert [plan.of(name).text for name in ("stem", "layer1/bn", "layer3/bn")] == ["fs:1/32", "bs:2", "bn"]
    assert parse_plan("stem*=ns:1").of("other").kind == "bn"


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "'' is none: a spec is ns:4, bs:4"),
        ("xs:4", "'xs:4' is none"),
        ("fs", "'fs' is none"),
        ("bn:2", "'bn:2' is none"),
        ("ns:0", "takes no sample: take 1 or more"),
        ("bs:-1", "needs a ratio above 0"),
        ("fs:2", "needs a ratio above 0 and at most 1"),
        ("fs:1/0", "needs a ratio above 0"),
        ("frs:x", "needs a ratio above 0"),
        ("fs:1e-999999999", "needs a ratio above 0"),
        ("ns:" + "9" * 5000, "needs a ratio above 0"),
        ("vdn:" + "9" * 5000, "is not vdn:N"),
        ("fs:3%", "needs a ratio above 0"),
        ("vdn:0", "'vdn:0' is not vdn:N"),
        ("vdn:1.5", "is not vdn:N"),
        ("vdnx:2", "is not vdn:N"),
        ("vdn:1@0.5", "a weight is that of vdn in a mixture: write bn+vdn:1@0.5, or vdn:1"),
        ("bn+vdn:1@1", "the weight of vdn is a number between 0 and 1"),
        ("bn+vdn:1@x", "the weight of vdn is a number"),
        ("fs:1/2+bs:1", "a mixture is of one sample of the batch and vdn:N"),
        ("l1bn+vdn:1", "l1bn takes the whole batch"),
        ("fs:1/4,a*=rbn,b*=vdn:1", "l1bn and rbn take the whole batch: leave vdn out, or them"),
        ("vdn:1,a*=vdn:2", "the same virtual samples go through all layers: write vdn:2 everywhere"),
        ("fs:1/4,bs:1", "'fs:1/4' and 'bs:1' both hold for all layers: keep one"),
        ("=bn", "before = goes a glob"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text, message):
    with pytest.raises(BnfuseError, match=re.escape(message)) as raised:
        parse_plan(text)
    assert "\n" not in str(raised.value)


SHAPE = (8, 3, 14, 10)


@pytest.mark.parametrize(
    "text, place, extent, elements",
    [
        ("ns:3", Box((0, 0, 0), (0, 0, 0)), (3, 14, 10), 3 * 140),
        ("bs:3", Box((0, 0, 0), (5, 0, 0)), (3, 14, 10), 3 * 140),
        ("bs:8", Box((0, 0, 0), (0, 0, 0)), (8, 14, 10), 8 * 140),
        ("bs:1/3", Box((0, 0, 0), (5, 0, 0)), (3, 14, 10), 3 * 140),
        ("bs:1/100", Box((0, 0, 0), (7, 0, 0)), (1, 14, 10), 140),
        ("fs:1/4", Box((0, 0, 0), (0, 7, 5)), (8, 7, 5), 8 * 35),
        ("frs:1/32", Points(35, 0, 1120), None, 35),
        ("frs:1/9999", Points(1, 0, 1120), None, 1),
    ],
)
def test_parts_of_a_map(text, place, extent, elements):
    (part,) = parts_of(parse_plan(text).default, SHAPE, 0)
    assert (part.place, part.extent, part.elements, part.weight) == (place, extent, elements, 1.0)


def test_parts_behind_virtual_samples():
    """Two of the ten rows are virtual: the sample of the batch begins behind them."""
    shape = (10, 3, 14, 10)
    virtual, real = parts_of(parse_plan("fs:1/4+vdn:2@0.25").default, shape, 2)
    assert (virtual.place, virtual.extent, virtual.weight) == (Box((0, 0, 0), (0, 0, 0)), (2, 14, 10), 0.25)
    assert (real.place, real.extent, real.weight) == (Box((2, 0, 0), (2, 7, 5)), (8, 7, 5), 0.75)
    (alone,) = parts_of(parse_plan("vdn:2").default, shape, 2)
    assert (alone.extent, alone.weight, alone.drawn) == ((2, 14, 10), 1.0, False)
    (whole,) = parts_of(parse_plan("bn").default, shape, 2)
    assert (whole.place.low, whole.extent, whole.drawn) == ((2, 0, 0), (8, 14, 10), False)
    (points,) = parts_of(parse_plan("frs:1/32").default, shape, 2)
    assert points.place == Points(35, 280, 1400)
    (run,) = parts_of(parse_plan("bs:3").default, shape, 2)
    assert run.place == Box((2, 0, 0), (7, 0, 0))


@pytest.mark.parametrize("shape", [(1, 1, 1, (1 << 31) - 1), (1, 1, (1 << 31) - 1, 1), (1, 1, 46340, 46340)])
def test_the_largest_maps_take_no_time(shape):
    (part,) = parts_of(parse_plan("fs:1/4").default, shape, 0)
    assert part.elements == pytest.approx(shape[2] * shape[3] / 4, rel=1e-3)


def test_a_map_that_no_kernel_can_count_is_refused():
    with pytest.raises(BnfuseError, match=r"a map of \[2, 1, 32768, 32768\] is too large"):
        parts_of(parse_plan("fs:1/4").default, (2, 1, 1 << 15, 1 << 15), 0)


def test_the_whole_batch_is_no_part():
    assert parts_of(parse_plan("bn").default, SHAPE, 0) is None


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(1, 60), st.integers(1, 60), st.fractions(Fraction(1, 500), 1))
def test_rectangles_come_near_the_ratio_and_the_aspect(h, w, ratio):
    rows, columns = rectangle(h, w, ratio)
    assert 1 <= rows <= h
    assert 1 <= columns <= w
    wanted = float(ratio) * h * w
    if wanted >= 16 and min(h, w) >= 8:
        assert abs(np.log(rows * columns / wanted)) < 0.25
        assert abs(np.log(rows * w / (columns * h))) < 1.0
    if wanted <= 1:
        assert rows * columns == 1


def test_rectangles_of_common_maps():
    ratio = Fraction(1, 32)
    found = {size: rectangle(size, size, ratio) for size in (7, 14, 28, 32, 56, 112)}
    assert {size: rows * columns for size, (rows, columns) in found.items()} == {
        7: 2, 14: 6, 28: 25, 32: 30, 56: 100, 112: 400,
    }  # fmt: skip
