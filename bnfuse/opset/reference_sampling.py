"""What the operators of sampled, local and baseline statistics compute, in numpy ([Chen18]; docs/maths.md).

As `reference.py`, of which this is a part: maps are NCHW, coefficients [C], or [G, C] where samples are normalised in
G groups. Everything is computed in the dtype of the operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bnfuse.opset.reference_whole import running, unbiased

Array = np.ndarray
Operands = Mapping[str, Array]
Attributes = Mapping[str, Any]
Index = tuple[Any, ...]

SUMMED = (0, 2, 3)  # N, H, W


def column(values: Array) -> Array:
    """[C] as [1, C, 1, 1]."""
    return values.reshape(1, -1, 1, 1)


def moments(x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Mean and biased variance in two passes."""
    return x.mean(axis=axes), x.var(axis=axes)


# Samples: a box, or points


def box(offset: Array, attributes: Attributes) -> Index:
    """Give the elements of a box as an index into a map: all channels."""
    n, h, w = (slice(int(o), int(o) + size) for o, size in zip(offset, attributes["extent"], strict=True))
    return (n, slice(None), h, w)


def places(points: Array, shape: tuple[int, ...]) -> Index:
    """Flat indices into N, H, W as an index into a map: it gives [points, C]."""
    n, h, w = np.unravel_index(points, (shape[0], *shape[2:]))
    return (n, slice(None), h, w)


def _sampled_statistics(operands: Operands, attributes: Attributes) -> tuple[Array, Array]:
    return moments(operands["x"][box(operands["offset"], attributes)], SUMMED)


def _point_statistics(operands: Operands, _: Attributes) -> tuple[Array, Array]:
    x = operands["x"]
    return moments(x[places(operands["points"], x.shape)], (0,))


def _mix(operands: Operands, attributes: Attributes) -> tuple[Array, Array]:
    weight = attributes["weight"]
    return (
        weight * operands["mean"] + (1 - weight) * operands["mean_2"],
        weight * operands["variance"] + (1 - weight) * operands["variance_2"],
    )


def _sampled_grad_finalize(operands: Operands, attributes: Attributes) -> tuple[Array, Array]:
    share = -attributes["weight"] / attributes["count"]
    q = share * operands["gamma_term"]
    return q, share * operands["beta_term"] - q * operands["mean"]


def _add_sampled(operands: Operands, attributes: Attributes) -> tuple[Array]:
    where = box(operands["offset"], attributes)
    dx = operands["acc"].copy()
    dx[where] += column(operands["q"]) * operands["x"][where] + column(operands["w"])
    return (dx,)


def _add_at_points(operands: Operands, _: Attributes) -> tuple[Array]:
    where = places(operands["points"], operands["x"].shape)
    dx = operands["acc"].copy()
    dx[where] += operands["q"] * operands["x"][where] + operands["w"]
    return (dx,)


# Groups of consecutive samples


def grouped(x: Array, attributes: Attributes) -> Array:
    """[N, C, H, W] as [N/samples, samples, C, H, W]."""
    return x.reshape(-1, attributes["samples"], *x.shape[1:])


def of_group(values: Array) -> Array:
    """[G, C] as [G, 1, C, 1, 1]."""
    return values[:, None, :, None, None]


def _rows(attributes: Attributes) -> Index:
    first = attributes["first"]
    return (slice(None), slice(first, first + attributes["rows"]))


def _local_statistics(operands: Operands, attributes: Attributes) -> tuple[Array, Array]:
    return moments(grouped(operands["x"], attributes)[_rows(attributes)], (1, 3, 4))


def _local_finalize(operands: Operands, attributes: Attributes) -> tuple[Array, ...]:
    mean, variance = operands["mean"], operands["variance"]
    inv_std = 1 / np.sqrt(variance + attributes["epsilon"])
    a = operands["scale"] * inv_std
    batch = {"mean": mean.mean(axis=0), "variance": unbiased(variance.mean(axis=0), attributes.get("elements", 0.0))}
    new = (running(operands, name, value, attributes) for name, value in batch.items())
    return a, operands["bias"] - mean * a, inv_std, *new


def _local_normalize(operands: Operands, attributes: Attributes) -> tuple[Array]:
    x = operands["x"]
    y = of_group(operands["a"]) * grouped(x, attributes) + of_group(operands["b"])
    return (y.reshape(x.shape),)


