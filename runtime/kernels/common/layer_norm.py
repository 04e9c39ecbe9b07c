"""LayerNorms over the channels of each pixel: the problems, and the parameters of their kernels on all targets."""

from __future__ import annotations

from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.runtime.kernels.common.norm import NormProblem
from bnfuse.runtime.kernels.kernel import Access, MapType, Param

OF_PIXELS = ("mean", "inv_std")  # one value for each pixel, float32


def forward_problem(x: MapType, y: MapType, epsilon: float) -> NormProblem:
    """Describe x, scale, bias -> y, mean, inv_std."""
    return NormProblem("LayerNorm", (("x", x), ("y", y)), (("epsilon", epsilon),))


def gradient_problem(dy: MapType, x: MapType, dx: MapType) -> NormProblem:
    """Describe dy, x, scale, mean, inv_std -> dx, dscale, dbias."""
    return NormProblem("LayerNormGrad", (("dy", dy), ("x", x), ("dx", dx)))


def params_of(problem: NormProblem) -> tuple[Param, ...]:
    """List the parameters: maps, vectors of the channels, and what there is one of for each pixel."""
    op, maps = PLAIN_OPS[problem.op], dict(problem.maps)
    found = []
    for name in (*op.operands, *op.results):
        access: Access = "in" if name in op.operands else "out"
        if name in maps:
            found.append(Param(name, access, maps[name].elements, maps[name].dtype, is_map=True))
        else:
            found.append(Param(name, access, maps["x"].pixels if name in OF_PIXELS else maps["x"].c))
    return tuple(found)
