"""Helpers for writing kernels with TVM's IRBuilder: a kernel's function, its maps, vectors, shares, compiling it.

Every buffer is flat. Vectors are written out (`buffer[span(i, 16)]` is a float32x16) or come from `T.vectorized` loops;
a tail is a narrower vector, which LLVM turns into the few moves that it takes, on every target.

What a kernel computes with is float32. Where a parameter is bfloat16 it gets a `Half` in the buffer's place, whose
loads widen and whose stores round: kernels do not know of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cpu.lanes import constant, like
from bnfuse.runtime.kernels.cpu.rounding import rounded, rounding_of
from bnfuse.runtime.kernels.kernel import MapType, Param
from bnfuse.runtime.targets import cpus
from bnfuse.runtime.targets.target import CpuTarget

Expr = Any  # a tvm PrimExpr, or an int
Buffer = Any
READ, WRITE, KEEP, DATA = 0, 1, 3, 1  # arguments of llvm.prefetch
SIMPLIFYING = (  # passes of TVM
    "s_tir.StmtSimplify",
    "s_tir.HoistIfThenElse",
    "s_tir.InjectPermutedLayout",
    "s_tir.InjectVirtualThread",
    "s_tir.RenormalizeSplitPattern",
    "tirx.StmtSimplify",
    "tirx.RemoveNoOp",
    "tirx.CommonSubexprElim",
)
HALF, HALF_BITS = "bfloat16", "uint16"  # a type of 16 bits, and what TVM is told that it is


@dataclasses.dataclass(frozen=True)
class Half:
    """A buffer of bfloat16, read and written (by `store`) as float32."""

    bits: Buffer  # uint16
    dtype = "float32"

    def __getitem__(self, index: Expr) -> Expr:
        return widened(self.bits[index])


@dataclasses.dataclass(frozen=True)
class MapRef:
    """A feature map inside a kernel: its flat buffer, the run-time offset of its slot, its geometry."""

    buffer: Buffer
    offset: Expr
    type: MapType

    def at(self, pixel: Expr, channel: Expr) -> Expr:
        """Write the index of channel `channel` of pixel `pixel` (counted over n, h, w) in `buffer`."""
        return self.offset + self.type.pixel(pixel) * self.type.stride + channel

    def pixel(self, n: Expr, h: Expr, w: Expr) -> Expr:
        """Write the number of a pixel, counted over n, h, w."""
        return (n * self.type.h + h) * self.type.w + w


@dataclasses.dataclass
class Arguments:
    """The arguments of the function under construction, by parameter name."""

    buffers: dict[str, Buffer]
    offsets: dict[str, Expr]
    result: Any = None  # the PrimFunc, once the function is closed

    def __getitem__(self, name: str) -> Buffer:
        return self.buffers[name]

    def __contains__(self, name: str) -> bool:
        return name in self.buffers

    def map(self, name: str, kind: MapType) -> MapRef:
        """Give a map of this type with its buffer and its offset; KeyError where no parameter has that name."""
        return MapRef(self.buffers[name], self.offsets[name], kind)


@contextlib.contextmanager
def function(name: str, params: Sequence[Param], *, may_alias: bool = False) -> Iterator[Arguments]:
    """Open a PrimFunc of `params`, then the offsets of the maps among them. After the block, `result` has it.

    `may_alias`: what one parameter is written through may be read through another one.
    """
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name(name)
            T.func_attr({"tirx.noalias": not may_alias})
            buffers = {p.name: parameter(p) for p in params}
            offsets = {p.name: T.arg(f"{p.name}_offset", T.int32()) for p in params if p.is_map}
            arguments = Arguments(buffers, offsets)
            yield arguments
        arguments.result = builder.get()


def parameter(param: Param) -> Buffer:
    """Declare the next argument of the function that is open."""
    if param.dtype != HALF:
        return T.arg(param.name, T.buffer((param.elements,), param.dtype))
    return Half(T.arg(param.name, T.buffer((param.elements,), HALF_BITS)))


def span(start: Expr, width: int, stride: int = 1) -> Expr:
    """Give the index of `width` elements from `start` on, as a vector index (a plain one where width is 1)."""
    return start if width == 1 else T.ramp(start, stride, width)


def splat(value: float, width: int, dtype: str = "float32") -> Expr:
    """Write a constant in every lane."""
    constant = tirx.const(value, dtype)
    return constant if width == 1 else T.broadcast(constant, width)


def widen(value: Expr, width: int) -> Expr:
    """Write a float32 vector as float64."""
    return tirx.Cast("float64" if width == 1 else f"float64x{width}", value)


def store(buffer: Buffer, index: Expr, value: Expr) -> None:
    """Store a value, or a vector of them, at a flat index."""
    if isinstance(buffer, Half):
        T.buffer_store(buffer.bits, rounded(value), [index])
    else:
        T.buffer_store(buffer, value, [index])


def widened(bits: Expr) -> Expr:
    """Write a bfloat16, given as its bits, as float32."""
    return T.reinterpret(like("float32", bits), widened_bits(bits) << constant(16, "uint32", bits))


def wide_bits(value: Expr) -> Expr:
    """Write a float32, rounded, as the lower half of 32 bits."""
    return widened_bits(rounded(value))


def widened_bits(bits: Expr) -> Expr:
    """Write 16 bits as the lower half of 32."""
    return tirx.Cast(like("uint32", bits), bits)


def paired(low: Expr, high: Expr | None = None) -> Expr:
    """Put two of them into 32 bits, as AMX takes neighbours of the depth; zero where there is no second one."""
    return low if high is None else low | (high << constant(16, "uint32", high))


def as_stored(buffer: Buffer, value: Expr) -> Expr:
    """Write what `store` would leave of a value in a buffer."""
    return T.bind(widened(rounded(value))) if isinstance(buffer, Half) else value


def element(buffer: Buffer, index: Expr) -> Expr:
    """Write the place of an element, of which to take the address."""
    return (buffer.bits if isinstance(buffer, Half) else buffer)[index]


def prefetch(buffer: Buffer, index: Expr, purpose: int) -> None:
    """Ask for the cache line of an element, to READ or to WRITE it; one outside of the buffer does no harm."""
    hint = (T.int32(k) for k in (purpose, KEEP, DATA))
    T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch", T.address_of(element(buffer, index)), *hint))


def vectors(count: int, lanes: int, body: Callable[[Expr, int], None]) -> None:
    """Call `body(start, width)` over [0, count): in a loop with width `lanes`, then once with what is left."""
    full = count // lanes
    if full == 1:
        body(0, lanes)
    elif full:
        with T.serial(0, full) as i:
            body(i * lanes, lanes)
    if count % lanes:
        body(full * lanes, count % lanes)


def with_width(block: Expr, size: int, total: int, body: Callable[[int], None]) -> None:
    """Call `body` with the elements of block `block`; `total` are cut into blocks of `size`, the last perhaps short."""
    whole, rest = divmod(total, size)
    if not rest:
        body(size)
    elif not whole:
        body(rest)
    else:
        with T.If(block < whole):
            with T.Then():
                body(size)
            with T.Else():
                body(rest)


def elementwise(width: int, body: Callable[[Expr], None]) -> None:
    """Call `body(j)` with the lane index j of a vectorised loop, inside which expressions are scalar."""
    if width == 1:
        body(0)
    else:
        with T.vectorized(0, width) as j:
            body(j)


def zero(buffer: Buffer, start: Expr, count: int, lanes: int) -> None:
    """Fill `count` elements from `start` on with zeros."""
    vectors(count, lanes, lambda i, width: store(buffer, span(start + i, width), splat(0, width, buffer.dtype)))


def workspace(elements: int, dtype: str = "float32") -> Buffer:
    """Allocate memory for the rest of the enclosing block: shared outside of a parallel loop, a thread's own inside."""
    if dtype == HALF:
        return Half(T.alloc_buffer((elements,), HALF_BITS))
    return T.alloc_buffer((elements,), dtype)


