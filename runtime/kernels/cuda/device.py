"""Writing CUDA kernels with TVM's IRBuilder: stages, registers, vectors of channels, tensor-core products.

A kernel is a tuple of *stages*, device functions that run one after the other. Inside a stage everything is explicit:
the thread's index, its registers, shared memory, barriers. Maps of 16-bit types are raw `uint16` buffers here; they are
unpacked to float32 registers, and all arithmetic but that of the tensor cores is float32.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.cuda import approximations
from bnfuse.runtime.kernels.kernel import MapType, Param

Expr = Any  # a tvm PrimExpr, or an int
Buffer = Any

WARP = 32
VECTOR_BYTES = 16  # of the widest access of a thread
RESERVED = 1024  # bytes of shared memory that the system takes of each block
RAW = {"bfloat16": "uint16", "float16": "uint16"}
SIZES = {"bfloat16": 2, "float16": 2, "uint8": 1, "float64": 8, "int64": 8}


@dataclasses.dataclass(frozen=True)
class Stage:
    """A device function and how it is launched. `shared` is its dynamic shared memory in bytes."""

    name: str
    grid: tuple[int, int, int]
    threads: int
    shared: int
    function: Any  # a tvm PrimFunc
    may_alias: bool = False  # what one parameter is written through may be read through another one


def size_of(dtype: str) -> int:
    """Count the bytes of an element."""
    return SIZES.get(dtype, 4)


def fma(x: Expr, y: Expr, z: Expr) -> Expr:
    """Compute x*y + z, rounded once (float32)."""
    return tirx.call_pure_extern("float32", "__fmaf_rn", x, y, z)


def wide(value: float) -> Expr:
    """Make a float64 constant. TVM writes 15 decimals of them, so what needs more is given by its bits."""
    if not math.isfinite(value) or float(f"{value:.15f}") == value:
        return tirx.const(value, "float64")
    return tirx.reinterpret("float64", tirx.const(struct.unpack("<q", struct.pack("<d", value))[0], "int64"))


@dataclasses.dataclass
class Block:
    """A stage under construction: its arguments, and where in the grid and the block this thread is."""

    buffers: dict[str, Buffer]
    dtypes: dict[str, str]
    offsets: dict[str, Expr]
    scalars: dict[str, Expr]
    x: Expr
    y: Expr
    z: Expr
    tid: Expr
    threads: int
    stage: Any = None

    def __getitem__(self, name: str) -> Buffer:
        return self.buffers[name]

    def __contains__(self, name: str) -> bool:
        return name in self.buffers

    def map(self, name: str, kind: MapType) -> Map:
        """Find the map among the arguments, with the offset of its slot.

        That it is a multiple of `align` is written out: TVM loads a vector as one where it can prove that.
        """
        offset = self.offsets[name]
        return Map(self.buffers[name], offset // kind.align * kind.align if kind.align > 1 else offset, kind)

    @property
    def lane(self) -> Expr:
        """Give the thread's index in its warp."""
        return self.tid % WARP

    @property
    def warp(self) -> Expr:
        """Give the index of the thread's warp in the block."""
        return self.tid // WARP

    def each(self, count: int, body: Callable[[Expr], None]) -> None:
        """Emit `body(i)` for i < count, dealt to the threads of the block."""
        rounds, rest = divmod(count, self.threads)
        if rounds == 1:
            body(self.tid)
        elif rounds:
            with T.serial(0, rounds) as i:
                body(T.bind(i * self.threads + self.tid))
        if rest:
            when(self.tid < rest, lambda: body(T.bind(rounds * self.threads + self.tid)))


@dataclasses.dataclass(frozen=True)
class Map:
    """A feature map inside a stage: its flat buffer, the run-time offset of its slot, its geometry."""

    buffer: Buffer
    offset: Expr
    type: MapType

    def at(self, pixel: Expr, channel: Expr) -> Expr:
        """Find the index of channel `channel` of pixel `pixel` (counted over n, h, w) in `buffer`."""
        return self.offset + self.type.pixel(pixel) * self.type.stride + channel


