"""A sparse linear map along the rows or columns of a map (kernels/common/taps.py).

    thread: a pixel of y and a vector of channels; up to eight taps are fetched, then weighed and added, in float32

All threads of a pixel read one row of the table. What neighbouring pixels share comes from the caches. Channels
that are picked come one by one.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.taps import UNROLLED, TapsProblem, first_of, taps_params
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.device import Block, Expr, Stage
from bnfuse.runtime.kernels.cuda.operand import words_of
from bnfuse.runtime.kernels.cuda.sweep import Sweep
from bnfuse.runtime.kernels.cuda.vector import Reader, Writer, width_of
from bnfuse.runtime.kernels.kernel import Kernel
from bnfuse.runtime.targets.target import CudaTarget

NO_UNROLL = 9  # maps read at a pixel: a thread takes one pixel at a time


def taps(problem: TapsProblem, target: CudaTarget) -> Kernel:
    """Make the kernel x, index, [weight] -> y. Raises BnfuseError as `taps_params` does."""
    params = taps_params(problem)
    y = problem.y
    sweep = Sweep.of(y.pixels, y.c, width_of([problem.x, y]), target, reads=NO_UNROLL, sums=False)
    name = unique_name("Taps", problem, target)

    def build() -> tuple[Stage, ...]:
        with d.stage(name, params, grid=sweep.grid, threads=sweep.team.threads) as block:
            _emit(block, problem, sweep)
        return (block.stage,)

    return Kernel(name, problem, target, params, build)


def _emit(block: Block, problem: TapsProblem, sweep: Sweep) -> None:
    width = sweep.team.width
    at_a_time = min(problem.taps, UNROLLED)
    reader = Reader(block, {"x": problem.x}, (), width, at_a_time)
    writer = Writer(block, "y", problem.y, width)
    channel, left = sweep.channel(block)
    reader.open(channel, left, False)
    total = d.registers(width)
    picked = d.registers(width, "int32")
    for j in range(width) if problem.picks_channels else ():
        index = block["index"][channel + j]
        d.put(picked, j, index if left is None else tirx.if_then_else(j < left, index, T.int32(0)))

    def some(first: Expr, count: int, place: tuple[Expr, Expr, Expr]) -> None:
        for i in range(count):
            reader.fetch(i, T.bind(problem.source(place, block["index"][first + i])))
        for i in range(count):
            reader.unpack(i)
            weight = T.bind(block["weight"][first + i]) if problem.weighted else None
            for j in range(width):
                value = reader.values["x"][j]
                d.put(total, j, value if weight is None else d.fma(weight, value, total[j]))

    def pick(pixel: Expr) -> None:
        source = block.map("x", problem.x)
        per_word = 4 // d.size_of(problem.x.dtype)
        for word in range(words_of(problem.x, width)):
            found: Expr = T.uint32(0)
            for half in range(per_word):
                raw = source.buffer[source.at(pixel, picked[word * per_word + half])]
                if per_word == 1:
                    found = d.bits(raw)
                else:
                    found = tirx.bitwise_or(found, tirx.Cast("uint32", raw) << T.uint32(16 * half))
            d.put(reader.raw["x"], word, found)
        reader.unpack(0)
        writer.store(reader.values["x"], pixel, channel, left)

    def visit(pixel: Expr) -> None:
        place = tuple(T.bind(at) for at in problem.place(pixel))
        first = T.bind(first_of(problem, place))
        for j in range(width):
            d.put(total, j, T.float32(0))
        whole, rest = divmod(problem.taps, at_a_time)
        if whole == 1:
            some(first, at_a_time, place)
        else:
            with T.serial(0, whole) as i:
                some(T.bind(first + i * at_a_time), at_a_time, place)
        if rest:
            some(first + whole * at_a_time, rest, place)
        writer.store(total, pixel, channel, left)

    def finish(i: int, pixel: Expr, valid: Expr) -> None:
        d.when(valid, lambda: (pick if problem.picks_channels else visit)(T.bind(pixel)))

    sweep.run(block, left, lambda i, pixel, valid: None, finish)
