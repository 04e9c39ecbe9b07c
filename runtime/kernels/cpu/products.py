"""Products of bfloat16 with float32 sums (`vdpbf16ps`) in the direct forward convolution, where the CPU has them.

    packed pixels     [pixel][channel]                      bfloat16: what is stored there is rounded
    packed weights    ...[r][s][channel/2][NR][2]           a pair of input channels of each output channel
    accumulators  +=  pixel's pair * weights' pairs         two products of each lane in one instruction

The instruction adds the odd channel's product first, then the even one's, takes subnormal operands for zero, and rounds
to nearest after each. TIR has not got it: the kernel takes it in as LLVM code, which is inlined.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cpu.tiles import ConvShape
from bnfuse.runtime.kernels.cpu.tir import Expr, Half, element, span
from bnfuse.runtime.targets.target import CpuTarget

FASTER = ("znver4", "znver5")  # than float32's products; Intel's, which have it too, are slower by it (D14)

NAME = "bnfuse_pair_products"
OPENING = """
define linkonce_odr <{lanes} x float> @{name}(<{lanes} x float> %sum, ptr %place, <{both} x i16> %weights)
    alwaysinline nounwind {{
  %pair = load i32, ptr %place, align 4
  %one = insertelement <{lanes} x i32> poison, i32 %pair, i64 0
  %pairs = shufflevector <{lanes} x i32> %one, <{lanes} x i32> poison, <{lanes} x i32> zeroinitializer
"""
INSTRUCTION = (
    """
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
"""
    + OPENING
    + """
  %a = bitcast <16 x i32> %pairs to <32 x bfloat>
  %b = bitcast <32 x i16> %weights to <32 x bfloat>
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %sum, <32 x bfloat> %a, <32 x bfloat> %b)
  ret <16 x float> %r
}}
"""
)


def takes(shape: ConvShape, target: CpuTarget) -> bool:
    """Tell whether a convolution is done by these products: where they are faster, of whole pairs of channels."""
    return is_able(target) and shape.groups == 1 and shape.cin % 2 == 0 and shape.cin >= target.lanes


def is_able(target: CpuTarget) -> bool:
    """Tell whether a target computes in bfloat16, and is faster by the instruction."""
    return target.precision == "bf16" and target.mcpu in FASTER


@contextlib.contextmanager
def products(lanes: int) -> Iterator[None]:
    """Let `add_products` be used within the block, which is to be opened right inside of the function."""
    text = INSTRUCTION.format(name=NAME, lanes=lanes, both=2 * lanes)
    with T.attr(tirx.const(0, "int32"), "pragma_import_llvm", text):
        yield


def add_products(sums: Expr, pixels: Half, at: Expr, weights: Half, row: Expr, lanes: int) -> Expr:
    """Write a vector of sums plus a pixel's pair, from element `at` on, times the pairs of `lanes` output channels."""
    place = tirx.address_of(element(pixels, at))
    return tirx.call_extern(f"float32x{lanes}", NAME, sums, place, weights.bits[span(row, 2 * lanes)])
