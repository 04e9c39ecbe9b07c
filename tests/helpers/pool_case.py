"""Pools to be tested, forward and backward: (operator, shape of x, attributes)."""

from __future__ import annotations

import numpy as np

from bnfuse.opset import reference
from bnfuse.opset.spec import (
    MAPS_LIKE_DY,
    MAPS_LIKE_X,
    is_numbered_map,
)
from bnfuse.runtime.kernels.kernel import is_gate


def window(kernel, strides=(1, 1), pads=(0, 0, 0, 0), dilations=None, ceil=0, include=None):
    """The attributes of a pool; `include` (count_include_pad) makes it an average."""
    made = {"kernel_shape": kernel, "strides": strides, "pads": pads, "ceil_mode": ceil}
    if include is None:
        made["dilations"] = dilations or (1, 1)
    else:
        made["count_include_pad"] = include
    return made


MAX = [
    ("MaxPool", (2, 21, 11, 9), window((3, 3), (2, 2), (1, 1, 1, 1))),
    ("NormalizeReluMaxPoolStatistics", (1, 16, 12, 12), window((2, 2), (2, 2))),
    ("NormalizeClipMaxPool", (2, 5, 9, 10), window((3, 2), (2, 3), (1, 0, 0, 1), ceil=1)),
    ("ReluMaxPoolBias", (1, 33, 11, 8), window((3, 3), (1, 2), (2, 1, 1, 2), (2, 3))),
    ("NormalizeAddReluMaxPoolStatistics", (3, 3, 5, 5), window((5, 5), (1, 1), (2, 2, 2, 2))),
]
AVERAGE = [
    ("AveragePool", (2, 20, 8, 8), window((2, 2), (2, 2), include=0)),
    ("NormalizeReluAveragePoolStatistics", (2, 19, 9, 7), window((3, 3), (2, 2), (1, 1, 1, 1), include=0)),
    ("ReluAveragePool", (1, 16, 9, 8), window((3, 3), (2, 2), (1, 1, 1, 1), ceil=1, include=1)),
    ("AveragePool", (1, 7, 10, 11), window((3, 4), (2, 3), (0, 1, 1, 2), ceil=1, include=0)),
    ("AveragePool", (1, 7, 10, 11), window((3, 4), (2, 3), (0, 1, 1, 2), ceil=1, include=1)),
]
GLOBAL = [
    ("GlobalAveragePool", (3, 85, 7, 7), {}),
    ("NormalizeReluGlobalAveragePoolStatistics", (4, 64, 3, 5), {}),
    ("NormalizeHardSwishGateGlobalAveragePool", (3, 21, 5, 4), {}),
]
MAX_GRAD = [
    ("MaxPoolGrad", (2, 21, 11, 9), window((3, 3), (2, 2), (1, 1, 1, 1))),
    ("NormalizeMaxPoolGradReluGradReduce", (1, 16, 12, 12), window((2, 2), (2, 2))),
    ("BatchNormGradNormalizeMaxPoolGradAddGradientClipGradReduceScale", (2, 5, 9, 10), window((3, 2), (2, 3), ceil=1)),
    ("ReluMaxPoolGradAddBatchNormGradReluGradAddSkipGradient", (1, 17, 7, 8), window((2, 2), (2, 2))),
    ("MaxPoolGradReluGrad", (1, 33, 11, 8), window((3, 3), (1, 2), (2, 1, 1, 2), (2, 3))),
    ("SliceBatchNormGradMaxPoolGradReduceReduceOtherAccumulate", (2, 18, 7, 6), window((3, 3), (1, 1), (1, 1, 1, 1))),
]
AVERAGE_GRAD = [
    ("AveragePoolGrad", (2, 20, 8, 8), window((2, 2), (2, 2), include=0)),
    ("NormalizeAveragePoolGradReluGradReduce", (2, 19, 9, 7), window((3, 3), (2, 2), (1, 1, 1, 1), include=0)),
    ("AveragePoolGradAddGradient", (1, 16, 9, 8), window((3, 3), (2, 2), (1, 1, 1, 1), ceil=1, include=1)),
    ("BatchNormGradAveragePoolGrad", (1, 7, 10, 11), window((3, 4), (2, 3), (0, 1, 1, 2), ceil=1, include=0)),
    ("GlobalAveragePoolGrad", (3, 85, 7, 7), {}),
    ("NormalizeGlobalAveragePoolGradReluGradReduceAccumulate", (2, 30, 4, 5), {}),
    ("NormalizeGlobalAveragePoolGradAddGatedGradientHardSwishGradReduce", (2, 30, 4, 5), {}),
]
POOLED = {*MAPS_LIKE_DY}  # at the resolution of y; every other map of a gradient is at that of x


def pooled_shape(shape, attributes):
    """The shape of y; a global pool has no attributes."""
    if not attributes:
        return (*shape[:2], 1, 1)
    return (*shape[:2], *reference.window_counts(shape[2:], attributes))


def operands_of(op, shape, attributes, rng):
    """Random operands by name, NCHW, float32; x and what is like it have this shape."""
    made = {}
    for name in op.operands:
        size = (shape[1],)
        if name in POOLED:
            size = pooled_shape(shape, attributes)
            if name == "dy" and "Slice" in op.prologue:
                size = (size[0], size[1] + 7, *size[2:])
        elif name in MAPS_LIKE_X or is_numbered_map(name):
            size = shape
        elif is_gate(name):
            size = shape if name == "gate" else (*shape[:2], 1, 1)
        elif name == "acc":
            size = (shape[0], shape[1] + 6, *shape[2:])
        made[name] = rng.normal(size=size).astype(np.float32)
    return made


def positions(flat, shape, attributes):
    """Flat NCHW indices into x as positions inside their windows."""
    (top, left, _, _), (stride_h, stride_w) = attributes["pads"], attributes["strides"]
    dilation_h, dilation_w = attributes["dilations"]
    rows = np.arange(flat.shape[2])[:, None] * stride_h - top
    columns = np.arange(flat.shape[3]) * stride_w - left
    r = (flat // shape[3] % shape[2] - rows) // dilation_h
    s = (flat % shape[3] - columns) // dilation_w
    return r * attributes["kernel_shape"][1] + s
