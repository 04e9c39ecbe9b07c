"""Activations by a GPU's approximations: which kernels have them, and their errors in the interpreter, whose
instructions are as wrong as those of a GPU may be."""

import math

import cuda_kernels
import numpy as np
import pointwise_case
import pytest
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.approximations import APPROXIMATIONS, INSTRUCTIONS
from bnfuse.runtime.kernels.cuda.compile import compile_kernel
from bnfuse.runtime.kernels.cuda.pointwise import pointwise_backward, pointwise_forward
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Param, Problem

THREADS = 128


def values():
    """Of all sizes; what is not finite stands at the end."""
    small = np.geomspace(1e-30, 1, 500)
    near = np.linspace(-12, 12, 4001)
    far = np.linspace(-87, 87, 500)
    special = [np.inf, -np.inf, np.nan, 1e30, -1e30]
    x = np.concatenate([small, -small, near, far, special])
    return np.concatenate([np.zeros(-len(x) % THREADS), x]).astype(np.float32)


def kernel(count):
    """What each of APPROXIMATIONS is of x, one below the other; a map of 16 bits is among the parameters."""
    results = count * len(APPROXIMATIONS)
    params = (Param("x", "in", count), Param("map", "in", 8, "bfloat16"), Param("out", "out", results))

    def build():
        with d.stage("approximations", params, grid=(count // THREADS, 1, 1), threads=THREADS) as block:
            at, one = T.bind(block.x * THREADS + block.tid), T.float32(1)
            for row, (name, function) in enumerate(APPROXIMATIONS.items()):
                x = block["x"][at]
                operands = {"divide": (one, x), "clamp": (x, T.float32(-1), T.float32(2)), "minimum": (x, one)}
                d.put(block["out"], row * count + at, function(*operands.get(name, (x,))))
        return (block.stage,)

    return Kernel("approximations", None, cuda_kernels.gpu("bf16"), params, build)


@pytest.fixture(scope="module")
def found():
    x = values()
    rows = cuda_kernels.run_kernel(kernel(len(x)), {"x": x, "map": np.zeros(8, np.uint16)})["out"]
    return dict(zip(APPROXIMATIONS, rows.reshape(len(APPROXIMATIONS), -1), strict=True))


def sigmoid(x):
    return np.where(x > 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


EXACT = {  # and the largest error, relative to the result
    "divide": (lambda x: 1 / x, 2**-21),
    "relu": (lambda x: np.maximum(x, 0), 0),
    "clamp": (lambda x: np.clip(x, -1, 2), 0),
    "minimum": (lambda x: np.minimum(x, 1), 0),
    "exp": (np.exp, 2**-17),  # x/ln 2 is rounded: of e**-87 that is 2**-17.6
    "sigmoid": (sigmoid, 2**-17),
    "tanh": (np.tanh, 2**-18),
    "erf": (np.vectorize(math.erf), 2**-20),
    "softplus": (lambda x: np.logaddexp(x, 0), 2**-17),
    "elu": (lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))), 2**-18),
}


@pytest.mark.parametrize("name", APPROXIMATIONS)
def test_the_error_is_far_below_the_rounding_of_16_bits(found, name):
    x = values()
    exact, bound = EXACT[name]
    with np.errstate(all="ignore"):
        wanted = exact(x.astype(np.float64))
        held = np.isfinite(wanted) & (np.abs(wanted) < 1e37) & np.isfinite(x)
        error = np.abs(found[name] - wanted)[held] / np.maximum(np.abs(wanted[held]), 1e-37)
    assert held.sum() > 5000
    assert error.max() <= bound
    assert np.isnan(found[name][np.isnan(x)]).all()
    for far in (np.inf, -np.inf):
        np.testing.assert_array_equal(found[name][x == far], exact(np.full(1, far)))


def operator(name, dtype):
    generator = pointwise_backward if "Grad" in name else pointwise_forward
    kind = MapType(2, 3, 3, 8, 8, dtype, 8)
    maps = tuple((n, kind) for n in (("x", "dy", "dx") if "Grad" in name else ("x", "y")))
    attributes = tuple(pointwise_case.ATTRIBUTES.items())
    return generator(Problem(name, maps, attributes), cuda_kernels.gpu("fp32" if dtype == "float32" else "bf16"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_only_kernels_of_16_bit_maps_have_them(dtype):
    text = str(operator("NormalizePointwiseGradQuickGeluGradReduce", dtype).build()[0].function)
    lanes = 4 if dtype == "float32" else 8
    assert text.count('func_call("approximate_exp2"') == (0 if dtype == "float32" else lanes)
    assert text.count('func_call("approximate_reciprocal"') == (0 if dtype == "float32" else lanes)


def test_a_division_by_a_constant_is_a_product():
    text = str(operator("HardSwishPointwise", "bfloat16").build()[0].function)
    assert "reciprocal" not in text
    assert " / T.float32" not in text


def test_the_instructions_are_those_of_the_machine():
    """They are compiled: a mistake in their text would be found on a GPU alone."""
    assert compile_kernel(kernel(THREADS))
    assert set(INSTRUCTIONS) == {
        name for name in INSTRUCTIONS if f'func_call("{name}"' in str(kernel(THREADS).build()[0].function)
    }
    assert steps.TIR.keys() >= APPROXIMATIONS.keys()
