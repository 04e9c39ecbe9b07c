"""The geometry of convolutions and poolings: plain Python integers, for the loop nests of all targets.

Towards the input, an index i is written  i = stride*u + e  (0 <= e < stride; e is its *residue*). Tap k of the kernel
reaches it from the output index  o = (i + pad - k*dilation)/stride, where that is an integer:  o = u + offset(e, k).
So, residue by residue, the gradient of the input is a convolution of stride one over u.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from bnfuse.runtime.kernels.common.sides import sides
from bnfuse.runtime.kernels.kernel import Problem


@dataclasses.dataclass(frozen=True)
class Axis:
    """One spatial axis: sizes of input and output, kernel size, stride, pads before and behind the input, dilation.

    Output o reads the inputs  o*stride - pad + k*dilation, k in [0, kernel).
    """

    size: int
    out: int
    kernel: int = 1
    stride: int = 1
    pad: int = 0
    dilation: int = 1
    behind: int = 0

    def offset(self, residue: int, tap: int) -> int | None:
        """Give o - u for this tap at this residue; None where the tap meets no output."""
        distance = residue + self.pad - tap * self.dilation
        return distance // self.stride if distance % self.stride == 0 else None

    def _offsets(self) -> Iterator[int]:
        yield 0
        for residue in range(self.stride):
            for tap in range(self.kernel):
                offset = self.offset(residue, tap)
                if offset is not None:
                    yield offset

    @property
    def low(self) -> int:
        """Give the smallest offset, at most 0."""
        return min(self._offsets())

    @property
    def high(self) -> int:
        """Give the largest offset, at least 0."""
        return max(self._offsets())

    @property
    def units(self) -> int:
        """Count the values of u that cover the input, and the output as well."""
        return max(-(-self.size // self.stride), self.out)

    @property
    def step(self) -> int:
        """Count the inputs from one position of a read tile to the next.

        What no tap meets is left out where that is regular.
        """
        return self.stride if self.kernel == 1 else 1

    @property
    def tile_stride(self) -> int:
        """Count the positions of a read tile from one output to the next."""
        return self.stride // self.step

    def reach(self, count: int) -> int:
        """Count the positions of a read tile that `count` neighbouring outputs take.

        Position i is input i*step - pad.
        """
        return (count - 1) * self.tile_stride + (self.kernel - 1) * self.dilation + 1

    def present(self, reach: int) -> tuple[int, int]:
        """Give the first of `reach` positions, from output 0 on, that is an input and not padding; and how many are."""
        first = -(-self.pad // self.step)
        last = (self.size - 1 + self.pad) // self.step
        return first, max(0, min(reach, last + 1) - first)


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A convolution of `n` images. `cin` and `cout` are channels of one group."""

    n: int
    rows: Axis
    columns: Axis
    cin: int
    cout: int
    groups: int

    @property
    def taps(self) -> int:
        """Count the places of the kernel, over rows and columns."""
        return self.rows.kernel * self.columns.kernel

    @property
    def is_pointwise(self) -> bool:
        """Tell whether every output pixel reads the input pixel of the same number and no other."""
        return all(
            a.kernel == 1 and a.stride == 1 and a.pad == 0 and a.out == a.size for a in (self.rows, self.columns)
        )


def spatial_axes(problem: Problem) -> tuple[Axis, Axis]:
    """Give rows and columns of a convolution or a pooling, from the map at its input to that at its output."""
    x, y = (problem.map(name) for name in sides(problem.spec))
    given = dict(problem.attributes)
    kernel, pads, strides = (given[name] for name in ("kernel_shape", "pads", "strides"))
    dilations = given.get("dilations", (1, 1))
    rows, columns = (
        Axis(size, out, kernel[i], strides[i], pads[i], dilations[i], pads[i + 2])
        for i, (size, out) in enumerate(((x.h, y.h), (x.w, y.w)))
    )
    return rows, columns


def convolution_of(problem: Problem) -> Convolution:
    """Give the geometry of a convolution's problem, forward or backward."""
    out, cin, *_ = problem.weight
    group = problem.attribute("group")
    return Convolution(problem.map("x").n, *spatial_axes(problem), cin, out // group, group)
