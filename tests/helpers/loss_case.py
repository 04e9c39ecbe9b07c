"""Softmax cross-entropy and its gradient in numpy."""

import numpy as np


def reference(scores, labels, dloss, reduction, weights, ignore):
    """scores [n, classes, inner], labels [n, inner]."""
    shifted = scores - scores.max(axis=1, keepdims=True)
    log_prob = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    used = labels != ignore
    index = np.where(used, labels, 0)
    weight = (weights[index] if weights is not None else np.ones(labels.shape)) * used
    own = np.arange(scores.shape[1])[None, :, None] == index[:, None]
    loss = -weight * np.take_along_axis(log_prob, index[:, None], 1)[:, 0]
    if reduction == "none":
        scale = weight * dloss.reshape(labels.shape)
    else:
        count = weight.sum() if reduction == "mean" else 1
        scale = weight * dloss / count
        loss = loss.sum() / count
    return loss, log_prob, (np.exp(log_prob) - own) * scale[:, None]


def gaps_case(kind):
    """log_prob [4, 3, 2], labels of `kind` of which some are no class, and a dloss for each, 0 for one of these."""
    scores = np.random.default_rng(1).normal(size=(4, 3, 2))
    log_prob = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    labels = np.array([[0, 2], [-100, 1], [3, -1], [np.iinfo(kind).min, 2]], kind)
    dloss = np.array([[1, 0.5], [0, 2], [0.25, 1], [1, 0]], np.float32)
    return {"log_prob": log_prob.astype(np.float32), "labels": labels, "dloss": dloss}


def gaps_gradient(kind):
    """(exp(log_prob) - onehot(labels))*dloss, where a label that is no class has no one, in one row."""
    case = gaps_case(kind)
    own = np.arange(3)[None, :, None] == case["labels"][:, None]
    return ((np.exp(case["log_prob"].astype(np.float64)) - own) * case["dloss"][:, None]).ravel()
