"""The windows of a pooling or a convolution along each axis: how many there are, and which no graph can have.

    window o covers o*stride - before + k*dilation, k in [0, kernel)

With ceil_mode a last window that hangs over the padded map counts if it starts inside the map or the padding before it,
as in torch and in ONNX from opset 22. onnxruntime 1.19 and onnx's shape inference count it wherever it starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

POOLS = ("MaxPool", "AveragePool")


@dataclasses.dataclass(frozen=True)
class Axis:
    """The windows along one axis of a map."""

    size: int
    kernel: int
    stride: int
    dilation: int
    before: int  # padding
    after: int

    @property
    def reach(self) -> int:
        """Elements from the first to the last of a window."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def room(self) -> int:
        """By how many elements the first window can move; negative where it does not fit."""
        return self.size + self.before + self.after - self.reach

    def count(self, ceil: bool) -> int:
        """Tell how many windows there are."""
        fitting = self.room // self.stride + 1
        hangs_over = ceil and self.room % self.stride and fitting * self.stride < self.size + self.before
        return fitting + bool(hangs_over)

    def count_of_onnxruntime(self, ceil: bool) -> int:
        """Give the same, with a last window that starts in the padding behind the map."""
        return self.room // self.stride + 1 + bool(ceil and self.room % self.stride)

    def overhang(self, ceil: bool) -> int:
        """Count the elements of the last window beyond the padding."""
        return max(0, (self.count(ceil) - 1) * self.stride - self.room)

    def has_empty(self, ceil: bool) -> bool:
        """Tell whether a window has no element of the map."""
        starts = (o * self.stride - self.before for o in range(self.count(ceil)))
        taps = range(0, self.reach, self.dilation)
        return any(not any(0 <= start + k < self.size for k in taps) for start in starts)


def axes_of(attributes: Mapping[str, Any], sizes: Sequence[int]) -> list[Axis]:
    """List the axes of windows over maps of these sizes (without batch and channels); its pads are explicit."""
    kernel = attributes["kernel_shape"]
    rank = len(kernel)
    strides, dilations = attributes.get("strides") or [1] * rank, attributes.get("dilations") or [1] * rank
    pads = attributes.get("pads") or [0] * (2 * rank)
    return [Axis(sizes[i], kernel[i], strides[i], dilations[i], pads[i], pads[i + rank]) for i in range(rank)]


def why_not(attributes: Mapping[str, Any], sizes: Sequence[int]) -> str | None:
    """Tell what is the matter with the windows of a pooling, whoever computes it, or None."""
    axes, ceil = axes_of(attributes, sizes), bool(attributes.get("ceil_mode"))
    if any(axis.room < 0 for axis in axes):
        return (
            f"has windows of {_by(axes, 'reach')} over maps of {_by(axes, 'size')} with pads="
            f"{list(attributes.get('pads') or [0] * 2 * len(axes))}: they do not fit. "
            "Use larger images, or a smaller window."
        )
    if any(axis.has_empty(ceil) for axis in axes):
        return "has a window that lies wholly in the padding: nothing is in it. Use less padding, or larger images."
    if is_miscounted(attributes, sizes):
        return (
            "has ceil_mode=1 and a last window that would start in the padding behind the map: onnxruntime counts it, "
            "torch does not. Set ceil_mode to 0."
        )
    return None


def is_miscounted(attributes: Mapping[str, Any], sizes: Sequence[int]) -> bool:
    """Tell whether onnxruntime counts a window that starts in the padding behind the map."""
    ceil = bool(attributes.get("ceil_mode"))
    return any(axis.count(ceil) != axis.count_of_onnxruntime(ceil) for axis in axes_of(attributes, sizes))


def resolved_pads(given: Mapping[str, Any], sizes: Sequence[int]) -> tuple[int, ...]:
    """List the padding of a convolution or pooling with its kernel_shape: begins, then ends. auto_pad is resolved."""
    kernel = given["kernel_shape"]
    rank = len(kernel)
    strides, dilations = given.get("strides") or [1] * rank, given.get("dilations") or [1] * rank
    mode = given.get("auto_pad") or "NOTSET"
    mode = mode.decode() if isinstance(mode, bytes) else mode
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        before, after = [], []
        for size, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
            windows = -(-size // stride)
            total = max((windows - 1) * stride + (k - 1) * dilation + 1 - size, 0)
            small, large = total // 2, total - total // 2
            before.append(small if mode == "SAME_UPPER" else large)
            after.append(large if mode == "SAME_UPPER" else small)
        return (*before, *after)
    if mode == "VALID":
        return (0,) * (2 * rank)
    return tuple(given.get("pads") or (0,) * (2 * rank))


def transposed_pads(
    attributes: Mapping[str, Any],
    sizes: Sequence[int],
    output_shape: Sequence[int] | None = None,
    output_padding: Sequence[int] = (0, 0),
    auto_pad: str = "NOTSET",
) -> tuple[int, ...]:
    """Give the pads of a transposed convolution of maps of these sizes, all befores, then all behinds.

    `attributes` has its explicit pads, which auto_pad or an output_shape replace.
    """
    rank = len(sizes)
    if output_shape is None and auto_pad == "NOTSET":
        return tuple(attributes["pads"])
    if output_shape is None and auto_pad == "VALID":
        return (0,) * (2 * rank)
    strides = attributes["strides"]
    wanted = [sizes[i] * strides[i] for i in range(rank)] if output_shape is None else [*output_shape][-rank:]
    unpadded = transposed_size({**attributes, "pads": (0,) * (2 * rank)}, sizes, output_padding)
    totals = [max(0, full - out) for full, out in zip(unpadded, wanted, strict=True)]
    smaller, larger = [total // 2 for total in totals], [total - total // 2 for total in totals]
    return (*smaller, *larger) if auto_pad == "SAME_UPPER" else (*larger, *smaller)


def transposed_size(
    attributes: Mapping[str, Any], sizes: Sequence[int], output_padding: Sequence[int] = (0, 0)
) -> tuple[int, ...]:
    """Give the sizes of the maps that a transposed convolution makes of maps of these sizes; its pads are explicit."""
    axes = axes_of(attributes, sizes)
    return tuple(
        (axis.size - 1) * axis.stride + axis.reach + more - axis.before - axis.after
        for axis, more in zip(axes, output_padding, strict=True)
    )


def _by(axes: Sequence[Axis], what: str) -> str:
    return "x".join(str(getattr(axis, what)) for axis in axes)
