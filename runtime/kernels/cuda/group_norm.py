"""The halves of a GroupNorm that stand alone, on a GPU.

sweeps:        a block has some vectors of channels of one image, and all of its pixels: nothing is merged
coefficients:  a block has one group of one sample, then a thread one channel of all samples
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.script.ir_builder import tirx as T

from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.runtime.kernels.common.group_norm import OVER_SAMPLES, GroupProblem, write_group, write_sums
from bnfuse.runtime.kernels.common.norm import NormProblem
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.device import Block, Buffer, Expr, Stage
from bnfuse.runtime.kernels.cuda.norm import swept
from bnfuse.runtime.kernels.cuda.operand import load_vector
from bnfuse.runtime.kernels.cuda.partials import Moments, Team, join_sums, write_row
from bnfuse.runtime.kernels.cuda.rows import BlockRows
from bnfuse.runtime.kernels.cuda.sweep import Sweep
from bnfuse.runtime.kernels.cuda.vector import Reader, width_of
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Param
from bnfuse.runtime.targets.target import CudaTarget

# chosen by hand
SLICE = 8  # vectors of channels of a block
THREADS = 256
MOST_UNROLLED = 4  # pixels that a thread has on their way


def group_norm_statistics(x: MapType, target: CudaTarget) -> Kernel:
    """Make the kernel: x -> mean, variance (biased), [n, c] float32."""
    sweep = image_sweep(x, width_of([x]))

    def emit(images: _Images, memory: Buffer) -> None:
        moments = Moments(sweep.team)
        moments.clear()
        images.visit(lambda: moments.add(images.reader.values["x"]))
        made = moments.join(images.block.tid, memory)
        images.write("mean", made)
        for j in range(sweep.team.width):
            d.put(made, j, made[sweep.team.width + j] / T.float32(sweep.pixels))
        images.write("variance", made)

    return _kernel(NormProblem("GroupNormStatistics", (("x", x),)), target, sweep, sweep.team.statistics_bytes, emit)


def group_norm_grad_reduce(dz: MapType, x: MapType, target: CudaTarget) -> Kernel:
    """Make the kernel: dz, x, mean, inv_std -> dbeta, dgamma, [n, c] float32."""
    sweep = image_sweep(x, width_of([dz, x]))
    width = sweep.team.width

    def emit(images: _Images, memory: Buffer) -> None:
        sums = d.registers(2 * width)
        for k in range(2 * width):
            d.put(sums, k, T.float32(0))

        def add() -> None:
            for j in range(width):
                load = images.reader.load(j)
                dz_j = load("dz", False)
                d.put(sums, j, sums[j] + dz_j)
                gap = load("x", False) - load("mean", True)
                # scaled at once: inv_std stays in range where the plain product might not
                d.put(sums, width + j, d.fma(dz_j, gap * load("inv_std", True), sums[width + j]))

        images.visit(add)
        join_sums(sweep.team, images.block.tid, memory, sums, 2)
        images.write("dbeta", sums)
        for j in range(width):
            d.put(sums, j, sums[width + j])
        images.write("dgamma", sums)

    problem = NormProblem("GroupNormGradReduce", (("dz", dz), ("x", x)))
    return _kernel(problem, target, sweep, sweep.team.sums_bytes(2), emit, ("mean", "inv_std"))


def image_sweep(x: MapType, width: int) -> Sweep:
    """Deal the pixels of one image, and the channels in slices, to blocks that have all pixels each."""
    pixels, vectors = x.h * x.w, -(-x.c // width)
    columns = -(-vectors // SLICE)
    across = -(-vectors // columns)
    down = max(1, min(THREADS // across, pixels))
    passes = -(-pixels // down)
    unroll = min(MOST_UNROLLED, passes)
    return Sweep(pixels, x.c, Team(across, down, width), columns, unroll, -(-passes // unroll))


class _Images:
    """A block of a sweep over one image, `block.z`: its reader, and where its results go."""

    def __init__(self, block: Block, sweep: Sweep, maps: dict[str, MapType], vectors: Sequence[str]) -> None:
        self.block, self.sweep = block, sweep
        self.reader = Reader(block, maps, vectors, sweep.team.width, sweep.unroll)
        self.channel, self.left = sweep.channel(block)
        self.aligned = sweep.channels % 4 == 0

    def visit(self, add: Callable[[], None]) -> None:
        """Emit `add()` for each pixel of the image, its channels in the reader."""
        vectors, self.reader.vectors = self.reader.vectors, {}  # those of the image, and not of all
        for name, held in vectors.items():
            start = T.bind(self.block.z * self.sweep.channels + self.channel)
            load_vector(self.block[name], start, self.sweep.team.width, held, self.aligned, self.left)
        place = lambda pixel: self.block.z * self.sweep.pixels + pixel  # noqa: E731

        def at_pixel(_: Expr) -> None:
            self.reader.vectors = vectors
            add()

        swept(self.block, self.sweep, self.reader, self.channel, self.left, at_pixel, place)

    def write(self, result: str, values: Buffer) -> None:
        """Write the image's row of a result, by the threads of lane 0."""
        team, channels = self.sweep.team, self.sweep.channels

        def store() -> None:
            write_row(
                self.block[result], self.block.z, 1, channels, self.channel, team.width, values, self.left, self.aligned
            )

        d.when(True if team.down == 1 else team.lane(self.block.tid) == 0, store)