@contextlib.contextmanager
def stage(
    name: str,
    params: Sequence[Param],
    *,
    grid: tuple[int, int, int],
    threads: int,
    shared: int = 0,
    min_blocks: int = 0,
    scalars: Sequence[tuple[str, str]] = (),
    may_alias: bool = False,
) -> Iterator[Block]:
    """Open a stage of `params`, the offsets of the maps among them, and scalars (name, dtype). `block.stage` has it.

    `min_blocks` is the number of blocks a multiprocessor should hold at a time: it bounds the registers.
    `may_alias`: what one parameter is written through may be read through another one.
    """
    with IRBuilder() as builder:
        with T.prim_func():
            T.func_name(name)
            T.func_attr({"tirx.noalias": not may_alias})
            buffers = {p.name: T.arg(p.name, T.buffer((p.elements,), RAW.get(p.dtype, p.dtype))) for p in params}
            offsets = {p.name: T.arg(f"{p.name}_offset", T.int32()) for p in params if p.is_map}
            known = {label: T.arg(label, getattr(T, dtype)()) for label, dtype in scalars}
            with contextlib.ExitStack() as stack:
                x, y, z = (
                    stack.enter_context(T.launch_thread(f"blockIdx.{axis}", extent)) if extent > 1 else 0
                    for axis, extent in zip("xyz", grid, strict=True)
                )
                if grid[0] == 1:
                    stack.enter_context(T.launch_thread("blockIdx.x", 1))
                tid = stack.enter_context(T.launch_thread("threadIdx.x", threads))
                if min_blocks:
                    stack.enter_context(T.attr({"tirx.launch_bounds_min_blocks_per_sm": min_blocks}))
                dtypes = {p.name: p.dtype for p in params}
                block = Block(buffers, dtypes, offsets, known, x, y, z, tid, threads)
                own = approximations.activations_of([p.dtype for p in params])
                with steps.written_as(steps.Written(fma, wide, held, own)):
                    yield block
        function = builder.get()
    block.stage = Stage(name, grid, threads, shared, function, may_alias)


# -- control -------------------------------------------------------------------------------------------------------


def when(condition: Expr, body: Callable[[], None], otherwise: Callable[[], None] | None = None) -> None:
    """Emit an If; where the condition is known now, only the branch that is taken."""
    if isinstance(condition, bool):
        taken = body if condition else otherwise
        if taken is not None:
            taken()
        return
    with T.If(condition):
        with T.Then():
            body()
        if otherwise is not None:
            with T.Else():
                otherwise()


def all_of(*conditions: Expr) -> Expr:
    """Join conditions by and; True where all are known to hold, False where one is known not to."""
    left: list[Expr] = [c for c in conditions if c is not True]
    if any(c is False for c in left):
        return False
    found: Expr = True
    for condition in left:
        found = condition if found is True else tirx.And(found, condition)
    return found


def below(value: Expr, bound: int, always: bool) -> Expr:
    """Compare value < bound, unless it is known to hold."""
    return True if always else value < bound


def within(value: Expr, bound: int) -> Expr:
    """Compare 0 <= value < bound."""
    return tirx.And(value >= 0, value < bound)


def unrolled(count: int, body: Callable[[Any], None]) -> None:
    """Emit `body(i)` for i < count, in a loop that is unrolled."""
    if count == 1:
        body(0)
    elif count:
        with T.unroll(0, count) as i:
            body(i)


def sync() -> None:
    """Emit a barrier of the block."""
    T.evaluate(T.cuda.cta_sync())


# -- memory --------------------------------------------------------------------------------------------------------


def held(value: Expr) -> Expr:
    """Write a float32 value to a register of its own, and read it there: TVM writes what is bound out again, and every
    use with it."""
    register = registers(1)
    put(register, 0, value)
    return register[0]


def registers(count: int, dtype: str = "float32") -> Buffer:
    """Allocate an array whose indices are constants once loops are unrolled: it lives in registers."""
    return T.alloc_buffer((count,), dtype, scope="local")


def put(buffer: Buffer, index: Expr, value: Expr) -> None:
    """Store an element."""
    T.buffer_store(buffer, value, [index])


