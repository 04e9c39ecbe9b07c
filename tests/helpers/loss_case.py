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
