"""Sampled, local and baseline BatchNorm by their definitions, for torch's autograd to differentiate."""

from __future__ import annotations

import math
from typing import Any


def moments(part: Any) -> tuple[Any, Any]:
    """Mean and biased variance of [..., C, ...] maps or of [points, C]."""
    axes = [axis for axis in range(part.dim()) if axis != 1]
    return part.mean(axes), part.var(axes, correction=0)


def of_box(x: Any, offset: Any, extent: Any) -> tuple[Any, Any]:
    n, h, w = (slice(int(o), int(o) + int(e)) for o, e in zip(offset, extent, strict=True))
    return moments(x[n, :, h, w])


def of_points(x: Any, points: Any) -> tuple[Any, Any]:
    return moments(x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])[points])


def mixed(first: tuple[Any, Any], second: tuple[Any, Any], weight: float) -> tuple[Any, Any]:
    """[Chen18], eq. 4"""
    return tuple(weight * a + (1 - weight) * b for a, b in zip(first, second, strict=True))  # type: ignore[return-value]


def l1(x: Any) -> tuple[Any, Any]:
    mean = x.mean((0, 2, 3))
    return mean, math.pi / 2 * (x - mean[None, :, None, None]).abs().mean((0, 2, 3)) ** 2


def of_range(x: Any) -> tuple[Any, Any]:
    count = x.numel() // x.shape[1]
    factor = 1 / (2 * math.sqrt(2 * math.log(count))) if count > 1 else 0.0
    return x.mean((0, 2, 3)), ((x.amax((0, 2, 3)) - x.amin((0, 2, 3))) * factor) ** 2


def normalise(x: Any, statistics: tuple[Any, Any], scale: Any, bias: Any, epsilon: float) -> Any:
    mean, variance = (value[None, :, None, None] for value in statistics)
    scale, bias = (value[None, :, None, None] for value in (scale, bias))
    return scale * (x - mean) / (variance + epsilon).sqrt() + bias
