"""Products of a warpgroup: which targets have them, and that the compiler takes them as they are written."""

from __future__ import annotations

import pytest
from cuda_kernels import gpu
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cuda import compile as compiling
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda import wgmma
from bnfuse.runtime.kernels.kernel import Param
from bnfuse.runtime.targets.arch import compiled_as


@pytest.mark.parametrize(
    ("arch", "precision", "has"),
    [("sm_90", "bf16", True), ("sm_90", "fp16", True), ("sm_90", "tf32", False), ("sm_80", "bf16", False)],
)
def test_maps_of_16_bits_are_multiplied_by_warpgroups_where_there_is_the_instruction(arch, precision, has):
    assert gpu(precision, arch).has_wgmma == has


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("in_words", [True, False])
def test_a_product_keeps_its_sums_in_registers(precision, in_words):
    outputs = 128
    size = wgmma.GROUP * outputs // 2
    with d.stage("product", [Param("y", "out", size)], grid=(1, 1, 1), threads=wgmma.GROUP, shared=1 << 15) as block:
        shared = d.shared_memory(1 << 15, wgmma.ALIGN)
        acc, a = d.registers(outputs // 2), d.registers(4, "uint32")
        d.unrolled(outputs // 2, lambda i: d.put(acc, i, T.float32(0)))
        d.unrolled(4, lambda i: d.put(a, i, T.uint32(0)))
        rows, turned = wgmma.along_rows(shared.address), wgmma.across_rows(shared.address, 8192)
        wgmma.publish()
        d.sync()
        wgmma.fence()
        words = [a[i] for i in range(4)]
        wgmma.multiply(precision, acc, 0, outputs, words if in_words else rows, turned, across=(False, True))
        wgmma.commit()
        wgmma.wait()
        d.unrolled(outputs // 2, lambda i: d.put(block["y"], block.tid * (outputs // 2) + i, acc[i]))
    source = compiling.cuda_source([block.stage], "sm_90")
    cubin, log = compiling.compile_cuda(source, compiled_as("sm_90"))
    (found,) = compiling.resources(log).values()
    assert cubin.startswith(b"\x7fELF") and "serialized" not in log
    assert (found["spills"], found["stack"]) == (0, 0)
