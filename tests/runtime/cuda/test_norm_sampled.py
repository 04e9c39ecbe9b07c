"""Statistics of samples and of the baselines on a GPU, and their input gradients, interpreted, against float64."""

import cuda_kernels
import numpy as np
import pytest
from cuda_operator import alignment, nhwc, raw, rounded, values_of

from bnfuse.opset import plain, reference
from bnfuse.runtime.kernels.cuda import norm_baseline, norm_sampled
from bnfuse.runtime.kernels.cuda.coefficients import coefficients
from bnfuse.runtime.kernels.cuda.sweep import Sweep
from bnfuse.runtime.kernels.kernel import MapType

DTYPES = ["float32", "bfloat16", "float16"]
ROUNDING = {"float32": 2e-7, "bfloat16": 2**-8, "float16": 2**-11}
N, H, W = 3, 9, 7
SLOTS = [(37, 50, 6), (24, 32, 8)]  # channels, stride, offset: the first with a tail and odd places

# what a box spans: some rows and columns, whole rows, whole samples, one element
BOXES = [((3, 2, 3), (0, 6, 4)), ((3, 5, W), (0, 4, 0)), ((2, H, W), (1, 0, 0)), ((1, 1, 1), (2, 8, 6))]


def in_slot(x, stride, offset, dtype):
    n, c, h, w = x.shape
    buffer = np.full((n, h, w, stride), 9.0, np.float32)
    buffer[..., offset : offset + c] = nhwc(x)
    return raw(buffer, dtype), MapType(n, h, w, c, stride, dtype, alignment(c, stride, offset))


def map_of(rng, c, dtype, mean=0.0):
    return rounded(rng.normal(size=(N, c, H, W)) + mean, dtype)


def vectors(rng, c, *names):
    return {name: rounded(rng.normal(size=c), "float32") for name in names}


def points_of(rng, count):
    return np.sort(rng.choice(N * H * W, count, replace=False)).astype(np.int64)


def expected(op, operands, **attributes):
    return reference.run(plain.PLAIN_OPS[op], operands, attributes)


def small(multiprocessors=4):
    return cuda_kernels.gpu(multiprocessors=multiprocessors)


# -- statistics ----------------------------------------------------------------------------------------------------


def check_statistics(found, wanted):
    np.testing.assert_allclose(found["mean"], wanted["mean"], rtol=2e-7, atol=1e-6)
    np.testing.assert_allclose(found["variance"], wanted["variance"], rtol=1e-5, atol=0)


@pytest.mark.parametrize(("dtype", "mean"), [("float32", 0), ("float32", 1e3), ("bfloat16", 0), ("float16", 3)])
@pytest.mark.parametrize(("c", "stride", "offset"), SLOTS)
@pytest.mark.parametrize(("extent", "place"), BOXES)
def test_statistics_of_a_box(extent, place, c, stride, offset, dtype, mean):
    x = map_of(np.random.default_rng(0), c, dtype, mean)
    buffer, kind = in_slot(x, stride, offset, dtype)
    kernel = norm_sampled.sampled_statistics(kind, extent, small())
    found = cuda_kernels.run_kernel(kernel, {"x": buffer, "offset": np.array(place)}, {"x": offset})
    check_statistics(found, expected("SampledStatistics", {"x": x, "offset": np.array(place)}, extent=extent))


@pytest.mark.parametrize(("dtype", "mean"), [("float32", 1e3), ("bfloat16", 0), ("float16", 3)])
@pytest.mark.parametrize("count", [1, 23, N * H * W])
def test_statistics_of_points(count, dtype, mean):
    rng = np.random.default_rng(1)
    x, points = map_of(rng, 21, dtype, mean), points_of(rng, count)
    buffer, kind = in_slot(x, 24, 3, dtype)
    kernel = norm_sampled.point_statistics(kind, count, small())
    found = cuda_kernels.run_kernel(kernel, {"x": buffer, "points": points}, {"x": 3})
    check_statistics(found, expected("PointStatistics", {"x": x, "points": points}))