def _local_grad_reduce(operands: Operands, attributes: Attributes) -> tuple[Array, Array]:
    dz, x = grouped(operands["dz"], attributes), grouped(operands["x"], attributes)
    normalised = (x - of_group(operands["mean"])) * of_group(operands["inv_std"])
    return dz.sum(axis=(1, 3, 4)), (dz * normalised).sum(axis=(1, 3, 4))


def _local_scale(operands: Operands, attributes: Attributes) -> tuple[Array]:
    dz = operands["dz"]
    return ((of_group(operands["p"]) * grouped(dz, attributes)).reshape(dz.shape),)


def _local_add_sampled(operands: Operands, attributes: Attributes) -> tuple[Array]:
    rows = _rows(attributes)
    dx = grouped(operands["acc"], attributes).copy()
    dx[rows] += of_group(operands["q"]) * grouped(operands["x"], attributes)[rows] + of_group(operands["w"])
    return (dx.reshape(operands["acc"].shape),)


# L1BN and RBN


def _l1_statistics(operands: Operands, _: Attributes) -> tuple[Array, ...]:
    x = operands["x"]
    mean = x.mean(axis=SUMMED)
    centred = x - column(mean)
    deviation = np.abs(centred).mean(axis=SUMMED)
    return mean, math.pi / 2 * deviation**2, np.sign(centred).mean(axis=SUMMED)


def _l1_grad_finalize(operands: Operands, attributes: Attributes) -> tuple[Array, Array]:
    q = -operands["gamma_term"] * np.sqrt(math.pi / 2 * operands["variance"]) / attributes["count"]
    return q, -operands["beta_term"] / attributes["count"] - q * operands["sign_mean"]


def _l1_grad_input(operands: Operands, _: Attributes) -> tuple[Array]:
    sign = np.sign(operands["x"] - column(operands["mean"]))
    return (column(operands["p"]) * operands["dz"] + column(operands["q"]) * sign + column(operands["w"]),)


def range_factor(count: int) -> float:
    """Give c = 1/(2*sqrt(2*ln(count))), the deviation that a range of `count` normal values stands for; 0 for one."""
    return 1 / (2 * math.sqrt(2 * math.log(count))) if count > 1 else 0.0


def _range_statistics(operands: Operands, _: Attributes) -> tuple[Array, ...]:
    x = operands["x"]
    low, high = x.min(axis=SUMMED), x.max(axis=SUMMED)
    counts = ((x == column(extreme)).sum(axis=SUMMED).astype(x.dtype) for extreme in (low, high))
    variance = ((high - low) * range_factor(x.size // x.shape[1])) ** 2
    return x.mean(axis=SUMMED), variance, low, high, *counts


def _range_grad_finalize(operands: Operands, attributes: Attributes) -> tuple[Array, ...]:
    share = operands["gamma_term"] * range_factor(attributes["count"]) ** 2 * (operands["high"] - operands["low"])
    w = -operands["beta_term"] / attributes["count"]
    return share / operands["low_count"], -share / operands["high_count"], w


def _range_grad_input(operands: Operands, _: Attributes) -> tuple[Array]:
    x = operands["x"]
    dx = column(operands["p"]) * operands["dz"] + column(operands["w"])
    for name in ("low", "high"):
        dx = dx + column(operands[f"q_{name}"]) * (x == column(operands[name]))
    return (dx,)


SAMPLING: dict[str, Callable[[Operands, Attributes], tuple[Array, ...]]] = {
    "SampledStatistics": _sampled_statistics,
    "PointStatistics": _point_statistics,
    "MixStatistics": _mix,
    "SampledGradFinalize": _sampled_grad_finalize,
    "AddSampled": _add_sampled,
    "AddAtPoints": _add_at_points,
    "LocalStatistics": _local_statistics,
    "LocalFinalize": _local_finalize,
    "LocalNormalize": _local_normalize,
    "LocalGradReduce": _local_grad_reduce,
    "LocalScale": _local_scale,
    "LocalAddSampled": _local_add_sampled,
    "L1Statistics": _l1_statistics,
    "L1GradFinalize": _l1_grad_finalize,
    "L1GradInput": _l1_grad_input,
    "RangeStatistics": _range_statistics,
    "RangeGradFinalize": _range_grad_finalize,
    "RangeGradInput": _range_grad_input,
}
