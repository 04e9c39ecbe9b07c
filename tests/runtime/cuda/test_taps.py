"""Sparse linear maps on a GPU, interpreted: all that is asked of the CPU's, and maps of 16 bits."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import source_files
from cuda_kernels import ARCHITECTURES, assert_no_spills, gpu, run_kernel
from cuda_operator import alignment, raw, rounded, values_of

from bnfuse.runtime.kernels.common.taps import TapsProblem, taps_of
from bnfuse.runtime.kernels.cuda.taps import taps
from bnfuse.runtime.kernels.kernel import MapType

on_cpu = source_files.load(pathlib.Path(__file__).parents[1] / "test_taps.py")


def run(x, matrix, axis, slots=((0, 0), (0, 0)), dtype="float32"):
    index, weight = taps_of(matrix)
    c, shape = x.shape[3], on_cpu.made(x.shape, matrix, axis)
    kinds = [
        MapType(*full, full[3] + more, dtype, alignment(full[3], full[3] + more, offset))
        for full, (more, offset) in zip((x.shape, shape), slots, strict=True)
    ]
    wide = np.full((*x.shape[:3], kinds[0].stride), 7, np.float32)
    wide[..., slots[0][1] : slots[0][1] + c] = x
    kernel = taps(TapsProblem(*kinds, axis, index.shape[1], weight is not None), gpu())
    arrays = {"x": raw(wide, dtype), "index": index} | ({} if weight is None else {"weight": weight})
    found = run_kernel(kernel, arrays, {"x": slots[0][1], "y": slots[1][1]})["y"]
    return values_of(found, dtype).reshape(*shape[:3], -1)[..., slots[1][1] : slots[1][1] + shape[3]]


on_cpu.run = run
globals().update({name: test for name, test in vars(on_cpu).items() if name.startswith("test_")})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("channels", "most"), [(16, 4), (5, 11)])
def test_maps_of_16_bits_are_rounded_once(channels, most, dtype):
    rng = np.random.default_rng(0)
    x = rounded(rng.normal(size=(2, 7, 5, channels)), dtype).astype(np.float32)
    matrix = on_cpu.sparse(6, 7, most, rng)
    exact = on_cpu.wanted(x, matrix, "h")
    np.testing.assert_allclose(run(x, matrix, "h", dtype=dtype), exact, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("c", "out", "slots"), [(16, 16, ((0, 0), (0, 0))), (37, 51, ((5, 3), (3, 1)))])
def test_channels_of_16_bits_are_picked_as_they_are(c, out, slots, dtype):
    rng = np.random.default_rng(0)
    x = rounded(rng.normal(size=(2, 3, 5, c)), dtype).astype(np.float32)
    matrix = on_cpu.sparse(out, c, 1, rng, picks=True)
    np.testing.assert_array_equal(run(x, matrix, "c", slots, dtype), on_cpu.wanted(x, matrix, "c"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiles_without_spills(arch, dtype):
    x, y = MapType(4, 28, 28, 64, 64, dtype, 8), MapType(4, 56, 28, 64, 64, dtype, 8)
    for count, weighted in ((1, False), (4, True), (20, True)):
        assert_no_spills(taps(TapsProblem(x, y, "h", count, weighted), gpu(arch=arch)))
    assert_no_spills(taps(TapsProblem(x, x, "c", 1, weighted=False), gpu(arch=arch)))