@pytest.mark.parametrize("far", [-1, 1 << 31, (1 << 32) + 1, -(1 << 62), 1 << 62])
def test_a_sample_outside_of_the_map_is_moved_into_it(far):
    x = map_of(np.random.default_rng(4), 21, "float32", 0)
    buffer, kind = in_slot(x, 24, 3, "float32")
    extent, moved = (N - 1, H, W), np.array([int(far > 0), 0, 0])
    kernel = norm_sampled.sampled_statistics(kind, extent, small())
    found = cuda_kernels.run_kernel(kernel, {"x": buffer, "offset": np.array([far] * 3)}, {"x": 3})
    check_statistics(found, expected("SampledStatistics", {"x": x, "offset": moved}, extent=extent))
    kernel = norm_sampled.point_statistics(kind, 1, small())
    found = cuda_kernels.run_kernel(kernel, {"x": buffer, "points": np.array([far])}, {"x": 3})
    moved = np.array([N * H * W - 1 if far > 0 else 0])
    check_statistics(found, expected("PointStatistics", {"x": x, "points": moved}))


@pytest.mark.parametrize("mean", [0, 1e3])
def test_statistics_of_many_pixels_are_merged_from_tiles(mean):
    rng = np.random.default_rng(2)
    x = rounded(rng.normal(size=(6, 33, 21, 19)) + mean, "float32")
    buffer, kind = in_slot(x, 33, 0, "float32")
    extent, place = (6, 17, 15), np.array([0, 2, 3])
    kernel = norm_sampled.sampled_statistics(kind, extent, small())
    assert len(kernel.build()) == 2
    found = cuda_kernels.run_kernel(kernel, {"x": buffer, "offset": place})
    check_statistics(found, expected("SampledStatistics", {"x": x, "offset": place}, extent=extent))


def test_a_small_sample_is_one_launch_of_few_blocks():
    """FS 1/32 of DenseNet-121's last maps at batch 64; at 56x56 the tiles fill the multiprocessors."""
    target = cuda_kernels.gpu("bf16", multiprocessors=132)
    last = Sweep.of_sample(64 * 2, 1024, 8, target)
    assert (last.tiles, last.columns, last.groups) == (1, 32, 1)
    first = Sweep.of_sample(64 * 100, 256, 8, target)
    assert 132 <= first.tiles <= 2 * 132


# -- gradients -----------------------------------------------------------------------------------------------------


def check_addition(found, wanted, before, dtype, stride, offset, touched):
    """`touched`: NHW, where the sample is. The rest of the buffer must be as it was, bit for bit."""
    c = wanted.shape[1]
    inside = np.zeros((*touched.shape, stride), bool)
    inside[touched, offset : offset + c] = True
    np.testing.assert_array_equal(found["dx"][~inside.reshape(-1)], before.reshape(-1)[~inside.reshape(-1)])
    values = values_of(found["dx"], dtype).reshape(N, H, W, stride)[..., offset : offset + c]
    tolerance = ROUNDING[dtype]
    np.testing.assert_allclose(values, nhwc(wanted), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("c", "stride", "offset"), SLOTS)
@pytest.mark.parametrize(("extent", "place"), BOXES)
def test_a_gradient_is_added_to_its_box_alone(extent, place, c, stride, offset, dtype):
    rng = np.random.default_rng(3)
    x, acc = map_of(rng, c, dtype), map_of(rng, c, dtype)
    operands = {**vectors(rng, c, "q", "w"), "offset": np.array(place)}
    (x_buffer, x_kind), (buffer, kind) = in_slot(x, c, 0, dtype), in_slot(acc, stride, offset, dtype)
    kernel = norm_sampled.add_sampled(x_kind, kind, extent, small())
    found = cuda_kernels.run_kernel(kernel, {**operands, "x": x_buffer, "dx": buffer}, {"dx": offset})
    wanted = expected("AddSampled", {**operands, "x": x, "acc": acc}, extent=extent)["dx"]
    touched = np.zeros((N, H, W), bool)
    touched[tuple(slice(o, o + size) for o, size in zip(place, extent, strict=True))] = True
    check_addition(found, wanted, buffer, dtype, stride, offset, touched)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 50, N * H * W])
