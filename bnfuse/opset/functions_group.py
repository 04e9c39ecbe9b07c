"""Bodies of GroupNorm and of its halves, a part of `functions.py`.

A channel's coefficients lie in [N, C]; what is of a group is [N, groups, 1], and is repeated for each of its channels.
No body knows how many samples there are.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from bnfuse.opset.body import Body
from bnfuse.opset.functions_whole import FLOAT, column, folded, unfolded

BOOL = int(ir.DataType.BOOL)
MEMBERS = (2,)  # the axis of what is in a group, of [N, groups, all of it]


def in_groups(x: ir.Value, body: Body) -> ir.Value:
    """Give [N, C, ...] as [N, groups, all that is in one]."""
    return body("Reshape", x, body("Concat", body.constant([0]), body.attribute("groups"), body.constant([-1]), axis=0))


def by_channel(value: ir.Value, like: ir.Value, body: Body) -> ir.Value:
    """Repeat [N, groups, 1] for each channel of a group: [N, C]; `like` is [C]."""
    one = body.constant([1])
    members = body("Div", body("Reshape", body("Size", like), one), body.attribute("groups"))
    spread = body("Expand", value, body("Concat", one, one, members, axis=0))
    return body("Reshape", spread, body.constant([0, -1]))


def mean_of(x: ir.Value, body: Body) -> ir.Value:
    """Give the mean over what is in a group, [N, groups, 1]."""
    total = body("ReduceSum", x, body.constant(MEMBERS), keepdims=1)
    count = body("Cast", body("Div", body("Size", x), body("Size", total)), to=FLOAT)
    return body("Div", total, count)


def inverse(variance: ir.Value, body: Body) -> ir.Value:
    """Give 1/sqrt(variance + epsilon)."""
    return body.power(body("Add", variance, body.attribute("epsilon")), -0.5)


def _group_norm(body: Body) -> tuple[ir.Value, ...]:
    """Two passes over x: a difference of raw sums would cancel where |mean| is large."""
    x = in_groups(body["x"], body)
    mean = mean_of(x, body)
    centred = body("Sub", x, mean)
    inv_std = inverse(mean_of(body("Mul", centred, centred), body), body)
    normalised = folded(unfolded(body("Mul", centred, inv_std), body["x"], body), body)
    scaled = body("Mul", normalised, column(body["scale"], body))
    y = unfolded(body("Add", scaled, column(body["bias"], body)), body["x"], body)
    return y, *(by_channel(value, body["scale"], body) for value in (mean, inv_std))


def _sums(dz: ir.Value, body: Body) -> tuple[ir.Value, ir.Value]:
    """Write dbeta and dgamma, [N, C], of dz, which is [N, C, the rest]."""
    last = body.constant([-1])
    mean, inv_std = (body("Unsqueeze", body[name], last) for name in ("mean", "inv_std"))
    normalised = body("Mul", body("Sub", folded(body["x"], body), mean), inv_std)
    dbeta, dgamma = (body("ReduceSum", value, last, keepdims=0) for value in (dz, body("Mul", dz, normalised)))
    return dbeta, dgamma


def _shares(dbeta: ir.Value, dgamma: ir.Value, count: ir.Value, body: Body) -> tuple[ir.Value, ir.Value]:
    """Give the sums over groups of scale*dbeta and scale*dgamma, divided by a count: [N, C] each."""
    weighed = (in_groups(body("Mul", value, body["scale"]), body) for value in (dbeta, dgamma))
    totals = [body("ReduceSum", value, body.constant(MEMBERS), keepdims=1) for value in weighed]
    beta, gamma = (by_channel(body("Div", total, count), body["scale"], body) for total in totals)
    return beta, gamma


def _over_samples(value: ir.Value, body: Body) -> ir.Value:
    return body("ReduceSum", value, body.constant([0]), keepdims=0)


def _group_norm_grad(body: Body) -> tuple[ir.Value, ...]:
    """Compute dx = inv_std*(scale*dy - (sum of scale*dy)/count - normalised*(sum of scale*dy*normalised)/count)."""
    x, dy = folded(body["x"], body), folded(body["dy"], body)
    dbeta, dgamma = _sums(dy, body)
    groups = body("Mul", body("Div", body("Size", body["mean"]), body("Size", body["scale"])), body.attribute("groups"))
    count = body("Cast", body("Div", body("Size", x), groups), to=FLOAT)
    last = body.constant([-1])
    beta, gamma = (body("Unsqueeze", share, last) for share in _shares(dbeta, dgamma, count, body))
    mean, inv_std = (body("Unsqueeze", body[name], last) for name in ("mean", "inv_std"))
    normalised = body("Mul", body("Sub", x, mean), inv_std)
    scaled = body("Mul", dy, column(body["scale"], body))
    own = body("Sub", body("Sub", scaled, beta), body("Mul", normalised, gamma))
    dx = unfolded(body("Mul", own, inv_std), body["x"], body)
    return dx, _over_samples(dgamma, body), _over_samples(dbeta, body)


def _statistics(body: Body) -> tuple[ir.Value, ...]:
    x, last = folded(body["x"], body), body.constant([-1])
    mean = mean_of(x, body)
    centred = body("Sub", x, mean)
    variance = mean_of(body("Mul", centred, centred), body)
    return body("Squeeze", mean, last), body("Squeeze", variance, last)


def _finalize(body: Body) -> tuple[ir.Value, ...]:
    """Give a group's variance as the mean of its channels' and of their means' squared distances from its own."""
    means = in_groups(body["mean"], body)
    mean = mean_of(means, body)
    gap = body("Sub", means, mean)
    spread = body("Add", in_groups(body["variance"], body), body("Mul", gap, gap))
    mean, inv_std = (by_channel(value, body["scale"], body) for value in (mean, inverse(mean_of(spread, body), body)))
    a = body("Mul", body["scale"], inv_std)
    return a, body("Sub", body["bias"], body("Mul", mean, a)), mean, inv_std


def _grad_finalize(body: Body) -> tuple[ir.Value, ...]:
    count = body("Neg", body("Cast", body.attribute("count"), to=FLOAT))
    inv_std, dbeta = body["inv_std"], body["dbeta"]
    centred = body("Mul", body("Sub", body["dgamma"], body("Mul", body["mean"], dbeta)), inv_std)
    dgamma = body("Where", body("Cast", body.attribute("raw"), to=BOOL), centred, body["dgamma"])
    beta, gamma = _shares(dbeta, dgamma, count, body)
    q = body("Mul", body("Mul", inv_std, inv_std), gamma)
    w = body("Sub", body("Mul", inv_std, beta), body("Mul", q, body["mean"]))
    return q, w, _over_samples(dgamma, body), _over_samples(dbeta, body)


GROUP: dict[str, Callable[[Body], tuple[ir.Value, ...]]] = {
    "GroupNorm": _group_norm,
    "GroupNormGrad": _group_norm_grad,
    "GroupNormStatistics": _statistics,
    "GroupNormFinalize": _finalize,
    "GroupNormGradReduce": lambda body: _sums(folded(body["dz"], body), body),
    "GroupNormGradFinalize": _grad_finalize,
}
