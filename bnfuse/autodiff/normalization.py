"""BatchNorms, whole ones of ours, that train, and frozen ones; GroupNorms; LayerNorms over channels."""

from __future__ import annotations

import numpy as np

from bnfuse.autodiff.emitter import Gradient
from bnfuse.autodiff.rules import Contributions, rule
from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.opset.spec import OpSpec

SCALED = OpSpec((), "PointwiseGrad", ("Scale",))
RESULTS = ("dx", "dscale", "dbias")  # of BatchNormGrad and LayerNormGrad, in the order of the forward operands


@rule("ai.bnfuse::BatchNorm")
def batch_norm(g: Gradient) -> Contributions:
    """Emit the BatchNormGrad."""
    if any(given is not None for given in g.gradients[1:]):
        raise g.error("has statistics that the loss depends on: they have no gradient here.")
    operands = {"dy": g.dy, "x": g.x, "scale": g.operand(1)}
    operands |= {"mean": g.node.outputs[3], "inv_std": g.node.outputs[4]}
    made = g.own(PLAIN_OPS["BatchNormGrad"], operands)
    return [made[name] for name in RESULTS]


@rule("ai.bnfuse::LayerNorm")
def layer_norm(g: Gradient) -> Contributions:
    """Emit the LayerNormGrad."""
    if any(given is not None for given in g.gradients[1:]):
        raise g.error("has statistics that the loss depends on: they have no gradient here.")
    mean, inv_std = (g.result(place, pixels_of(g), g.dtype(g.x), what) for place, what in ((1, "mean"), (2, "inv_std")))
    operands = {"dy": g.dy, "x": g.x, "scale": g.operand(1), "mean": mean, "inv_std": inv_std}
    made = g.own(PLAIN_OPS["LayerNormGrad"], operands)
    return [made[name] for name in RESULTS]


def pixels_of(g: Gradient) -> tuple[int, ...]:
    """Give the shape of x without its channels."""
    batch, _, *rest = g.shape(g.x)
    return (batch, *rest)


@rule("ai.bnfuse::GroupNorm")
def group_norm(g: Gradient) -> Contributions:
    """Emit the GroupNormGrad."""
    if any(given is not None for given in g.gradients[1:]):
        raise g.error("has statistics that the loss depends on: they have no gradient here.")
    operands = {"dy": g.dy, "x": g.x, "scale": g.operand(1), "mean": g.node.outputs[1], "inv_std": g.node.outputs[2]}
    made = g.own(PLAIN_OPS["GroupNormGrad"], operands, {"groups": g.attribute("groups", 1)})
    return [made[name] for name in RESULTS]


@rule("BatchNormalization")
def frozen_batch_norm(g: Gradient) -> Contributions:
    """Of y = (x - mean)*inv_std*scale + bias by running statistics: an affine map by channel."""
    if g.attribute("training_mode", 0):
        raise g.error("trains: its gradient is that of ai.bnfuse::BatchNorm.")
    x, scale, mean, variance = (g.operand(place) for place in (0, 1, 3, 4))
    channels, rank = g.shape(scale)[0], g.rank(x)
    aligned = (channels, *[1] * (rank - 2))
    deviation = g.op("Sqrt", g.add(variance, g.number(g.attribute("epsilon", 1e-5), variance)))
    dx = g.mul(g.dy, g.reshape(g.div(scale, deviation), aligned))
    axes = [axis for axis in range(rank) if axis != 1]
    centred = g.sub(x, g.reshape(mean, aligned))
    dscale = g.div(g.sum(g.mul(g.dy, centred), axes), deviation)
    dbias = g.sum(g.dy, axes)
    if not g.wants(3) and not g.wants(4):
        return dx, dscale, dbias
    dmean = g.neg(g.div(g.mul(dbias, scale), deviation))
    dvariance = g.mul(g.div(g.mul(dscale, scale), g.mul(deviation, deviation)), g.number(-0.5, variance))
    return dx, dscale, dbias, dmean, dvariance


@rule("ai.bnfuse::NormalizePointwise")
def affine(g: Gradient) -> Contributions:
    """Of y = a*x + b by channel; of maps by the operators of a BatchNorm's gradient, which the passes fuse."""
    a = g.operand(1)
    if g.rank(g.x) == 4:
        dx = g.own(SCALED, {"dy": g.dy, "acc_p": a})["dx"] if g.wants(0) else None
        if not g.wants(1) and not g.wants(2):
            return [dx]
        width, dtype = g.shape(a), g.dtype(g.x).numpy()
        operands = {"dz": g.dy, "x": g.x, "mean": g.array(np.zeros(width), dtype, "zeros")}
        operands["inv_std"] = g.array(np.ones(width), dtype, "ones")
        sums = g.own(PLAIN_OPS["BatchNormGradReduce"], operands)
        return dx, sums["dgamma"], sums["dbeta"]
    axes = [axis for axis in range(g.rank(g.x)) if axis != 1]
    aligned = (g.shape(a)[0], *[1] * (g.rank(g.x) - 2))
    return g.mul(g.dy, g.reshape(a, aligned)), g.sum(g.mul(g.dy, g.x), axes), g.sum(g.dy, axes)