def test_a_gradient_is_added_at_its_points_alone(count, dtype):
    rng = np.random.default_rng(4)
    x, acc, points = map_of(rng, 21, dtype), map_of(rng, 21, dtype), points_of(rng, count)
    operands = {**vectors(rng, 21, "q", "w"), "points": points}
    (x_buffer, x_kind), (buffer, kind) = in_slot(x, 30, 5, dtype), in_slot(acc, 24, 2, dtype)
    kernel = norm_sampled.add_at_points(x_kind, kind, count, small())
    found = cuda_kernels.run_kernel(kernel, {**operands, "x": x_buffer, "dx": buffer}, {"x": 5, "dx": 2})
    wanted = expected("AddAtPoints", {**operands, "x": x, "acc": acc})["dx"]
    touched = np.zeros(N * H * W, bool)
    touched[points] = True
    check_addition(found, wanted, buffer, dtype, 24, 2, touched.reshape(N, H, W))


# -- baselines -----------------------------------------------------------------------------------------------------

BASELINES = {
    "L1": (norm_baseline.l1_statistics, norm_baseline.l1_grad_input),
    "Range": (norm_baseline.range_statistics, norm_baseline.range_grad_input),
}


@pytest.mark.parametrize(("dtype", "mean"), [("float32", 0), ("float32", 1e3), ("bfloat16", 0), ("float16", 3)])
@pytest.mark.parametrize(("c", "stride", "offset"), SLOTS)
@pytest.mark.parametrize("baseline", BASELINES)
def test_baselines(baseline, c, stride, offset, dtype, mean):
    """The gradient compares with statistics: it gets those of the kernel, so that nothing lies between the two."""
    rng = np.random.default_rng(5)
    x, dz = map_of(rng, c, dtype, mean), map_of(rng, c, dtype)
    (x_buffer, x_kind), (dz_buffer, dz_kind) = in_slot(x, stride, offset, dtype), in_slot(dz, c, 0, dtype)
    statistics, grad_input = (make for make in BASELINES[baseline])
    found = cuda_kernels.run_kernel(statistics(x_kind, small(2)), {"x": x_buffer}, {"x": offset})
    wanted = expected(f"{baseline}Statistics", {"x": x})
    if baseline == "L1":
        own_mean = found["mean"].astype(np.float64).reshape(1, -1, 1, 1)
        wanted["sign_mean"] = np.sign(x - own_mean).mean(axis=(0, 2, 3))
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5 if name == "variance" else 2e-7, atol=2e-7)
    op = plain.PLAIN_OPS[f"{baseline}GradInput"]
    known = {name: found[name] for name in op.operands if name in wanted}
    operands = {**vectors(rng, c, *op.operands[2:]), **known}
    kernel = grad_input(dz_kind, x_kind, dz_kind, small())
    made = cuda_kernels.run_kernel(kernel, {**operands, "dz": dz_buffer, "x": x_buffer}, {"x": offset})
    exact = nhwc(expected(op.name, {**operands, "dz": dz, "x": x})["dx"]).reshape(-1)
    assert np.abs(values_of(made["dx"], dtype) - exact).max() <= ROUNDING[dtype] * np.abs(exact).max()


def test_extremes_that_many_elements_attain_are_counted_across_tiles():
    """A clipped map: whole tiles have one value, and others none of the extremes."""
    x = np.clip(np.random.default_rng(6).normal(size=(N, 5, H, W)), -0.5, 1.0)
    x[1] = 0.25
    buffer, kind = in_slot(rounded(x, "float32"), 5, 0, "float32")
    found = cuda_kernels.run_kernel(norm_baseline.range_statistics(kind, small(8)), {"x": buffer})
    for name, value in expected("RangeStatistics", {"x": rounded(x, "float32")}).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


def test_a_map_of_one_element_a_channel_has_no_range():
    x = np.random.default_rng(7).normal(size=(1, 9, 1, 1)).astype(np.float32)
    found = cuda_kernels.run_kernel(norm_baseline.range_statistics(MapType(1, 1, 1, 9, 9), small()), {"x": x})
    np.testing.assert_array_equal(found["variance"], 0)
    np.testing.assert_array_equal(found["mean"], x.reshape(-1))


