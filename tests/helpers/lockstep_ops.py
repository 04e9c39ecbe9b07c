"""What the calls in a CUDA kernel's TIR mean: functions, shuffles and PTX instructions, on numpy arrays of lanes.

PTX semantics are those of NVIDIA's PTX ISA, chapter 9.7: fragments of `mma` in 9.7.15, `ldmatrix` in 9.7.15.5.15.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from lockstep_memory import Arena, LockstepError, Pointer, Value
from lockstep_wgmma import INSTRUCTIONS

Run = Callable[[], Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LOW = np.uint32(0xFFFF)
HIGH = np.uint32(0xFFFF0000)


def same_bits(value: Value, dtype: Any) -> Value:
    """The same bits as another type of the same size."""
    if not isinstance(value, np.ndarray) or not value.ndim:
        return np.asarray(value).view(dtype)[()]
    return (value if value.flags.c_contiguous else np.ascontiguousarray(value)).view(dtype)


def _wide(function: Callable[..., Any]) -> Callable[..., Value]:
    """A function computed in float64 and rounded once."""
    return lambda *values: function(*(v.astype(np.float64) for v in values)).astype(values[0].dtype)


def _erf(value: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[np.float64])(value)


def _approximate(function: Callable[[np.ndarray], np.ndarray], *, flush: bool) -> Callable[[Value], Value]:
    """An instruction of a GPU that is right to 2**-22: the result of `function` in float64 cut to 23 bits, or, with
    `flush`, 0 where it or the operand is below the normal floats."""
    least = np.finfo(np.float32).tiny

    def normal(values: np.ndarray) -> np.ndarray:
        return np.where(np.abs(values) < least, values * 0, values) if flush else values

    def run(value: Value) -> Value:
        made = np.asarray(normal(function(normal(value.astype(np.float64)))), np.float32)
        return same_bits(same_bits(made, np.uint32) & np.uint32(0xFFFFFFFE), np.float32)

    return run


def round_tf32(value: Value) -> Value:
    """float32 to the nearest tf32, ties away from zero, as bits (cvt.rna.tf32.f32)."""
    bits = same_bits(value, np.uint32)
    return (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)


def pack(high: Value, low: Value, dtype: np.dtype) -> Value:
    """Two float32 as two 16-bit floats in a uint32."""
    halves = [same_bits(v.astype(dtype), np.uint16).astype(np.uint32) for v in (high, low)]
    return (halves[0] << np.uint32(16)) | halves[1]


def unpack(word: Value, dtype: np.dtype) -> tuple[Value, Value]:
    """The (low, high) 16-bit floats of a uint32, as float32."""
    if dtype == BFLOAT16:
        return same_bits(word << np.uint32(16), np.float32), same_bits(word & HIGH, np.float32)
    low, high = (word & LOW).astype(np.uint16), (word >> np.uint32(16)).astype(np.uint16)
    return same_bits(low, dtype).astype(np.float32), same_bits(high, dtype).astype(np.float32)


# Functions of values: name in TIR (after its last namespace) -> function. --------------------------------------------

FUNCTIONS: dict[str, Callable[..., Value]] = {
    "exp": _wide(np.exp),
    "exp2": _wide(np.exp2),
    "log": _wide(np.log),
    "log2": _wide(np.log2),
    "log1p": _wide(np.log1p),
    "sqrt": np.sqrt,
    "rsqrt": _wide(lambda x: 1 / np.sqrt(x)),
    "tanh": _wide(np.tanh),
    "sin": _wide(np.sin),
    "cos": _wide(np.cos),
    "sigmoid": _wide(lambda x: 1 / (1 + np.exp(-x))),
    "erf": _wide(_erf),
    "tan": _wide(np.tan),
    "asin": _wide(np.arcsin),
    "acos": _wide(np.arccos),
    "atan": _wide(np.arctan),
    "sinh": _wide(np.sinh),
    "cosh": _wide(np.cosh),
    "asinh": _wide(np.arcsinh),
    "acosh": _wide(np.arccosh),
    "atanh": _wide(np.arctanh),
    "fmod": _wide(np.fmod),
    "pow": _wide(np.power),
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "nearbyint": np.rint,
    "round": lambda x: np.trunc(x + np.copysign(x.dtype.type(0.5), x)),
    "fabs": np.abs,
    "isnan": np.isnan,
    "fma": _wide(lambda a, b, c: a * b + c),
    "fdividef": np.divide,
    "approximate_exp2": _approximate(np.exp2, flush=True),
    "approximate_reciprocal": _approximate(np.reciprocal, flush=True),
    "approximate_reciprocal_of_any": _approximate(np.reciprocal, flush=False),
    "max_or_nan": np.maximum,
    "min_or_nan": np.minimum,
    "uint_as_float": lambda x: same_bits(x, np.float32),
    "float_as_uint": lambda x: same_bits(x, np.uint32),
    "bfloat162float": lambda x: x.astype(np.float32),
    "half2float": lambda x: x.astype(np.float32),
    "shift_left": np.left_shift,
    "shift_right": np.right_shift,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "bitwise_not": np.invert,
}


def shuffle(compiler: Any, kind: str, operands: Sequence[Any]) -> Run:
    """__shfl_*_sync(mask, value, lane or delta, width): a lane of the warp's value, or one's own beyond the segment."""
    machine = compiler.machine
    value, argument, width = (compiler.value(node) for node in operands[1:])
    within = machine.thread % 32
    warp = machine.lane - within

    def run() -> Value:
        own, by, size = machine.spread(value()), argument(), int(width())
        if np.ndim(own) == 0:
            return own
        segment = within & ~(size - 1)
        source, reachable = {
            "xor": lambda: (within ^ by, None),
            "up": lambda: (within - by, "low"),
            "down": lambda: (within + by, None),
            "": lambda: (segment | (by & (size - 1)), None),
        }[kind]()
        inside = source >= segment if reachable == "low" else source < segment + size
        source = np.where(inside, warp + source, machine.lane)
        outside = (source >= machine.lanes) | (machine.block[np.minimum(source, machine.lanes - 1)] != machine.block)
        if machine.mask is not None:
            outside |= ~machine.mask[np.minimum(source, machine.lanes - 1)]
        machine.fail_where(outside, source, lambda lane: f"shuffle reads lane {lane % 32}, which is not active")
        return own[source]

    return run


# PTX -----------------------------------------------------------------------------------------------------------------


def _floating(tokens: Sequence[str]) -> np.dtype:
    return next(
        np.dtype(np.float16) if t.startswith("f16") else BFLOAT16 for t in tokens if t.startswith(("f16", "bf16"))
    )


def _relu(function: Callable[..., Value], tokens: Sequence[str]) -> Callable[..., Value]:
    if "relu" not in tokens:
        return function
    return lambda *values: function(*(np.fmax(v, v.dtype.type(0)) for v in values))


def _convert(tokens: Sequence[str]) -> Callable[..., Value]:
    """cvt between float32 and a 16-bit float in the bits of a uint16."""
    to, source = [t for t in tokens if t in ("f32", "f16", "bf16")]
    if to == "f32":
        return lambda h: same_bits(h, _floating([source])).astype(np.float32)
    return _relu(lambda x: same_bits(x.astype(_floating([to])), np.uint16), tokens)


def _packed_fma(tokens: Sequence[str]) -> Callable[..., Value]:
    dtype = _floating(tokens)

    def run(*words: Value) -> Value:
        parts = [unpack(w, dtype) for w in words]
        low, high = (a * b + c for a, b, c in zip(*parts, strict=True))
        if "relu" in tokens:
            low, high = np.fmax(low, np.float32(0)), np.fmax(high, np.float32(0))
        return pack(high, low, dtype)

    return run


def _permute(a: Value, b: Value, selector: Value) -> Value:
    """prmt.b32 in its default mode: a nibble of the selector names a byte, or, from 8 on, its sign over eight bits."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.uint64(0)
    for i in range(4):
        nibble = int(selector) >> 4 * i & 15
        byte = (both >> np.uint64(8 * (nibble & 7))) & np.uint64(255)
        byte = (byte >> np.uint64(7)) * np.uint64(255) if nibble & 8 else byte
        out = out | byte << np.uint64(8 * i)
    return out.astype(np.uint32)


