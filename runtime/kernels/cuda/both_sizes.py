"""The sizes of a tile of both gradients of a 1x1 convolution (weight_both.py): how it is cut up, and what follows."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from bnfuse.runtime.kernels.common.epilogue import EpiloguePlan
from bnfuse.runtime.kernels.cuda import wgmma
from bnfuse.runtime.kernels.cuda.correlation import Correlation
from bnfuse.runtime.kernels.cuda.device import Expr
from bnfuse.runtime.kernels.cuda.operand import Operand
from bnfuse.runtime.kernels.cuda.partials import Team
from bnfuse.runtime.kernels.cuda.weight_sizes import GroupPlan, GroupTile, brought_beside


@dataclasses.dataclass(frozen=True)
class BothPlan(GroupPlan):
    """Of a tile that gives dx of its input channels, too (weight_both.py).

    It has all outputs, `deep` times 64 for each group of four warps, of which each has 32 of the `inputs` in dx.
    """

    deep: int = 1

    @property
    def outputs(self) -> int:
        """Count the output channels."""
        return self.deep * super().outputs


@dataclasses.dataclass(frozen=True)
class BothTeam(Team):
    """Threads as the sums of products are dealt to them: four have a pixel of four warps, of which each has eight."""

    def vector(self, tid: Expr) -> Expr:
        """Find the vector of channels of a thread."""
        return tid // wgmma.GROUP * 4 + tid % 4

    def lane(self, tid: Expr) -> Expr:
        """Find the lane of a thread: which of the `down` that share its vector it is."""
        return tid % wgmma.GROUP // 4


@dataclasses.dataclass(frozen=True)
class BothTile(GroupTile):
    """Sizes of a tile of both gradients: behind the rest of shared memory lie its weights, [64 outputs][input], and the
    coefficients of dx's epilogue."""

    plan: BothPlan
    behind: int  # vectors of those coefficients

    own_inputs: ClassVar[int] = 32  # of four warps, in dx

    @property
    def buffers(self) -> tuple[int, int]:
        """Count the steps of dy and of x: one is read while `ahead` are filled."""
        return self.ahead + 1, self.ahead + 1

    @property
    def weight_column(self) -> int:
        """Count the bytes of the weights of 64 outputs."""
        return self.plan.inputs * self.row_bytes

    @property
    def weights_at(self) -> int:
        """Give the byte offset of the weights."""
        return -(-super().shared // wgmma.ALIGN) * wgmma.ALIGN

    @property
    def epilogue_at(self) -> int:
        """Give the byte offset of the epilogue's coefficients: [vector][channel]."""
        return self.weights_at + self.columns[0] * self.weight_column

    @property
    def shared(self) -> int:
        """Count the bytes of shared memory."""
        return self.epilogue_at + self.behind * self.plan.inputs * 4

    @property
    def team(self) -> BothTeam:
        """Lay out the threads over dx."""
        return BothTeam(self.plan.inputs // 8, 32, 8)


def both_tile_of(c: Correlation, plan: BothPlan, precision: str, gradient: Operand, source: Operand) -> BothTile:
    """Size the tile of a plan."""
    behind = len(EpiloguePlan(gradient.problem).vectors)
    return BothTile(c, plan, precision, *brought_beside(gradient, source), behind)
