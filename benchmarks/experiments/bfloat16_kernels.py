"""The kernels of bfloat16.py: relu(a*x + b) convolved with 1x1 weights, by `dpbf16ps` or by AMX's `tdpbf16ps`.

    pack the weights as pairs of input channels: [COUT/32][k/2][32]                              workspace
    parallel over threads, for the thread's tiles of pixels:
        pack the activated pixels as pairs: [tile][k/2]                                          second-level cache
        for 32 output channels, for a micro tile (14 pixels; AMX: 32, as 2 x 2 tiles of 16 x 16):
            for pairs (AMX: 16 of them): sums += pixels * weights                                registers, tiles
            store y

TIR has neither instruction: the vector one is taken in as LLVM code, AMX's are LLVM's intrinsics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.tir import registers, span, splat, store, workspace
from bnfuse.runtime.kernels.kernel import Kernel, Param, Problem
from bnfuse.runtime.targets.target import CpuTarget

COUT, MICRO, BLOCK = 128, {"dpbf16ps": 14, "AMX": 32}, 32
DOT = """
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
declare <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float>, <16 x float>)
define linkonce_odr <16 x float> @dot(<16 x float> %sum, i32 %pair, <16 x i32> %w) alwaysinline nounwind {
  %one = insertelement <16 x i32> poison, i32 %pair, i64 0
  %all = shufflevector <16 x i32> %one, <16 x i32> poison, <16 x i32> zeroinitializer
  %a = bitcast <16 x i32> %all to <32 x bfloat>
  %b = bitcast <16 x i32> %w to <32 x bfloat>
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %sum, <32 x bfloat> %a, <32 x bfloat> %b)
  ret <16 x float> %r
}
define linkonce_odr <16 x i32> @pair(<16 x float> %low, <16 x float> %high) alwaysinline nounwind {
  %r = call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float> %high, <16 x float> %low)
  %i = bitcast <32 x bfloat> %r to <16 x i32>
  ret <16 x i32> %i
}
"""


def kernel(way: str, p: Problem, target: CpuTarget) -> Kernel:
    """y[pixels, COUT] from x[pixels, k]; packed weights [COUT/32][k/2][32] and pixels [tile][k/2] are pairs."""
    pixels, k = p.map("x").pixels, p.map("x").c
    sizes = {"x": pixels * k, "a": k, "b": k, "weight": COUT * k, "y": pixels * COUT}
    params = tuple(Param(name, "out" if name == "y" else "in", size) for name, size in sizes.items())
    params += (Param("config", "in", 16, "int32"),)
    micro, half, row = MICRO[way], k // 2, k // 2 + 16
    tile = micro * 4 if pixels % (micro * 4) == 0 else micro

    def build() -> Any:
        with tir.function(way, params) as given, T.attr(tirx.const(0, "int32"), "pragma_import_llvm", DOT):
            weights = workspace(COUT * half, "int32")
            with T.parallel(0, target.threads) as thread:
                first, count = tir.share(COUT // BLOCK * half, target.threads, thread)
                with T.serial(0, count) as i, T.serial(0, 2) as v:
                    source = ((first + i) // half * BLOCK + v * 16) * k + (first + i) % half * 2
                    low, high = (given["weight"][span(source + odd, 16, k)] for odd in (0, 1))
                    # an even and an odd channel for each output: `pair` puts its operands one after the other
                    store(weights, span((first + i) * BLOCK + v * 16, 16), interleaved(low, high))
            with T.parallel(0, target.threads) as thread:
                packed = workspace(tile * row, "int32")
                if way == "AMX":
                    intrinsic("ldtilecfg", T.address_of(given["config"][0]))
                first, count = tir.share(pixels // tile, target.threads, thread)
                with T.serial(0, count) as i:
                    start = T.bind((first + i) * tile)
                    with T.serial(0, tile) as pixel, T.serial(0, k // 32) as c:
                        values = [activated(given, (start + pixel) * k, c * 32 + lane) for lane in (0, 16)]
                        store(packed, span(pixel * row + c * 16, 16), tirx.call_extern("int32x16", "pair", *values))
                    with T.serial(0, COUT // BLOCK) as block, T.serial(0, tile // micro) as m:
                        at = T.bind((start + m * micro) * COUT + block * BLOCK)
                        multiply[way](packed, m * micro * row, row, weights, block * half * BLOCK, given["y"], at, half)
        return given.result

    return Kernel(way, p, target, params, build)


def interleaved(low: Any, high: Any) -> Any:
    """Rounded to nearest even by integers: the bits of bfloat16 are the upper half of float32's."""

    def rounded(value: Any) -> Any:
        bits = tirx.reinterpret("uint32x16", value)
        one, upper = splat(1, 16, "uint32"), splat(16, 16, "uint32")
        return bits + splat(0x7FFF, 16, "uint32") + ((bits >> upper) & one)

    upper = rounded(high) & splat(0xFFFF0000, 16, "uint32")
    return tirx.reinterpret("int32x16", upper | (rounded(low) >> splat(16, 16, "uint32")))


