"""The lockstep interpreter's wgmma against numpy, and that it sees what a kernel that uses it does wrong."""

from __future__ import annotations

from typing import Any

import lockstep
import ml_dtypes
import numpy as np
import pytest
from lockstep import LockstepError
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.kernel import Param

ROWS, DEPTH = 128, 32  # of A: two warpgroups; two products
TYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
BASE = 1024  # bytes before the operands: what a forgotten base would find
FIXED = 1 << 62 | 64 << 32


def lines(matrix: np.ndarray) -> np.ndarray:
    """A matrix [line][element] of 16 bits in atoms of 8 lines of 128 bytes, swizzled; blocks of 64 elements follow."""
    count, elements = matrix.shape
    chunks = matrix.reshape(count, -1, 8, 8) if elements > 64 else matrix.reshape(count, 1, -1, 8)
    placed = np.zeros((chunks.shape[1], count, 8, 8), matrix.dtype)
    for line in range(count):
        for chunk in range(chunks.shape[2]):
            placed[:, line, chunk ^ line % 8] = chunks[line, :, chunk]
    return placed.reshape(-1)


def kernel(kind: str, n: int, turned: tuple[bool, bool], from_registers: bool, wrong: str) -> tuple[Any, int]:
    """Y[128, n] = A[128, 32] B[32, n] by two warpgroups of a block; operands lie in memory as in shared memory.

    `turned` operands are MN-major. Returns the function and the 16-bit elements of both operands.
    """
    a_bytes = ROWS // 64 * DEPTH * 128 if turned[0] else ROWS * 128
    b_bytes = -(-n // 64) * DEPTH * 128 if turned[1] else n * 128
    size = a_bytes + b_bytes
    params = Param("both", "in", size // 2, "float16"), Param("words", "in", ROWS * DEPTH // 2, "uint32")
    with d.stage("k", (*params, Param("y", "out", ROWS * n)), grid=(1, 1, 1), threads=256) as block:
        shared = d.shared_memory(BASE + size)
        acc, a = d.registers(n // 2), d.registers(8, "uint32")
        group, lane, warp = T.bind(block.tid // 128), block.lane, T.bind(block.warp)
        late = wrong == "fenced before the copy has arrived"

        def bring() -> None:
            block.each(
                size // 16,
                lambda i: d.copy_async(
                    shared.address + tirx.Cast("uint32", BASE + i * 16), block["both"].ptr_to([i * 8]), 16
                ),
            )
            d.commit()

        def publish() -> None:
            if wrong != "no proxy fence":
                who = block.tid < 255 if wrong == "a thread without a proxy fence" else True
                d.when(who, lambda: T.evaluate(T.ptx["fence.proxy.async.shared::cta"]()))

        bring()
        if late:
            publish()
        d.wait()
        if wrong == "a barrier before the proxy fence alone":
            d.sync()
        if not late:
            publish()
        if wrong not in ("no barrier", "a barrier before the proxy fence alone"):
            d.sync()
        row = warp * 16 + lane // 4
        for k in range(2):
            for i in range(4):
                at = (row + i % 2 * 8) * (DEPTH // 2) + k * 8 + lane % 4 + i // 2 * 4
                d.put(a, k * 4 + i, block["words"][at])
        with T.serial(0, n // 2) as i:
            d.put(acc, i, T.float32(0))
        if wrong != "no wgmma.fence":
            T.evaluate(T.ptx["wgmma.fence.sync.aligned"]())
        step = {True: 16 * 128, False: 32}  # bytes from one product to the next
        own = group * (DEPTH * 128 if turned[0] else 64 * 128)
        starts = [BASE + own, BASE + a_bytes + (1 << 14 if wrong == "a descriptor out of bounds" else 0)]
        leading = DEPTH * 128 >> 4
        descriptors = [
            T.uint64(FIXED | leading << 16)
            + tirx.Cast("uint64", (shared.address + tirx.Cast("uint32", start)) >> T.uint32(4))
            for start in starts
        ]
        if wrong == "different descriptors":
            descriptors[1] = descriptors[1] + tirx.Cast("uint64", lane // 16)
        for k in range(2):
            left, right = (
                value + T.uint64(step[turn] * k >> 4) for value, turn in zip(descriptors, turned, strict=True)
            )
            operands = [a[k * 4 + i] for i in range(4)] if from_registers else [left]
            flags = [int(turned[1])] if from_registers else [int(turn) for turn in turned]
            name = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
            held = [acc[i] for i in range(n // 2)]
            keeps = k > 0 if wrong != "no wgmma.fence" else True
            T.evaluate(T.ptx[name](*held, *operands, right, tirx.const(keeps, "bool"), 1, 1, *flags))
        T.evaluate(T.ptx["wgmma.commit_group.sync.aligned"]())
        if wrong == "A's registers are written meanwhile":
            d.put(a, 0, T.uint32(0))
        if wrong == "shared memory is written meanwhile":
            bring()
        T.evaluate(T.ptx["wgmma.wait_group.sync.aligned"](int(wrong == "accumulators before the wait")))
        if wrong == "shared memory is written before all have waited":
            bring()
        for j in range(n // 8):
            for i in range(4):
                at = (row + i // 2 * 8) * n + j * 8 + lane % 4 * 2 + i % 2
                d.put(block["y"], at, acc[j * 4 + i])
    return block.stage.function, size // 2


def product(kind: str, n: int, turned: tuple[bool, bool], from_registers: bool, wrong: str = "") -> np.ndarray:
    """Run the kernel; gives what it should have computed less what it has."""
    function, size = kernel(kind, n, turned, from_registers, wrong)
    rng = np.random.default_rng(n)
    a, b = (rng.integers(-8, 9, shape).astype(TYPES[kind]) for shape in ((ROWS, DEPTH), (DEPTH, n)))
    first = np.concatenate([lines(part.T) for part in np.split(a, 2)]) if turned[0] else lines(a)
    both = np.concatenate([first.view(np.uint16), lines(b if turned[1] else b.T).view(np.uint16)])
    assert both.size == size
    y = np.full((ROWS, n), np.nan, np.float32)
    lockstep.run(function, {"both": both, "words": np.ascontiguousarray(a).view(np.uint32), "y": y})
    return y - a.astype(np.float32) @ b.astype(np.float32)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("n", [8, 64, 192])
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
def test_both_operands_in_shared_memory(kind: str, n: int, turned: tuple[bool, bool]) -> None:
    np.testing.assert_array_equal(product(kind, n, turned, False), 0)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("across", [False, True])
def test_the_left_operand_in_registers(kind: str, across: bool) -> None:
    np.testing.assert_array_equal(product(kind, 128, (False, across), True), 0)


WRONG = {
    "no proxy fence": "without a fence of thread",
    "a thread without a proxy fence": "without a fence of thread 255",
    "fenced before the copy has arrived": "without a fence of thread",
    "no barrier": "without a barrier since",
    "a barrier before the proxy fence alone": "without a barrier since",
    "no wgmma.fence": "without a wgmma.fence",
    "different descriptors": "different descriptors",
    "a descriptor out of bounds": "out of bounds",
    "accumulators before the wait": "read before its wgmma",
    "A's registers are written meanwhile": "written before its wgmma",
    "shared memory is written meanwhile": "that was not waited for reads it",
    "shared memory is written before all have waited": "race: write",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_seen(wrong: str) -> None:
    with pytest.raises(LockstepError, match=WRONG[wrong]):
        product("bf16", 64, (False, False), True, wrong)
