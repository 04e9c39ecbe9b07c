"""The sum of any number of maps in one sweep, each in its own slot: y = x0 + x1 + ... , added from left to right."""

from __future__ import annotations

from bnfuse.runtime.kernels.common.maps import SumProblem
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.steps import Expr
from bnfuse.runtime.kernels.cpu.sweep import Args, Vector, prim_func, sweep
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Param
from bnfuse.runtime.targets.target import CpuTarget


def sum_maps(xs: tuple[MapType, ...], y: MapType, target: CpuTarget) -> Kernel:
    """Make the kernel x0, x1, ... -> y, maps of one size."""
    problem = SumProblem(xs, y)
    maps = {**{f"x{i}": x for i, x in enumerate(xs)}, "y": y}
    params = tuple(
        Param(name, "out" if name == "y" else "in", kind.elements, kind.dtype, is_map=True)
        for name, kind in maps.items()
    )

    def emit(args: Args) -> None:
        def visit(pixel: Expr, vector: Vector, is_first: Expr) -> None:
            with vector.each() as j:
                total = args.read("x0", pixel, vector.base + j)
                for i in range(1, len(xs)):
                    total = total + args.read(f"x{i}", pixel, vector.base + j)
                args.write("y", pixel, vector.base + j, total)

        sweep(y.pixels, y.c, target, visit)

    name = unique_name("SumMaps", problem, target)
    return Kernel(name, problem, target, params, lambda: prim_func(name, params, maps, emit))