# -- coefficients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "loop", "arguments", "attributes"),
    [
        ("MixStatistics", "mix_statistics", (0.3,), {"weight": 0.3}),
        ("SampledGradFinalize", "sampled_grad_finalize", (98, 0.7), {"count": 98, "weight": 0.7}),
        ("L1GradFinalize", "l1_grad_finalize", (98,), {"count": 98}),
        ("RangeGradFinalize", "range_grad_finalize", (98,), {"count": 98}),
    ],
)
def test_coefficients(op, loop, arguments, attributes):
    rng = np.random.default_rng(8)
    operands = {n: rng.uniform(0.5, 2, size=300).astype(np.float32) for n in plain.PLAIN_OPS[op].operands}
    found = cuda_kernels.run_kernel(coefficients(((loop, (300, *arguments)),), small()), operands)
    for name, value in expected(op, {k: v.astype(np.float64) for k, v in operands.items()}, **attributes).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("pitch", [19, 32])
def test_coefficients_of_groups(pitch):
    """Rows `pitch` apart, of which the channels are the first."""
    rng, groups, channels = np.random.default_rng(9), 3, 19
    names = ("scale", "bias", "running_mean", "running_variance")
    operands = {n: rng.uniform(0.5, 2, size=channels).astype(np.float32) for n in names}
    rows = {n: rng.uniform(0.5, 2, size=(groups, pitch)).astype(np.float32) for n in ("mean", "variance")}
    member = ("local_finalize", (channels, pitch, groups, 1e-3, 0.9))
    found = cuda_kernels.run_kernel(coefficients((member,), small()), operands | rows)
    wide = {k: v[..., :channels].astype(np.float64) for k, v in (operands | rows).items()}
    for name, value in expected("LocalFinalize", wide, epsilon=1e-3, momentum=0.9).items():
        made = found[name].reshape(groups, pitch)[:, :channels] if value.ndim == 2 else found[name]
        np.testing.assert_allclose(made, value, rtol=1e-6, err_msg=name)


def test_a_mixture_is_mixed_before_it_is_used():
    """In one launch: a barrier lies between the two, as the second reads what the first wrote."""
    rng, c = np.random.default_rng(10), 19
    first = {n: rng.uniform(0.5, 2, size=c).astype(np.float32) for n in plain.PLAIN_OPS["MixStatistics"].operands}
    mixed = {n: np.zeros(c, np.float32) for n in ("mean", "variance")}
    second = {n: rng.uniform(0.5, 2, size=c).astype(np.float32) for n in ("scale", "bias")}
    second |= {"running_mean": np.zeros(c, np.float32), "running_variance": np.ones(c, np.float32), **mixed}
    kernel = coefficients((("mix_statistics", (c, 0.3)), ("finalize", (c, 1e-5, 0.9))), small())
    arrays = {f"{n}_0": v for n, v in first.items()} | {f"{n}_1": v for n, v in second.items()}
    arrays |= {f"mixed_{n}_0": v for n, v in mixed.items()}
    found = cuda_kernels.run_kernel(kernel, arrays)
    exact = 0.3 * first["variance"].astype(np.float64) + 0.7 * first["variance_2"]
    np.testing.assert_allclose(found["inv_std_1"], (exact + 1e-5) ** -0.5, rtol=1e-6)


# -- compiled ------------------------------------------------------------------------------------------------------


WIDE, RAGGED = (56, 256, (64, 10, 10)), (13, 37, (64, 2, 3))  # side, channels, extent


@pytest.mark.parametrize(
    ("dtype", "arch", "shape"),
    [
        ("bfloat16", "sm_90", WIDE),
        ("float32", "sm_80", RAGGED),
    ],
)
def test_no_spills(shape, dtype, arch):
    side, c, extent = shape
    target = cuda_kernels.gpu("bf16", arch, 132)
    kind, count = MapType(64, side, side, c, c, dtype, alignment(c)), 64 * extent[1] * extent[2]
    for kernel in (
        norm_sampled.sampled_statistics(kind, extent, target),
        norm_sampled.point_statistics(kind, count, target),
        norm_sampled.add_sampled(kind, kind, extent, target),
        norm_sampled.add_at_points(kind, kind, count, target),
        norm_baseline.l1_statistics(kind, target),
        norm_baseline.range_statistics(kind, target),
        norm_baseline.l1_grad_input(kind, kind, kind, target),
        norm_baseline.range_grad_input(kind, kind, kind, target),
    ):
        cuda_kernels.assert_no_spills(kernel)
