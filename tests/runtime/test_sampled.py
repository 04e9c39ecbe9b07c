"""Kernels of samples, and of the statistics that they are compared with, against the numpy reference in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bnfuse.opset import plain, reference
from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.cpu import coefficients, norm_baseline, norm_sampled
from bnfuse.runtime.kernels.kernel import MapType

pytestmark = pytest.mark.usefixtures("optimized_by_turns")

TARGET = resolve("cpu", 2)
FEW = settings(max_examples=8, deadline=None, derandomize=True)  # each compiles a kernel or two


def expected(name, operands, **attributes):
    wide = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in operands.items()}
    return reference.run(plain.PLAIN_OPS[name], wide, attributes)


def in_slot(x, before, after):
    """NCHW as a slot of a wider buffer: the buffer, the map's type."""
    n, c, h, w = x.shape
    buffer = np.full((n, h, w, before + c + after), 9.0, np.float32)
    buffer[..., before : before + c] = x.transpose(0, 2, 3, 1)
    return buffer, MapType(n, h, w, c, before + c + after)


def numbers(rng, *shape, mean=0.0):
    return (rng.standard_normal(shape) + mean).astype(np.float32)


def close(found, wanted, tolerance=2e-6):
    assert np.abs(found - wanted).max() <= tolerance * max(np.abs(wanted).max(), 1e-30)


@st.composite
def boxes(draw):
    """Shape of a map [n, c, h, w], extent and offset of a box in it."""
    n, h, w = (draw(st.integers(1, 9)) for _ in range(3))
    c = draw(st.sampled_from([1, 3, 16, 21, 40, 1030]))
    extent = tuple(draw(st.integers(1, size)) for size in (n, h, w))
    offset = tuple(draw(st.integers(0, size - e)) for size, e in zip((n, h, w), extent, strict=True))
    return (n, c, h, w), extent, offset


@st.composite
def points(draw):
    shape, _, _ = draw(boxes())
    pixels = shape[0] * shape[2] * shape[3]
    count = draw(st.integers(1, min(pixels, 100)))
    chosen = np.random.default_rng(draw(st.integers(0, 99))).choice(pixels, count, replace=False)
    return shape, np.sort(chosen).astype(np.int64)


def check_statistics(kernel, name, x, buffer, before, place, **attributes):
    found = execute.call(kernel, {"x": buffer, **place}, {"x": before})
    wanted = expected(name, {"x": x, **place}, **attributes)
    assert np.abs(found["mean"] - wanted["mean"]).max() <= 1e-7 * np.abs(wanted["mean"]).max() + 1e-6
    assert (found["variance"] >= 0).all()
    # an element alone has the variance 0, exactly
    assert (np.abs(found["variance"] - wanted["variance"]) <= 1e-5 * wanted["variance"]).all()


def check_addition(kernel, name, x, buffers, offsets, place, rng, **attributes):
    channels = x.shape[1]
    operands = {"x": x, "q": numbers(rng, channels), "w": numbers(rng, channels), **place}
    acc = numbers(rng, *x.shape)
    dx, _ = in_slot(acc, offsets["dx"], buffers["after"])
    found = execute.call(kernel, {**operands, "x": buffers["x"], "dx": dx}, offsets)
    wanted, _ = in_slot(acc, offsets["dx"], buffers["after"])
    sums = expected(name, {"acc": acc, **operands}, **attributes)["dx"].transpose(0, 2, 3, 1)
    touched = sums != acc.transpose(0, 2, 3, 1)
    slot = wanted[..., offsets["dx"] : offsets["dx"] + channels]
    result = found["dx"].reshape(wanted.shape)
    close(result[..., offsets["dx"] : offsets["dx"] + channels], sums, 1e-6)
    slot[touched] = result[..., offsets["dx"] : offsets["dx"] + channels][touched]
    np.testing.assert_array_equal(result, wanted)  # nothing outside of the sample has changed, to the bit


@FEW
@given(boxes(), st.sampled_from([0.0, 1e3]), st.integers(0, 5))
def test_statistics_of_a_box(case, mean, before):
    shape, extent, offset = case
    x = numbers(np.random.default_rng(1), *shape, mean=mean)
    buffer, kind = in_slot(x, before, 3)
    kernel = norm_sampled.sampled_statistics(kind, extent, TARGET)
    place = {"offset": np.array(offset, np.int64)}
    check_statistics(kernel, "SampledStatistics", x, buffer, before, place, extent=extent)


