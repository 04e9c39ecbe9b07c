"""Pointwise and PointwiseGrad on a GPU: in the interpreter against the numpy reference in float64, and as compiled."""

import cuda_kernels
import numpy as np
import pointwise_case
import pytest
from cuda_operator import operator, rounded
from hypothesis import given, settings
from hypothesis import strategies as st
from pointwise_case import BACKWARD

from bnfuse.opset import reference, spec
from bnfuse.runtime.kernels.cuda.compile import cuda_source
from bnfuse.runtime.kernels.cuda.pointwise import pointwise_backward, pointwise_forward
from bnfuse.runtime.kernels.kernel import MapType, Problem, is_gate

TOLERANCE = {"fp32": 2e-6, "bf16": 2**-8, "fp16": 2**-11}
REDUCED = ("mean", "variance", "dbeta", "dgamma", "dbias")


def is_map(name):
    return name in (*spec.MAPS_LIKE_X, *spec.MAPS_LIKE_DY, "acc", "y", "stored", "dx") or spec.is_numbered_map(name)


def size_of(name, shape, *, wide):
    """The sizes of an operand; `wide` ones have five channels more."""
    n, c, h, w = shape
    if is_gate(name):
        return (n, c, 1, 1)
    return ((n, c + 5, h, w) if wide else shape) if is_map(name) else (c,)


def operands_of(op, shape, rng, dtype):
    """Random operands of an operator whose maps all have this NCHW shape, as float64 that the type can hold."""
    made = {}
    for name in op.operands:
        wide = name == "acc" or (name == "dy" and "Slice" in op.prologue)
        size = size_of(name, shape, wide=wide)
        made[name] = rounded(rng.normal(size=size), dtype if is_map(name) else "float32")
    return made


def check(name, shape, precision="fp32", slots=None, seed=0, dtypes=None):
    op, target = spec.parse(name), cuda_kernels.gpu(precision)
    rng = np.random.default_rng(seed)
    operands = operands_of(op, shape, rng, target.map_dtype)
    attributes = {a: pointwise_case.ATTRIBUTES[a] for a in op.attributes if a in pointwise_case.ATTRIBUTES}
    if "grad_start" in op.attributes:
        attributes |= {"grad_start": 3, "grad_stop": 3 + shape[1]}
    if "acc_start" in op.attributes:
        attributes |= {"acc_start": 2, "acc_stop": 2 + shape[1]}
    expected = reference.run(op, operands, attributes)
    if "Statistics" in op.epilogue:  # they are those of y as it is stored
        y = rounded(expected["y"], (dtypes or {}).get("y", target.map_dtype))
        expected["mean"], expected["variance"] = reference.statistics(y)
    shapes = {k: v.shape for k, v in expected.items()}
    generator = pointwise_backward if op.is_gradient else pointwise_forward
    found = operator(generator, target, name, operands, shapes, attributes, slots, dtypes)
    for result in op.results:
        scale = np.abs(expected[result]).max() + 1e-30
        tolerance = TOLERANCE[precision] if is_map(result) else 1e-5
        if result in ("mean", "variance") and precision != "fp32":
            tolerance = 2e-4  # an element of y may be rounded the other way
        assert np.abs(found[result] - expected[result]).max() <= tolerance * scale, result


FORWARD = [*pointwise_case.FORWARD, ("NormalizeReluPointwiseStatistics", (1, 1100, 3, 3))]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("name", "shape"), FORWARD + BACKWARD)
def test_equals_the_reference(name, shape, precision):
    check(name, shape, precision)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(("name", "shape"), pointwise_case.EACH)
def test_every_activation_equals_the_reference(name, shape, precision):
    check(name, shape, precision)


@settings(max_examples=12, derandomize=True, deadline=None, database=None)
@given(
    name=st.sampled_from([name for name, _ in FORWARD + BACKWARD]),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 9), st.integers(1, 9)),
    slot=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
)
def test_any_shape_in_any_slot(name, shape, slot, precision):
    before, after = slot
    taken = spec.parse(name).attributes  # an Accumulate or a Slice has its own slot
    maps = {"x", "y", "skip"}
    maps |= set() if "grad_start" in taken else {"dy"}
    maps |= set() if "acc_start" in taken else {"dx"}
    check(name, shape, precision, dict.fromkeys(maps, (before + shape[1] + after, before)))


