"""Linear maps along one axis, as matrices [out, in]: what Resize, Upsample and Pad do to a map, axis after axis.

A row has the few inputs that its output is a mixture of: one of nearest and of Pad, two of linear, four of cubic, more
where antialiasing widens the window. The gradient is the transposed matrix, so all of these have one here.

Coordinates are float32 and lengths whole numbers, as in onnxruntime: which of two pixels is the nearer one, and where a
crop ends, depends on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bnfuse.core.errors import BnfuseError
from bnfuse.core.windows import axes_of

Matrices = dict[int, npt.NDArray[np.float32]]  # axis -> [out, in]
FloatArray = npt.NDArray[np.float32]
Coordinates = Callable[["ResizedAxis", FloatArray], FloatArray]

RADIUS = {"linear": 1, "cubic": 2}
PAD_MODES = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}  # of ONNX, as numpy calls them
F32 = np.float32


@dataclasses.dataclass(frozen=True)
class Resampling:
    """How a Resize finds where an output lies in the input, and what it makes of the neighbours there."""

    mode: str = "nearest"
    coordinates: str = "half_pixel"
    rounding: str = "round_prefer_floor"
    cubic: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    beyond: float = 0.0  # of tf_crop_and_resize, where the crop leaves the map

    @staticmethod
    def of(op_type: str, attributes: Mapping[str, Any]) -> Resampling:
        """Read the attributes of a Resize or an Upsample. Raises BnfuseError for a mode that ONNX has not."""
        mode = text(attributes.get("mode", "nearest"))
        if op_type == "Upsample":
            found = Resampling(mode, "asymmetric", "floor")
        else:
            found = Resampling(
                mode,
                text(attributes.get("coordinate_transformation_mode", "half_pixel")),
                text(attributes.get("nearest_mode", "round_prefer_floor")),
                float(attributes.get("cubic_coeff_a", -0.75)),
                bool(attributes.get("exclude_outside", 0)),
                bool(attributes.get("antialias", 0)),
                float(attributes.get("extrapolation_value", 0.0)),
            )
        for value, known in ((found.mode, ("nearest", *RADIUS)), (found.coordinates, COORDINATES)):
            if value not in known:
                raise BnfuseError(f"has the mode '{value}': choose one of {', '.join(known)}")
        if found.rounding not in NEAREST:
            raise BnfuseError(f"has nearest_mode '{found.rounding}': choose one of {', '.join(NEAREST)}")
        return found


def text(value: Any) -> str:
    """Give an attribute that is a word as str; protobuf has it as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


# -- nodes ---------------------------------------------------------------------------------------------------------


def resize_matrices(
    op_type: str,
    attributes: Mapping[str, Any],
    shape: Sequence[int],
    *,
    roi: npt.ArrayLike | None = None,
    scales: npt.ArrayLike | None = None,
    sizes: npt.ArrayLike | None = None,
) -> Matrices:
    """Give the matrix [out, in], float32, of each axis that a Resize or an Upsample of a tensor of `shape` changes.

    Either `scales` or `sizes` is given, both as the node has them: for all axes, or for those of its `axes`. Axes that
    stay as they are have no matrix. Raises BnfuseError, with what the node "has", for what is no linear map or in no
    version of ONNX.
    """
    how = Resampling.of(op_type, attributes)
    found: Matrices = {}
    for part in resized_axes(attributes, shape, roi=roi, scales=scales, sizes=sizes):
        if part.stays and how.coordinates != "tf_crop_and_resize":
            continue
        matrix = resize_matrix(part, how)
        if matrix.shape[0] != matrix.shape[1] or (matrix != np.eye(len(matrix), dtype=F32)).any():
            found[part.axis] = matrix
    return found


@dataclasses.dataclass(frozen=True)
class ResizedAxis:
    """One axis of a Resize: `out` of `size` elements, `scale` apart, of the part [start, end] of it (of 1)."""

    axis: int
    size: int
    out: int
    scale: float
    start: float = 0.0
    end: float = 1.0

    @property
    def stays(self) -> bool:
        """Tell whether nothing is resampled: runtimes leave an axis of scale 1 alone."""
        return self.size == self.out and self.scale == 1.0