@FEW
@given(points(), st.sampled_from([0.0, 1e3]), st.integers(0, 5))
def test_statistics_of_points(case, mean, before):
    shape, at = case
    x = numbers(np.random.default_rng(2), *shape, mean=mean)
    buffer, kind = in_slot(x, before, 3)
    kernel = norm_sampled.point_statistics(kind, len(at), TARGET)
    check_statistics(kernel, "PointStatistics", x, buffer, before, {"points": at})


@pytest.mark.parametrize("far", [-1, 1 << 31, -(1 << 31), (1 << 32) + 1, -(1 << 62), 1 << 62])
def test_a_sample_outside_of_the_map_is_moved_into_it(far):
    x = numbers(np.random.default_rng(7), 3, 5, 4, 6)
    buffer, kind = in_slot(x, 0, 0)
    last = 0 if far < 0 else 1
    at = {"offset": np.full(3, far, np.int64)}
    found = execute.call(norm_sampled.sampled_statistics(kind, (2, 3, 5), TARGET), {"x": buffer, **at}, {"x": 0})
    part = x[last:, :, last:, last:][:2, :, :3, :5]
    close(found["mean"], part.mean((0, 2, 3)))
    at = {"points": np.array([far], np.int64)}
    found = execute.call(norm_sampled.point_statistics(kind, 1, TARGET), {"x": buffer, **at}, {"x": 0})
    close(found["mean"], x[-last, :, -last, -last])


@FEW
@given(boxes(), st.integers(0, 5))
def test_the_gradient_is_added_in_the_box_alone(case, before):
    shape, extent, offset = case
    rng = np.random.default_rng(3)
    x = numbers(rng, *shape)
    buffer, kind = in_slot(x, before, 3)
    _, dx = in_slot(x, 2, before)
    kernel = norm_sampled.add_sampled(kind, dx, extent, TARGET)
    place = {"offset": np.array(offset, np.int64)}
    buffers = {"x": buffer, "after": before}
    check_addition(kernel, "AddSampled", x, buffers, {"x": before, "dx": 2}, place, rng, extent=extent)


@FEW
@given(points(), st.integers(0, 5))
def test_the_gradient_is_added_at_the_points_alone(case, before):
    shape, at = case
    rng = np.random.default_rng(4)
    x = numbers(rng, *shape)
    buffer, kind = in_slot(x, before, 3)
    _, dx = in_slot(x, 2, before)
    kernel = norm_sampled.add_at_points(kind, dx, len(at), TARGET)
    buffers = {"x": buffer, "after": before}
    check_addition(kernel, "AddAtPoints", x, buffers, {"x": before, "dx": 2}, {"points": at}, rng)


def test_one_kernel_serves_every_place_and_a_constant_channel_has_no_variance():
    x = numbers(np.random.default_rng(5), 4, 20, 6, 7, mean=3)
    x[:, 7] = 1.7
    buffer, kind = in_slot(x, 0, 0)
    kernel = norm_sampled.sampled_statistics(kind, (2, 3, 4), TARGET)
    function = execute.compile_kernel(kernel)
    for offset in ((0, 0, 0), (2, 3, 3), (1, 2, 0)):
        at = {"offset": np.array(offset, np.int64)}
        found = execute.call(kernel, {"x": buffer, **at}, function=function)
        wanted = expected("SampledStatistics", {"x": x, **at}, extent=(2, 3, 4))
        close(found["mean"], wanted["mean"])
        assert found["variance"][7] == 0
        close(found["variance"], wanted["variance"], 1e-5)


@pytest.mark.parametrize("mean", [0.0, 1e3])
@pytest.mark.parametrize("shape", [(3, 21, 9, 7), (1, 16, 1, 1), (2, 5, 1, 3)])
def test_mean_absolute_deviation(shape, mean):
    rng = np.random.default_rng(6)
    x = numbers(rng, *shape, mean=mean)
    buffer, kind = in_slot(x, 2, 3)
    found = execute.call(norm_baseline.l1_statistics(kind, TARGET), {"x": buffer}, {"x": 2})
    wanted = expected("L1Statistics", {"x": x})
    assert np.abs(found["mean"] - wanted["mean"]).max() <= 1e-7 * np.abs(wanted["mean"]).max() + 1e-6
    if shape[0] * shape[2] * shape[3] > 1:  # of one element alone the sign is that of a rounding error
        assert (np.abs(found["variance"] - wanted["variance"]) <= 1e-5 * wanted["variance"]).all()
        np.testing.assert_allclose(found["sign_mean"], wanted["sign_mean"], atol=1e-6)
    operands = {"dz": numbers(rng, *shape), "x": x, "mean": found["mean"]}
    operands |= {name: numbers(rng, shape[1]) for name in ("p", "q", "w")}
    dz, _ = in_slot(operands["dz"], 0, 0)
    dense = MapType(kind.n, kind.h, kind.w, kind.c, kind.c)
    kernel = norm_baseline.l1_grad_input(dense, kind, dense, TARGET)
    dx = execute.call(kernel, {**operands, "dz": dz, "x": buffer}, {"x": 2})["dx"]
    close(dx, expected("L1GradInput", operands)["dx"].transpose(0, 2, 3, 1).reshape(-1), 1e-6)


