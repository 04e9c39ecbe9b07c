"""What the operators compute that a training graph has before any pass, in numpy.

As `reference.py`, of which this is a part, but maps are [N, C, ...] of any rank from 2 on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray
Operands = Mapping[str, Array]
Attributes = Mapping[str, Any]


def others(x: Array) -> tuple[int, ...]:
    """List the axes of a map without that of its channels."""
    return (0, *range(2, x.ndim))


def column(values: Array, like: Array) -> Array:
    """Give [C] as [1, C, 1, ...], of the rank of a map."""
    return values.reshape(1, -1, *(1,) * (like.ndim - 2))


def running(operands: Operands, name: str, batch: Array, attributes: Attributes) -> Array:
    """Give the running statistic `name` after the step, from that of the batch."""
    momentum = attributes["momentum"]
    new: Array = operands[f"running_{name}"] * momentum + batch * (1 - momentum)
    return new


def unbiased(variance: Array, count: float) -> Array:
    """Give the unbiased estimate of a variance over `count` elements; the variance itself where that is at most 1."""
    return variance * (count / (count - 1)) if count > 1 else variance


def _batch_norm(operands: Operands, attributes: Attributes) -> tuple[Array, ...]:
    x = operands["x"]
    mean, variance = x.mean(axis=others(x)), x.var(axis=others(x))
    inv_std = 1 / np.sqrt(variance + attributes["epsilon"])
    y = (x - column(mean, x)) * column(operands["scale"] * inv_std, x) + column(operands["bias"], x)
    estimate = unbiased(variance, x.size // x.shape[1]) if attributes.get("unbiased") else variance
    new = (running(operands, name, batch, attributes) for name, batch in (("mean", mean), ("variance", estimate)))
    return y, *new, mean, inv_std


def _batch_norm_grad(operands: Operands, _: Attributes) -> tuple[Array, ...]:
    dy, x, inv_std = operands["dy"], operands["x"], operands["inv_std"]
    normalised = (x - column(operands["mean"], x)) * column(inv_std, x)
    dbias, dscale = dy.sum(axis=others(x)), (dy * normalised).sum(axis=others(x))
    count = x.size // x.shape[1]
    own = dy - column(dbias / count, x) - normalised * column(dscale / count, x)
    return column(operands["scale"] * inv_std, x) * own, dscale, dbias


def _layer_norm(operands: Operands, attributes: Attributes) -> tuple[Array, ...]:
    x = operands["x"]
    mean, variance = x.mean(axis=1, keepdims=True), x.var(axis=1, keepdims=True)
    inv_std = 1 / np.sqrt(variance + attributes["epsilon"])
    y = (x - mean) * inv_std * column(operands["scale"], x) + column(operands["bias"], x)
    return y, mean[:, 0], inv_std[:, 0]


def _layer_norm_grad(operands: Operands, _: Attributes) -> tuple[Array, ...]:
    dy, x = operands["dy"], operands["x"]
    mean, inv_std = (np.expand_dims(operands[name], 1) for name in ("mean", "inv_std"))
    normalised = (x - mean) * inv_std
    g = dy * column(operands["scale"], x)
    own = g - g.mean(axis=1, keepdims=True) - normalised * (g * normalised).mean(axis=1, keepdims=True)
    return inv_std * own, (dy * normalised).sum(axis=others(x)), dy.sum(axis=others(x))


def _softmax_cross_entropy_grad(operands: Operands, _: Attributes) -> tuple[Array]:
    log_prob, labels = operands["log_prob"], operands["labels"]
    own = np.expand_dims(labels, 1) == column(np.arange(log_prob.shape[1]), log_prob)
    return ((np.exp(log_prob) - own) * np.expand_dims(operands["dlosses"], 1),)


WHOLE: dict[str, Callable[[Operands, Attributes], tuple[Array, ...]]] = {
    "BatchNorm": _batch_norm,
    "BatchNormGrad": _batch_norm_grad,
    "LayerNorm": _layer_norm,
    "LayerNormGrad": _layer_norm_grad,
    "SoftmaxCrossEntropyGrad": _softmax_cross_entropy_grad,
}
