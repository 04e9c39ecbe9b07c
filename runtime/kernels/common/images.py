"""Sums of each image and channel, described once: what a step such as ImageGateHardSwish adds up of an element.

    y     ImageStatistics             mean and variance over each image
    dx    ImageReduce                 sums of dx and of dx*x
          ImageReduceOther            of dx and of dx*reduced_x
          ImageGate[Activation]       of dx*f(z), d = dx*f'(z), d*(x - mean), f'(z) and f'(z)*(x - mean); x is gated_x

Results are float32 [N, C]. A code generator brings the operands, adds up, and multiplies by the factors in the end. One
that cannot keep images apart leaves the step to the sweep `image_sums`, which each target has (`of_map`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from bnfuse.opset.spec import EPILOGUE_RESULTS, IMAGE_GATES, OpSpec, image_step
from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.common.params import operator_params
from bnfuse.runtime.kernels.common.steps import Expr, Load
from bnfuse.runtime.kernels.kernel import Param, Problem

DOTS = {"ImageReduce": ("x",), "ImageReduceOther": ("reduced_x",)}  # and the map by which dx is multiplied
SCALED = ("image_gamma", "image_tilt")  # sums of what is centred: they take the factor inv_std in the end


@dataclasses.dataclass(frozen=True)
class ImagePlan:
    """The step of a problem that sums over images."""

    problem: Problem
    step: str

    @staticmethod
    def of(problem: Problem) -> ImagePlan | None:
        """Plan the sums over images of a problem; None where it has none."""
        step = image_step(problem.spec.epilogue)
        return None if step is None else ImagePlan(problem, step)

    @property
    def statistics(self) -> bool:
        """Tell whether mean and variance of y are taken, and no sums of a gradient."""
        return self.step == "ImageStatistics"

    @property
    def results(self) -> tuple[str, ...]:
        """Name the results, [N, C] each, in the order of `terms`."""
        return EPILOGUE_RESULTS[self.step]

    @property
    def maps(self) -> tuple[str, ...]:
        """Name the maps that are read beside the gradient."""
        return {"ImageStatistics": (), **DOTS}.get(self.step, ("gated_x",))

    @property
    def vectors(self) -> tuple[str, ...]:
        """Name the per-channel vectors that are read for each element."""
        return ("gated_mean", "gated_a", "gated_b") if self.step in IMAGE_GATES else ()

    def factor(self, result: str) -> str | None:
        """Name the per-channel vector by which a sum is multiplied in the end, if there is one."""
        return "gated_inv_std" if result in SCALED else None

    def terms(self, value: Expr, load: Load, bind: Callable[[Expr], Expr]) -> tuple[Expr, ...]:
        """Write what an element of dx adds to each sum of a gradient; what is used twice goes through `bind`."""
        if self.step in DOTS:
            return value, value * load(DOTS[self.step][0], False)
        kind, x = IMAGE_GATES[self.step], bind(load("gated_x", False))
        attributes = dict(self.problem.attributes)
        z = bind(steps.normalize(x, load("gated_a", True), load("gated_b", True)))
        centred = bind(x - load("gated_mean", True))
        if kind is None:
            return value * z, value, value * centred, steps.f32(1.0), centred
        slope = bind(steps.activation_grad(f"{kind}Grad", steps.f32(1.0), z, attributes))
        sloped = bind(value * slope)
        gated = value * steps.apply_activation(kind, z, attributes)
        return gated, sloped, sloped * centred, slope, slope * centred


def of_map(problem: Problem) -> Problem:
    """Give the problem of summing over images alone, with what the operator made as its x or dy."""
    plan = ImagePlan.of(problem)
    assert plan is not None, problem.op
    core, made, read = ("Pointwise", "y", "x") if plan.statistics else ("PointwiseGrad", "dx", "dy")
    kept = {name: problem.map(name) for name in plan.maps}
    maps = {**kept, read: problem.map(made), made: problem.map(made)}
    spec = OpSpec((), core, (plan.step,))
    known = tuple((name, problem.attribute(name)) for name in spec.attributes)
    return Problem(spec.name, tuple(maps.items()), known)


def sums_params(problem: Problem) -> tuple[Param, ...]:
    """List the parameters of the sweep of `of_map`: the operator's without its map, which is there already."""
    made = "y" if "y" in problem.spec.results else "dx"
    return tuple(param for param in operator_params(problem) if param.name != made)


def source_of(problem: Problem) -> str:
    """Name the map that the sweep of `of_map` sums over."""
    return "dy" if problem.spec.is_gradient else "x"