def resized_axes(
    attributes: Mapping[str, Any],
    shape: Sequence[int],
    *,
    roi: npt.ArrayLike | None = None,
    scales: npt.ArrayLike | None = None,
    sizes: npt.ArrayLike | None = None,
) -> list[ResizedAxis]:
    """List the axes that a Resize is told of, with their lengths before and behind it.

    Raises BnfuseError where the operands do not fit the axes.
    """
    axes = [int(axis) % len(shape) for axis in attributes.get("axes") or range(len(shape))]
    given_scales = np.zeros(0, F32) if scales is None else np.asarray(scales, F32).reshape(-1)
    given_sizes = np.zeros(0, np.int64) if sizes is None else np.asarray(sizes, np.int64).reshape(-1)
    lengths = np.array([shape[axis] for axis in axes], F32)
    if given_sizes.size not in (0, len(axes)) or given_scales.size != (0 if given_sizes.size else len(axes)):
        counts = f"{given_scales.size} scales and {given_sizes.size} sizes for {len(axes)} axes"
        raise BnfuseError(f"has {counts}: give one of either for each axis")
    if given_sizes.size:
        given_scales = (given_sizes.astype(F32) / lengths).astype(F32)
        policy = text(attributes.get("keep_aspect_ratio_policy", "stretch"))
        if policy != "stretch":
            one = np.min(given_scales) if policy == "not_larger" else np.max(given_scales)
            given_scales = np.full(len(axes), one, F32)
            given_sizes = np.floor(one * lengths + F32(0.5)).astype(np.int64)
    else:
        given_sizes = np.floor(given_scales * lengths).astype(np.int64)
    if (given_sizes < 1).any() or (given_scales <= 0).any():
        raise BnfuseError(f"makes {given_sizes.tolist()} elements along its axes {axes}: make it at least one of each")
    corners = np.asarray([] if roi is None else roi, F32).reshape(-1)
    if corners.size not in (0, 2 * len(axes)):
        raise BnfuseError(f"has a roi of {corners.size} numbers for {len(axes)} axes: give two for each axis")
    starts, ends = corners.reshape(2, -1) if corners.size else (np.zeros(len(axes), F32), np.ones(len(axes), F32))
    return [
        ResizedAxis(axis, shape[axis], int(given_sizes[i]), float(given_scales[i]), float(starts[i]), float(ends[i]))
        for i, axis in enumerate(axes)
    ]


def pad_matrices(mode: str, pads: Sequence[int], axes: Sequence[int] | None, shape: Sequence[int]) -> Matrices:
    """Give the matrix [out, in], float32, of each axis that a Pad in mode reflect, edge or wrap changes.

    `pads` are the node's: all befores, then all behinds, of `axes` (all axes if None). Raises BnfuseError, with what
    the node "has", for another mode and for pads that do not fit.
    """
    axes = [axis % len(shape) for axis in (range(len(shape)) if axes is None else axes)]
    if mode not in PAD_MODES or len(pads) != 2 * len(axes):
        raise BnfuseError(f"has {len(pads)} pads for {len(axes)} axes in mode '{mode}': give two for each axis")
    pairs = zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True)
    return {axis: pad_matrix(mode, shape[axis], before, after) for axis, before, after in pairs if before or after}


def mean_matrices(window: Mapping[str, Any], shape: Sequence[int]) -> Matrices:
    """Give the matrix [out, in], float32, of each axis of an AveragePool of [N, C, ...]: the mean of its windows.

    `window` has its attributes, pads made explicit. A window of more axes is the product of those along each.
    """
    ceil, padding_counts = bool(window.get("ceil_mode")), bool(window.get("count_include_pad"))
    found: Matrices = {}
    for number, axis in enumerate(axes_of(window, shape[2:]), 2):
        taps = np.arange(axis.count(ceil))[:, None] * axis.stride + np.arange(axis.kernel) * axis.dilation
        inside = (taps >= axis.before) & (taps < axis.before + axis.size)
        counted = taps < axis.before + axis.size + axis.after if padding_counts else inside
        matrix = np.zeros((len(taps), axis.size), F32)
        rows, places = np.nonzero(inside)
        matrix[rows, taps[rows, places] - axis.before] = (1 / counted.sum(1))[rows]
        found[number] = matrix
    return found


# -- one axis ------------------------------------------------------------------------------------------------------


def pad_matrix(mode: str, size: int, before: int, after: int) -> FloatArray:
    """Give the matrix [before + size + after, size] of a Pad along one axis; negative pads cut off first.

    Raises BnfuseError where nothing is left to be repeated.
    """
    kept = np.arange(size)[max(-before, 0) : size - max(-after, 0)]
    if not len(kept):
        raise BnfuseError(f"has pads that cut off all {size} elements of an axis: make them smaller")
    indices = np.pad(kept, (max(before, 0), max(after, 0)), mode=PAD_MODES[mode])  # type: ignore[call-overload]
    return _picked(indices, size)


