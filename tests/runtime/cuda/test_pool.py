"""Pools on a GPU: in the interpreter against the numpy reference in float64, and as compiled."""

import cuda_kernels
import numpy as np
import pytest
from cuda_operator import operator, rounded
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pool_case import AVERAGE, AVERAGE_GRAD, GLOBAL, MAX, MAX_GRAD, operands_of, positions, window

from bnfuse.core.errors import BnfuseError
from bnfuse.opset import reference, spec
from bnfuse.runtime.kernels.cuda.pool import pool_backward, pool_forward
from bnfuse.runtime.kernels.kernel import MapType, Problem
from bnfuse.runtime.lowering.layout import stored_dtype

CLIP = {"min": -0.5, "max": 0.75}
TOLERANCE = {"fp32": 2e-6, "bf16": 2**-8, "fp16": 2**-11}


def run(name, shape, attributes, precision="fp32", slots=None, operands=None):
    op, target = spec.parse(name), cuda_kernels.gpu(precision)
    held = lambda v: rounded(v, stored_dtype(v.shape, "float32", target))  # noqa: E731
    operands = operands or operands_of(op, shape, attributes, np.random.default_rng(0))
    operands = {k: held(v) for k, v in operands.items()}
    full = dict(attributes)
    if "Clip" in name:
        full |= CLIP
    if "grad_start" in op.attributes:
        full |= {"grad_start": 4, "grad_stop": 4 + shape[1]}
    if "acc_start" in op.attributes:
        full |= {"acc_start": 1, "acc_stop": 1 + shape[1]}
    given = dict(operands)
    if op.core == "MaxPoolGrad":
        _, operands["indices"] = reference.max_pool(operands["x"], attributes)
        given["indices"] = positions(operands["indices"], shape, attributes)
    expected = reference.run(op, operands, full)
    if "Statistics" in op.epilogue:
        expected["mean"], expected["variance"] = reference.statistics(held(expected["y"]))
    generator = pool_backward if op.is_gradient else pool_forward
    shapes = {k: v.shape for k, v in expected.items()}
    found = operator(generator, target, name, given, shapes, full, slots)
    if op.core == "MaxPool":
        expected["indices"] = positions(expected["indices"], shape, attributes)
    return found, expected


def check(name, shape, attributes, precision="fp32", slots=None):
    found, expected = run(name, shape, attributes, precision, slots)
    for result, value in expected.items():
        if result == "indices":
            # what rounds to the same float32 may be another of nearly equal maxima: there are none in these cases
            assert (found[result] == value).all()
            continue
        tolerance = TOLERANCE[precision] if result in ("y", "dx") else 1e-5
        if result in ("mean", "variance") and precision != "fp32":
            tolerance = 5e-4  # an element of y may be rounded the other way
        assert np.abs(found[result] - value).max() <= tolerance * np.abs(value).max() + 1e-7, result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "shape", "attributes"), MAX + AVERAGE + GLOBAL + MAX_GRAD + AVERAGE_GRAD)
def test_equals_the_reference(name, shape, attributes, precision):
    check(name, shape, attributes, precision)


@st.composite
def pools(draw):
    """Kernel up to 4, padding less than the window, any stride, dilation and overhang."""
    average = draw(st.booleans())
    pair = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(2))  # noqa: E731
    kernel, strides = pair(1, 4), pair(1, 3)
    pads = tuple(draw(st.integers(0, k - 1)) for k in kernel * 2)
    include = draw(st.integers(0, 1)) if average else None
    attributes = window(kernel, strides, pads, None if average else pair(1, 2), draw(st.integers(0, 1)), include)
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 40)), draw(st.integers(4, 11)), draw(st.integers(4, 11)))
    return average, draw(st.booleans()), shape, attributes


@settings(max_examples=10, derandomize=True, deadline=None, database=None)
@given(pools())
def test_any_window(case):
    average, backward, shape, attributes = case
    reach = [
        d * (k - 1) + 1 for d, k in zip(attributes.get("dilations", (1, 1)), attributes["kernel_shape"], strict=True)
    ]
    assume(all(size >= r for size, r in zip(shape[2:], reach, strict=True)))
    core = "AveragePool" if average else "MaxPool"
    name = f"Normalize{core}GradReluGradReduce" if backward else f"NormalizeRelu{core}Statistics"
    check(name, shape, attributes, "fp16" if shape[1] % 2 else "fp32")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_maps_in_channel_slots_leave_their_neighbours_alone(precision):
    attributes = window((3, 3), (2, 2), (1, 1, 1, 1))
    slots = {"x": (30, 3), "y": (40, 17)}
    check("NormalizeReluMaxPoolStatistics", (2, 20, 7, 7), attributes, precision, slots)
    slots = {"x": (30, 3), "dy": (40, 17), "other": (25, 5), "dx": (50, 20)}
    check("MaxPoolGradAddGradientReluGradReduce", (2, 20, 7, 7), attributes, precision, slots)
    check("NormalizeReluGlobalAveragePool", (2, 20, 7, 7), {}, precision, {"x": (30, 3)})


