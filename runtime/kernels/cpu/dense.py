"""Gemm and MatMul:  y = alpha * A * B + beta * C  in float32, any sizes, A or B stored transposed, one or a batch.

B as [k, n] (or both transposed): outer products. The threads share the columns.

    for block of k (64):   for 32 columns:  for 14 rows:    28 vector registers
        for k:                                              two vectors of B times 14 broadcast elements of A

B as [n, k], the weight of a classifier: A and B run along k, so dot products need no packing.

    for block of k (2048):  for 6 columns:  for 4 rows:     24 vector registers, summed across their lanes at the end
        for 16 k:                                           4 vectors of A times 6 of B

Of a batch with few of k (the scores of an attention) blocks of such a B are turned around in L1, for outer products.

Both add into y after each block of k. Where the columns are fewer than the threads need, the rows are shared instead.
Of a batch each thread has whole products, unless there are too few: then all threads share one after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.dense import GemmProblem, gemm_params
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.steps import Expr, f32, fma
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.sweep import Args, prim_func, vectors
from bnfuse.runtime.kernels.kernel import Kernel
from bnfuse.runtime.targets.target import CpuTarget

# Blocks of k, and the accumulators (28 and 24 of 32 vector registers): chosen by hand
OUTER_K, OUTER_ROWS, OUTER_VECTORS = 64, 14, 2
DOT_K, DOT_ROWS, DOT_COLUMNS = 2048, 4, 6
SHORT = 256  # of k: dot products that end before their sums across lanes pay


def gemm(problem: GemmProblem, target: CpuTarget) -> Kernel:
    """Make the kernel a, b, [c] -> y, flat float32. Raises BnfuseError as `gemm_params` does."""
    params = gemm_params(problem)
    name = unique_name("Gemm", problem, target)
    nest = nest_of(problem)
    return Kernel(name, problem, target, params, lambda: prim_func(name, params, {}, nest(problem, target).emit))


def nest_of(problem: GemmProblem) -> type[OuterProducts] | type[Dots]:
    """Choose the nest of a problem."""
    if not problem.trans_b or problem.trans_a:
        return OuterProducts
    return TurnedColumns if problem.batch and problem.k <= SHORT else Dots


@dataclasses.dataclass(frozen=True)
class Block:
    """A range of a dimension: `start` is an expression, `size` an int."""

    start: Expr
    size: int


def blocks(count: int, size: int, first: Expr = 0, last: Expr | None = None) -> Iterator[Block]:
    """Emit the loop over whole blocks (of which [first, last) only), then the rest, by `for block in blocks(...):`."""
    whole = count // size
    if whole:
        stop = whole if last is None else last
        with T.serial(0, stop - first) as i:
            yield Block((first + i) * size, size)
    if count % size and last is None:
        yield Block(tirx.const(whole * size, "int32"), count % size)


class _Nest:
    """What both nests share: the order of blocks, sharing among threads, and what happens to y."""

    rows: int
    columns: int
    depth: int
    start_a: Expr = 0  # of the product at work
    start_b: Expr = 0
    start_y: Expr = 0

    def __init__(self, problem: GemmProblem, target: CpuTarget) -> None:
        self.problem, self.target = problem, target
        self.one_pass = problem.k <= self.depth

    def emit(self, args: Args) -> None:
        self.args = args
        count, threads = self.problem.count, self.target.threads
        if count == 1:
            self._product(0, threads)
        elif count >= 2 * threads or count % threads == 0:
            with T.parallel(0, threads) as thread:
                first, own = tir.share(count, threads, thread)
                with T.serial(0, own) as i:
                    self._product(first + i, 1)
        else:
            with T.serial(0, count) as i:
                self._product(i, threads)

    def _product(self, number: Expr, threads: int) -> None:
        """Make one product, shared by so many threads."""
        problem = self.problem
        if problem.batch:
            self.start_a, self.start_b, self.start_y = problem.starts(number)
        by_columns = problem.n // self.columns >= threads or problem.n >= problem.m
        count, size = (problem.n, self.columns) if by_columns else (problem.m, self.rows)
        whole = count // size
        if threads == 1:
            self._share(by_columns, lambda: blocks(count, size))
            return
        if whole:
            threads = min(threads, whole)
            with T.parallel(0, threads) as thread:
                first = T.bind(thread * whole // threads)
                last = T.bind((thread + 1) * whole // threads)
                self._share(by_columns, lambda: blocks(count, size, first, last))
        if count % size:
            self._share(by_columns, lambda: iter([Block(tirx.const(whole * size, "int32"), count % size)]))

    def _share(self, by_columns: bool, own: Callable[[], Iterator[Block]]) -> None:
        """Make the part of y that one thread makes: `own` are its blocks of columns or of rows."""
        problem = self.problem

        def each_tile(depth: Block | None = None) -> Iterator[tuple[Block, Block]]:
            if by_columns:
                for columns in own():
                    self.begin(columns, depth)
                    for rows in blocks(problem.m, self.rows):
                        yield rows, columns
            else:
                for rows in own():
                    for columns in blocks(problem.n, self.columns):
                        self.begin(columns, depth)
                        yield rows, columns

        if not self.one_pass:
            for rows, columns in each_tile():
                self._start(rows, columns)
        for depth in blocks(problem.k, self.depth):
            for rows, columns in each_tile(depth):
                self.tile(rows, columns, depth)

    def begin(self, columns: Block, depth: Block | None) -> None:
        """Make ready for the tiles of some columns and one block of k: nothing by default."""

    def tile(self, rows: Block, columns: Block, depth: Block) -> None:
        raise NotImplementedError

    def _start(self, rows: Block, columns: Block) -> None:
        """Store beta*C in y, before the first block of k adds to it."""
        with T.serial(0, rows.size) as i:
            for vector in vectors(columns.size, self.target.lanes):
                with vector.each() as j:
                    row, column = rows.start + i, columns.start + vector.base + j
                    T.buffer_store(self.args["y"], self._bias(row, column), [self._at_y(row, column)])

    def a(self, row: Expr, k: Expr) -> Expr:
        """Read A[row, k] of the product."""
        return self.args["a"][self.start_a + self.problem.at_a(row, k)]

    def b(self, k: Expr, column: Expr) -> Expr:
        """Read B[k, column] of the product."""
        return self.args["b"][self.start_b + self.problem.at_b(k, column)]

    def _at_y(self, row: Expr, column: Expr) -> Expr:
        return self.start_y + row * self.problem.n + column

    def put(self, row: Expr, column: Expr, value: Expr) -> None:
        """Take alpha*value into y."""
        at = self._at_y(row, column)
        before = self._bias(row, column) if self.one_pass else self.args["y"][at]
        T.buffer_store(self.args["y"], fma(f32(self.problem.alpha), value, before), [at])

    def _bias(self, row: Expr, column: Expr) -> Expr:
        if self.problem.bias is None or not self.problem.beta:
            return f32(0.0)
        by_row, by_column = self.problem.bias_strides
        return f32(self.problem.beta) * self.args["c"][row * by_row + column * by_column]


class OuterProducts(_Nest):
    """Tiles of rows x vectors of columns in registers."""

    def __init__(self, problem: GemmProblem, target: CpuTarget) -> None:
        tiles = -(-problem.m // OUTER_ROWS)
        self.rows = -(-problem.m // tiles)  # 16 rows are two tiles of 8, not 14 and 2
        self.columns, self.depth = OUTER_VECTORS * target.lanes, OUTER_K
        super().__init__(problem, target)

    def tile(self, rows: Block, columns: Block, depth: Block) -> None:
        """Add to a tile of y the outer products of one block of k."""
        lanes = self.target.lanes
        pieces = [(v, min(lanes, columns.size - v)) for v in range(0, columns.size, lanes)]
        sums = tir.registers(rows.size * columns.size)
        for r in range(rows.size):
            for v, width in pieces:
                with T.vectorized(0, width) as j:
                    T.buffer_store(sums, f32(0.0), [r * columns.size + v + j])
        with T.serial(0, depth.size) as i:
            k = depth.start + i
            for r in range(rows.size):
                for v, width in pieces:
                    with T.vectorized(0, width) as j:
                        at = r * columns.size + v + j
                        a, b = self.a(rows.start + r, k), self.column(columns, depth, i, v + j)
                        T.buffer_store(sums, fma(a, b, sums[at]), [at])
        for r in range(rows.size):
            for v, width in pieces:
                with T.vectorized(0, width) as j:
                    self.put(rows.start + r, columns.start + v + j, sums[r * columns.size + v + j])

    def column(self, columns: Block, depth: Block, k: Expr, column: Expr) -> Expr:
        """Read B at a place within both blocks."""
        return self.b(depth.start + k, columns.start + column)


class TurnedColumns(OuterProducts):
    """Outer products with a B that is stored along k: a block of its columns lies in L1 as its rows do."""

    def begin(self, columns: Block, depth: Block | None) -> None:
        """Turn a block of B around."""
        if depth is None:
            return
        self.turned = tir.registers(self.columns * self.depth)
        with T.serial(0, columns.size) as column:
            for vector in vectors(depth.size, self.target.lanes):
                with vector.each() as j:
                    k = vector.base + j
                    value = self.b(depth.start + k, columns.start + column)
                    T.buffer_store(self.turned, value, [k * self.columns + column])

    def column(self, columns: Block, depth: Block, k: Expr, column: Expr) -> Expr:
        """Read B at a place within both blocks, where it has been turned."""
        return self.turned[k * self.columns + column]


class Dots(_Nest):
    """Tiles of rows x columns, each a vector of partial sums along k."""

    rows, columns, depth = DOT_ROWS, DOT_COLUMNS, DOT_K

    def tile(self, rows: Block, columns: Block, depth: Block) -> None:
        """Add to a tile of y the dot products along one block of k."""
        lanes = self.target.lanes
        tile = [(r, c) for r in range(rows.size) for c in range(columns.size)]
        sums = tir.registers(len(tile) * lanes)
        for i in range(len(tile)):
            with T.vectorized(0, lanes) as j:
                T.buffer_store(sums, f32(0.0), [i * lanes + j])
        for vector in vectors(depth.size, lanes):
            for i, (r, c) in enumerate(tile):
                with vector.each() as j:
                    k = depth.start + vector.base + j
                    a, b = self.a(rows.start + r, k), self.b(k, columns.start + c)
                    T.buffer_store(sums, fma(a, b, sums[i * lanes + j]), [i * lanes + j])
        for i, (r, c) in enumerate(tile):
            self.put(rows.start + r, columns.start + c, _across(sums, i * lanes, lanes))


def _across(sums: Any, start: int, lanes: int) -> Expr:
    """Add up `lanes` elements, pairwise."""
    parts = [sums[start + j] for j in range(lanes)]
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