def resize_matrix(part: ResizedAxis, how: Resampling) -> FloatArray:
    """Give the matrix [out, size] of a Resize along one axis.

    Raises BnfuseError where the crop leaves the map and what lies there is not 0.
    """
    x = COORDINATES[how.coordinates](part, np.arange(part.out, dtype=F32)).astype(F32)
    if how.mode == "nearest":
        matrix = _picked(NEAREST[how.rounding](x).astype(np.int64).clip(0, part.size - 1), part.size)
    else:
        matrix = _mixed(x.astype(np.float64), part, how).astype(F32)
    if how.coordinates == "tf_crop_and_resize":
        outside = (x < 0) | (x > part.size - 1)
        if outside.any() and how.beyond:
            raise BnfuseError(
                f"has extrapolation_value={how.beyond:g} and a crop that leaves the map: only 0 is supported there"
            )
        matrix[outside] = 0
    return matrix


def _picked(indices: npt.NDArray[np.int64], size: int) -> FloatArray:
    matrix = np.zeros((len(indices), size), F32)
    matrix[np.arange(len(indices)), indices] = 1
    return matrix


def _mixed(x: npt.NDArray[np.float64], part: ResizedAxis, how: Resampling) -> npt.NDArray[np.float64]:
    """Weigh the neighbours of each coordinate by their distance; what lies outside of the map is its edge, or nothing.

    Antialiasing stretches the window over all the pixels that an output stands for.
    """
    stretch = min(part.scale, 1.0) if how.antialias else 1.0
    reach = int(np.ceil(RADIUS[how.mode] / stretch))
    taps = np.floor(x).astype(np.int64)[:, None] + np.arange(1 - reach, 1 + reach)
    distance = np.abs(taps - x[:, None]) * stretch
    weights = np.maximum(1 - distance, 0) if how.mode == "linear" else cubic_kernel(distance, how.cubic)
    if how.exclude_outside:
        weights = np.where((taps >= 0) & (taps < part.size), weights, 0.0)
    if how.exclude_outside or how.antialias:
        weights = weights / weights.sum(1, keepdims=True)
    matrix = np.zeros((part.out, part.size))
    np.add.at(matrix, (np.arange(part.out)[:, None], taps.clip(0, part.size - 1)), weights)
    return matrix


def cubic_kernel(distance: npt.NDArray[np.float64], a: float) -> npt.NDArray[np.float64]:
    """Give Keys' cubic of a distance of 0 and more."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * a - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))


def _half_pixel(part: ResizedAxis, o: FloatArray) -> FloatArray:
    found: FloatArray = (o + F32(0.5)) / F32(part.scale) - F32(0.5)
    return found


def _symmetric(part: ResizedAxis, o: FloatArray) -> FloatArray:
    adjustment = F32(part.out) / (F32(part.scale) * F32(part.size))
    found: FloatArray = F32(part.size) / F32(2) * (F32(1) - adjustment) + _half_pixel(part, o)
    return found


def _align_corners(part: ResizedAxis, o: FloatArray) -> FloatArray:
    found: FloatArray = o * F32(part.size - 1) / F32(max(part.out - 1, 1))
    return found


def _crop(part: ResizedAxis, o: FloatArray) -> FloatArray:
    last = F32(part.size - 1)
    if part.out == 1:
        return np.full_like(o, F32(0.5) * (F32(part.start) + F32(part.end)) * last)
    found: FloatArray = F32(part.start) * last + o * (F32(part.end) - F32(part.start)) * last / F32(part.out - 1)
    return found


COORDINATES: dict[str, Coordinates] = {  # where the o-th output lies in the input
    "half_pixel": _half_pixel,
    "half_pixel_symmetric": _symmetric,
    "pytorch_half_pixel": lambda part, o: _half_pixel(part, o) if part.out > 1 else np.zeros_like(o),
    "align_corners": _align_corners,
    "asymmetric": lambda part, o: o / F32(part.scale),
    "tf_half_pixel_for_nn": lambda part, o: (o + F32(0.5)) / F32(part.scale),
    "tf_crop_and_resize": _crop,
}
NEAREST: dict[str, Callable[[FloatArray], FloatArray]] = {
    "round_prefer_floor": lambda x: np.ceil(x - F32(0.5)),
    "round_prefer_ceil": lambda x: np.floor(x + F32(0.5)),
    "floor": np.floor,
    "ceil": np.ceil,
}
