"""LayerNorms over the channels of each pixel, and their gradients, on a GPU.

rows:    a warp has a pixel; its lanes take channels next to each other, 32 at a time, and join their sums by shuffles
sums:    dscale and dbias, sums over pixels, in a sweep of their own: tiles of sweep.py, and a stage that merges them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.layer_norm import forward_problem, gradient_problem, params_of
from bnfuse.runtime.kernels.common.norm import NormProblem
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.device import WARP, Block, Buffer, Expr, Stage
from bnfuse.runtime.kernels.cuda.norm import only, swept, write_sums
from bnfuse.runtime.kernels.cuda.partials import join_sums, partials_param, sums_stage
from bnfuse.runtime.kernels.cuda.sweep import Sweep
from bnfuse.runtime.kernels.cuda.vector import Reader, width_of
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Param
from bnfuse.runtime.targets.target import CudaTarget

PIXELS = 8  # of a block, a warp each: chosen by hand


def layer_norm(x: MapType, y: MapType, target: CudaTarget, epsilon: float) -> Kernel:
    """Make the kernel x, scale, bias -> y, mean, inv_std; the last two [pixels] float32."""
    problem = forward_problem(x, y, epsilon)
    params, name = params_of(problem), unique_name(problem.op, problem, target)

    def visit(row: Row) -> None:
        (total,) = row.totals(1, lambda c: [row.read("x", c)])
        mean = T.bind(total / T.float32(x.c))

        def squared(channel: Expr) -> list[Expr]:
            gap = T.bind(row.read("x", channel) - mean)
            return [gap * gap]

        (squares,) = row.totals(1, squared)
        inv_std = T.bind(T.float32(1) / tirx.sqrt(squares / T.float32(x.c) + T.float32(epsilon)))

        def keep() -> None:
            d.put(row.block["mean"], row.pixel, mean)
            d.put(row.block["inv_std"], row.pixel, inv_std)

        d.when(row.block.lane == 0, keep)

        def store(c: Expr) -> None:
            normalised = (row.read("x", c) - mean) * inv_std
            row.write("y", c, d.fma(normalised, row.block["scale"][c], row.block["bias"][c]))

        row.along(store)

    return Kernel(name, problem, target, params, lambda: (_rows_stage(name, params, problem, visit),))


def layer_norm_grad(dy: MapType, x: MapType, dx: MapType, target: CudaTarget) -> Kernel:
    """Make the kernel dy, x, scale, mean, inv_std -> dx, dscale, dbias; the last two [c] float32."""
    problem = gradient_problem(dy, x, dx)
    sweep = Sweep.of(x.pixels, x.c, width_of([dy, x]), target, reads=2, sums=True)
    params = (*params_of(problem), partials_param(sweep.tiles, 2, x.c))
    name = unique_name(problem.op, problem, target)

    def visit(row: Row) -> None:
        mean, inv_std = (T.bind(row.block[each][row.pixel]) for each in ("mean", "inv_std"))

        def sums(c: Expr) -> list[Expr]:
            scaled = T.bind(row.read("dy", c) * row.block["scale"][c])
            return [scaled, scaled * ((row.read("x", c) - mean) * inv_std)]

        plain, along = (T.bind(total / T.float32(x.c)) for total in row.totals(2, sums))

        def store(c: Expr) -> None:
            normalised = (row.read("x", c) - mean) * inv_std
            own = row.read("dy", c) * row.block["scale"][c] - plain - normalised * along
            row.write("dx", c, own * inv_std)

        row.along(store)

    def build() -> tuple[Stage, ...]:
        rows = only(params, "dy", "x", "scale", "mean", "inv_std", "dx")
        merged = only(params, "partials", "dscale", "dbias")
        results = ["dscale", "dbias"]
        return (
            _rows_stage(name, rows, problem, visit),
            _sums_stage(f"{name}_sums", only(params, "dy", "x", "mean", "inv_std", "partials"), sweep, dy, x),
            sums_stage(f"{name}_merge", merged, tiles=sweep.tiles, channels=x.c, results=results),
        )

    return Kernel(name, problem, target, params, build)


class Row:
    """The channels of a pixel, as the warp sees them that has it."""

    def __init__(self, block: Block, problem: NormProblem, pixel: Expr) -> None:
        self.block, self.pixel, self.kinds = block, pixel, dict(problem.maps)
        self.channels = self.kinds["x"].c

    def along(self, emit: Callable[[Expr], None]) -> None:
        """Emit `emit(channel)` for the channels of this lane."""
        rounds, rest = divmod(self.channels, WARP)
        if rounds:
            with T.serial(0, rounds) as i:
                emit(T.bind(i * WARP + self.block.lane))
        if rest:
            d.when(self.block.lane < rest, lambda: emit(T.bind(rounds * WARP + self.block.lane)))

    def totals(self, count: int, values: Callable[[Expr], Sequence[Expr]]) -> list[Expr]:
        """Emit the sums over all channels of the `count` terms `values(channel)`; all lanes have them."""
        sums = d.registers(count)
        for place in range(count):
            d.put(sums, place, T.float32(0))

        def add(channel: Expr) -> None:
            for place, value in enumerate(values(channel)):
                d.put(sums, place, sums[place] + value)

        self.along(add)
        for distance in (16, 8, 4, 2, 1):
            for place in range(count):
                d.put(sums, place, sums[place] + d.shuffle_xor(sums[place], distance))
        return [T.bind(sums[place]) for place in range(count)]

    def read(self, name: str, channel: Expr) -> Expr:
        """Read a channel of a map as float32."""
        source = self.block.map(name, self.kinds[name])
        return d.element(source.buffer, source.at(self.pixel, channel), source.type.dtype)

    def write(self, name: str, channel: Expr, value: Expr) -> None:
        """Round a float32 to a channel of a map."""
        target = self.block.map(name, self.kinds[name])
        d.put_element(target.buffer, target.at(self.pixel, channel), value, target.type.dtype)


def _rows_stage(name: str, params: Sequence[Param], problem: NormProblem, visit: Callable[[Row], None]) -> Stage:
    """Build a stage in which each warp visits a pixel."""
    pixels = dict(problem.maps)["x"].pixels
    with d.stage(name, params, grid=(-(-pixels // PIXELS), 1, 1), threads=PIXELS * WARP) as block:
        pixel = T.bind(block.x * PIXELS + block.warp)
        d.when(d.below(pixel, pixels, pixels % PIXELS == 0), lambda: visit(Row(block, problem, pixel)))
    return block.stage


def _sums_stage(name: str, params: Sequence[Param], sweep: Sweep, dy: MapType, x: MapType) -> Stage:
    """Build the stage of the tiles' sums of dy*x_hat and of dy."""
    team, size, width = sweep.team, sweep.team.sums_bytes(2), sweep.team.width
    with d.stage(name, params, grid=sweep.grid, threads=team.threads, shared=size) as block:
        memory = d.shared_memory(size).view("float32")
        reader = Reader(block, {"dy": dy, "x": x}, (), width, sweep.unroll)
        sums: Buffer = d.registers(2 * width)
        for k in range(2 * width):
            d.put(sums, k, T.float32(0))
        channel, left = sweep.channel(block)

        def add(pixel: Expr) -> None:
            mean, inv_std = T.bind(block["mean"][pixel]), T.bind(block["inv_std"][pixel])
            for j in range(width):
                load = reader.load(j)
                gradient = T.bind(load("dy", False))
                d.put(sums, j, d.fma(gradient, (load("x", False) - mean) * inv_std, sums[j]))
                d.put(sums, width + j, sums[width + j] + gradient)

        swept(block, sweep, reader, channel, left, add)
        join_sums(team, block.tid, memory, sums, 2)
        write_sums(block, sweep, channel, left, 2, sums)
    return block.stage
