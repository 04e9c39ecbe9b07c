"""Pointwise and PointwiseGrad kernels against the numpy reference in float64."""

import numpy as np
import pytest
from halves import as_held, of_stored, rounding, targets
from hypothesis import given, settings
from hypothesis import strategies as st
from pointwise_case import ATTRIBUTES, BACKWARD, FORWARD

from bnfuse.opset import reference, spec
from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.cpu.pointwise import pointwise_backward, pointwise_forward
from bnfuse.runtime.kernels.kernel import is_gate

pytestmark = pytest.mark.usefixtures("optimized_by_turns")

TARGET = resolve("cpu", 2)


def operands_of(op, shape, rng, stop=None):
    """Random operands of an operator whose maps all have this NCHW shape, float32."""
    made = {}
    for name in op.operands:
        is_map = name in (*spec.MAPS_LIKE_X, *spec.MAPS_LIKE_DY, "acc") or spec.is_numbered_map(name)
        n, c, h, w = shape
        wide = name == "acc" or (name == "dy" and "Slice" in op.prologue)
        size = (n, c + 5, h, w) if wide else shape if is_map else (n, c, 1, 1) if is_gate(name) else c
        made[name] = rng.normal(size=size).astype(np.float32)
    return made


def check(name, shape, slots=None, seed=0, tolerance=2e-6, target=TARGET):
    op = spec.parse(name)
    rng = np.random.default_rng(seed)
    operands = as_held(operands_of(op, shape, rng), target)
    attributes = {a: ATTRIBUTES[a] for a in op.attributes if a in ATTRIBUTES}
    if "grad_start" in op.attributes:
        attributes |= {"grad_start": 3, "grad_stop": 3 + shape[1]}
    if "acc_start" in op.attributes:
        attributes |= {"acc_start": 2, "acc_stop": 2 + shape[1]}
    expected = reference.run(op, {k: v.astype(np.float64) for k, v in operands.items()}, attributes)
    generator = pointwise_backward if op.is_gradient else pointwise_forward
    shapes = {k: v.shape for k, v in expected.items()}
    found = execute.operator(generator, target, name, operands, shapes, attributes, slots)
    expected = of_stored(expected, found, target)
    for result in op.results:
        scale = np.abs(expected[result]).max() + 1e-30
        bound = tolerance * 4 + rounding(result, expected[result], target)
        assert np.abs(found[result] - expected[result]).max() <= bound * scale, result


@pytest.mark.parametrize(("name", "shape"), FORWARD + BACKWARD)
def test_equals_the_reference(name, shape):
    check(name, shape)


@settings(max_examples=12, derandomize=True, deadline=None, database=None)
@given(
    name=st.sampled_from([name for name, _ in FORWARD + BACKWARD]),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 9), st.integers(1, 9)),
    slot=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    target=targets,
)
def test_any_shape_in_any_slot(name, shape, slot, target):
    before, after = slot
    taken = spec.parse(name).attributes  # an Accumulate or a Slice has its own slot
    maps = {"x", "y", "skip"}
    maps |= set() if "grad_start" in taken else {"dy"}
    maps |= set() if "acc_start" in taken else {"dx"}
    check(name, shape, dict.fromkeys(maps, (before + shape[1] + after, before)), target=target)


def test_maps_in_channel_slots_leave_their_neighbours_alone():
    slots = {"x": (40, 7), "y": (33, 11), "skip": (25, 0)}
    check("NormalizeReluAddPointwiseStatistics", (2, 22, 3, 5), slots)
    slots = {"x": (40, 7), "dx": (33, 11), "dy": (25, 3), "other": (23, 1)}
    check("NormalizePointwiseGradAddGradientReluGradReduceScale", (2, 22, 3, 5), slots)


@pytest.mark.parametrize("ratio", [1.0, 1e3])
def test_the_variance_holds_where_the_mean_is_a_thousand_deviations(ratio):
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(4, 20, 17, 13)) + ratio).astype(np.float32)
    x[:, 3] = 0.1  # constant: its variance is exactly 0
    x[:, 4] *= np.float32(1e-4)
    shapes = {"y": x.shape, "mean": (20,), "variance": (20,)}
    found = execute.operator(pointwise_forward, TARGET, "PointwiseStatistics", {"x": x}, shapes)
    mean, variance = reference.statistics(x.astype(np.float64))
    assert found["variance"][3] == 0
    assert found["variance"].min() >= 0
    others = np.arange(20) != 3
    np.testing.assert_allclose(found["variance"][others], variance[others], rtol=1e-5)
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-7)


def test_one_outlier_first_in_its_tile_does_not_spoil_the_variance():
    x = np.random.default_rng(2).normal(size=(1, 16, 8, 8)).astype(np.float32)
    x[0, :, 0, 0] = 1e4
    shapes = {"y": x.shape, "mean": (16,), "variance": (16,)}
    found = execute.operator(pointwise_forward, TARGET, "PointwiseStatistics", {"x": x}, shapes)
    np.testing.assert_allclose(found["variance"], reference.statistics(x.astype(np.float64))[1], rtol=1e-5)


def test_any_number_of_threads_gives_the_same_maps():
    x = np.random.default_rng(3).normal(size=(1, 18, 3, 3)).astype(np.float32)
    shapes = {"y": x.shape, "mean": (18,), "variance": (18,)}
    for threads in (1, 3, 16):  # 16 threads: more than pixels
        target = resolve("cpu", threads)
        found = execute.operator(pointwise_forward, target, "ReluPointwiseStatistics", {"x": x}, shapes)
        y = np.maximum(x.astype(np.float64), 0)
        assert (found["y"] == y).all()
        np.testing.assert_allclose(found["variance"], reference.statistics(y)[1], rtol=1e-5)


def test_a_diverged_run_shows_through_the_relu():
    x = np.full((1, 16, 2, 2), np.nan, np.float32)
    found = execute.operator(pointwise_forward, TARGET, "ReluPointwise", {"x": x}, {"y": x.shape})
    assert np.isnan(found["y"]).all()
