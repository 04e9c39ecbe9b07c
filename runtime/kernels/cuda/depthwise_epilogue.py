"""What becomes of dx and of the sums of a depthwise convolution's gradients."""

from __future__ import annotations

import dataclasses

from bnfuse.opset.spec import OpSpec
from bnfuse.runtime.kernels.cuda.device import Block, Buffer
from bnfuse.runtime.kernels.cuda.partials import Team
from bnfuse.runtime.kernels.cuda.vector import BackwardEpilogue, Reductions
from bnfuse.runtime.kernels.kernel import Problem


def reductions_of(spec: OpSpec) -> Reductions:
    """Give the sums of dx. That of dy goes with dweight: its channels are those of dy."""
    found = Reductions.of(spec)
    return dataclasses.replace(found, totals=tuple(total for total in found.totals if not total.of_bias))


def own_taps(problem: Problem) -> int:
    """Count the sums a channel of dy that make dweight."""
    return problem.weight[2] * problem.weight[3] if problem.spec.core != "ConvGradInput" else 0


def quantities_of(problem: Problem) -> int:
    """Count the sums a channel of dy: the taps of dweight, and dbias."""
    return own_taps(problem) + ("BiasGrad" in problem.spec.epilogue)


class DepthwiseEpilogue(BackwardEpilogue):
    """The epilogue without BiasGrad."""

    def __init__(self, block: Block, problem: Problem, team: Team, shared: Buffer | None, passes: int = 1) -> None:
        super().__init__(block, problem, team, shared, passes)
        self.reductions = reductions_of(problem.spec)
