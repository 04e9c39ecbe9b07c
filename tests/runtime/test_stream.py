"""Stores past the caches: the same results, wherever the map lies."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.cpu import stream, tir
from bnfuse.runtime.kernels.cpu.conv_backward import conv_backward
from bnfuse.runtime.kernels.cpu.conv_forward import conv_forward
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Problem

TARGET = dataclasses.replace(resolve("cpu"), threads=2)
SIZE, CHANNELS, WIDTH = 9, 40, 64  # 40 channels in a buffer of 64: whole vectors and a tail
GEOMETRY = (
    ("dilations", (1, 1)),
    ("group", CHANNELS),
    ("kernel_shape", (3, 3)),
    ("pads", (1, 1, 1, 1)),
    ("strides", (1, 1)),
)
needs_streams = pytest.mark.skipif(TARGET.lanes not in stream.X86_LANES, reason="this processor has no such stores")


def problem(op: str, *maps: str) -> Problem:
    kind = MapType(2, SIZE, SIZE, CHANNELS, WIDTH)
    return Problem(op, tuple((name, kind) for name in maps), GEOMETRY, (CHANNELS, 1, 3, 3))


def forward() -> Kernel:
    return conv_forward(problem("NormalizeReluConvStatistics", "x", "y"), TARGET)


def backward() -> Kernel:
    op = "BatchNormGradNormalizeReluConvGradReluGradReduce"
    return conv_backward(problem(op, "dy", "x", "grad_x", "dx"), TARGET)


def results(kernel: Kernel, offset: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    given = {p.name: rng.standard_normal(p.elements).astype(np.float32) for p in kernel.params}
    offsets = {p.name: offset for p in kernel.params if p.is_map}
    found = execute.call(kernel, given, offsets)
    return {p.name: found[p.name] for p in kernel.params if p.access == "out"}


@needs_streams
@pytest.mark.parametrize("offset", [0, 5, 16])
@pytest.mark.parametrize("make", [forward, backward])
def test_streamed_results_are_those_of_ordinary_stores(make, offset: int, monkeypatch) -> None:
    expected = results(make(), offset)
    monkeypatch.setattr(stream, "STREAMED_BYTES", 0)
    for name, found in results(make(), offset).items():
        np.testing.assert_array_equal(found, expected[name], err_msg=name)


@needs_streams
@pytest.mark.parametrize("make", [forward, backward])
def test_only_large_maps_are_streamed(make, monkeypatch) -> None:
    assert "vmovntps" not in assembly(make())
    monkeypatch.setattr(stream, "STREAMED_BYTES", 0)
    code = assembly(make())
    assert "vmovntps" in code and "sfence" in code and "bnfuse_stream" not in code


def assembly(kernel: Kernel) -> str:
    return str(tir.compile_function(kernel.build(), kernel.target).mod.inspect_source("asm"))
