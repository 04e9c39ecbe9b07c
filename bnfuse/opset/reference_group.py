"""What GroupNorm and its halves compute, in numpy.

As `reference.py`, of which this is a part. Maps are [N, C, ...], coefficients [N, C]; what is of a group is the same
for all of its channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bnfuse.opset.reference_whole import column

Array = np.ndarray
Operands = Mapping[str, Array]
Attributes = Mapping[str, Any]


def in_groups(x: Array, groups: int) -> Array:
    """Give [N, C, ...] as [N, groups, all that is in one]."""
    return x.reshape(x.shape[0], groups, -1)


def by_channel(values: Array, channels: int) -> Array:
    """Repeat [N, groups] for each channel of a group: [N, C]."""
    return np.repeat(values, channels // values.shape[1], axis=1)


def spread(values: Array, like: Array) -> Array:
    """Give [N, C] as [N, C, 1, ...], of the rank of a map."""
    return values.reshape(*values.shape, *(1,) * (like.ndim - 2))


def pixels(x: Array) -> tuple[int, ...]:
    """List the axes of a map behind that of its channels."""
    return tuple(range(2, x.ndim))


def _group_norm(operands: Operands, attributes: Attributes) -> tuple[Array, ...]:
    x, scale = operands["x"], operands["scale"]
    grouped = in_groups(x, attributes["groups"])
    mean = by_channel(grouped.mean(axis=2), x.shape[1])
    inv_std = by_channel(1 / np.sqrt(grouped.var(axis=2) + attributes["epsilon"]), x.shape[1])
    normalised = (x - spread(mean, x)) * spread(inv_std, x)
    return normalised * column(scale, x) + column(operands["bias"], x), mean, inv_std


def _sums(dz: Array, operands: Operands) -> tuple[Array, Array]:
    """Give dbeta and dgamma, [N, C]."""
    x = operands["x"]
    normalised = (x - spread(operands["mean"], x)) * spread(operands["inv_std"], x)
    return dz.sum(axis=pixels(x)), (dz * normalised).sum(axis=pixels(x))


def _group_norm_grad(operands: Operands, attributes: Attributes) -> tuple[Array, ...]:
    dy, x, inv_std = operands["dy"], operands["x"], operands["inv_std"]
    dbeta, dgamma = _sums(dy, operands)
    means = []
    for total in (dbeta, dgamma):
        whole = in_groups(total * operands["scale"], attributes["groups"]).sum(axis=2)
        means.append(spread(by_channel(whole * whole.size / x.size, x.shape[1]), x))
    normalised = (x - spread(operands["mean"], x)) * spread(inv_std, x)
    own = dy * column(operands["scale"], x) - means[0] - normalised * means[1]
    return own * spread(inv_std, x), dgamma.sum(axis=0), dbeta.sum(axis=0)


def _statistics(operands: Operands, _: Attributes) -> tuple[Array, Array]:
    x = operands["x"]
    return x.mean(axis=pixels(x)), x.var(axis=pixels(x))


def _finalize(operands: Operands, attributes: Attributes) -> tuple[Array, ...]:
    channels = len(operands["scale"])
    means, variances = (in_groups(operands[name], attributes["groups"]) for name in ("mean", "variance"))
    mean = by_channel(means.mean(axis=2), channels)
    variance = by_channel(variances.mean(axis=2) + means.var(axis=2), channels)
    inv_std = 1 / np.sqrt(variance + attributes["epsilon"])
    a = operands["scale"] * inv_std
    return a, operands["bias"] - mean * a, mean, inv_std


def _grad_finalize(operands: Operands, attributes: Attributes) -> tuple[Array, ...]:
    inv_std, channels = operands["inv_std"], len(operands["scale"])
    dbeta, dgamma = operands["dbeta"], operands["dgamma"]
    if attributes.get("raw"):
        dgamma = (dgamma - operands["mean"] * dbeta) * inv_std
    beta, gamma = (
        by_channel(in_groups(total * operands["scale"], attributes["groups"]).sum(axis=2), channels)
        for total in (dbeta, dgamma)
    )
    q = -(inv_std**2) * gamma / attributes["count"]
    w = -inv_std * beta / attributes["count"] - q * operands["mean"]
    return q, w, dgamma.sum(axis=0), dbeta.sum(axis=0)


GROUP: dict[str, Callable[[Operands, Attributes], tuple[Array, ...]]] = {
    "GroupNorm": _group_norm,
    "GroupNormGrad": _group_norm_grad,
    "GroupNormStatistics": _statistics,
    "GroupNormFinalize": _finalize,
    "GroupNormGradReduce": lambda operands, _: _sums(operands["dz"], operands),
    "GroupNormGradFinalize": _grad_finalize,
}