def _kernel(
    problem: NormProblem,
    target: CudaTarget,
    sweep: Sweep,
    shared: int,
    emit: Callable[[_Images, Buffer], None],
    vectors: Sequence[str] = (),
) -> Kernel:
    """Make the kernel of a half; what is no map of the problem is [n, c] float32."""
    op, maps = PLAIN_OPS[problem.op], dict(problem.maps)
    size, name = maps["x"].n * maps["x"].c, unique_name(problem.op, problem, target)
    params = tuple(
        Param(key, "in" if key in op.operands else "out", maps[key].elements, maps[key].dtype, is_map=True)
        if key in maps
        else Param(key, "in" if key in op.operands else "out", size)
        for key in (*op.operands, *op.results)
    )

    def build() -> tuple[Stage, ...]:
        grid = (1, sweep.columns, maps["x"].n)
        with d.stage(name, params, grid=grid, threads=sweep.team.threads, shared=shared) as block:
            memory = d.shared_memory(shared).view("float32") if shared else None
            emit(_Images(block, sweep, maps, vectors), memory)
        return (block.stage,)

    return Kernel(name, problem, target, params, build)


def group_coefficients(problem: GroupProblem, target: CudaTarget) -> Kernel:
    """Make the kernel of GroupNormFinalize or GroupNormGradFinalize."""
    params, name = problem.params, unique_name(problem.op, problem, target)

    def build() -> tuple[Stage, ...]:
        sums = {*OVER_SAMPLES} & {*PLAIN_OPS[problem.op].results}
        rows = BlockRows.of(problem.along_groups)
        own = [param for param in params if param.name not in sums]
        with d.stage(name, own, grid=rows.grid, threads=rows.threads) as block:
            within = rows.within(block)
            within.each(target, lambda row, at: write_group(problem, target, block, within, row, at))
        stages = [block.stage]
        if sums:
            rows = BlockRows.of(problem.along_samples)
            read = (*OVER_SAMPLES.values(), *(("mean", "inv_std") if problem.raw else ()))
            taken = [param for param in params if param.name in (*sums, *read)]
            with d.stage(f"{name}_sums", taken, grid=rows.grid, threads=rows.threads) as block:
                over = rows.within(block)
                over.each(target, lambda row, at: write_sums(problem, target, block, over, row, at))
            stages.append(block.stage)
        return tuple(stages)

    return Kernel(name, problem, target, params, build)