@dataclasses.dataclass(frozen=True)
class Shared:
    """The dynamic shared memory of a block. Offsets are in bytes."""

    raw: Buffer
    bytes: int
    address: Expr  # for PTX, uint32

    def view(self, dtype: str) -> Buffer:
        """View all of it as elements of a type; indices count those."""
        return T.decl_buffer((self.bytes // size_of(dtype),), dtype, data=self.raw.data, scope="shared.dyn")


def shared_memory(size: int, align: int = 128) -> Shared:
    """Declare the stage's dynamic shared memory, of `size` bytes, from a multiple of `align` on."""
    raw = T.alloc_buffer((size,), "uint8", scope="shared.dyn", align=align)
    return Shared(raw, size, T.bind(T.cuda.cvta_generic_to_shared(raw.ptr_to([0]))))


def words(buffer: Buffer, elements: int, dtype: str) -> Buffer:
    """View a buffer of the caller, `elements` of `dtype`, as 32-bit words."""
    return T.decl_buffer((elements * size_of(dtype) // 4,), "uint32", data=buffer.data)


# -- vectors of channels -------------------------------------------------------------------------------------------


def bits(value: Expr) -> Expr:
    """Read a float32 as its bits, uint32."""
    return tirx.reinterpret("uint32", value)


def from_bits(word: Expr) -> Expr:
    """Read a 32-bit word as a float32."""
    return tirx.reinterpret("float32", word)


def unpack(word: Expr, dtype: str, into: Buffer, at: Expr) -> None:
    """Unpack the elements of a 32-bit word to float32, in registers from `at` on."""
    if dtype == "float32":
        put(into, at, from_bits(word))
    elif dtype == "bfloat16":
        put(into, at, from_bits(word << T.uint32(16)))
        put(into, at + 1, from_bits(tirx.bitwise_and(word, T.uint32(0xFFFF0000))))
    else:
        for half in range(2):
            bits16 = tirx.Cast("uint16", tirx.bitwise_and(word >> T.uint32(16 * half), T.uint32(0xFFFF)))
            T.evaluate(T.ptx["cvt.f32.f16"](into[at + half], bits16))


def pack(into: Buffer, at: Expr, low: Expr, high: Expr, dtype: str, *, relu: bool = False) -> None:
    """Round two float32 to one word of a 16-bit type; with `relu` what is below 0 is 0, and NaN stays."""
    name = f"cvt.rn.{'relu.' if relu else ''}{'bf16x2' if dtype == 'bfloat16' else 'f16x2'}.f32"
    T.evaluate(T.ptx[name](into[at], high, low))


def element(buffer: Buffer, index: Expr, dtype: str) -> Expr:
    """Read one element of a map as float32."""
    if dtype == "float32":
        return buffer[index]
    if dtype == "bfloat16":
        return from_bits(tirx.Cast("uint32", buffer[index]) << T.uint32(16))
    found = registers(1)
    T.evaluate(T.ptx["cvt.f32.f16"](found[0], buffer[index]))
    return found[0]


def put_element(buffer: Buffer, index: Expr, value: Expr, dtype: str) -> None:
    """Store a float32 as one element of a map."""
    if dtype == "float32":
        put(buffer, index, value)
        return
    word = registers(1, "uint32")
    pack(word, 0, value, value, dtype)
    put(buffer, index, tirx.Cast("uint16", tirx.bitwise_and(word[0], T.uint32(0xFFFF))))


@dataclasses.dataclass(frozen=True)
class Lanes:
    """How many channels a thread takes at a time, and how wide its accesses to a map can be."""

    count: int  # channels
    access: int  # channels of one access: a power of two that divides count

    @staticmethod
    def of(count: int, *kinds: MapType) -> Lanes:
        """Split `count` channels of maps into accesses of up to 16 bytes that suit them all."""
        access = count
        for kind in kinds:
            widest = min(max(kind.align, 1), VECTOR_BYTES // size_of(kind.dtype))
            while access > widest or count % access:
                access //= 2
        return Lanes(count, max(access, 1))


def fetch(source: Map, index: Expr, lanes: Lanes, into: Buffer, at: Expr, left: Expr | None = None) -> None:
    """Load `lanes.count` channels from `index` on into words, raw. Of channels from `left` on zeros are taken.

    One access takes `lanes.access` channels; where that is less than a word, words are put together.
    """
    size = size_of(source.type.dtype)
    per_word = 4 // size
    for first in range(0, lanes.count, max(lanes.access, per_word)):
        word = at + first // per_word

        def load(first: int = first, word: Expr = word) -> None:
            if lanes.access >= per_word:
                count = lanes.access // per_word
                view = words(source.buffer, source.type.elements, source.type.dtype)
                place = (index + first) // per_word if per_word > 1 else index + first
                span = (lambda i: i) if count == 1 else (lambda i: T.ramp(i, 1, count))
                T.buffer_store(into, view[span(place)], [span(word)])
            else:
                low = tirx.Cast("uint32", source.buffer[index + first])
                high: Expr = T.uint32(0)
                if first + 1 < lanes.count:
                    high = tirx.Cast("uint32", source.buffer[index + first + 1])
                    if left is not None:
                        high = tirx.if_then_else(first + 1 < left, high, T.uint32(0))
                put(into, word, tirx.bitwise_or(low, high << T.uint32(16)))

        def clear(first: int = first, word: Expr = word) -> None:
            for i in range(max(lanes.access // per_word, 1)):
                put(into, word + i, T.uint32(0))

        if left is None:
            load()
        else:
            when(first < left, load, clear)


def zeros(into: Buffer, at: Expr, count: int) -> None:
    """Clear `count` words of 32 bits from `at` on."""
    for i in range(count):
        put(into, at + i, T.uint32(0))


def write(target: Map, index: Expr, lanes: Lanes, values: Buffer, at: Expr = 0, left: Expr | None = None) -> None:
    """Store `lanes.count` float32 registers as channels of a map; none from `left` on."""
    size = size_of(target.type.dtype)
    per_word = 4 // size
    for first in range(0, lanes.count, lanes.access):

        def store(first: int = first) -> None:
            if lanes.access < per_word:
                put_element(target.buffer, index + first, values[at + first], target.type.dtype)
                return
            count = lanes.access // per_word
            made = registers(count, "uint32")
            for i in range(count):
                if per_word == 1:
                    put(made, i, bits(values[at + first + i]))
                else:
                    pack(made, i, values[at + first + 2 * i], values[at + first + 2 * i + 1], target.type.dtype)
            view = words(target.buffer, target.type.elements, target.type.dtype)
            place = (index + first) // per_word if per_word > 1 else index + first
            span = (lambda i: i) if count == 1 else (lambda i: T.ramp(i, 1, count))
            T.buffer_store(view, made[span(0)], [span(place)])

        if left is None:
            store()
        else:
            when(first < left, store)


# -- tensor cores --------------------------------------------------------------------------------------------------

MMA = {
    "bf16": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "fp16": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "tf32": "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
}
STEP_BYTES = 32  # of one operand's row in one product: 16 elements of 16 bits, or 8 of 32


def ldmatrix(into: Buffer, at: Expr, address: Expr, *, transposed: bool = False) -> None:
    """Load four 8x8 tiles of 16-bit elements (or 8x4 of 32-bit ones) from shared memory.

    Lane l gives the address of row l%8 of tile l//8.
    """
    name = f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16"
    T.evaluate(T.ptx[name](*[into[at + i] for i in range(4)], address))


def mma(precision: str, acc: Buffer, at: Expr, a: Buffer, a_at: Expr, b: Buffer, b_at: Expr) -> None:
    """Multiply A (4 words) by B (2 words), and add the 16x8 products: acc[at:at+4] += A x B."""
    d = [acc[at + i] for i in range(4)]
    T.evaluate(T.ptx[MMA[precision]](*d, *[a[a_at + i] for i in range(4)], *[b[b_at + i] for i in range(2)], *d))


def copy_async(address: Expr, source: Any, size: int = VECTOR_BYTES, valid: Expr = True) -> None:
    """Copy from global to shared memory in the background; zeros where not `valid`."""
    name = "cp.async.cg.shared.global" if size == VECTOR_BYTES else "cp.async.ca.shared.global"
    if valid is True:
        T.evaluate(T.ptx[name](address, source, size))
    else:
        T.evaluate(T.ptx[name](address, source, size, tirx.Select(valid, T.uint32(size), T.uint32(0))))


def commit() -> None:
    """Close a group of background copies, to be waited for."""
    T.evaluate(T.ptx["cp.async.commit_group"]())


def wait(pending: int = 0) -> None:
    """Wait until no more than `pending` of this thread's latest groups of copies are under way."""
    T.evaluate(T.ptx["cp.async.wait_group"](pending))


def shuffle_xor(value: Expr, mask: int) -> Expr:
    """Read the value of the lane whose index differs in the bits of `mask`; the whole warp takes part."""
    return T.cuda.__shfl_xor_sync(T.uint32(0xFFFFFFFF), value, mask, WARP)


def of_warp(value: Expr) -> Expr:
    """Read what is the same in all lanes of a warp from the first, so that the compiler knows that it is."""
    return T.cuda.__shfl_sync(T.uint32(0xFFFFFFFF), value, 0, WARP)


def hidden(value: Expr) -> Expr:
    """Give an int32 of which the compiler does not know what it is made of: by a permutation that keeps all bytes."""
    held = registers(1, "uint32")
    T.evaluate(T.ptx["prmt.b32"](held[0], tirx.Cast("uint32", value), T.uint32(0), T.uint32(0x3210)))
    return T.bind(tirx.Cast("int32", held[0]))


def shared_limit(arch: str) -> int:
    """Look up the bytes of shared memory that a block can have on `arch` (sm_XX)."""
    return {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_87": 163}.get(arch, 227) << 10


def blocks_beside(arch: str, shared: int) -> int:
    """Count the blocks with so many bytes of shared memory that a multiprocessor has room for: it takes RESERVED more
    of each."""
    return (shared_limit(arch) + RESERVED) // (shared + RESERVED)