@pytest.mark.parametrize("c", [24, 19])
def test_maps_of_two_types(c):
    check("NormalizeReluPointwiseStatistics", (2, c, 5, 3), "bf16", dtypes={"x": "float32"})
    check("NormalizePointwiseGradReluGradReduce", (2, c, 5, 3), "fp16", dtypes={"dx": "float32", "dy": "float32"})


@pytest.mark.parametrize("ratio", [1.0, 1e3])
def test_the_variance_holds_where_the_mean_is_a_thousand_deviations(ratio):
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(4, 20, 17, 13)) + ratio).astype(np.float32)
    x[:, 3] = 0.1  # constant: its variance is exactly 0
    x[:, 4] *= np.float32(1e-4)
    shapes = {"y": x.shape, "mean": (20,), "variance": (20,)}
    found = operator(pointwise_forward, cuda_kernels.gpu(), "PointwiseStatistics", {"x": x}, shapes)
    mean, variance = reference.statistics(x.astype(np.float64))
    assert found["variance"][3] == 0
    assert found["variance"].min() >= 0
    others = np.arange(20) != 3
    np.testing.assert_allclose(found["variance"][others], variance[others], rtol=1e-5)
    np.testing.assert_allclose(found["mean"], mean, rtol=2e-7)


def test_one_outlier_first_in_its_tile_does_not_spoil_the_variance():
    x = np.random.default_rng(2).normal(size=(1, 16, 8, 8)).astype(np.float32)
    x[0, :, 0, 0] = 1e4
    shapes = {"y": x.shape, "mean": (16,), "variance": (16,)}
    found = operator(pointwise_forward, cuda_kernels.gpu(), "PointwiseStatistics", {"x": x}, shapes)
    np.testing.assert_allclose(found["variance"], reference.statistics(x.astype(np.float64))[1], rtol=1e-5)


def test_a_diverged_run_shows():
    x = np.full((1, 16, 2, 2), np.nan, np.float32)
    shapes = {"y": x.shape, "mean": (16,), "variance": (16,)}
    found = operator(pointwise_forward, cuda_kernels.gpu(), "ReluPointwiseStatistics", {"x": x}, shapes)
    assert all(np.isnan(found[name]).all() for name in shapes)


def large(name, dtype, c=256, align=8):
    """The kernel of an operator on maps of 64 images of 56 by 56."""
    op, kind = spec.parse(name), MapType(64, 56, 56, c, c, dtype, align)
    maps = tuple((n, kind) for n in (*op.operands, *op.results) if is_map(n) and n != "acc")
    attributes = tuple((a, pointwise_case.ATTRIBUTES[a]) for a in op.attributes if a in pointwise_case.ATTRIBUTES)
    return pointwise_backward if op.is_gradient else pointwise_forward, Problem(name, maps, attributes)


LARGE = [
    ("NormalizeReluPointwiseStatistics", "bfloat16", 256, 8),
    ("NormalizeAddNormalizedReluPointwiseStatistics", "float32", 256, 8),
    ("BatchNormGradNormalizePointwiseGradReluGradReduceAccumulate", "bfloat16", 256, 8),
    ("BatchNormGradNormalizePointwiseGradBiasGradAddGradientReluGradReduceReduceOtherAccumulate", "float16", 203, 1),
    ("BatchNormGradNormalizePointwiseGradQuickGeluGradReduceAccumulate", "float32", 64, 4),
    ("BatchNormGradNormalizePointwiseGradGeluGradReduceAccumulate", "float32", 64, 4),
    ("NormalizeMishPointwise", "float32", 64, 4),
]


@pytest.mark.parametrize("arch", cuda_kernels.ARCHITECTURES)
@pytest.mark.parametrize(("name", "dtype", "c", "align"), LARGE)
def test_no_spills(name, dtype, c, align, arch):
    generator, problem = large(name, dtype, c, align)
    cuda_kernels.assert_no_spills(generator(problem, cuda_kernels.gpu(arch=arch, multiprocessors=132)))


@pytest.mark.parametrize("activation", ["Sigmoid", "QuickGelu", "Gelu", "Mish"])
def test_what_is_read_often_is_written_once(activation):
    """A compiler reads every copy: text of lines of 12,000 characters took minutes where this takes a second."""
    generator, problem = large(f"BatchNormGradNormalizePointwiseGrad{activation}GradReduceAccumulate", "bfloat16")
    source = cuda_source(generator(problem, cuda_kernels.gpu(multiprocessors=132)).build(), "sm_90")
    assert max(map(len, source.splitlines())) < 2500
