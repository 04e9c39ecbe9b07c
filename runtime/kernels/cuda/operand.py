"""What a convolution reads: a map after its prologue, brought from global to shared memory.

    fetch(i, pixel)      start loading the vector of channels of pass i
    finish(i) -> words   the prologue in float32, rounded to what the tensor cores take

Between the two lie the products of tiles before, so that memory and tensor cores work at the same time. The prologue is
applied once to each element of a tile, however many taps read it.

Vectors that are stored as the tensor cores take them are copied asynchronously, several steps ahead (`ring`): the first
map of the operand to where the product will read it, where `finish` replaces it by what the prologue makes of it,
further maps to places that each thread has for itself. Others come one step ahead, by way of registers. Gates and
coefficients of each sample have few elements, which the cache holds: beside a ring they are read when they are needed,
as per-channel vectors are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.common.prologue import ProloguePlan
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.correlation import FlatView
from bnfuse.runtime.kernels.cuda.device import Block, Buffer, Expr, Lanes
from bnfuse.runtime.kernels.kernel import MapType, Problem

HELD = 2  # vectors of a ring that a thread has in registers: the one it works on, and the next


@dataclasses.dataclass(frozen=True)
class Operand:
    """A map with its prologue, as a convolution reads it."""

    problem: Problem
    gradient: bool  # of the map at the convolution's output, dy of a Conv's gradient, and not of that at its input

    @property
    def plan(self) -> ProloguePlan:
        """Describe the prologue of the map on that side."""
        return (ProloguePlan.at_output if self.gradient else ProloguePlan.at_input)(self.problem)

    @property
    def maps(self) -> dict[str, MapType]:
        """Give the maps that are read, by name."""
        return self.plan.maps

    @property
    def streamed(self) -> dict[str, MapType]:
        """Give the maps that have an element for each pixel, by name; the first is the one that is worked on."""
        return {name: kind for name, kind in self.maps.items() if kind.spread == 1}

    @property
    def by_image(self) -> dict[str, MapType]:
        """Give the maps of which a pixel stands for those of an image, by name: gates, coefficients of each sample."""
        return {name: kind for name, kind in self.maps.items() if kind.spread > 1}

    @property
    def vectors(self) -> tuple[str, ...]:
        """Name the per-channel vectors that are read."""
        return self.plan.vectors

    @property
    def names(self) -> set[str]:
        """Name all that is read, maps and vectors."""
        return {*self.plan.operands}

    @property
    def kind(self) -> MapType:
        """Give the type of the map that the convolution works on."""
        return self.problem.map(self.plan.source)

    @property
    def ends_in_relu(self) -> bool:
        """Tell whether the prologue's last step is a Relu."""
        return self.plan.ends_in("Relu")

    def value(self, load: steps.Load, *, but_relu: bool = False) -> Expr:
        """Write what the prologue makes of an element; with `but_relu` without the Relu that it ends in."""
        return (self.plan.without_last() if but_relu else self.plan).value(load)


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where a vector goes: byte offsets in shared memory of its place in the tile, and of the thread's own place for
    the vectors of further maps, which lie `apart` bytes from each other.

    Where a condition holds it goes to a place `beyond` its own, too.
    """

    place: Expr
    own: Expr
    apart: int
    twice: Expr = False
    beyond: int = 0

    @property
    def second(self) -> Slot:
        """Give the second place."""
        return dataclasses.replace(self, place=self.place + self.beyond, twice=False)


def can_ring(operand: Operand, precision: str) -> bool:
    """Tell whether vectors can be copied asynchronously: stored as tensor cores take them, 4 bytes or more a time."""
    size = element_size(precision)
    kinds = operand.streamed.values()
    lanes = Lanes.of(vector_width(precision), *kinds)
    return all(d.size_of(kind.dtype) == size for kind in kinds) and lanes.access * size >= 4


@dataclasses.dataclass
class Loader:
    """The registers through which a thread brings `passes` vectors of channels; with `ring` those of HELD."""

    operand: Operand
    block: Block
    precision: str
    passes: int
    raw: dict[str, Buffer]
    unpacked: dict[str, Buffer]
    coefficients: dict[str, Buffer]
    result: Buffer  # float32
    packed: Buffer  # words
    masks: Buffer  # of a flat source: which elements of each pass lie in the image
    lanes: Lanes  # of copies
    ring: d.Shared | None = None

    @staticmethod
    def make(
        operand: Operand,
        block: Block,
        precision: str,
        passes: int,
        ring: d.Shared | None = None,
        width: int | None = None,
    ) -> Loader:
        """Allocate the registers of an operand, for `width` channels (None: 16 bytes of them)."""
        width = width or vector_width(precision)
        passes = HELD if ring else passes
        lanes = Lanes.of(width, *operand.streamed.values())
        return Loader(
            operand,
            block,
            precision,
            passes,
            {name: d.registers(passes * words_of(kind, width), "uint32") for name, kind in operand.maps.items()},
            {name: d.registers(width) for name in operand.maps},
            {name: d.registers(width) for name in operand.vectors},
            d.registers(width),
            d.registers(width * element_size(precision) // 4, "uint32"),
            d.registers(passes, "uint32"),
            lanes,
            ring,
        )

    @property
    def is_plain(self) -> bool:
        """Tell whether what is copied needs nothing done to it."""
        return not self.operand.plan.steps and self.precision != "tf32"

    @property
    def needs_pixels(self) -> bool:
        """Tell whether `read` has to know of which pixel a vector is."""
        return bool(self.operand.by_image)

    @property
    def width(self) -> int:
        """Count the channels of a vector."""
        return self.lanes.count

    @property
    def words(self) -> int:
        """Count the words of a vector as the tensor cores read it."""
        return self.width * element_size(self.precision) // 4

    def copy(self, slot: Slot, pixel: Expr, channel: Expr, valid: Expr, left: Expr | None) -> None:
        """Start copying a vector to its places; zeros where not `valid`, and from `left` on."""
        assert self.ring is not None
        access = self.lanes.access
        for n, (name, kind) in enumerate(self.operand.streamed.items()):
            source, size = self.block.map(name, kind), d.size_of(kind.dtype)
            start = slot.place if n == 0 else slot.own + (n - 1) * slot.apart
            start = T.bind(self.ring.address + tirx.Cast("uint32", start))
            index = source.at(pixel, channel)
            for first in range(0, self.width, access):
                there = valid if left is None else d.all_of(valid, first < left)
                at = index + first if there is True else tirx.Select(there, index + first, T.int32(0))
                address = start + T.uint32(first * size)
                d.copy_async(address, source.buffer.ptr_to([at]), access * size, there)

    def read(self, index: Expr, slot: Slot, pixel: Expr, channel: Expr, valid: Expr, left: Expr | None) -> None:
        """Read what has been copied, for `finish` of pass `index`, which is below HELD.

        Pixel, channel and the rest are those of `copy`; `needs_pixels` says whether they matter.
        """
        assert self.ring is not None
        store, words = self.ring.view("uint32"), self.words
        self._fetch(self.operand.by_image, index, pixel, channel, valid, left)
        for n, name in enumerate(self.operand.streamed):
            start = slot.place if n == 0 else slot.own + (n - 1) * slot.apart
            place = T.ramp(index * words, 1, words)
            T.buffer_store(self.raw[name], store[T.ramp(start // 4, 1, words)], [place])

    def fetch(self, index: Expr, pixel: Expr, channel: Expr, valid: Expr, left: Expr | None) -> None:
        """Start loading pass `index`. Where not `valid` it is zeros."""
        self._fetch(self.operand.maps, index, pixel, channel, valid, left)

    def _fetch(
        self, maps: dict[str, MapType], index: Expr, pixel: Expr, channel: Expr, valid: Expr, left: Expr | None
    ) -> None:
        def load() -> None:
            for name, kind in maps.items():
                source = self.block.map(name, kind)
                at = index * words_of(kind, self.width)
                lanes = Lanes.of(self.width, kind)
                d.fetch(source, source.at(pixel, channel), lanes, self.raw[name], at, left)

        def clear() -> None:
            for name, kind in maps.items():
                count = words_of(kind, self.width)
                d.zeros(self.raw[name], index * count, count)

        if maps:
            d.when(valid, load, clear)

    def fetch_flat(self, index: Expr, element_of: Callable[[int], tuple[Expr, Expr, Expr]]) -> None:
        """Start loading pass `index` where the elements of a vector are not neighbours.

        `element_of(j)` is the pixel and the channel of element j, and whether it exists; else it is zero.
        """
        places = [element_of(j) for j in range(self.width)]
        mask: Expr = T.uint32(0)
        for j, (_, _, valid) in enumerate(places):
            mask = tirx.bitwise_or(mask, tirx.Select(valid, T.uint32(1 << j), T.uint32(0)))
        d.put(self.masks, index, mask)
        for name, kind in self.operand.maps.items():
            source, per_word = self.block.map(name, kind), 4 // d.size_of(kind.dtype)
            for word in range(words_of(kind, self.width)):
                found: Expr = T.uint32(0)
                for half in range(per_word):
                    pixel, channel, valid = places[word * per_word + half]
                    raw = source.buffer[source.at(pixel, channel)]
                    raw = d.bits(raw) if per_word == 1 else tirx.Cast("uint32", raw)
                    raw = tirx.if_then_else(valid, raw, T.uint32(0))
                    found = raw if per_word == 1 else tirx.bitwise_or(found, raw << T.uint32(16 * half))
                d.put(self.raw[name], index * words_of(kind, self.width) + word, found)

    def load_flat_coefficients(self, channel_of: Callable[[int], Expr]) -> None:
        """Load the per-channel vectors for elements that have the channels `channel_of(j)`."""
        for name, held in self.coefficients.items():
            for j in range(self.width):
                d.put(held, j, self.block[name][channel_of(j)])

    def load_coefficients(self, channel: Expr, aligned: bool, left: Expr | None) -> None:
        """Load the per-channel vectors of the channels from `channel` on, for the passes that follow."""
        for name, held in self.coefficients.items():
            load_vector(self.block[name], channel, self.width, held, aligned, left)

    def finish(self, index: Expr, *, flat: bool = False) -> Buffer:
        """Make the words that the tensor cores read of pass `index`, four of 16 bytes."""
        for name, kind in self.operand.maps.items():
            at = index * words_of(kind, self.width)
            unpack_words(self.raw[name], at, kind, self.width, self.unpacked[name])
        relu = self.operand.ends_in_relu and element_size(self.precision) == 2  # done by the conversion to 16 bits
        for j in range(self.width):

            def load(name: str, is_vector: bool, j: int = j) -> Expr:
                return (self.coefficients if is_vector else self.unpacked)[name][j]

            value = self.operand.value(load, but_relu=relu)
            if flat:  # padding is zero behind the prologue
                inside = tirx.bitwise_and(self.masks[index], T.uint32(1 << j)) != T.uint32(0)
                value = tirx.Select(inside, value, T.float32(0))
            d.put(self.result, j, value)
        round_words(self.precision, self.result, self.packed, self.words, relu=relu)
        return self.packed


Pass = Callable[[int, int], None]  # number, and which of HELD vectors it has


def read_ahead(count: int, read: Pass, use: Pass, own: Callable[[int], Expr] = lambda i: True) -> None:
    """Emit `read` and `use` of each pass that is `own`, the next one's reading before a pass is used.

    No pass reads what another one writes. Compilers do not know that, and would not read ahead.
    """
    for i in range(count + 1):
        if i < count:
            d.when(own(i), lambda i=i: read(i, i % HELD))  # type: ignore[misc]
        if i:
            d.when(own(i - 1), lambda i=i - 1: use(i, i % HELD))  # type: ignore[misc]


def vector_width(precision: str) -> int:
    """Count the channels of 16 bytes as the tensor cores read them."""
    return 8 if precision in ("bf16", "fp16") else 4


def element_size(precision: str) -> int:
    """Count the bytes of a channel as the tensor cores read it."""
    return 16 // vector_width(precision)


def words_of(kind: MapType, width: int) -> int:
    """Count the words of `width` channels as stored."""
    return max(width * d.size_of(kind.dtype) // 4, 1)


def round_words(precision: str, values: Buffer, into: Buffer, count: int = 4, *, relu: bool = False) -> None:
    """Round float32 registers to `count` words that go into a row of shared memory.

    With `relu` what is below 0 is 0.
    """
    for i in range(count):
        if precision in ("bf16", "fp16"):
            dtype = "bfloat16" if precision == "bf16" else "float16"
            d.pack(into, i, values[2 * i], values[2 * i + 1], dtype, relu=relu)
        elif precision == "tf32":
            T.evaluate(T.ptx["cvt.rna.tf32.f32"](into[i], values[i]))
        else:
            d.put(into, i, d.bits(values[i]))


def load_vector(source: Buffer, channel: Expr, width: int, into: Buffer, aligned: bool, left: Expr | None) -> None:
    """Load `width` elements of a per-channel vector; zeros from `left` on.

    `aligned`: channel is a multiple of 4.
    """
    step = 4 if aligned else 1
    for first in range(0, width, step):

        def load(first: int = first) -> None:
            if step == 1:
                d.put(into, first, source[channel + first])
            else:
                T.buffer_store(into, source[T.ramp(channel + first, 1, 4)], [T.ramp(first, 1, 4)])

        if left is None:
            load()
            continue

        def edge(first: int = first) -> None:
            for i in range(step):
                value = tirx.if_then_else(first + i < left, source[channel + first + i], T.float32(0))
                d.put(into, first + i, value)

        d.when(first + step <= left, load, edge)


def chunks_of(row_bytes: int) -> int:
    """Count the 16-byte chunks of a row."""
    return row_bytes // d.VECTOR_BYTES


def swizzled(row: Expr, chunk: Expr, chunks: int) -> Expr:
    """Find where in its row a 16-byte chunk lies, so that eight rows' equal chunks are in different banks."""
    if chunks >= 8:
        return tirx.bitwise_xor(chunk, row % 8)
    if chunks == 4:
        return tirx.bitwise_xor(chunk, row // 2 % 4)
    return tirx.bitwise_xor(chunk, row // 4 % 2)


def unpack_words(words: Buffer, at: Expr, kind: MapType, width: int, into: Buffer) -> None:
    """Unpack `width` channels of a map, from words as stored to float32."""
    count = words_of(kind, width)
    for i in range(count):
        d.unpack(words[at + i], kind.dtype, into, i * width // count)


def flat_elements(
    view: FlatView, first: Expr, image: Expr, y: Expr, x: Expr, own: Expr, group: Expr
) -> Callable[[int], tuple[Expr, Expr, Expr]]:
    """Find the elements from `first` on of a flat row: pixel, channel and whether there is such an element.

    `y` and `x` are those of the row's first tap, `image` is its image's first pixel.
    """
    v, h, inputs = view.correlation.vertical, view.correlation.horizontal, view.correlation.inputs
    row = T.bind(first // view.correlation.flat_row)
    start = T.bind(first % view.correlation.flat_row)
    y = T.bind(y + row * v.step)
    inside = T.bind(d.all_of(own, row < v.window, d.within(y, v.source)))
    pixel = T.bind(image + y * h.source + x)
    across = T.bind(x * inputs + start)

    def element(j: int) -> tuple[Expr, Expr, Expr]:
        exists = d.all_of(inside, start + j < h.window * inputs)
        if view.is_dense:
            return pixel, start + j, d.all_of(exists, d.within(across + j, h.source * inputs))
        tap, channel = (start + j) // inputs * h.step, (start + j) % inputs
        return pixel + tap, group * inputs + channel, d.all_of(exists, d.within(x + tap, h.source))

    return element
