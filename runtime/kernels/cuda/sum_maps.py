"""The sum of any number of maps in one sweep, each in its own slot: y = x0 + x1 + ... , added from left to right.

Up to four maps a pass are on their way at a time; many maps take several passes over the same registers.
"""

from __future__ import annotations

from bnfuse.runtime.kernels.common.maps import SumProblem
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.device import Block, Expr, Stage
from bnfuse.runtime.kernels.cuda.sweep import Sweep
from bnfuse.runtime.kernels.cuda.vector import Reader, Writer, width_of
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Param
from bnfuse.runtime.targets.target import CudaTarget

AT_A_TIME = 4  # maps of a pass: chosen by hand


def sum_maps(xs: tuple[MapType, ...], y: MapType, target: CudaTarget) -> Kernel:
    """Make the kernel: x0, x1, ... -> y, maps of one size; sums are float32."""
    problem = SumProblem(xs, y)
    sources = {f"x{i}": x for i, x in enumerate(xs)}
    params = (
        *(Param(name, "in", kind.elements, kind.dtype, is_map=True) for name, kind in sources.items()),
        Param("y", "out", y.elements, y.dtype, is_map=True),
    )
    sweep = Sweep.of(y.pixels, y.c, width_of([*xs, y]), target, reads=min(len(xs), AT_A_TIME), sums=False)
    name = unique_name("SumMaps", problem, target)

    def build() -> tuple[Stage, ...]:
        with d.stage(name, params, grid=sweep.grid, threads=sweep.team.threads) as block:
            _emit(block, sweep, sources, y)
        return (block.stage,)

    return Kernel(name, problem, target, params, build)


def _emit(block: Block, sweep: Sweep, sources: dict[str, MapType], y: MapType) -> None:
    width, names = sweep.team.width, list(sources)
    channel, left = sweep.channel(block)
    total = d.registers(width)
    writer = Writer(block, "y", y, width)
    readers = []
    for first in range(0, len(names), AT_A_TIME):
        part = {name: sources[name] for name in names[first : first + AT_A_TIME]}
        readers.append(Reader(block, part, (), width, sweep.unroll))
        readers[-1].open(channel, left, False)

    def finish(i: int, pixel: Expr, valid: Expr) -> None:
        def run() -> None:
            for number, reader in enumerate(readers):
                if number:
                    reader.fetch(i, pixel)
                reader.unpack(i)
                for name in reader.values:
                    for j in range(width):
                        value = reader.values[name][j]
                        d.put(total, j, value if name == "x0" else total[j] + value)
            writer.store(total, pixel, channel, left)

        d.when(valid, run)

    sweep.run(block, left, readers[0].fetch, finish)