def test_the_first_of_equal_maxima_takes_the_gradient():
    operands = {"x": np.zeros((1, 16, 3, 3), np.float32)}
    found, expected = run("ReluMaxPool", (1, 16, 3, 3), window((2, 2), (1, 1)), operands=operands)
    assert (found["indices"] == 0).all()
    assert (expected["indices"] == 0).all()


def test_a_maximum_shows_nan():
    x = np.zeros((1, 16, 4, 4), np.float32)
    x[:, :, 1, 2] = np.nan
    shapes = {"y": (1, 16, 2, 2), "indices": (1, 16, 2, 2)}
    attributes = window((2, 2), (2, 2))
    found = operator(pool_forward, cuda_kernels.gpu(), "MaxPool", {"x": x}, shapes, attributes)
    assert np.isnan(found["y"][0, :, 0, 1]).all()
    assert np.isnan(found["y"]).sum() == 16


@pytest.mark.parametrize("c", [1, 4])
def test_indices_of_large_windows_are_int32(c):
    attributes = window((17, 16), (1, 1))
    x = np.tile(-np.arange(17 * 16, dtype=np.float32)[::-1].reshape(1, 1, 17, 16), (1, c, 1, 1))
    found, _ = run("MaxPool", x.shape, attributes, operands={"x": x})
    assert (found["y"] == 0).all()
    assert (found["indices"] == 271).all()
    check("MaxPoolGrad", (1, c, 18, 17), attributes)


def test_what_a_pool_cannot_do_is_refused():
    maps = tuple((name, MapType(1, 2, 2, 3, 3)) for name in ("x", "y", "indices", "stored", "dy", "dx"))
    attributes = tuple(window((1, 1)).items())
    with pytest.raises(BnfuseError, match="stores the input"):
        pool_forward(Problem("ReluMaxPoolStoreInput", maps, attributes), cuda_kernels.gpu())
    with pytest.raises(BnfuseError, match="no bias"):
        pool_backward(Problem("MaxPoolGradBiasGrad", maps, attributes), cuda_kernels.gpu())


STEM = window((3, 3), (2, 2), (1, 1, 1, 1))
HALF = window((2, 2), (2, 2), include=0)
LARGE = [
    ("NormalizeReluMaxPoolStatistics", 112, 56, STEM),
    ("NormalizeMaxPoolGradReluGradReduce", 112, 56, STEM),
    ("NormalizeReluAveragePoolStatistics", 56, 28, HALF),
    ("BatchNormGradNormalizeAveragePoolGradReluGradReduceAccumulate", 56, 28, HALF),
    ("NormalizeReluGlobalAveragePool", 7, 1, {}),
    ("NormalizeGlobalAveragePoolGradReluGradReduce", 7, 1, {}),
]


def large(name, size, pooled, attributes, dtype, c=64):
    """A pool of 64 images."""
    op = spec.parse(name)
    kinds = {
        n: MapType(64, side, side, c, c, dtype if side > 1 else "float32", 8)
        for n, side in {"x": size, "dx": size, "y": pooled, "dy": pooled, "grad_x": pooled, "indices": pooled}.items()
        if n in (*op.operands, *op.results)
    }
    return pool_backward if op.is_gradient else pool_forward, Problem(
        name, tuple(kinds.items()), tuple(attributes.items())
    )


@pytest.mark.parametrize("arch", cuda_kernels.ARCHITECTURES)
@pytest.mark.parametrize(("name", "size", "pooled", "attributes"), LARGE)
def test_no_spills(name, size, pooled, attributes, arch):
    generator, problem = large(name, size, pooled, attributes, "bfloat16" if arch == "sm_90" else "float32")
    cuda_kernels.assert_no_spills(generator(problem, cuda_kernels.gpu("bf16", arch, 132)))
