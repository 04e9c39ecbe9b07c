"""The statistics that sampling is compared with, and their input gradients (BASELINE_OPS of bnfuse/opset/plain.py).

L1BN:    two sweeps over the map, as its deviation is taken from the mean; each with the stage that merges its tiles
RBN:     one sweep: sums, extremes, and how many elements attain them
dx:      one sweep, elementwise; what compares x with a statistic compares float32 with float32, as the forward did
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.opset.reference_sampling import range_factor
from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.common.norm import NormProblem
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.device import Block, Buffer, Expr, Stage
from bnfuse.runtime.kernels.cuda.norm import named, only, statistics_stages, swept, tile_sums, write_sums
from bnfuse.runtime.kernels.cuda.partials import Columns, join_lanes, merge_stage, sums_stage
from bnfuse.runtime.kernels.cuda.sweep import Sweep
from bnfuse.runtime.kernels.cuda.vector import Reader, Writer, width_of
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Param
from bnfuse.runtime.targets.target import CudaTarget

# -- L1BN ----------------------------------------------------------------------------------------------------------


def l1_statistics(x: MapType, target: CudaTarget) -> Kernel:
    """Make the kernel: x -> mean, variance = pi/2*(mean |x - mean|)^2, sign_mean = mean sign(x - mean).

    Results are [c] float32. The signs are those that `l1_grad_input` finds with the mean as float32. What that rounds
    away is the mean gap; with it the mean |gap| is that about the exact mean, but for what lies between the two.
    """
    problem = NormProblem("L1Statistics", (("x", x),))
    sweep = Sweep.of(x.pixels, x.c, width_of([x]), target, reads=1, sums=True)
    name, params = named(problem, target, sweep, 3)

    def add(reader: Reader, sums: Buffer) -> None:
        width = sweep.team.width
        for j in range(width):
            load = reader.load(j)
            gap = T.bind(load("x", False) - load("mean", True))
            for k, value in enumerate((tirx.abs(gap), steps.sign(gap), gap)):
                d.put(sums, k * width + j, sums[k * width + j] + value)

    def finish(means: Sequence[Expr]) -> Sequence[Expr]:
        deviation = T.bind(means[0] - means[2] * means[1])
        return d.wide(math.pi / 2) * deviation * deviation, means[1]

    def build() -> tuple[Stage, ...]:
        # of the first sweep only the mean stays: its variance is replaced
        of_mean = statistics_stages(f"{name}_mean", params, sweep, x)
        merge = sums_stage(
            f"{name}_merge",
            only(params, "partials", "variance", "sign_mean"),
            tiles=sweep.tiles,
            channels=x.c,
            results=["variance", "sign_mean"],
            count=x.pixels,
            quantities=3,
            finish=finish,
        )
        return (
            *of_mean,
            tile_sums(name, only(params, "x", "mean", "partials"), sweep, {"x": x}, ["mean"], 3, add),
            merge,
        )

    return Kernel(name, problem, target, params, build)


def l1_grad_input(dz: MapType, x: MapType, dx: MapType, target: CudaTarget) -> Kernel:
    """Make the kernel: dz, x, mean, p, q, w -> dx = p*dz + q*sign(x - mean) + w."""

    def value(load: steps.Load) -> Expr:
        side = steps.sign(T.bind(load("x", False) - load("mean", True)))
        return steps.fma(load("p", True), load("dz", False), steps.fma(load("q", True), side, load("w", True)))

    return _grad_input("L1GradInput", ("mean", "p", "q", "w"), dz, x, dx, target, value)


def _grad_input(
    op: str,
    vectors: Sequence[str],
    dz: MapType,
    x: MapType,
    dx: MapType,
    target: CudaTarget,
    value: Callable[[steps.Load], Expr],
) -> Kernel:
    problem = NormProblem(op, (("dz", dz), ("x", x), ("dx", dx)))
    sweep = Sweep.of(dx.pixels, dx.c, width_of([dz, x, dx]), target, reads=2, sums=False)
    name, params = named(problem, target, sweep)

    def build() -> tuple[Stage, ...]:
        width = sweep.team.width
        with d.stage(name, params, grid=sweep.grid, threads=sweep.team.threads) as block:
            reader = Reader(block, {"dz": dz, "x": x}, vectors, width, sweep.unroll)
            writer, values = Writer(block, "dx", dx, width), d.registers(width)
            channel, left = sweep.channel(block)

            def store(pixel: Expr) -> None:
                for j in range(width):
                    d.put(values, j, value(reader.load(j)))
                writer.store(values, pixel, channel, left)

            swept(block, sweep, reader, channel, left, store)
        return (block.stage,)

    return Kernel(name, problem, target, params, build)


# -- RBN -----------------------------------------------------------------------------------------------------------

MIN_BLOCKS = 2  # of a multiprocessor, chosen by hand: left to itself, the assembler keeps four, and spills
PARTS = ("mean", "low", "high", "low_count", "high_count")  # of a row of partials


def range_statistics(x: MapType, target: CudaTarget) -> Kernel:
    """Make the kernel: x -> mean, variance = ((high - low)*c)^2, low, high, low_count, high_count.

    Results are [c] float32.
    """
    problem = NormProblem("RangeStatistics", (("x", x),))
    sweep = Sweep.of(x.pixels, x.c, width_of([x]), target, reads=1, sums=True)
    name, params = named(problem, target, sweep, len(PARTS))

    def build() -> tuple[Stage, ...]:
        return (
            _ranges_stage(name, only(params, "x", "partials"), sweep, x),
            _merge_ranges(f"{name}_merge", [p for p in params if p.name != "x"], sweep),
        )

    return Kernel(name, problem, target, params, build)


class Extremes:
    """The least and the greatest of some values per channel, and how many attain them: registers [4][width]."""

    def __init__(self, width: int, dtype: str = "float32") -> None:
        self.width, self.dtype = width, dtype
        self.held = d.registers(4 * width, dtype)
        for j in range(width):
            for k, start in enumerate((math.inf, -math.inf, 0.0, 0.0)):
                d.put(self.held, k * width + j, tirx.const(start, dtype))

    def take(self, j: int, low: Expr, high: Expr, low_count: Expr, high_count: Expr) -> None:
        """Take in extremes of further values of channel j. NaN attains nothing."""
        for k, value, count in ((0, low, low_count), (1, high, high_count)):
            at, counted = k * self.width + j, (2 + k) * self.width + j
            value, own = T.bind(value), T.bind(self.held[at])
            beyond = T.bind(value < own if k == 0 else value > own)
            equal = tirx.Select(value == own, count, tirx.const(0, self.dtype))
            d.put(self.held, counted, tirx.Select(beyond, count, self.held[counted] + equal))
            d.put(self.held, at, tirx.Select(beyond, value, own))


def _ranges_stage(name: str, params: Sequence[Param], sweep: Sweep, x: MapType) -> Stage:
    """Build the stage of the tiles' PARTS. A thread sums x less its tile's first pixel: a large mean costs nothing."""
    team, width = sweep.team, sweep.team.width
    size = team.sums_bytes(len(PARTS))
    with d.stage(name, params, grid=sweep.grid, threads=team.threads, shared=size, min_blocks=MIN_BLOCKS) as block:
        memory = d.shared_memory(size).view("float32")
        channel, left = sweep.channel(block)
        reader = Reader(block, {"x": x}, (), width, sweep.unroll)
        shift, sums, extremes = d.registers(width), d.registers(width), Extremes(width)
        first = T.bind(block.x * sweep.rows)
        reader.open(channel, left, False)
        reader.fetch(0, first, sweep.holds(left))
        reader.unpack(0)
        for j in range(width):
            d.put(shift, j, reader.values["x"][j])
            d.put(sums, j, T.float32(0))

        def add(pixel: Expr) -> None:
            for j in range(width):
                value = reader.values["x"][j]
                d.put(sums, j, sums[j] + (value - shift[j]))
                extremes.take(j, value, value, T.float32(1), T.float32(1))

        swept(block, sweep, reader, channel, left, add)

        def combine(partner: Callable[[int], Expr]) -> None:
            for j in range(width):
                d.put(sums, j, sums[j] + partner(j))
                extremes.take(j, *(partner((1 + k) * width + j) for k in range(4)))

        own = [held[k] for held, count in ((sums, width), (extremes.held, 4 * width)) for k in range(count)]
        join_lanes(team, block.tid, memory, own, combine)
        count = T.bind(tirx.Cast("float32", tirx.Min(tirx.const(sweep.rows, "int32"), sweep.pixels - first)))
        made = d.registers(len(PARTS) * width)
        for j in range(width):
            d.put(made, j, shift[j] + sums[j] / count)
            for k in range(4):
                d.put(made, (1 + k) * width + j, extremes.held[k * width + j])
        write_sums(block, sweep, channel, left, len(PARTS), made)
    return block.stage


def _merge_ranges(name: str, params: Sequence[Param], sweep: Sweep) -> Stage:
    tiles, rows, total = sweep.tiles, sweep.rows, sweep.pixels
    factor = range_factor(total)

    def emit(block: Block, columns: Columns) -> None:
        total_of, extremes = d.registers(1, "float64"), Extremes(1, "float64")
        d.put(total_of, 0, tirx.const(0, "float64"))

        def add(tile: Expr, values: Callable[[int], Expr]) -> None:
            n = tirx.Select(
                tile == tiles - 1, tirx.const(float(total - rows * (tiles - 1)), "float64"), d.wide(float(rows))
            )
            d.put(total_of, 0, total_of[0] + n * values(0))
            extremes.take(0, *(values(1 + k) for k in range(4)))

        columns.sweep(block["partials"], len(PARTS), add)

        def combine(partner: Callable[[int], Expr]) -> None:
            d.put(total_of, 0, total_of[0] + partner(0))
            extremes.take(0, *(partner(1 + k) for k in range(4)))

        columns.join_by([total_of[0], *(extremes.held[k] for k in range(4))], combine)

        def store() -> None:
            width = T.bind((extremes.held[1] - extremes.held[0]) * d.wide(factor))
            results = [total_of[0] / d.wide(float(total)), *(extremes.held[k] for k in range(4)), width * width]
            for result, value in zip((*PARTS, "variance"), results, strict=True):
                d.put(block[result], columns.channel, tirx.Cast("float32", value))

        columns.first_lane(store)

    return merge_stage(name, params, tiles, sweep.channels, len(PARTS), emit)


def range_grad_input(dz: MapType, x: MapType, dx: MapType, target: CudaTarget) -> Kernel:
    """Make the kernel: dz, x, low, high, p, q_low, q_high, w -> dx.

    dx = p*dz + w, plus q_low where x = low, plus q_high where x = high.
    """

    def value(load: steps.Load) -> Expr:
        x_j, none = load("x", False), T.float32(0)
        at = [tirx.Select(x_j == load(end, True), load(f"q_{end}", True), none) for end in ("low", "high")]
        return steps.fma(load("p", True), load("dz", False), load("w", True) + (at[0] + at[1]))

    return _grad_input("RangeGradInput", ("low", "high", "p", "q_low", "q_high", "w"), dz, x, dx, target, value)