def _split_word(word: Value) -> tuple[Value, Value]:
    return (word & LOW).astype(np.uint16), (word >> np.uint32(16)).astype(np.uint16)


# Instructions from registers to registers: name -> (destinations, function of the tokens that gives that of values).
REGISTERS: dict[str, tuple[int, Callable[[Sequence[str]], Callable[..., Any]]]] = {
    "cvt": (1, _convert),
    "cvt_bf16x2_f32": (1, lambda t: _relu(lambda high, low: pack(high, low, BFLOAT16), t)),
    "cvt_f16x2_f32": (1, lambda t: _relu(lambda high, low: pack(high, low, np.dtype(np.float16)), t)),
    "cvt_tf32_f32": (1, lambda t: round_tf32),
    "fma": (1, lambda t: FUNCTIONS["fma"]),
    "fma_half": (1, _packed_fma),
    "max": (1, lambda t: np.fmax),
    "min": (1, lambda t: np.fmin),
    "mul": (1, lambda t: np.multiply),
    "add": (1, lambda t: np.add),
    "sub": (1, lambda t: np.subtract),
    "div_f": (1, lambda t: np.divide),
    "ex2": (1, lambda t: FUNCTIONS["exp2"]),
    "lg2": (1, lambda t: FUNCTIONS["log2"]),
    "rsqrt": (1, lambda t: FUNCTIONS["rsqrt"]),
    "sqrt": (1, lambda t: np.sqrt),
    "rcp": (1, lambda t: lambda x: x.dtype.type(1) / x),
    "tanh": (1, lambda t: FUNCTIONS["tanh"]),
    "mov_pack_b16x2": (1, lambda t: lambda low, high: low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)),
    "mov_unpack_b16x2": (2, lambda t: _split_word),
    "prmt": (1, lambda t: _permute),
}


