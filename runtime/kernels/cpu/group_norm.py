"""The halves of a GroupNorm that stand alone: sweeps over maps whose sums are by image, and coefficients by group.

parallel thread:                 a static share of the images
    for image:
        for tile:                of 16 pixels
            for pixel, vector:   add to sums (float32, per channel, L1)
            the tile's sums join the image's, float64
        results of the image, float32
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.runtime.kernels.common.group_norm import OVER_SAMPLES, GroupProblem, write_group, write_sums
from bnfuse.runtime.kernels.common.norm import NormProblem
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.steps import Expr, f64, to_f32
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.rows import ThreadRows
from bnfuse.runtime.kernels.cpu.sweep import TILE, Args, Moments, Reduction, Sum, Tile, Visit, prim_func, vectors
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Param
from bnfuse.runtime.targets.target import CpuTarget


def group_norm_statistics(x: MapType, target: CpuTarget) -> Kernel:
    """Make the kernel x -> mean, variance (biased), [n, c] float32."""

    def emit(args: Args) -> None:
        def image(first: Expr, at: Callable[[Expr], Expr]) -> tuple[Sequence[Reduction], Visit]:
            def finish(channel: Expr, mean: Expr, variance: Expr) -> None:
                T.buffer_store(args["mean"], to_f32(mean), [at(channel)])
                T.buffer_store(args["variance"], to_f32(variance), [at(channel)])

            moments = Moments(finish)

            def visit(pixel: Expr, vector: object, is_first: Expr) -> None:
                with vector.each() as j:  # type: ignore[attr-defined]
                    channel = vector.base + j  # type: ignore[attr-defined]
                    moments.add(channel, args.read("x", first + pixel, channel), is_first)

            return [moments], visit

        sweep_images(x, target, image)

    return _map_kernel(NormProblem("GroupNormStatistics", (("x", x),)), target, emit)


def group_norm_grad_reduce(dz: MapType, x: MapType, target: CpuTarget) -> Kernel:
    """Make the kernel dz, x, mean, inv_std -> dbeta, dgamma, [n, c] float32."""

    def emit(args: Args) -> None:
        def image(first: Expr, at: Callable[[Expr], Expr]) -> tuple[Sequence[Reduction], Visit]:
            def store(result: str, value: Expr, channel: Expr) -> None:
                T.buffer_store(args[result], to_f32(value), [at(channel)])

            dbeta = Sum(lambda c, total: store("dbeta", total, c))
            dgamma = Sum(lambda c, total: store("dgamma", total * f64(args["inv_std"][at(c)]), c))

            def visit(pixel: Expr, vector: object, is_first: Expr) -> None:
                with vector.each() as j:  # type: ignore[attr-defined]
                    channel = vector.base + j  # type: ignore[attr-defined]
                    d = args.read("dz", first + pixel, channel)
                    dbeta.add(channel, d)
                    gap = args.read("x", first + pixel, channel) - args["mean"][at(channel)]
                    dgamma.add(channel, d * gap)

            return [dbeta, dgamma], visit

        sweep_images(x, target, image)

    return _map_kernel(NormProblem("GroupNormGradReduce", (("dz", dz), ("x", x))), target, emit)


Image = Callable[[Expr, Callable[[Expr], Expr]], tuple[Sequence[Reduction], Visit]]


def sweep_images(x: MapType, target: CpuTarget, image: Image) -> None:
    """Emit the loops of the module's docstring.

    `image(first, at)` gives the sums of the image whose first pixel is `first`, of which channel c has its results at
    `at(c)`, and what visits its pixels.
    """
    pixels, threads = x.h * x.w, min(target.threads, x.n)
    size = min(TILE, pixels)
    with T.parallel(0, threads) as thread:
        start, count = tir.share(x.n, threads, thread)
        with T.serial(0, count) as number:
            n = T.bind(start + number)
            reductions, visit = image(T.bind(n * pixels), lambda channel: n * x.c + channel)
            for reduction in reductions:
                reduction.before_threads([pixels], x.c, target.lanes)
                reduction.begin_thread(0)
            with T.serial(0, -(-pixels // size)) as t:
                for reduction in reductions:
                    reduction.begin_tile()
                left = T.bind(tirx.Min(tirx.const(size, "int32"), pixels - t * size))
                with T.serial(0, left) as i:
                    for vector in vectors(x.c, target.lanes):
                        visit(t * size + i, vector, i == 0)
                for reduction in reductions:
                    reduction.end_tile(Tile(t * size, f64(left), f64(t * size)))
            for reduction in reductions:
                reduction.after_threads()


def _map_kernel(problem: NormProblem, target: CpuTarget, emit: Callable[[Args], None]) -> Kernel:
    """Make the kernel of a half; what is no map of the problem is [n, c] float32."""
    op, maps = PLAIN_OPS[problem.op], dict(problem.maps)
    size = maps["x"].n * maps["x"].c
    params = tuple(
        Param(name, "in" if name in op.operands else "out", maps[name].elements if name in maps else size,
              maps[name].dtype if name in maps else "float32", is_map=name in maps)
        for name in (*op.operands, *op.results)
    )  # fmt: skip
    name = unique_name(problem.op, problem, target)
    return Kernel(name, problem, target, params, lambda: prim_func(name, params, maps, emit))


def group_coefficients(problem: GroupProblem, target: CpuTarget) -> Kernel:
    """Make the kernel of GroupNormFinalize or GroupNormGradFinalize."""
    params, name = problem.params, unique_name(problem.op, problem, target)

    def emit(args: Args) -> None:
        groups = ThreadRows.of(problem.along_groups)
        groups.each(target, lambda row, at: write_group(problem, target, args, groups, row, at))
        if {*OVER_SAMPLES} & {*PLAIN_OPS[problem.op].results}:
            channels = ThreadRows.of(problem.along_samples)
            channels.each(target, lambda row, at: write_sums(problem, target, args, channels, row, at))

    return Kernel(name, problem, target, params, lambda: prim_func(name, params, {}, emit))
