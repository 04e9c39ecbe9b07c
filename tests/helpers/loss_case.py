"""Softmax cross-entropy and its gradient in numpy."""

import numpy as np

from bnfuse.opset import reference
from bnfuse.opset.plain import PLAIN_OPS


def losses(scores, labels, reduction, weights, ignore):
    """Give the loss and log_prob of scores [n, classes, inner], labels [n, inner]."""
    shifted = scores - scores.max(axis=1, keepdims=True)
    log_prob = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    used = labels != ignore
    index = np.where(used, labels, 0)
    weight = (weights[index] if weights is not None else np.ones(labels.shape)) * used
    loss = -weight * np.take_along_axis(log_prob, index[:, None], 1)[:, 0]
    if reduction == "none":
        return loss, log_prob
    return loss.sum() / (weight.sum() if reduction == "mean" else 1), log_prob


def gradient_case(problem, labels=None):
    """Give operands for the gradient of a loss: random ones, but for labels that are given."""
    rng = np.random.default_rng(1)
    rows = (problem.n, problem.inner)
    scores = rng.normal(size=(problem.n, problem.classes, problem.inner))
    log_prob = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    drawn = rng.integers(problem.classes, size=rows) if labels is None else np.array(labels).reshape(rows)
    dlosses = rng.uniform(-2, 2, size=rows).astype(np.float32)
    dlosses.flat[-1] = 0
    labels = drawn.astype(problem.label_dtype)
    return {"dlosses": dlosses, "log_prob": log_prob.astype(np.float32), "labels": labels}


def gradient(case):
    """Give dscores in one row, computed in float64."""
    wide = {name: value.astype(np.float64) if value.dtype == np.float32 else value for name, value in case.items()}
    return reference.run(PLAIN_OPS["SoftmaxCrossEntropyGrad"], wide, {})["dscores"].ravel()