def registers(compiler: Any, name: str, operands: Sequence[Any], tokens: Sequence[str]) -> Run:
    count, make = REGISTERS[name]
    function = make(tokens)
    places = [compiler.place(node) for node in operands[:count]]
    sources = [compiler.value(node) for node in operands[count:]]

    def run() -> None:
        results = function(*(source() for source in sources))
        for place, result in zip(places, results if count > 1 else (results,), strict=True):
            place(result)

    return run


def _access(tokens: Sequence[str]) -> tuple[bool, int, int]:
    """(is it shared memory, registers, bytes of each)."""
    spaces = {t.split("::")[0] for t in tokens} & {"shared", "global"}
    if len(spaces) != 1:
        raise LockstepError(f"an access to memory must name shared or global: {' '.join(tokens)}")
    kind = next(t for t in reversed(tokens) if t and t[0] in "bfsu" and t[1:].isdigit())
    return spaces == {"shared"}, next((int(t[1:]) for t in tokens if t in ("v2", "v4", "v8")), 1), int(kind[1:]) // 8


def _read(arena: Arena, pointer: Any, nbytes: int) -> np.ndarray:
    """Words (lanes or nothing, words) behind a Pointer or a shared address."""
    if isinstance(pointer, Pointer):
        return pointer.memory.read(pointer.offset, nbytes, pointer.size)
    return arena.read(pointer, nbytes)


def _write(arena: Arena, pointer: Any, data: np.ndarray) -> None:
    if isinstance(pointer, Pointer):
        pointer.memory.write(pointer.offset, data, pointer.size)
    else:
        arena.write(pointer, data)


def load(compiler: Any, operands: Sequence[Any], tokens: Sequence[str]) -> Run:
    """ld.{global,shared}[...].{vN.}type d..., [address]"""
    _, count, size = _access(tokens)
    places = [compiler.place(node) for node in operands[:count]]
    address = compiler.value(operands[count])

    def run() -> None:
        data = np.ascontiguousarray(_read(compiler.arena, address(), count * size)).view(f"u{size}")
        for i, place in enumerate(places):
            place(data[..., i])

    return run