@pytest.mark.parametrize("mean", [0.0, 1e3])
@pytest.mark.parametrize("shape", [(3, 21, 9, 7), (1, 16, 1, 1), (2, 5, 1, 3)])
def test_range(shape, mean):
    rng = np.random.default_rng(7)
    x = np.round(numbers(rng, *shape, mean=mean) * 4) / 4  # so that extremes are met several times
    buffer, kind = in_slot(x, 2, 3)
    found = execute.call(norm_baseline.range_statistics(kind, TARGET), {"x": buffer}, {"x": 2})
    wanted = expected("RangeStatistics", {"x": x})
    for name in ("low", "high", "low_count", "high_count"):
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
    assert np.abs(found["mean"] - wanted["mean"]).max() <= 1e-7 * np.abs(wanted["mean"]).max() + 1e-6
    assert (np.abs(found["variance"] - wanted["variance"]) <= 1e-6 * wanted["variance"]).all()
    operands = {"dz": numbers(rng, *shape), "x": x, "low": found["low"], "high": found["high"]}
    operands |= {name: numbers(rng, shape[1]) for name in ("p", "q_low", "q_high", "w")}
    dz, _ = in_slot(operands["dz"], 0, 0)
    dense = MapType(kind.n, kind.h, kind.w, kind.c, kind.c)
    kernel = norm_baseline.range_grad_input(dense, kind, dense, TARGET)
    dx = execute.call(kernel, {**operands, "dz": dz, "x": buffer}, {"x": 2})["dx"]
    close(dx, expected("RangeGradInput", operands)["dx"].transpose(0, 2, 3, 1).reshape(-1), 1e-6)


COEFFICIENTS = {
    "MixStatistics": ("mix_statistics", {"weight": 0.3}),
    "SampledGradFinalize": ("sampled_grad_finalize", {"count": 98, "weight": 0.7}),
    "L1GradFinalize": ("l1_grad_finalize", {"count": 98}),
    "RangeGradFinalize": ("range_grad_finalize", {"count": 98}),
}


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_coefficients(name):
    loop, attributes = COEFFICIENTS[name]
    rng = np.random.default_rng(8)
    function = None
    for count in (24, 7):
        kernel = coefficients.coefficients(((loop, (count, *attributes.values())),), TARGET)
        function = function or execute.compile_kernel(kernel)  # one kernel serves every number of channels
        operands = {n: rng.uniform(0.5, 2, count).astype(np.float32) for n in plain.PLAIN_OPS[name].operands}
        found = execute.call(kernel, operands, function=function)
        for result, value in expected(name, operands, **attributes).items():
            np.testing.assert_allclose(found[result], value, rtol=1e-6, atol=1e-7, err_msg=result)


@pytest.mark.parametrize(
    ("channels", "pitch", "groups", "elements"), [(21, 32, 3, 0.0), (16, 16, 1, 0.0), (21, 32, 3, 8.0)]
)
def test_coefficients_of_groups(channels, pitch, groups, elements):
    rng = np.random.default_rng(9)
    kernel = coefficients.coefficients((("local_finalize", (channels, pitch, groups, 1e-5, 0.9, elements)),), TARGET)
    operands = {}
    padded = {}
    for name in plain.PLAIN_OPS["LocalFinalize"].operands:
        rows = groups if name in ("mean", "variance") else None
        operands[name] = rng.uniform(0.5, 2, (channels,) if rows is None else (rows, channels)).astype(np.float32)
        padded[name] = operands[name]
        if rows:
            padded[name] = np.pad(operands[name], ((0, 0), (0, pitch - channels)), constant_values=np.nan)
    found = execute.call(kernel, padded)
    wanted = expected("LocalFinalize", operands, epsilon=1e-5, momentum=0.9, elements=elements)
    for name, value in wanted.items():
        result = found[name].reshape(groups, pitch)[:, :channels] if value.ndim == 2 else found[name]
        np.testing.assert_allclose(result, value, rtol=1e-6, atol=1e-6, err_msg=name)
