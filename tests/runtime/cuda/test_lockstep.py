"""The lockstep interpreter against numpy, and that it sees what a kernel does wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from lockstep import LockstepError, run
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

BUFFERS = {
    "f": "float32",
    "u": "uint32",
    "i": "int32",
    "h": "uint16",
    "out": "float32",
    "word": "uint32",
    "half": "uint16",
}
SIZE = 256
FULL = 0xFFFFFFFF


def kernel(body: Callable[[Any], None], *, threads: int = 64, blocks: int = 4) -> Any:
    """A kernel with a buffer of 256 elements of each kind, 4 KiB of shared memory and 8 registers of each kind."""
    with IRBuilder() as builder, T.prim_func():
        T.func_name("main")
        given = {name: T.arg(name, T.buffer((SIZE,), dtype)) for name, dtype in BUFFERS.items()}
        scale = T.arg("scale", T.float32())
        with T.launch_thread("blockIdx.x", blocks) as bx, T.launch_thread("threadIdx.x", threads) as tx:
            shared = T.alloc_buffer((4096,), "uint8", scope="shared.dyn", align=128)
            env = SimpleNamespace(**given, scale=scale, bx=bx, tx=tx, lane=bx * threads + tx, shared=shared)
            env.sf = T.decl_buffer((1024,), "float32", data=shared.data, scope="shared.dyn")
            env.s0 = T.bind(T.cuda.cvta_generic_to_shared(shared.ptr_to([0])))
            for name in ("f", "u", "h"):
                setattr(env, f"r{name}", T.alloc_buffer((8,), BUFFERS[name], scope="local"))
            body(env)
    return builder.get()


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "f": rng.standard_normal(SIZE).astype(np.float32),
        "u": rng.integers(0, 1 << 32, SIZE, dtype=np.uint32),
        "i": rng.integers(-1000, 1000, SIZE, dtype=np.int32),
        "h": rng.standard_normal(SIZE).astype(ml_dtypes.bfloat16).view(np.uint16),
        "out": np.zeros(SIZE, np.float32),
        "word": np.zeros(SIZE, np.uint32),
        "half": np.zeros(SIZE, np.uint16),
        "scale": 1.5,
    }


def results(body: Callable[[Any], None], lanes: int = 128, **options: int) -> SimpleNamespace:
    """The buffers after the kernel. Two blocks a group, so that every test runs several groups."""
    data = arrays()
    run(kernel(body, **options), data, lanes=lanes)
    return SimpleNamespace(**data)


def put(buffer: Any, value: Any, index: Any) -> None:
    T.buffer_store(buffer, value, [index])


def ptx(text: str, *operands: Any) -> None:
    T.evaluate(T.ptx[text](*operands))


@contextlib.contextmanager
def when(condition: Any) -> Iterator[None]:
    with T.If(condition), T.Then():
        yield


def wide(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float64)


EXPRESSIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], np.ndarray]]] = {
    "arithmetic": (lambda k: (k.f[k.lane] * k.scale - T.float32(2)) / T.float32(3), lambda d: (d.f * 1.5 - 2) / 3),
    "exp": (lambda k: T.exp(k.f[k.lane]), lambda d: np.exp(d.f)),
    "sqrt": (lambda k: T.sqrt(T.fabs(k.f[k.lane])), lambda d: np.sqrt(abs(d.f))),
    "rsqrt": (lambda k: T.rsqrt(T.fabs(k.f[k.lane])), lambda d: 1 / np.sqrt(abs(d.f))),
    "log": (lambda k: T.log(T.fabs(k.f[k.lane])), lambda d: np.log(abs(d.f))),
    "tanh": (lambda k: T.tanh(k.f[k.lane]), lambda d: np.tanh(d.f)),
    "pow": (lambda k: T.pow(T.fabs(k.f[k.lane]), T.float32(1.5)), lambda d: abs(d.f) ** 1.5),
    "max and min": (lambda k: T.min(T.max(k.f[k.lane], T.float32(0)), T.float32(1)), lambda d: np.clip(d.f, 0, 1)),
    "select": (
        lambda k: T.Select(k.f[k.lane] > T.float32(0), k.f[k.lane], T.float32(7)),
        lambda d: np.where(d.f > 0, d.f, 7),
    ),
    "floor": (lambda k: T.floor(k.f[k.lane]), lambda d: np.floor(d.f)),
    "floordiv": (lambda k: T.cast(T.floordiv(k.i[k.lane], 7), "float32"), lambda d: d.i // 7),
    "floormod": (lambda k: T.cast(T.floormod(k.i[k.lane], 7), "float32"), lambda d: d.i % 7),
    "truncdiv": (lambda k: T.cast(T.truncdiv(k.i[k.lane], 7), "float32"), lambda d: np.trunc(d.i / 7)),
    "truncmod": (lambda k: T.cast(T.truncmod(k.i[k.lane], 7), "float32"), lambda d: np.fmod(d.i, 7)),
    "wrap": (
        lambda k: T.cast((k.u[k.lane] * T.uint32(2654435761) + T.uint32(12345)) >> T.uint32(16), "float32"),
        lambda d: (d.u.astype(np.uint64) * 2654435761 + 12345) % (1 << 32) >> 16,
    ),
    "guarded load": (
        lambda k: T.if_then_else(T.And(k.lane >= 3, k.f[k.lane - 3] > T.float32(0)), k.f[k.lane - 3], T.float32(9)),
        lambda d: np.concatenate([np.full(3, 9), np.where(d.f > 0, d.f, 9)[:-3]]),
    ),
    "bf16 bits": (
        lambda k: T.cuda.uint_as_float(T.cast(k.h[k.lane], "uint32") << T.uint32(16)),
        lambda d: d.h.view(ml_dtypes.bfloat16),
    ),
    "to bf16": (
        lambda k: T.cast(T.reinterpret("uint16", T.cast(k.f[k.lane], "bfloat16")), "float32"),
        lambda d: d.f.astype(ml_dtypes.bfloat16).view(np.uint16),
    ),
    "shuffle xor": (
        lambda k: T.cuda.__shfl_xor_sync(T.uint32(FULL), k.f[k.lane], 5, 32),
        lambda d: d.f[np.arange(SIZE) ^ 5],
    ),
    "shuffle down": (
        lambda k: T.cuda.__shfl_down_sync(T.uint32(FULL), k.f[k.lane], 3, 16),
        lambda d: d.f[np.where(np.arange(SIZE) % 16 < 13, np.arange(SIZE) + 3, np.arange(SIZE))],
    ),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expression(name: str) -> None:
    expression, expected = EXPRESSIONS[name]
    done = results(lambda k: put(k.out, expression(k), k.lane))
    reference = expected(
        SimpleNamespace(**{n: wide(v) if n == "f" else v for n, v in arrays().items() if n != "scale"})
    )
    np.testing.assert_allclose(done.out, wide(np.asarray(reference)), rtol=1e-6, atol=1e-6)


def test_masks_loops_and_partial_groups() -> None:
    """Loops whose bounds depend on the thread, an else branch and a while; three blocks in groups of two."""

    def body(k: Any) -> None:
        put(k.rf, T.float32(0), 0)
        with T.serial(0, k.tx % 5) as j:
            put(k.rf, k.rf[0] + T.cast(j + 1, "float32"), 0)
        with T.If(k.tx % 2 == 0):
            with T.Then():
                put(k.rf, k.rf[0] * T.float32(2), 0)
            with T.Else():
                put(k.rf, k.rf[0] - T.float32(1), 0)
        with T.While(k.rf[0] < T.float32(4)):
            put(k.rf, k.rf[0] + T.float32(3), 0)
        put(k.out, k.rf[0], k.lane)

    done = results(body, blocks=3)
    expected = []
    for t in range(64):
        value = sum(range(1, t % 5 + 1)) * 2.0 if t % 2 == 0 else sum(range(1, t % 5 + 1)) - 1.0
        while value < 4:
            value += 3
        expected.append(value)
    np.testing.assert_array_equal(done.out, expected * 3 + [0.0] * 64)


def test_global_vectors_and_conversions() -> None:
    def body(k: Any) -> None:
        with when(k.lane < 64):
            ptx("ld.global.nc.L1::no_allocate.v4.f32", *(k.rf[j] for j in range(4)), k.f.ptr_to([k.lane * 4]))
            ptx("cvt.rn.relu.bf16x2.f32", k.ru[0], k.rf[1], k.rf[0])
            ptx("cvt.rn.bf16x2.f32", k.ru[1], k.rf[3], k.rf[2])
            ptx("st.global.v2.b32", k.half.ptr_to([k.lane * 4]), k.ru[0], k.ru[1])
            ptx("fma.rn.f32", k.rf[0], k.rf[1], k.rf[2], k.rf[3])
            ptx("st.global.f32", k.out.ptr_to([k.lane]), k.rf[0])
            ptx("cvt.rna.tf32.f32", k.ru[0], k.rf[1])
            put(k.word, k.ru[0], k.lane)

    done = results(body)
    quads = done.f.reshape(-1, 4)
    halves = np.concatenate([np.maximum(quads[:, :2], 0), quads[:, 2:]], 1).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(done.half, halves.reshape(-1).view(np.uint16))
    np.testing.assert_allclose(done.out[:64], (wide(quads[:, 1]) * quads[:, 2] + quads[:, 3]), rtol=1e-6, atol=1e-7)
    tf32 = done.word[:64].view(np.float32)
    assert not (done.word & 0x1FFF).any()
    np.testing.assert_allclose(tf32, quads[:, 1], rtol=2.0**-11)


def test_vectors_of_elements() -> None:
    def body(k: Any) -> None:
        with when(k.lane < 64):
            put(k.out, k.f[T.ramp(k.lane * 4, 1, 4)] + T.broadcast(T.float32(1), 4), T.ramp(k.lane * 4, 1, 4))
            with T.vectorized(0, 4) as v:
                put(k.word, k.u[k.lane * 4 + v] + T.uint32(1), k.lane * 4 + v)

    done = results(body)
    np.testing.assert_array_equal(done.out, done.f + np.float32(1))
    np.testing.assert_array_equal(done.word, done.u + np.uint32(1))


def test_async_copy_with_zero_fill_and_reversal() -> None:
    """Copies through shared memory: every fifth is zero, and the block's words come back reversed."""

    def body(k: Any) -> None:
        with when(k.tx < 16):
            size = T.Select(k.tx % 5 == 0, T.uint32(0), T.uint32(16))
            at = k.s0 + T.cast(k.tx * 16, "uint32")
            ptx("cp.async.cg.shared.global", at, k.f.ptr_to([k.bx * 64 + k.tx * 4]), 16, size)
        ptx("cp.async.commit_group")
        ptx("cp.async.wait_group", 0)
        T.evaluate(T.cuda.cta_sync())
        put(k.out, k.sf[63 - k.tx], k.lane)

    done = results(body)
    copied = done.f.reshape(4, 16, 4) * (np.arange(16) % 5 != 0)[:, None]
    np.testing.assert_array_equal(done.out.reshape(4, 64), copied.reshape(4, 64)[:, ::-1])


