"""Gemm on tensor cores:  y = alpha * A * B + beta * C,  float32 in memory, A or B stored transposed, one or a batch.

    block: a tile of rows x columns of y, and a share of k where the tiles alone would not fill the GPU
        for 32 of k:               copied to shared memory in the background, 3 or 4 steps ahead
            for 16 of k:           a warp reads its part of A and B and rounds it to the precision's type
                rows/16 x columns/8 tensor-core products, accumulated in float32 registers

With a share of k per block, blocks write their sums to `partials` [shares][m][n], and a second stage adds them up in
order. At fp32, an operand is the sum of two of TF32, of whose four products three are taken.

Operands stay float32 in shared memory, since that is what the background copies bring. In which order the tensor cores
take the 16 of k is free as long as A and B agree: lane t of four takes k = 4t .. 4t+3, so that an operand stored along
k is one 16-byte access a lane. No access has two lanes in one bank: where an operand is stored along k (its lines are
32 of k), the halves of odd lines are swapped; where it is stored across k, 8-word pieces are exchanged by k/4.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.dense import GemmProblem, gemm_params
from bnfuse.runtime.kernels.common.params import INT32_LIMIT, unique_name
from bnfuse.runtime.kernels.common.steps import f32, fma
from bnfuse.runtime.kernels.cuda.device import (
    WARP,
    Block,
    Buffer,
    Expr,
    Shared,
    Stage,
    all_of,
    bits,
    commit,
    copy_async,
    mma,
    pack,
    put,
    registers,
    shared_limit,
    shared_memory,
    stage,
    sync,
    wait,
    when,
)
from bnfuse.runtime.kernels.cuda.exact import add_products, split_in_place
from bnfuse.runtime.kernels.kernel import Kernel, Param
from bnfuse.runtime.targets.target import CudaTarget

DEPTH = 32  # of k, of a tile in shared memory
STEP = 16  # of k, that a warp takes at a time
MERGE_THREADS = 256
# what the first copies (steps) and the second launch (words) cost, as copies: chosen by hand, as is what `choose_tiles`
# takes a word of partial sums for
FIRST_STEPS, MERGE_WORDS = 3, 12_000


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A block's `rows` x `columns`, a warp's `warp_rows` x `warp_columns`; k in `shares`, `ahead` tiles buffered."""

    rows: int
    columns: int
    warp_rows: int
    warp_columns: int
    shares: int = 1
    ahead: int = 4

    @property
    def threads(self) -> int:
        """Count the threads of a block."""
        return WARP * (self.rows // self.warp_rows) * (self.columns // self.warp_columns)

    @property
    def words(self) -> int:
        """Count the words of shared memory of one tile of A and one of B."""
        return (self.rows + self.columns) * DEPTH

    @property
    def shared(self) -> int:
        """Count the bytes of shared memory of all that is buffered."""
        return 4 * self.words * self.ahead


SHAPES = (  # chosen by hand
    Tiles(128, 128, 64, 32),
    Tiles(64, 128, 32, 32),
    Tiles(128, 64, 32, 32),
    Tiles(64, 64, 32, 32),
    Tiles(32, 64, 32, 16),
    Tiles(64, 32, 16, 32),
)


def steps_of(problem: GemmProblem) -> int:
    """Count the tiles of k."""
    return -(-problem.k // DEPTH)


def choose_tiles(problem: GemmProblem, target: CudaTarget) -> Tiles:
    """Choose the tiles with the least estimated time.

    A block takes as long as its copies: (rows + columns) words for each of k, and the first ones are waited for. A
    multiprocessor does its blocks one after the other. Shares of k cost another launch and the partial sums' way.
    """
    steps, results = steps_of(problem), problem.elements[2]
    best: tuple[float, Tiles] | None = None
    for shape in SHAPES:
        ahead = max(2, min(4, steps + 1, shared_limit(target.architecture) // (4 * shape.words)))
        tiles = problem.count * -(-problem.m // shape.rows) * -(-problem.n // shape.columns)
        for shares in range(1, min(64, max(1, steps // 4)) + 1):
            if shares > 1 and shares * results >= INT32_LIMIT:
                break
            words = (-(-steps // shares) + FIRST_STEPS) * shape.words + shape.rows * shape.columns
            time: float = -(-tiles * shares // target.multiprocessors) * words
            if shares > 1:
                time += 3 * shares * results / target.multiprocessors + MERGE_WORDS
            if best is None or time < best[0]:
                best = time, dataclasses.replace(shape, shares=shares, ahead=ahead)
    assert best is not None
    return best[1]


def gemm(problem: GemmProblem, target: CudaTarget) -> Kernel:
    """Make the kernel: a, b, [c] -> y, float32; scratch: partials [shares][m][n], where k is shared."""
    params = gemm_params(problem)
    tiles = choose_tiles(problem, target)
    if tiles.shares > 1:
        params += (Param("partials", "out", tiles.shares * problem.elements[2]),)
    name = unique_name("Gemm", problem, target)

    def build() -> tuple[Stage, ...]:
        if tiles.shares == 1:
            return (_Product(problem, target, tiles).stage(name, params),)
        product = _Product(problem, target, tiles).stage(name, [p for p in params if p.name in ("a", "b", "partials")])
        return product, _merge(f"{name}_merge", problem, tiles, [p for p in params if p.name not in ("a", "b")])

    return Kernel(name, problem, target, params, build)


@dataclasses.dataclass(frozen=True)
class Operand:
    """A or B: `size` rows of A, or columns of B, of which a block has `tile`; stored along k or across it."""

    name: str
    size: int
    k: int
    tile: int
    along_k: bool
    first_word: int  # of its tile, in a buffer of shared memory

    @property
    def line(self) -> int:
        """Count the words of a line of the tile in shared memory: a line is one row's 32 of k, or one k's rows."""
        return DEPTH if self.along_k else self.tile

    @property
    def access(self) -> int:
        """Count the words of one copy, 1, 2 or 4: the operand's lines in memory are multiples of them."""
        return math.gcd(self.k if self.along_k else self.size, 4)

    def place(self, index: Expr, k: Expr) -> Expr:
        """Find the word of the tile where element (index, k) lies. Four of k, or eight of index, stay together."""
        if self.along_k:
            return index * DEPTH + tirx.bitwise_xor(k, tirx.bitwise_and(index, 1) * 16)
        return k * self.tile + tirx.bitwise_xor(index, tirx.bitwise_and(k // 4, 3) * 8)

    def load(self, block: Block, shared: Shared, matrix: Expr, buffer: Expr, start: Expr, step: Expr) -> None:
        """Begin to copy the tile of rows from `start` on and the `step`-th 32 of k.

        `matrix` is the first element of the operand's matrix, `buffer` the tile's first word.
        """
        width = self.access
        per_line = self.line // width

        def piece(i: Expr) -> None:
            line, within = i // per_line, (i % per_line) * width
            index, k = (line, within) if self.along_k else (within, line)
            row, depth = start + index, step * DEPTH + k
            address = shared.address + tirx.Cast("uint32", (buffer + self.first_word + self.place(index, k)) * 4)
            at = row * self.k + depth if self.along_k else depth * self.size + row
            exists = all_of(
                True if self.size % self.tile == 0 else row < self.size, True if self.k % DEPTH == 0 else depth < self.k
            )
            at = matrix + at
            at = at if exists is True else tirx.Select(exists, at, 0)
            copy_async(address, block[self.name].ptr_to([at]), 4 * width, exists)

        block.each(self.tile * DEPTH // width, piece)

    def read(self, view: Buffer, buffer: Expr, index: Expr, k: Expr, into: Buffer, at: int) -> None:
        """Read elements (index, k .. k+3) of the tile into four registers. k is a multiple of four."""
        base = buffer + self.first_word
        if self.along_k:
            T.buffer_store(into, view[T.ramp(base + self.place(index, k), 1, 4)], [T.ramp(at, 1, 4)])
        else:
            for i in range(4):
                put(into, at + i, view[base + self.place(index, k) + i * self.tile])


class _Product:
    """The stage that multiplies."""

    def __init__(self, problem: GemmProblem, target: CudaTarget, tiles: Tiles) -> None:
        self.problem, self.tiles, self.precision = problem, tiles, target.precision
        self.down = -(-problem.m // tiles.rows)  # tiles along the rows
        self.a = Operand("a", problem.m, problem.k, tiles.rows, not problem.trans_a, 0)
        self.b = Operand("b", problem.n, problem.k, tiles.columns, problem.trans_b, tiles.rows * DEPTH)

    def stage(self, name: str, params: Any) -> Stage:
        problem, tiles = self.problem, self.tiles
        # neighbouring blocks share the columns' tile, which is the larger operand as a rule
        grid = (problem.count * self.down, -(-problem.n // tiles.columns), tiles.shares)
        with stage(name, params, grid=grid, threads=tiles.threads, shared=tiles.shared, min_blocks=1) as block:
            self._emit(block)
        return block.stage

    def _emit(self, block: Block) -> None:
        tiles, steps = self.tiles, steps_of(self.problem)
        self.block, self.shared = block, shared_memory(tiles.shared)
        self.view = self.shared.view("float32")
        self.tile, self.start_a, self.start_b, self.start_y = block.x, 0, 0, 0
        if self.problem.batch:
            number = T.bind(block.x // self.down)
            self.tile = T.bind(block.x % self.down)
            self.start_a, self.start_b, self.start_y = (T.bind(at) for at in self.problem.starts(number))
        first = T.bind(block.z * steps // tiles.shares) if tiles.shares > 1 else 0
        stop = T.bind((block.z + 1) * steps // tiles.shares) if tiles.shares > 1 else steps
        warps = tiles.columns // tiles.warp_columns
        self.row = T.bind((block.warp // warps) * tiles.warp_rows + block.lane // 4)
        self.column = T.bind((block.warp % warps) * tiles.warp_columns + block.lane // 4)
        self.lane_k = T.bind((block.lane % 4) * 4)
        self.acc = registers(tiles.warp_rows * tiles.warp_columns // WARP)
        for i in range(tiles.warp_rows * tiles.warp_columns // WARP):
            put(self.acc, i, f32(0.0))
        for i in range(tiles.ahead - 1):
            self._load(first + i, stop, i)
        with T.serial(0, stop - first) as i:
            wait(tiles.ahead - 2)
            sync()
            self._load(first + i + tiles.ahead - 1, stop, (i + tiles.ahead - 1) % tiles.ahead)
            buffer = T.bind((i % tiles.ahead) * tiles.words)
            for k in range(0, DEPTH, STEP):
                self._multiply(buffer, k)
        wait(0)
        self._finish()

    def _load(self, step: Expr, stop: Expr, buffer: Expr) -> None:
        """Begin to copy tiles of A and B, or nothing (zeros) behind the last one."""

        def load() -> None:
            start = buffer * self.tiles.words
            block, shared = self.block, self.shared
            self.a.load(block, shared, self.start_a, start, self.tile * self.tiles.rows, step)
            self.b.load(block, shared, self.start_b, start, block.y * self.tiles.columns, step)

        when(step < stop, load)
        commit()

    # 16 of k in registers

    def _multiply(self, buffer: Expr, k: int) -> None:
        tiles, depth = self.tiles, self.lane_k + k
        b = [self._fragment(self.b, buffer, [self.column + j], depth) for j in range(0, tiles.warp_columns, 8)]
        for i in range(0, tiles.warp_rows, 16):
            a = self._fragment(self.a, buffer, [self.row + i, self.row + i + 8], depth)
            for j, own in enumerate(b):
                self._product(a, own, 4 * ((i // 16) * len(b) + j))

    def _fragment(self, operand: Operand, buffer: Expr, indices: list[Expr], k: Expr) -> list[Buffer]:
        """Make words for the tensor cores of two rows of A or one column of B: [values], or [high, low] at fp32.

        For a 16-bit type one product takes all 16 of k, else two take 8 each.
        """
        count = len(indices)
        values = registers(4 * count)
        for n, index in enumerate(indices):
            operand.read(self.view, buffer, index, k, values, 4 * n)
        if self.precision in ("bf16", "fp16"):
            words = registers(2 * count, "uint32")
            dtype = "bfloat16" if self.precision == "bf16" else "float16"
            for half in range(2):
                for n in range(count):
                    pack(words, half * count + n, values[4 * n + 2 * half], values[4 * n + 2 * half + 1], dtype)
            return [words]
        # word (product, j, n) is element k = 4t + 2*product + j of row n
        found = [registers(4 * count, "uint32") for _ in range(2 if self.precision == "fp32" else 1)]
        for product in range(2):
            for j in range(2):
                for n in range(count):
                    at, value = (product * 2 + j) * count + n, values[4 * n + 2 * product + j]
                    if self.precision == "fp32":
                        put(found[0], at, bits(value))
                        split_in_place(found[0], found[1], at)
                    else:
                        T.evaluate(T.ptx["cvt.rna.tf32.f32"](found[0][at], value))
        return found

    def _product(self, a: list[Buffer], b: list[Buffer], at: int) -> None:
        if self.precision in ("bf16", "fp16"):
            mma(self.precision, self.acc, at, a[0], 0, b[0], 0)
            return
        if self.precision == "fp32":
            add_products(self.acc, at, (a[0], a[1]), 0, (b[0], b[1]), 0, steps=2)
            return
        for product in range(2):
            mma("tf32", self.acc, at, a[0], 4 * product, b[0], 2 * product)

    # results

    def _finish(self) -> None:
        problem, tiles, block = self.problem, self.tiles, self.block
        shared_k = tiles.shares > 1
        target = block["partials" if shared_k else "y"]
        start = self.start_y + (block.z * problem.elements[2] if shared_k else 0)
        finish: Finish = (lambda row, column, value: value) if shared_k else finishing(problem, block)
        columns = tiles.warp_columns // 8
        for i in range(0, tiles.warp_rows, 16):
            for half in range(2):
                row = T.bind(self.tile * tiles.rows + self.row + (i + 8 * half))
                for j in range(columns):
                    # lane t of four has columns 2t and 2t+1
                    base = block.y * tiles.columns + self.column - block.lane // 4 + block.lane % 4 * 2 + 8 * j
                    column = T.bind(base)
                    at = 4 * ((i // 16) * columns + j) + 2 * half
                    _put_pair(problem, target, start, row, column, finish, self.acc, at, tiles)


Finish = Callable[[Expr, Expr, Expr], Expr]  # (row, column, sum) -> what y has there


def finishing(problem: GemmProblem, block: Block) -> Finish:
    """Make the function that gives alpha*sum + beta*C at (row, column); alpha*sum where there is no C."""

    def finish(row: Expr, column: Expr, value: Expr) -> Expr:
        if "c" not in block:
            return f32(problem.alpha) * value
        by_row, by_column = problem.bias_strides
        return fma(f32(problem.alpha), value, f32(problem.beta) * block["c"][row * by_row + column * by_column])

    return finish


def _put_pair(
    problem: GemmProblem,
    target: Buffer,
    start: Expr,
    row: Expr,
    column: Expr,
    finish: Finish,
    acc: Buffer,
    at: int,
    tiles: Tiles,
) -> None:
    """Store two neighbouring columns, in one access where rows have an even length."""
    row_exists = True if problem.m % tiles.rows == 0 else row < problem.m
    index = start + row * problem.n + column

    def exists(offset: int) -> Expr:
        return all_of(row_exists, True if problem.n % tiles.columns == 0 else column + offset < problem.n)

    def one(i: int) -> None:
        put(target, index + i, finish(row, column + i, acc[at + i]))

    def both() -> None:
        made = registers(2)
        for i in range(2):
            put(made, i, finish(row, column + i, acc[at + i]))
        T.buffer_store(target, made[T.ramp(0, 1, 2)], [T.ramp(index, 1, 2)])

    if problem.n % 2 == 0:
        when(exists(0), both)
    else:
        for i in range(2):
            when(exists(i), functools.partial(one, i))


def _merge(name: str, problem: GemmProblem, tiles: Tiles, params: list[Param]) -> Stage:
    """Merge partials, [c] -> y: the shares of k are added up in order, a thread for up to four columns."""
    width = math.gcd(problem.n, 4)
    results = problem.elements[2]
    total = results // width
    with stage(name, params, grid=(-(-total // MERGE_THREADS), 1, 1), threads=MERGE_THREADS) as block:
        own = T.bind(block.x * MERGE_THREADS + block.tid)
        span = (lambda at: at) if width == 1 else (lambda at: T.ramp(at, 1, width))

        def merge() -> None:
            sums, part = registers(width), registers(width)
            first = T.bind(own * width)
            T.buffer_store(sums, block["partials"][span(first)], [span(0)])
            with T.serial(1, tiles.shares, unroll=tiles.shares <= 16) as share:
                T.buffer_store(part, block["partials"][span(share * results + first)], [span(0)])
                for i in range(width):
                    put(sums, i, sums[i] + part[i])
            row = T.bind(first // problem.n)
            finish = finishing(problem, block)
            for i in range(width):
                put(sums, i, finish(row, first - row * problem.n + i, sums[i]))
            T.buffer_store(block["y"], sums[span(0)], [span(first)])

        when(True if total % MERGE_THREADS == 0 else own < total, merge)
    return block.stage
