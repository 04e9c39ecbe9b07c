"""Pool kernels against the numpy reference in float64."""

import numpy as np
import pytest
from halves import as_held, of_stored, rounding, targets
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pool_case import AVERAGE, AVERAGE_GRAD, GLOBAL, MAX, MAX_GRAD, operands_of, positions, window

from bnfuse.core.errors import BnfuseError
from bnfuse.opset import reference, spec
from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.common.windows import index_dtype
from bnfuse.runtime.kernels.cpu.pool import pool_backward, pool_forward
from bnfuse.runtime.kernels.kernel import MapType, Problem

pytestmark = pytest.mark.usefixtures("optimized")

TARGET = resolve("cpu", 2)
CLIP = {"min": -0.5, "max": 0.75}


def run(name, shape, attributes, slots=None, operands=None, target=TARGET):
    op = spec.parse(name)
    operands = as_held(operands or operands_of(op, shape, attributes, np.random.default_rng(0)), target)
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
    wide = {k: v if k == "indices" else v.astype(np.float64) for k, v in operands.items()}
    expected = reference.run(op, wide, full)
    generator = pool_backward if op.is_gradient else pool_forward
    found = execute.operator(generator, target, name, given, {k: v.shape for k, v in expected.items()}, full, slots)
    if op.core == "MaxPool":
        expected["indices"] = positions(expected["indices"], shape, attributes)
    return found, expected


def check(*case, slots=None, target=TARGET):
    found, expected = run(*case, slots=slots, target=target)
    for name, value in of_stored(expected, found, target).items():
        if name == "indices":
            assert (found[name] == value).all()
        else:
            tolerance = 1e-5 + rounding(name, value, target)
            assert np.abs(found[name] - value).max() <= tolerance * np.abs(value).max(), name


@pytest.mark.parametrize(("name", "shape", "attributes"), MAX + AVERAGE + GLOBAL + MAX_GRAD + AVERAGE_GRAD)
def test_equals_the_reference(name, shape, attributes):
    check(name, shape, attributes)


@st.composite
def pools(draw):
    """Kernel up to 4, padding less than the window, any stride, dilation and overhang."""
    average = draw(st.booleans())
    pair = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(2))  # noqa: E731
    kernel, strides = pair(1, 4), pair(1, 3)
    pads = tuple(draw(st.integers(0, k - 1)) for k in kernel * 2)
    include = draw(st.integers(0, 1)) if average else None
    attributes = window(kernel, strides, pads, None if average else pair(1, 2), draw(st.integers(0, 1)), include)
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 70)), draw(st.integers(4, 11)), draw(st.integers(4, 11)))
    return average, draw(st.booleans()), shape, attributes


@settings(max_examples=10, derandomize=True, deadline=None, database=None)
@given(pools(), targets)
def test_any_window(case, target):
    average, backward, shape, attributes = case
    reach = [
        d * (k - 1) + 1 for d, k in zip(attributes.get("dilations", (1, 1)), attributes["kernel_shape"], strict=True)
    ]
    assume(all(size >= r for size, r in zip(shape[2:], reach, strict=True)))
    core = "AveragePool" if average else "MaxPool"
    name = f"Normalize{core}GradReluGradReduce" if backward else f"NormalizeRelu{core}Statistics"
    check(name, shape, attributes, target=target)


def test_maps_in_channel_slots_leave_their_neighbours_alone():
    attributes = window((3, 3), (2, 2), (1, 1, 1, 1))
    slots = {"x": (30, 3), "y": (40, 17)}
    check("NormalizeReluMaxPoolStatistics", (2, 20, 7, 7), attributes, slots=slots)
    slots = {"x": (30, 3), "dy": (40, 17), "other": (25, 5), "dx": (50, 20)}
    check("MaxPoolGradAddGradientReluGradReduce", (2, 20, 7, 7), attributes, slots=slots)


def test_the_first_of_equal_maxima_takes_the_gradient():
    attributes = window((2, 2), (1, 1))
    operands = {"x": np.zeros((1, 16, 3, 3), np.float32)}
    found, expected = run("ReluMaxPool", (1, 16, 3, 3), attributes, operands=operands)
    assert (found["indices"] == 0).all()
    assert (expected["indices"] == 0).all()


def test_a_maximum_shows_nan():
    x = np.zeros((1, 16, 4, 4), np.float32)
    x[:, :, 1, 2] = np.nan
    attributes = window((2, 2), (2, 2))
    shapes = {"y": (1, 16, 2, 2), "indices": (1, 16, 2, 2)}
    found = execute.operator(pool_forward, TARGET, "MaxPool", {"x": x}, shapes, attributes)
    assert np.isnan(found["y"][0, :, 0, 1]).all()
    assert np.isnan(found["y"]).sum() == 16


def test_indices_of_large_windows_are_int32():
    assert (index_dtype((16, 16)), index_dtype((17, 16))) == ("uint8", "int32")
    attributes = window((17, 16), (1, 1))
    x = -np.arange(17 * 16, dtype=np.float32)[::-1].reshape(1, 1, 17, 16).copy()
    found, _ = run("MaxPool", x.shape, attributes, operands={"x": x})
    assert (found["y"].item(), found["indices"].item()) == (0, 271)


def test_a_pool_that_stores_its_input_is_refused():
    maps = tuple((name, MapType(1, 2, 2, 3, 3)) for name in ("x", "y", "indices", "stored"))
    with pytest.raises(BnfuseError, match="stores the input"):
        pool_forward(Problem("ReluMaxPoolStoreInput", maps, tuple(window((1, 1)).items())), TARGET)
