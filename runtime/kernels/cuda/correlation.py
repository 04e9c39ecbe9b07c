"""A convolution, forward or towards its input, as one form: sums over taps and channels of a source map.

    y[n, h, w, o] = sum over taps (r, s) and channels c of  source[n, h(r), w(s), c] * weight[o, tap, c]

Along each axis a destination index is  index*scale + phase, and its taps are at  index*mult + base[phase] + i*step.
Forward there is one phase. Towards the input of a convolution of stride s there are s phases, each with those taps of
the window that meet it: nothing is multiplied by zeros.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from bnfuse.runtime.kernels.common import geometry
from bnfuse.runtime.kernels.common.geometry import convolution_of
from bnfuse.runtime.kernels.common.sides import OF_RESULT
from bnfuse.runtime.kernels.cuda.merging import merged_groups
from bnfuse.runtime.kernels.kernel import MapType, Problem
from bnfuse.runtime.targets.target import CudaTarget


@dataclasses.dataclass(frozen=True)
class Phase:
    """The taps of one phase: `count` of them, the i-th is `tap + i*tap_step` of the window, `base + i*step` away."""

    tap: int
    count: int
    base: int


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of a correlation: destination and source pixels, and how taps move."""

    destination: int
    source: int
    window: int
    scale: int
    mult: int
    step: int
    tap_step: int
    phases: tuple[Phase, ...]

    @property
    def rows(self) -> int:
        """Count the destination indices of the largest phase."""
        return -(-self.destination // self.scale)

    @property
    def is_same(self) -> bool:
        """Tell whether source and destination have the same pixels, so that a tap is a constant distance."""
        return self.scale == 1 and self.mult == 1 and self.destination == self.source

    @property
    def reach(self) -> int:
        """Count the pixels that the taps of a `same` axis reach to either side."""
        phase = self.phases[0]
        return max(abs(phase.base), abs(phase.base + (phase.count - 1) * self.step))


def forward_axis(axis: geometry.Axis) -> Axis:
    """Describe an axis from the input to the output of a convolution."""
    taps = (Phase(0, axis.kernel, -axis.pad),)
    return Axis(axis.out, axis.size, axis.kernel, 1, axis.stride, axis.dilation, 1, taps)


def gradient_axis(axis: geometry.Axis) -> Axis:
    """Describe an axis towards the input: destination is the forward convolution's input, source its output."""
    stride, dilation, window = axis.stride, axis.dilation, axis.kernel
    common = math.gcd(stride, dilation)
    tap_step, step = stride // common, -(dilation // common)
    phases = []
    for phase in range(stride):
        taps = [r for r in range(min(window, tap_step)) if (phase + axis.pad - r * dilation) % stride == 0]
        if not taps:
            phases.append(Phase(0, 0, 0))
            continue
        count = len(range(taps[0], window, tap_step))
        phases.append(Phase(taps[0], count, (phase + axis.pad - taps[0] * dilation) // stride))
    return Axis(axis.size, axis.out, window, stride, 1, step, tap_step, tuple(phases))


@dataclasses.dataclass(frozen=True)
class Correlation:
    """`outputs` and `inputs` are channels of one group, which is `merged` groups of the convolution (merging.py)."""

    images: int
    vertical: Axis
    horizontal: Axis
    groups: int
    outputs: int
    inputs: int
    merged: int = 1

    @property
    def own_inputs(self) -> int:
        """Count the input channels that an output has weights for: those of one group of the convolution."""
        return self.inputs // self.merged

    @property
    def own_outputs(self) -> int:
        """Count the output channels of one group of the convolution."""
        return self.outputs // self.merged

    @property
    def taps(self) -> int:
        """Count the taps of the window."""
        return self.vertical.window * self.horizontal.window

    @property
    def flat_row(self) -> int:
        """Count the elements of a window's row, taps and channels as one axis, filled up to eights (weights.py)."""
        return -(-self.horizontal.window * self.inputs // 8) * 8

    @property
    def phases(self) -> int:
        """Count the phases, those of both axes combined."""
        return len(self.vertical.phases) * len(self.horizontal.phases)

    @property
    def rows(self) -> int:
        """Count the destination pixels of the largest phase; their order is image, row, column."""
        return self.images * self.vertical.rows * self.horizontal.rows

    @property
    def is_pointwise(self) -> bool:
        """Tell whether destination and source pixels are the same and there is one tap."""
        one = all(p == Phase(0, 1, 0) for axis in (self.vertical, self.horizontal) for p in axis.phases)
        return self.taps == 1 and one and self.vertical.is_same and self.horizontal.is_same

    @property
    def is_same(self) -> bool:
        """Tell whether source and destination have the same pixels along both axes."""
        return self.vertical.is_same and self.horizontal.is_same

    @property
    def halo(self) -> int:
        """Count the pixels that taps reach before the first, and behind the last, of a run of destination pixels."""
        return self.vertical.reach * self.horizontal.source + self.horizontal.reach


def merged_of(problem: Problem, target: CudaTarget) -> int:
    """Count the groups of a problem that are multiplied as one."""
    return merged_groups(problem.weight, problem.attribute("group"), target)


def with_groups_aligned(problem: Problem, target: CudaTarget) -> Problem:
    """Give a problem maps whose `align` holds at the first channel of every group that is multiplied, too."""
    outputs, per_group, *_ = problem.weight
    group, merged = problem.attribute("group"), merged_of(problem, target)
    at_input, at_output = merged * per_group, merged * outputs // group
    like_x, like_y = (at_output, at_input) if problem.spec.is_transposed else (at_input, at_output)
    maps = tuple(
        (name, dataclasses.replace(kind, align=math.gcd(kind.align, like_y if name in OF_RESULT else like_x)))
        for name, kind in problem.maps
    )
    return problem if group == merged else dataclasses.replace(problem, maps=maps)


@dataclasses.dataclass(frozen=True)
class FlatView:
    """Rows of a window as one axis of taps and channels: column s of row r, channel c at  r*flat_row + s*channels + c.

    `is_dense`: pixels of the source lie side by side and so do the taps, so that a row is a run of memory.
    """

    correlation: Correlation
    is_dense: bool

    @staticmethod
    def of(correlation: Correlation, maps: Iterable[MapType]) -> FlatView:
        """View the windows of a correlation over its source, and over the further maps of its prologue."""
        dense = all(kind.stride == kind.c and kind.spread == 1 for kind in maps)
        return FlatView(correlation, dense and correlation.groups == 1 and correlation.horizontal.step == 1)


def forward_correlation(problem: Problem, target: CudaTarget) -> Correlation:
    """Describe the convolution of a problem; of a gradient's what the weight gradient sums over."""
    c, m = convolution_of(problem), merged_of(problem, target)
    return Correlation(c.n, forward_axis(c.rows), forward_axis(c.columns), c.groups // m, m * c.cout, m * c.cin, m)


def gradient_correlation(problem: Problem, target: CudaTarget) -> Correlation:
    """Describe the convolution towards the input of a gradient's problem."""
    c, m = convolution_of(problem), merged_of(problem, target)
    return Correlation(c.n, gradient_axis(c.rows), gradient_axis(c.columns), c.groups // m, m * c.cin, m * c.cout, m)