def store(compiler: Any, operands: Sequence[Any], tokens: Sequence[str]) -> Run:
    """st.{global,shared}[...].{vN.}type [address], s..."""
    _, count, size = _access(tokens)
    address, sources = compiler.value(operands[0]), [compiler.value(node) for node in operands[1:]]
    machine = compiler.machine

    def run() -> None:
        data = np.empty((machine.lanes, count), f"u{size}")
        for i, source in enumerate(sources):
            data[:, i] = same_bits(source(), data.dtype)
        _write(compiler.arena, address(), data.view(f"u{min(8, count * size)}"))

    return run


def copy_async(compiler: Any, operands: Sequence[Any], tokens: Sequence[str]) -> Run:
    """cp.async [shared], [global], size{, source size}: what the source lacks is zero."""
    target, source, size = (compiler.value(node) for node in operands[:3])
    present = compiler.value(operands[3]) if len(operands) > 3 else size
    machine, arena = compiler.machine, compiler.arena

    def run() -> None:
        nbytes, given, pointer, address = int(size()), machine.spread(present()), source(), target()
        if "cg" in tokens and nbytes != 16:
            raise LockstepError("cp.async.cg copies 16 bytes only")
        if isinstance(address, Pointer):
            address = address.offset + address.memory.start
        data = np.zeros((machine.lanes, nbytes), np.uint8)
        for part in np.unique(given[machine.active()]):
            lanes = given == part
            if not 0 <= part <= nbytes:
                raise LockstepError(f"cp.async: a source of {part} bytes for {nbytes}")
            if part == nbytes:
                words = machine.under(lanes, lambda: _read(arena, pointer, nbytes))
                data[lanes] = np.broadcast_to(words, (machine.lanes, words.shape[-1])).view(np.uint8)[lanes]
            for byte in range(part if part < nbytes else 0):
                moved = Pointer(pointer.memory, pointer.offset + byte, pointer.size)
                one = machine.under(lanes, lambda moved=moved: _read(arena, moved, 1))
                data[lanes, byte] = np.broadcast_to(one[..., 0], (machine.lanes,))[lanes]
        arena.copy(address, data.view(f"u{min(8, nbytes)}"))

    return run


def load_matrix(compiler: Any, operands: Sequence[Any], tokens: Sequence[str]) -> Run:
    """ldmatrix: lanes 8i to 8i+7 of a warp give the rows of matrix i; lane 4r+c gets its columns 2c, 2c+1 of row r.

    With .trans it gets the rows 2c, 2c+1 of column r.
    """
    count = next(int(t[1:]) for t in tokens if t in ("x1", "x2", "x4"))
    places, address = [compiler.place(node) for node in operands[:count]], compiler.value(operands[count])
    machine = compiler.machine
    given = machine.thread % 32 < 8 * count

    def run() -> None:
        machine.whole(32, "ldmatrix")
        where = address()
        rows = machine.under(given, lambda: _read(compiler.arena, where, 16))
        data = rows.reshape(-1, 32, 2)[:, : 8 * count].copy().view(np.uint16).reshape(-1, count, 8, 8)
        if "trans" in tokens:
            data = np.ascontiguousarray(data.transpose(0, 1, 3, 2))
        words = data.view(np.uint32)
        for i, place in enumerate(places):
            place(words[:, i].reshape(-1))

    return run


def accumulate(left: np.ndarray, right: np.ndarray, c: np.ndarray) -> np.ndarray:
    """c + left x right in float32, rounded to the nearest; tensor_core.py does as the hardware, and takes longer."""
    return np.matmul(left, right) + c