def activated(given: tir.Arguments, pixel: Any, channel: Any) -> Any:
    x, a, b = given["x"][span(pixel + channel, 16)], given["a"][span(channel, 16)], given["b"][span(channel, 16)]
    return T.bind(tirx.Max(x * a + b, splat(0, 16)))


def intrinsic(name: str, *operands: Any) -> None:
    T.evaluate(T.call_llvm_intrin("void", f"llvm.x86.{name}", *operands))


def multiply_dot(packed: Any, pixel: Any, row: int, weights: Any, block: Any, y: Any, at: Any, half: int) -> None:
    sums = registers(14 * BLOCK)
    slots = [(p, v, span(p * BLOCK + v * 16, 16)) for p in range(14) for v in range(2)]
    for _, _, slot in slots:
        store(sums, slot, splat(0, 16))
    with T.serial(0, half) as k:
        for p, v, slot in slots:
            pair, weight = packed[pixel + p * row + k], weights[span(block + k * BLOCK + v * 16, 16)]
            store(sums, slot, tirx.call_extern("float32x16", "dot", sums[slot], pair, weight))
    for p, v, slot in slots:
        store(y, span(at + p * COUT + v * 16, 16), sums[slot])


def multiply_amx(packed: Any, pixel: Any, row: int, weights: Any, block: Any, y: Any, at: Any, half: int) -> None:
    """Tiles 0-3: sums, pixels by output channels; 4-5: pixels; 6-7: weights."""
    tiles = [(m, n, T.int8(2 * m + n)) for m in range(2) for n in range(2)]
    for _, _, index in tiles:
        intrinsic("tilezero", index)
    with T.serial(0, half // 16) as k:
        for m in range(2):
            address = T.address_of(packed[pixel + m * 16 * row + k * 16])
            intrinsic("tileloadd64", T.int8(4 + m), address, T.int64(4 * row))
            address = T.address_of(weights[block + k * 16 * BLOCK + m * 16])
            intrinsic("tileloadd64", T.int8(6 + m), address, T.int64(4 * BLOCK))
        for m, n, index in tiles:
            intrinsic("tdpbf16ps", index, T.int8(4 + m), T.int8(6 + n))
    for m, n, index in tiles:
        intrinsic("tilestored64", index, T.address_of(y[at + m * 16 * COUT + n * 16]), T.int64(4 * COUT))


multiply: dict[str, Callable[..., None]] = {"dpbf16ps": multiply_dot, "AMX": multiply_amx}


def register_kernel(instruction: str, p: Problem, target: CpuTarget, turns: int) -> Kernel:
    """What an instruction could do at most: on 28 sums that stay in registers, `turns` times, one thread."""
    params = (Param("x", "in", 32), Param("y", "out", 28 * 16))

    def build() -> Any:
        with (
            tir.function("registers_" + instruction, params) as given,
            T.attr(tirx.const(0, "int32"), "pragma_import_llvm", DOT),
        ):
            sums = registers(28 * 16)
            slots = [span(i * 16, 16) for i in range(28)]
            for slot in slots:
                store(sums, slot, splat(0, 16))
            left, right = (T.bind(given["x"][span(i * 16, 16)]) for i in range(2))
            pair, weight = tirx.reinterpret("int32", given["x"][0]), tirx.reinterpret("int32x16", right)
            with T.serial(0, turns):
                for slot in slots:
                    if instruction == "float32":
                        product = tirx.call_llvm_pure_intrin("float32x16", "llvm.fma", left, right, sums[slot])
                        store(sums, slot, product)
                    else:
                        store(sums, slot, tirx.call_extern("float32x16", "dot", sums[slot], pair, weight))
            for slot in slots:
                store(given["y"], slot, sums[slot])
        return given.result

    return Kernel("registers_" + instruction, p, target, params, build)