def matmul(kind: str, k_size: int, transposed: bool) -> Any:
    """C (16, 16) = A (16, K) Bᵀ by one warp. B is (16, K), or (K, 16) and read by ldmatrix.trans."""
    row = k_size * 2
    with IRBuilder() as builder, T.prim_func():
        T.func_name("main")
        a, b = (T.arg(n, T.buffer((16 * k_size,), "uint16")) for n in "AB")
        c = T.arg("C", T.buffer((256,), "float32"))
        with T.launch_thread("threadIdx.x", 32) as tx:
            shared = T.alloc_buffer((32 * row,), "uint8", scope="shared.dyn", align=128)
            s0 = T.bind(T.cuda.cvta_generic_to_shared(shared.ptr_to([0])))
            acc = T.alloc_buffer((8,), "float32", scope="local")
            ra, rb = (T.alloc_buffer((4,), "uint32", scope="local") for _ in range(2))
            with T.serial(0, 16 * row // 512) as i:
                for offset, source in ((0, a), (16 * row, b)):
                    at = s0 + T.cast(offset + (i * 32 + tx) * 16, "uint32")
                    ptx("cp.async.cg.shared.global", at, source.ptr_to([(i * 32 + tx) * 8]), 16)
            ptx("cp.async.wait_all")
            T.evaluate(T.cuda.cta_sync())
            for j in range(8):
                put(acc, T.float32(0), j)
            with T.serial(0, k_size // 16) as i:
                at = s0 + T.cast(tx % 16 * row + i * 32 + tx // 16 * 16, "uint32")
                ptx("ldmatrix.sync.aligned.m8n8.x4.shared.b16", *(ra[j] for j in range(4)), at)
                if transposed:
                    at = s0 + T.cast(16 * row + (i * 16 + tx % 16) * 32 + tx // 16 * 16, "uint32")
                    ptx("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", *(rb[j] for j in range(4)), at)
                else:
                    n = tx // 16 * 8 + tx % 8
                    at = s0 + T.cast(16 * row + n * row + i * 32 + tx // 8 % 2 * 16, "uint32")
                    ptx("ldmatrix.sync.aligned.m8n8.x4.shared.b16", *(rb[j] for j in range(4)), at)
                for half in range(2):
                    d = [acc[half * 4 + u] for u in range(4)]
                    left = [ra[j] for j in range(4)]
                    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
                    ptx(text, *d, *left, rb[half * 2], rb[half * 2 + 1], *d)
            for half in range(2):
                for u in range(4):
                    put(c, acc[half * 4 + u], (tx // 4 + u // 2 * 8) * 16 + half * 8 + tx % 4 * 2 + u % 2)
    return builder.get()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_matmul_of_fragments(kind: str, transposed: bool) -> None:
    dtype = np.dtype(ml_dtypes.bfloat16 if kind == "bf16" else np.float16)
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((16, 64)).astype(dtype) for _ in range(2))
    c = np.zeros(256, np.float32)
    given = np.ascontiguousarray(b.T) if transposed else b
    run(matmul(kind, 64, transposed), {"A": a.view(np.uint16), "B": given.view(np.uint16), "C": c})
    np.testing.assert_allclose(c.reshape(16, 16), wide(a) @ wide(b).T, rtol=1e-5, atol=1e-5)


def test_tf32_product() -> None:
    """One m16n8k8 product of a warp: its operands keep 10 bits of mantissa."""

    def body(k: Any) -> None:
        for j in range(4):
            put(k.ru, T.cuda.float_as_uint(k.f[(k.tx // 4 + j % 2 * 8) * 8 + k.tx % 4 + j // 2 * 4]), j)
            put(k.rf, T.float32(j), j)
        for j in range(2):
            put(k.ru, T.cuda.float_as_uint(k.f[128 + (k.tx % 4 + j * 4) * 8 + k.tx // 4]), 4 + j)
        d = [k.rf[j] for j in range(4)]
        ptx("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", *d, *(k.ru[j] for j in range(6)), *d)
        for j in range(4):
            put(k.out, k.rf[j], (k.tx // 4 + j // 2 * 8) * 8 + k.tx % 4 * 2 + j % 2)

    done = results(body, threads=32, blocks=1)
    operands = wide((done.f.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32))
    start = np.arange(2)[None] + 2 * (np.arange(16) // 8)[:, None]
    expected = operands[:128].reshape(16, 8) @ operands[128:192].reshape(8, 8) + np.tile(start, 4)
    np.testing.assert_allclose(done.out[:128].reshape(16, 8), expected, rtol=1e-5, atol=1e-6)


def reversed_through_shared(k: Any) -> None:
    """Right only with a barrier between."""
    put(k.sf, k.f[k.lane], k.tx)
    put(k.out, k.sf[63 - k.tx], k.lane)


def unwaited(k: Any) -> None:
    ptx("cp.async.ca.shared.global", k.s0 + T.cast(k.tx * 4, "uint32"), k.f.ptr_to([k.lane]), 4)
    ptx("cp.async.commit_group")
    ptx("cp.async.wait_group", 1)
    put(k.out, k.sf[k.tx], k.lane)


def divergent(k: Any) -> None:
    with when(k.tx < 40):
        T.evaluate(T.cuda.cta_sync())


def written_after_read(k: Any) -> None:
    put(k.sf, k.f[k.lane], k.tx)
    T.evaluate(T.cuda.cta_sync())
    put(k.out, k.sf[(k.tx + 32) % 64], k.lane)
    put(k.sf, T.float32(0), k.tx)


def halves_of_words(k: Any) -> None:
    for offset in (0, 4):
        ptx("st.shared.b32", k.s0 + T.cast(k.tx * 4 + offset, "uint32"), k.u[k.lane])


WRONG: dict[str, tuple[Callable[[Any], None], str]] = {
    "global": (
        lambda k: put(k.out, k.f[k.lane + 1], k.lane),
        r"f\[256\] out of bounds \(256 elements\), block 3, thread 63",
    ),
    "global store": (lambda k: put(k.out, T.float32(0), k.lane - 1), r"out\[-1\] out of bounds"),
    "registers": (lambda k: put(k.rf, T.float32(0), k.tx % 9), r"\[8\] out of bounds"),
    "unwritten register": (lambda k: put(k.out, k.rf[2], k.lane), "read before it is written"),
    "shared": (lambda k: put(k.sf, T.float32(0), k.tx + 961), r"\[1024\] out of bounds"),
    "shared address": (
        lambda k: ptx("st.shared.b32", k.s0 + T.cast(k.tx * 68, "uint32"), k.u[k.lane]),
        "out of bounds, block 0, thread 61",
    ),
    "unwritten shared": (lambda k: put(k.out, k.sf[k.tx], k.lane), "read before it is written"),
    "misaligned": (
        lambda k: ptx("ld.global.v2.b32", k.ru[0], k.ru[1], k.u.ptr_to([k.tx])),
        "misaligned access of 8 bytes, block 0, thread 1",
    ),
    "race of a read": (reversed_through_shared, "race: read .* after the write of thread 63, block 0, thread 0"),
    "race with a read": (written_after_read, "race: write .* as the read of thread 32"),
    "race of writes": (halves_of_words, "race: write .* as the write of thread 1, block 0, thread 0"),
    "race at once": (lambda k: put(k.sf, k.f[k.lane], k.tx // 2), "two threads write it at once"),
    "not waited for": (unwaited, "read before it is written"),
    "divergent barrier": (divergent, "barrier of a block: only some of 64 lanes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_seen(name: str) -> None:
    body, text = WRONG[name]
    with pytest.raises(LockstepError, match=text):
        results(body)


def test_races_can_be_allowed() -> None:
    """Without the check the same kernel runs (in lockstep all writes come first)."""
    data = arrays()
    run(kernel(reversed_through_shared), data, races=False)
    np.testing.assert_array_equal(data["out"].reshape(4, 64), data["f"].reshape(4, 64)[:, ::-1])


def test_warp_barrier_orders_one_warp() -> None:
    def body(k: Any, across: int) -> None:
        put(k.sf, k.f[k.lane], k.tx)
        T.evaluate(T.cuda.warp_sync())
        put(k.out, k.sf[T.bitwise_xor(k.tx, across)], k.lane)
        T.evaluate(T.cuda.warp_sync())
        put(k.sf, k.out[k.lane], k.tx)

    done = results(lambda k: body(k, 31))
    np.testing.assert_array_equal(done.out, done.f[np.arange(SIZE) ^ 31])
    with pytest.raises(LockstepError, match="race"):
        results(lambda k: body(k, 32))
