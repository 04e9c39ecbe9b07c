"""Losses over classes; all others are made of elementwise operators and reductions."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnfuse.autodiff.emitter import Gradient
from bnfuse.autodiff.rules import Contributions, rule
from bnfuse.opset.plain import PLAIN_OPS


@rule("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(g: Gradient) -> Contributions:
    """Emit (softmax - one-hot)*share, each label's share of dy by the reduction, and what arrives at log_prob."""
    labels = g.operand(1)
    log_prob = g.result(1, g.shape(g.x), g.dtype(g.x), "log_prob")
    found: ir.Value | None = None
    if g.gradients[0] is not None:
        operands = {"dlosses": shares(g), "log_prob": log_prob, "labels": labels}
        found = g.own(PLAIN_OPS["SoftmaxCrossEntropyGrad"], operands)["dscores"]
    given = g.gradients[1] if len(g.gradients) > 1 else None
    if given is not None:
        total = g.sum(given, [1], keepdims=True)
        more = g.sub(given, g.mul(g.op("Exp", log_prob), total))
        found = more if found is None else g.add(found, more)
    return [found]


@rule("NegativeLogLikelihoodLoss")
def negative_log_likelihood(g: Gradient) -> Contributions:
    """Emit -share at each label, 0 elsewhere."""
    labels, shape = g.operand(1), g.shape(g.x)
    classes = np.arange(shape[1]).reshape(-1, *(1,) * (len(shape) - 2))
    own = g.op("Equal", g.op("Unsqueeze", labels, g.ints([1])), g.array(classes, g.dtype(labels).numpy(), "classes"))
    share = g.neg(g.op("Unsqueeze", shares(g), g.ints([1])))
    return [g.where(own, share, g.number(0.0, g.x))]


def counted(g: Gradient, labels: ir.Value) -> ir.Value | None:
    """Emit which labels are not ignored; None where all count."""
    if "ignore_index" not in g.node.attributes:
        return None
    dtype = (labels.dtype or ir.DataType.INT64).numpy()
    return g.op("Not", g.op("Equal", labels, g.array(g.attribute("ignore_index", 0), dtype, "ignored")))


def shares(g: Gradient) -> ir.Value:
    """Emit the gradient at each label's own loss, [N, ...]: dy times its weight, over their sum for a mean."""
    labels, weights = g.operand(1), g.optional(2)
    if g.wants(2):
        raise g.error("has class weights that are trained, of which there is no gradient: freeze them.")
    shape, reduction = g.shape(labels), g.attribute("reduction", "mean")
    known, own = counted(g, labels), None
    if weights is not None:
        if known is not None:
            labels = g.where(known, labels, g.array(0, g.dtype(labels).numpy(), "zero"))
        own = g.op("Gather", weights, labels, axis=0)
    if known is not None:
        counts = g.op("Cast", known, to=int(g.dtype(g.x)))
        own = counts if own is None else g.mul(own, counts)
    if reduction == "mean":
        if own is None:
            return g.expand(g.div(g.dy, g.count(labels)), shape)
        return g.mul(own, g.div(g.dy, g.op("ReduceSum", own, keepdims=0)))
    if own is None:
        return g.dy if reduction == "none" else g.expand(g.dy, shape)
    return g.mul(own, g.dy)