def multiply(compiler: Any, operands: Sequence[Any], tokens: Sequence[str]) -> Run:
    """mma.m16n8kK d, a, b, c, accumulated in float32: fragments of all warps become matrices, which are multiplied."""
    shape = next(t for t in tokens if t.startswith("m16n8k"))
    k, tf32 = int(shape[6:]), "tf32" in tokens
    per_word = 1 if tf32 else 2
    n_a, n_b = 16 * k // 32 // per_word, 8 * k // 32 // per_word
    places = [compiler.place(node) for node in operands[:4]]
    sources = [compiler.value(node) for node in operands[4:]]
    machine = compiler.machine
    dtype = np.dtype(np.float32) if tf32 else _floating(tokens)

    def parts(words: np.ndarray) -> np.ndarray:
        """The numbers in words (registers, lanes): (part, registers, lanes)."""
        return np.stack((same_bits(words & np.uint32(0xFFFFE000), np.float32),) if tf32 else unpack(words, dtype))

    def run() -> None:
        machine.whole(32, "mma")
        words = np.empty((n_a + n_b, machine.lanes), np.uint32)
        for i, source in enumerate(sources[: n_a + n_b]):
            np.copyto(words[i], source(), casting="equiv")
        c = np.empty((4, machine.lanes), np.float32)
        for i, source in enumerate(sources[n_a + n_b :]):
            np.copyto(c[i], source(), casting="equiv")
        # axes: part, register, warp, row group g, column t
        numbers = parts(words).reshape(per_word, n_a + n_b, -1, 8, 4)
        a = numbers[:, :n_a].reshape(per_word, n_a // 2, 2, -1, 8, 4)
        left = a.transpose(3, 2, 4, 1, 5, 0).reshape(-1, 16, k)
        right = numbers[:, n_a:].transpose(2, 1, 4, 0, 3).reshape(-1, k, 8)
        sums = accumulate(left, right, c.reshape(2, 2, -1, 8, 4).transpose(2, 0, 3, 4, 1).reshape(-1, 16, 8))
        for place, result in zip(
            places, sums.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1), strict=True
        ):
            place(result)

    return run


def reduce_memory(compiler: Any, operands: Sequence[Any], tokens: Sequence[str]) -> Run:
    """red.global.add.f32 [address], value: lanes add in their order."""
    address, value = compiler.value(operands[0]), compiler.value(operands[1])
    machine = compiler.machine

    def run() -> None:
        pointer, amount = address(), machine.spread(value())
        pointer.memory.read(pointer.offset, 4, pointer.size)  # the checks
        lane = machine.active()
        index = machine.spread(pointer.offset)[lane] // 4
        np.add.at(pointer.memory.words[4].view(np.float32), index, amount[lane])

    return run


PTX: dict[str, Callable[[Any, Sequence[Any], Sequence[str]], Run]] = {
    "ld": load,
    "ld_vec": load,
    "st": store,
    "st_vec": store,
    "cp_async_cg": copy_async,
    "cp_async_cg_src_size": copy_async,
    "cp_async_ca": copy_async,
    "cp_async_ca_src_size": copy_async,
    "ldmatrix": load_matrix,
    "mma": multiply,
    **INSTRUCTIONS,
    "red": reduce_memory,
    "bar_sync": lambda compiler, operands, tokens: compiler.arena.barrier,
    "bar_warp_sync": lambda compiler, operands, tokens: compiler.arena.warp_barrier,
    "griddepcontrol": lambda compiler, operands, tokens: lambda: None,
    "prefetch": lambda compiler, operands, tokens: lambda: None,
    "cp_async_commit_group": lambda compiler, operands, tokens: compiler.arena.commit,
    "cp_async_wait_all": lambda compiler, operands, tokens: lambda: compiler.arena.wait(-1),
    "cp_async_wait_group": lambda compiler, operands, tokens: _wait_group(compiler, operands[0]),
}


def _wait_group(compiler: Any, node: Any) -> Run:
    left = compiler.value(node)
    return lambda: compiler.arena.wait(int(left()))


def ptx(compiler: Any, name: str, args: Sequence[Any]) -> Run:
    """The instruction `name`: operands, then its modifiers as strings, the last being flags of the call."""
    tokens = [arg.value for arg in args if type(arg).__name__ == "StringImm"]
    operands = [arg for arg in args if type(arg).__name__ != "StringImm"]
    if tokens[-1] and not name.startswith("wgmma"):  # whose predicate is scale-d
        raise NotImplementedError(f"PTX {name}: predicates and sinks are not interpreted ({tokens[-1]})")
    if name in REGISTERS:
        return registers(compiler, name, operands, tokens)
    if name not in PTX:
        raise NotImplementedError(f"PTX {name} {tokens} is not interpreted: add it to lockstep_ops.PTX")
    return PTX[name](compiler, operands, tokens)
