"""float32 is rounded to bfloat16 as ml_dtypes has it, in vectors of any width, by an instruction where there is one."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.cpu import rounding, tir
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Param, Problem
from bnfuse.runtime.targets import cpus

COUNT = 4096
SOURCE, TARGET = MapType(1, 1, COUNT, 1, 1), MapType(1, 1, COUNT, 1, 1, "bfloat16")


def kernel(width: int, target, looped: bool = False) -> Kernel:
    """Copy the first elements of a map, rounded, in vectors of a width."""
    params = (
        Param("x", "in", COUNT, is_map=True),
        Param("y", "out", COUNT, "bfloat16", is_map=True),
    )

    def build():
        with tir.function("round", params) as arguments, T.serial(0, COUNT // width) as i:
            x, y = arguments["x"], arguments["y"]
            if looped:
                tir.elementwise(width, lambda j: tir.store(y, i * width + j, x[i * width + j]))
            else:
                tir.store(y, tir.span(i * width, width), x[tir.span(i * width, width)])
        return arguments.result

    return Kernel("round", Problem("Rounded", (("x", SOURCE), ("y", TARGET)), (), ()), target, params, build)


def values() -> np.ndarray:
    """Give numbers of all sizes, those halfway between two, the largest, infinite ones, and none."""
    bits = np.random.default_rng(0).integers(0, 2**32, COUNT, dtype=np.uint64).astype(np.uint32)
    halfway = np.arange(0x3F7F8000, 0x3F7F8000 + 64 * 0x8000, 0x8000, dtype=np.uint32)
    bits[: len(halfway)] = halfway
    bits[100:110] = [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x00800000, 1]
    return bits.view(np.float32)


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("width", [1, 3, 4, 5, 8, 13, 16, 64, 128])
def test_nearest(width, looped):
    target = resolve("cpu", 1, "bf16")
    x = values()
    found = execute.call(kernel(width, target, looped), {"x": x})["y"][: COUNT // width * width]
    with np.errstate(invalid="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)[: len(found)]
    if rounding.FEATURE in cpus.features_of(target.mcpu):  # what is subnormal is zero then
        expected[np.abs(x[: len(found)]) < np.finfo(np.float32).tiny] = 0
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("mcpu", "instruction"), [("sapphirerapids", True), ("znver4", True), ("znver3", False)])
def test_instruction_where_there_is_one(mcpu, instruction):
    target = resolve(f"cpu:{mcpu}", 1, "bf16")
    for looped in (False, True):
        made = kernel(64, target, looped)
        assembly = str(tir.compile_function(made.build(), target).mod.inspect_source("asm"))
        assert ("vcvtneps2bf16" in assembly) == instruction
        assert "__truncsfbf2" not in assembly
