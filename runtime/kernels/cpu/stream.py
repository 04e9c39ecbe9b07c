"""Stores that go past the caches (non-temporal), for maps that are far larger than they.

An ordinary store first reads the line that it fills: a map that is written and not read before it has left the cache
costs memory twice its size. One core here copies 80 MB at 14-18 GB/s with ordinary stores and at 24-26 with these.

TIR has no such store, so a kernel that wants it takes one in as LLVM code, which is inlined. They are ordered weakly
on x86: `fence` at the end of a thread's work puts them before everything after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cpu.tir import HALF, Buffer, Expr, Half, element, rounded
from bnfuse.runtime.kernels.kernel import MapType

STREAMED_BYTES = 16 << 20  # smaller maps may be in the next launch's reach; chosen by hand
X86_LANES = (8, 16)  # AVX2 and AVX-512: only there do vectors have these

NAME = "bnfuse_stream_{lanes}"
CODE = """
define linkonce_odr void @{name}(ptr %place, <{lanes} x {kind}> %value) alwaysinline nounwind {{
  %address = ptrtoint ptr %place to i64
  %offset = and i64 %address, {mask}
  %whole = icmp eq i64 %offset, 0
  br i1 %whole, label %past, label %through
past:
  store <{lanes} x {kind}> %value, ptr %place, align {size}, !nontemporal !0
  ret void
through:
  store <{lanes} x {kind}> %value, ptr %place, align {each}
  ret void
}}
!0 = !{{i32 1}}
"""


def is_streamed(kind: MapType, lanes: int) -> bool:
    """Tell whether whole vectors of a map that a kernel writes should go past the caches."""
    size = bytes_of(kind) * kind.pixels * kind.c
    return lanes in X86_LANES and kind.stride % lanes == 0 and size >= STREAMED_BYTES


def bytes_of(kind: MapType) -> int:
    """Count the bytes of an element of a map."""
    return 2 if kind.dtype == HALF else 4


@contextmanager
def streaming(map_type: MapType, lanes: int) -> Iterator[None]:
    """Let `stream` be used on a map within the block, which is to be opened right inside of the function."""
    each = bytes_of(map_type)
    kind, size = "i16" if each == 2 else "float", each * lanes
    code = CODE.format(name=NAME.format(lanes=lanes), lanes=lanes, kind=kind, each=each, size=size, mask=size - 1)
    with T.attr(tirx.const(0, "int32"), "pragma_import_llvm", code):
        yield


def stream(buffer: Buffer, index: Expr, value: Expr, lanes: int) -> None:
    """Store a whole vector past the caches, if it turns out to be aligned; else as usual."""
    value = rounded(value) if isinstance(buffer, Half) else value
    T.evaluate(tirx.call_extern("void", NAME.format(lanes=lanes), tirx.address_of(element(buffer, index)), value))


def fence() -> None:
    """Put the stores past the caches before everything after it."""
    T.evaluate(T.call_llvm_intrin("void", "llvm.x86.sse.sfence"))
