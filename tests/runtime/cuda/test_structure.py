"""What generated CUDA is made of, by kernel kind: no change goes unseen (pytest --update-golden, and read the diff)."""

from __future__ import annotations

import functools
import re

import pytest
from cuda_conv import CudaCase
from cuda_kernels import gpu
from cuda_structure import structure

from bnfuse.runtime.kernels.cuda.conv_backward import conv_backward
from bnfuse.runtime.kernels.cuda.conv_forward import conv_forward
from bnfuse.runtime.kernels.cuda.depthwise_backward import depthwise_backward
from bnfuse.runtime.kernels.cuda.depthwise_forward import depthwise_forward

FORWARD = "NormalizeReluConvStatistics"
BACKWARD = "BatchNormGradNormalizeReluConvGradReluGradReduce"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "tf32": "float32", "fp32": "float32"}
MULTIPROCESSORS = 132

GEOMETRIES = {  # input and output channels, size, window, stride, groups
    "1x1": (256, 128, 28, 1, 1, 1),
    "3x3": (128, 32, 28, 3, 1, 1),
    "strided": (128, 128, 28, 3, 2, 1),
    "grouped": (64, 64, 28, 3, 1, 4),
    "depthwise": (96, 96, 28, 3, 1, 96),
    "depthwise-strided": (96, 96, 28, 3, 2, 96),
}


def layer(op: str, geometry: str, precision: str) -> CudaCase:
    cin, cout, size, window, stride, groups = GEOMETRIES[geometry]
    around = ((window,) * 2, (stride,) * 2, (window // 2,) * 4)
    return CudaCase(op, 64, size, size, cin, cout, *around, group=groups, dtype=DTYPES[precision])


@functools.cache
def text_of(op: str, geometry: str, precision: str) -> str:
    case = layer(op, geometry, precision)
    generators = (depthwise_forward, depthwise_backward) if "depthwise" in geometry else (conv_forward, conv_backward)
    generator = generators[op == BACKWARD]
    return structure(lambda arch: generator(case.problem(), gpu(precision, arch, MULTIPROCESSORS)))


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("op", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_of_convolutions_in_bf16(golden, op, geometry):
    golden.check_text(text_of(op, geometry, "bf16"))


@pytest.mark.parametrize("precision", ["fp16", "tf32", "fp32"])
@pytest.mark.parametrize("op", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_of_a_1x1_convolution_in_other_precisions(golden, op, precision):
    golden.check_text(text_of(op, "1x1", precision))


@pytest.mark.parametrize(
    ("precision", "products"),
    [
        ("bf16", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"),
        ("fp16", "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"),
        ("tf32", "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"),
        ("fp32", "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"),
    ],
)
def test_products_are_those_of_the_precision_and_sums_are_float32(precision, products):
    text = text_of(BACKWARD, "1x1", precision)
    assert set(re.findall(r"\bmma\S+", text)) == {products}  # those of warps
    assert "cp.async" in text and "__syncthreads" in text


def test_maps_are_read_and_written_16_bytes_at_a_time():
    for op, geometry in ((FORWARD, "1x1"), (FORWARD, "3x3"), (BACKWARD, "1x1"), (BACKWARD, "3x3")):
        text = text_of(op, geometry, "bf16")
        maps = set(re.findall(r"((?:load|store) of \d+ B, (?:x|y|dx|dy|grad_x))\n", text))
        own = {"store of 16 B, y"} if op == FORWARD else {"store of 16 B, dx", "load of 16 B, x"}
        assert maps == own, (op, geometry, maps)
        copies = re.findall(r"cp\.async\.c\w\.\S+", text)
        assert copies and set(copies) == {"cp.async.cg.shared.global"}, (op, geometry)  # which copies 16 bytes
