"""Copies between layouts: NCHW and NHWC, by way of shared memory so that both sides are read and written in runs; slot
and slot; dense and dense. Where the two sides differ in type (float32 and a 16-bit type) the copy converts.

    block (pixels of an image, channels):    up to 4096 elements, [channels][pixels + 1] in shared memory
        dense side:   neighbouring threads take neighbouring pixels of a channel
        map side:     neighbouring threads take neighbouring channels of a pixel, as many at a time as alignment allows
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.maps import CopyProblem
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.device import Block, Buffer, Expr, Lanes, Map, Stage
from bnfuse.runtime.kernels.cuda.operand import words_of
from bnfuse.runtime.kernels.cuda.sweep import Sweep
from bnfuse.runtime.kernels.cuda.vector import Reader, Writer, store_words, width_of
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Param
from bnfuse.runtime.targets.target import CudaTarget

THREADS = 256
TILE = 4096  # elements of a tile, and
MOST_CHANNELS = 64  # of its channels at most: both chosen by hand
FLOATS = ("float32", "bfloat16", "float16")


def nchw_to_nhwc(y: MapType, target: CudaTarget, dtype: str = "float32") -> Kernel:
    """Make the kernel: x, dense [n, c, h, w] of `dtype` -> the map y."""
    params = (Param("x", "in", y.pixels * y.c, dtype), Param("y", "out", y.elements, y.dtype, is_map=True))
    problem = CopyProblem("NchwToNhwc", y.pixels * y.c, y, dtype)

    def emit(block: Block, tile: Transposition, memory: Buffer) -> None:
        tile.dense(lambda at, index: d.put(memory, at, _read(block["x"], index, dtype)))
        d.sync()
        target_map = block.map("y", y)

        def store(values: Buffer, pixel: Expr, channel: Expr) -> None:
            _write(target_map, target_map.at(pixel, channel), tile.lanes, values)

        tile.map_side(memory, store=store)

    return _transposition(problem, y, dtype, target, params, emit)


def nhwc_to_nchw(x: MapType, target: CudaTarget, dtype: str = "float32") -> Kernel:
    """Make the kernel: the map x -> y, dense [n, c, h, w] of `dtype`."""
    params = (Param("x", "in", x.elements, x.dtype, is_map=True), Param("y", "out", x.pixels * x.c, dtype))
    problem = CopyProblem("NhwcToNchw", x, x.pixels * x.c, dtype)

    def emit(block: Block, tile: Transposition, memory: Buffer) -> None:
        source = block.map("x", x)

        def load(values: Buffer, pixel: Expr, channel: Expr) -> None:
            _load(source, source.at(pixel, channel), tile.lanes, values)

        tile.map_side(memory, load=load)
        d.sync()
        tile.dense(lambda at, index: _put(block["y"], index, memory[at], dtype))

    return _transposition(problem, x, dtype, target, params, emit)


@dataclasses.dataclass
class Transposition:
    """A tile of one image under construction: `wide` channels by `long` pixels."""

    block: Block
    kind: MapType
    wide: int
    long: int
    lanes: Lanes
    held: str  # the type in shared memory

    @property
    def area(self) -> int:
        """Count the pixels of an image."""
        return self.kind.h * self.kind.w

    @property
    def runs(self) -> int:
        """Count the tiles along the pixels of an image."""
        return -(-self.area // self.long)

    def place(self) -> None:
        """Find the tile's image, first pixel and first channel."""
        self.image = T.bind(self.block.x // self.runs)
        self.first = T.bind(self.block.x % self.runs * self.long)  # pixel of the image
        self.channel = T.bind(self.block.y * self.wide) if self.kind.c > self.wide else 0

    def dense(self, move: Callable[[Expr, Expr], None]) -> None:
        """Emit `move(index in shared memory, index in NCHW)` for each element of the tile."""

        def one(k: Expr) -> None:
            c, p = T.bind(k // self.long), T.bind(k % self.long)
            pixel, channel = self.first + p, self.channel + c
            index = (self.image * self.kind.c + channel) * self.area + pixel
            inside = d.all_of(
                d.below(pixel, self.area, self.area % self.long == 0),
                d.below(channel, self.kind.c, self.kind.c % self.wide == 0),
            )
            d.when(inside, lambda: move(c * (self.long + 1) + p, index))

        _each_unrolled(self.block, self.wide * self.long, one)

    def map_side(
        self,
        memory: Buffer,
        *,
        load: Callable[[Buffer, Expr, Expr], None] | None = None,
        store: Callable[[Buffer, Expr, Expr], None] | None = None,
    ) -> None:
        """Visit each vector of channels of a pixel of the tile, NHWC.

        `load(values, pixel, channel)` brings it into registers, from where it goes to shared memory; `store` is called
        with what comes from there.
        """
        vectors = self.wide // self.lanes.count

        def one(k: Expr) -> None:
            values = d.registers(self.lanes.count, self.held)
            c, p = T.bind(k % vectors * self.lanes.count), T.bind(k // vectors)
            pixel, channel = self.first + p, self.channel + c
            inside = d.all_of(
                d.below(pixel, self.area, self.area % self.long == 0),
                d.below(channel, self.kind.c, self.kind.c % self.wide == 0),
            )

            def run() -> None:
                if load is not None:
                    load(values, self.image * self.area + pixel, channel)
                for j in range(self.lanes.count):
                    at = (c + j) * (self.long + 1) + p
                    if load is not None:
                        d.put(memory, at, values[j])
                    else:
                        d.put(values, j, memory[at])
                if store is not None:
                    store(values, self.image * self.area + pixel, channel)

            d.when(inside, run)

        _each_unrolled(self.block, vectors * self.long, one)


def _transposition(
    problem: CopyProblem,
    kind: MapType,
    dtype: str,
    target: CudaTarget,
    params: tuple[Param, ...],
    emit: Callable[[Block, Transposition, Buffer], None],
) -> Kernel:
    area = kind.h * kind.w
    wide = min(kind.c, MOST_CHANNELS)
    long = max(1, min(area, TILE // wide))
    long = long // 32 * 32 if long > 32 else long
    widest = 1
    if kind.dtype in FLOATS:
        widest = next(w for w in (8, 4, 2, 1) if wide % w == 0 and w <= d.VECTOR_BYTES // d.size_of(kind.dtype))
    lanes = Lanes.of(widest, kind)
    lanes = Lanes(lanes.access, lanes.access)
    held = "float32" if dtype in FLOATS else dtype
    shared = wide * (long + 1) * d.size_of(held)
    grid = kind.n * -(-area // long), -(-kind.c // wide), 1
    name = unique_name(problem.op, problem, target)

    def build() -> tuple[Stage, ...]:
        with d.stage(name, params, grid=grid, threads=THREADS, shared=shared) as block:
            tile = Transposition(block, kind, wide, long, lanes, held)
            tile.place()
            emit(block, tile, d.shared_memory(shared).view(held))
        return (block.stage,)

    return Kernel(name, problem, target, params, build)


def _each_unrolled(block: Block, count: int, body: Callable[[Expr], None]) -> None:
    """Emit `body(i)` for i < count, dealt to the threads.

    Whole rounds are unrolled, so that their loads overlap.
    """
    rounds, rest = divmod(count, block.threads)
    d.unrolled(rounds, lambda i: body(T.bind(i * block.threads + block.tid)))
    if rest:
        d.when(block.tid < rest, lambda: body(T.bind(rounds * block.threads + block.tid)))


def _read(buffer: Buffer, index: Expr, dtype: str) -> Expr:
    return d.element(buffer, index, dtype) if dtype in FLOATS else buffer[index]


def _put(buffer: Buffer, index: Expr, value: Expr, dtype: str) -> None:
    if dtype in FLOATS:
        d.put_element(buffer, index, value, dtype)
    else:
        d.put(buffer, index, value)


def _load(source: Map, index: Expr, lanes: Lanes, values: Buffer) -> None:
    kind = source.type
    if kind.dtype not in FLOATS or lanes.count * d.size_of(kind.dtype) < 4:
        for j in range(lanes.count):
            d.put(values, j, _read(source.buffer, index + j, kind.dtype))
        return
    count = lanes.count * d.size_of(kind.dtype) // 4
    raw = d.registers(count, "uint32")
    d.fetch(source, index, lanes, raw, 0)
    for i in range(count):
        d.unpack(raw[i], kind.dtype, values, i * lanes.count // count)


def _write(target: Map, index: Expr, lanes: Lanes, values: Buffer) -> None:
    if target.type.dtype in FLOATS:
        d.write(target, index, lanes, values)
    else:
        for j in range(lanes.count):
            d.put(target.buffer, index + j, values[j])


# -- slots and dense tensors ---------------------------------------------------------------------------------------


def copy_map(x: MapType, y: MapType, target: CudaTarget, dtype: str = "float32") -> Kernel:
    """Make the kernel: the map x -> the map y, of one size but perhaps in other slots or, of floats, of other types.

    `dtype` is the type of maps that are no floats.
    """
    kinds = [kind if kind.dtype in FLOATS and dtype in FLOATS else _typed(kind, dtype) for kind in (x, y)]
    params = tuple(
        Param(name, access, kind.elements, kind.dtype, is_map=True)  # type: ignore[arg-type]
        for name, access, kind in zip(("x", "y"), ("in", "out"), kinds, strict=True)
    )
    problem = CopyProblem("CopyMap", x, y, dtype)
    name = unique_name(problem.op, problem, target)
    emit = _emit_vectors if all(kind.dtype in FLOATS for kind in kinds) else _emit_elements
    sweep = Sweep.of(y.pixels, y.c, width_of(kinds), target, reads=1, sums=False)

    def build() -> tuple[Stage, ...]:
        with d.stage(name, params, grid=sweep.grid, threads=sweep.team.threads) as block:
            emit(block, sweep, *kinds)
        return (block.stage,)

    return Kernel(name, problem, target, params, build)


def _typed(kind: MapType, dtype: str) -> MapType:
    return dataclasses.replace(kind, dtype=dtype)


def _emit_vectors(block: Block, sweep: Sweep, x: MapType, y: MapType) -> None:
    width = sweep.team.width
    channel, left = sweep.channel(block)
    reader, writer = Reader(block, {"x": x}, (), width, sweep.unroll), Writer(block, "y", y, width)
    reader.open(channel, left, False)
    count = words_of(y, width)

    def finish(i: int, pixel: Expr, valid: Expr) -> None:
        def run() -> None:
            if x.dtype == y.dtype:
                for word in range(count):
                    d.put(writer.words, word, reader.raw["x"][i * count + word])
                index = writer.target.at(pixel, channel)
                store_words(writer.target, index, Lanes.of(width, y), writer.words, left)
            else:
                reader.unpack(i)
                writer.store(reader.values["x"], pixel, channel, left)

        d.when(valid, run)

    sweep.run(block, left, reader.fetch, finish)


def _emit_elements(block: Block, sweep: Sweep, x: MapType, y: MapType) -> None:
    source, result = block.map("x", x), block.map("y", y)
    channel, left = sweep.channel(block)

    def finish(i: int, pixel: Expr, valid: Expr) -> None:
        def one(j: int) -> None:
            d.put(result.buffer, result.at(pixel, channel + j), source.buffer[source.at(pixel, channel + j)])

        for j in range(sweep.team.width):
            inside = True if left is None else j < left
            d.when(d.all_of(valid, inside), lambda j=j: one(j))  # type: ignore[misc]

    sweep.run(block, left, lambda i, pixel, valid: None, finish)


def copy(elements: int, target: CudaTarget, dtype: str = "float32") -> Kernel:
    """Make the kernel: x -> y, dense, `elements` of `dtype`."""
    params = (Param("x", "in", elements, dtype), Param("y", "out", elements, dtype))
    problem = CopyProblem("Copy", elements, elements, dtype)
    name = unique_name(problem.op, problem, target)
    per_vector = d.VECTOR_BYTES // d.size_of(dtype)
    vectors, rest = divmod(elements, per_vector)
    unroll = 4
    while unroll > 1 and vectors < THREADS * unroll * target.multiprocessors:
        unroll //= 2
    grid = max(1, -(-vectors // (THREADS * unroll))), 1, 1

    def build() -> tuple[Stage, ...]:
        with d.stage(name, params, grid=grid, threads=THREADS) as block:
            if vectors:
                _emit_copy(block, vectors, unroll)
            if rest:
                at = vectors * per_vector + block.tid
                first_block = tirx.And(block.x == 0, block.tid < rest) if grid[0] > 1 else block.tid < rest
                d.when(first_block, lambda: d.put(block["y"], at, block["x"][at]))
        return (block.stage,)

    return Kernel(name, problem, target, params, build)


def _emit_copy(block: Block, vectors: int, unroll: int) -> None:
    """Copy whole vectors of 16 bytes."""
    x, y = (T.decl_buffer((vectors * 4,), "uint32", data=block[name].data) for name in ("x", "y"))
    held = d.registers(4 * unroll, "uint32")
    base = T.bind(block.x * (THREADS * unroll) + block.tid)
    places = [base + i * THREADS for i in range(unroll)]
    exact = vectors % (THREADS * unroll) == 0

    def load(i: int) -> None:
        T.buffer_store(held, x[T.ramp(places[i] * 4, 1, 4)], [T.ramp(4 * i, 1, 4)])

    def store(i: int) -> None:
        T.buffer_store(y, held[T.ramp(4 * i, 1, 4)], [T.ramp(places[i] * 4, 1, 4)])

    for step in (load, store):
        for i in range(unroll):
            d.when(d.below(places[i], vectors, exact), lambda i=i, step=step: step(i))  # type: ignore[misc]