def zeros(elements: int, lanes: int, dtype: str = "float32") -> Buffer:
    """Allocate a workspace of zeros."""
    buffer = workspace(elements, dtype)
    zero(buffer, 0, elements, lanes)
    return buffer


def registers(elements: int, dtype: str = "float32") -> Buffer:
    """Allocate a small array on the stack, which LLVM keeps in registers if all its indices are constants."""
    return T.alloc_buffer((elements,), dtype, scope="local", annotations={"disable_lower_builtin": True})


def share(items: int, threads: int, thread: Expr) -> tuple[Expr, Expr]:
    """Give first index and count of a thread's static share of `items`; shares differ by at most one."""
    if items % threads == 0:
        return thread * (items // threads), items // threads
    first = thread * items // threads
    return first, (thread + 1) * items // threads - first


def at_most(value: Expr, bound: Expr) -> Expr:
    """Give the smaller one: an int of ints."""
    return tirx.Min(value, bound) if not (isinstance(value, int) and isinstance(bound, int)) else min(value, bound)


def compile_function(function: Any, target: CpuTarget, level: int = 3) -> Any:
    """Compile a PrimFunc to an executable, which takes its arguments as they come, at one of LLVM's levels.

    Left out of TVM's passes: storage rewrite would turn `registers` into heap memory (and there is nothing for it to
    share); buffers are made as large as they are used; and assertions about each argument would be half of the code
    and of the time, to say in each launch what is seen to once where a program is lowered, and where a file is read.
    At level 0 those are left out, too, which only make code simpler.
    """
    config = {"tirx.disable_storage_rewrite": True, "tirx.disable_assert": True}
    left_out = ["s_tir.CompactBufferAllocation", *(() if level else SIMPLIFYING)]
    passes = tvm.transform.PassContext(opt_level=3, config=config, disabled_pass=left_out)
    with rounding_of(function, target) as complete, passes:
        return tvm.compile(complete, target=cpus.llvm_target(target.mcpu, **{"kind": target.kind, "opt-level": level}))
