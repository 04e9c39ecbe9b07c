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

from bnfuse.runtime.kernels.cpu.tir import Buffer, Expr
from bnfuse.runtime.kernels.kernel import MapType

FLOAT_BYTES = 4
STREAMED_BYTES = 16 << 20  # smaller maps may be in the next launch's reach; chosen by hand
X86_LANES = (8, 16)  # AVX2 and AVX-512: only there do vectors have these

CODE = """
define linkonce_odr void @bnfuse_stream_{lanes}(ptr %place, <{lanes} x float> %value) alwaysinline nounwind {{
  %address = ptrtoint ptr %place to i64
  %offset = and i64 %address, {mask}
  %whole = icmp eq i64 %offset, 0
  br i1 %whole, label %past, label %through
past:
  store <{lanes} x float> %value, ptr %place, align {size}, !nontemporal !0
  ret void
through:
  store <{lanes} x float> %value, ptr %place, align 4
  ret void
}}
!0 = !{{i32 1}}
"""


def is_streamed(kind: MapType, lanes: int) -> bool:
    """Tell whether whole vectors of a map that a kernel writes should go past the caches."""
    size = FLOAT_BYTES * kind.pixels * kind.c
    return lanes in X86_LANES and kind.stride % lanes == 0 and size >= STREAMED_BYTES


@contextmanager
def streaming(lanes: int) -> Iterator[None]:
    """Let `stream` be used within the block, which is to be opened right inside of the function."""
    size = FLOAT_BYTES * lanes
    with T.attr(tirx.const(0, "int32"), "pragma_import_llvm", CODE.format(lanes=lanes, size=size, mask=size - 1)):
        yield


def stream(buffer: Buffer, index: Expr, value: Expr, lanes: int) -> None:
    """Store a whole vector past the caches, if it turns out to be aligned; else as usual."""
    T.evaluate(tirx.call_extern("void", f"bnfuse_stream_{lanes}", tirx.address_of(buffer[index]), value))


def fence() -> None:
    """Put the stores past the caches before everything after it."""
    T.evaluate(T.call_llvm_intrin("void", "llvm.x86.sse.sfence"))
