"""Is bfloat16 with float32 sums worth it? Rate and error of DenseNet's 1x1 convolutions on AVX512-BF16 and on AMX.

    python benchmarks/experiments/bfloat16.py [--batch 16] [--repeats 15]

Three kernels of relu(a*x + b) convolved with 1x1 weights take turns on two threads: the product's in float32, one with
`dpbf16ps` and one with AMX (bfloat16_kernels.py); before that, the two vector instructions in registers alone. Needs
Linux on an x86 CPU with AVX512-BF16 and AMX. The gradients' errors are those of numpy's float32 products of rounded
operands, which are exact as the instructions' are. `split`: each operand as the sum of two, three products of the four.
The finding: docs/decisions.md.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from bfloat16_kernels import COUT, kernel, multiply, register_kernel
from measuring import rates

from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.cpu.conv_forward import conv_forward
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Problem
from bnfuse.runtime.targets import cpus

SHAPES = ((56, 128), (28, 256), (28, 480), (14, 512))  # rows of pixels, input channels
ATTRIBUTES = {"dilations": (1, 1), "group": 1, "kernel_shape": (1, 1), "pads": (0,) * 4, "strides": (1, 1)}
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # a system call and its arguments: AMX has to be asked for
TURNS = 100_000


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, as float32."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def split(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """left @ right by three products of bfloat16."""
    (a, c), (b, d) = ((bfloat16(v), bfloat16(v - bfloat16(v))) for v in (left, right))
    return a @ b + (a @ d + c @ b)


def error(value: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(value - exact) / np.linalg.norm(exact))


def print_errors(values: dict[str, np.ndarray], x: np.ndarray) -> None:
    """Of y = x w', dx = dy w and dweight = dy' x, dy being normal, against float64."""
    dy = np.random.default_rng(1).standard_normal((len(x), COUT), np.float32)
    w = values["weight"].reshape(COUT, -1)
    for name, left, right in (("y", x, w.T), ("dx", dy, w), ("dweight", dy.T, x)):
        left, right = np.ascontiguousarray(left), np.ascontiguousarray(right)
        exact = left.astype(np.float64) @ right.astype(np.float64)
        results = left @ right, bfloat16(left) @ bfloat16(right), split(left, right)
        found = [error(result, exact) for result in results]
        print(f"    {name:8} error: float32 {found[0]:.1e}   bfloat16 {found[1]:.1e}   split {found[2]:.1e}")


def drawn(pixels: int, k: int) -> dict[str, np.ndarray]:
    """Operands: normal, He's weights; `config` describes eight tiles of 16 rows of 64 bytes."""
    rng = np.random.default_rng(0)
    sizes = {"x": pixels * k, "a": k, "b": k, "weight": COUT * k}
    values = {name: rng.standard_normal(size, np.float32) for name, size in sizes.items()}
    values["weight"] *= np.float32((2 / k) ** 0.5)
    config = np.zeros(64, np.uint8)
    config[0], config[16:32:2], config[48:56] = 1, 64, 16
    return {**values, "config": config.view(np.int32)}


def bound(made: Kernel, values: dict[str, np.ndarray], y: np.ndarray) -> Callable[[], Any]:
    arrays = [execute.aligned_copy(values[q.name]) if q.name in values else y for q in made.params]
    tensors, offsets = [tvm.runtime.from_dlpack(a) for a in arrays], [0 for q in made.params if q.is_map]
    function = execute.compile_kernel(made)
    return lambda: function(*tensors, *offsets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    if missing := {"avx512bf16", "amx-bf16"} - cpus.host_features():
        parser.exit(1, f"this CPU lacks {', '.join(sorted(missing))}\n")
    if ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA):
        parser.exit(1, "the operating system gives no permission to use AMX\n")
    target, n = resolve("cpu:sapphirerapids", 2), arguments.batch
    for size, k in SHAPES:
        maps = (("x", MapType(n, size, size, k, k)), ("y", MapType(n, size, size, COUT, COUT)))
        p = Problem("NormalizeReluConv", maps, tuple(ATTRIBUTES.items()), (COUT, k, 1, 1))
        pixels = p.map("x").pixels
        values = drawn(pixels, k)
        if (size, k) == SHAPES[0]:
            alone = {way: register_kernel(way, p, target, TURNS) for way in ("float32", "dpbf16ps")}
            ones = {"x": np.ones(32, np.float32)}
            calls = {way: bound(made, ones, execute.aligned(28 * 16)) for way, made in alone.items()}
            for way, rate in rates(calls, 28 * TURNS, arguments.repeats).items():
                print(f"{way} in registers, one thread: {rate} 10^9 instructions/s")
        kernels = {"float32": conv_forward(p, target), **{way: kernel(way, p, target) for way in multiply}}
        results = {way: execute.aligned(pixels * COUT) for way in kernels}
        calls = {way: bound(made, values, results[way]) for way, made in kernels.items()}
        print(f"{size}x{size} {k} -> {COUT}, GFLOP/s from the minimum (median)")
        found = rates(calls, 2 * pixels * k * COUT, arguments.repeats)
        x = np.maximum(values["x"].reshape(pixels, k) * values["a"] + values["b"], np.float32(0))
        exact = x.astype(np.float64) @ values["weight"].reshape(COUT, k).T.astype(np.float64)
        for way, rate in found.items():
            print(f"    {way:8} {rate}   error of y {error(results[way].reshape(exact.shape), exact):.1e}")
        print_errors(values, x)


if __name__ == "__main__":
    main()
