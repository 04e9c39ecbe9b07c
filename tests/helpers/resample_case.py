"""Resamples to be tested, forward and backward: (operator, shape of x, scales, mode)."""

from __future__ import annotations

import numpy as np

from bnfuse.opset.resampling import pad_matrices, resize_matrices
from bnfuse.opset.spec import (
    MAPS_LIKE_DY,
    is_numbered_map,
)
from bnfuse.runtime.kernels.common.resample import tables_of
from bnfuse.runtime.kernels.kernel import is_gate

NEAREST = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
LINEAR = {"mode": "linear", "coordinate_transformation_mode": "half_pixel"}
CUBIC = {"mode": "cubic", "coordinate_transformation_mode": "half_pixel"}

CASES = [
    ("Resample", (2, 21, 3, 5), (2, 2), NEAREST),
    ("NormalizeReluResample", (1, 16, 4, 4), (2, 3), NEAREST),
    ("NormalizeQuickGeluResampleStatistics", (2, 5, 5, 3), (2, 2), LINEAR),
    ("NormalizeAddNormalizedReluResample", (2, 33, 6, 5), (0.5, 1), LINEAR),
    ("NormalizeResampleBiasStatistics", (1, 7, 5, 4), (1.6, 2), CUBIC),
    ("NormalizeReluResample", (1, 5, 4, 5), (2, 1, 1, 3), "reflect"),
    ("NormalizeGateHardSwishResample", (2, 64, 7, 7), (1, 2), NEAREST),
    ("NormalizeGateReluResample", (2, 21, 3, 5), (1, 2), LINEAR),
    ("ResampleGrad", (2, 21, 3, 5), (2, 2), NEAREST),
    ("NormalizeResampleGradReluGradReduce", (2, 16, 4, 4), (2, 3), NEAREST),
    ("BatchNormGradNormalizeResampleGradAddGradientClipGradReduceScale", (1, 5, 5, 3), (2, 2), LINEAR),
    ("SliceBatchNormGradResampleGradReduceReduceOtherAccumulate", (2, 18, 5, 4), (1, 2), LINEAR),
    ("ResampleGradReluGrad", (1, 33, 6, 5), (0.5, 1), CUBIC),
    ("NormalizeResampleGradReluGradReduce", (1, 5, 4, 5), (2, 1, 1, 3), "reflect"),
]


def matrices(shape, scales, mode):
    """The matrices [OH, H] and [OW, W], float32; of a Pad `scales` are top, left, bottom and right."""
    if isinstance(mode, str):
        found = pad_matrices(mode, scales, (2, 3), shape)
    else:
        found = resize_matrices("Resize", mode, shape, scales=np.array((1, 1, *scales), np.float32))
    return tuple(found.get(axis, np.eye(shape[axis], dtype=np.float32)) for axis in (2, 3))


def operands_of(op, shape, rows, columns, rng):
    """Random operands by name, NCHW, float32."""
    size = (*shape[:2], len(rows), len(columns))
    made = {"rows": rows, "columns": columns}
    for name in op.operands:
        if name in MAPS_LIKE_DY:
            more = 7 if name == "dy" and "Slice" in op.prologue else 0
            shaped = (size[0], size[1] + more, *size[2:])
        elif name in ("x", "skip", "other") or is_numbered_map(name):
            shaped = shape
        elif is_gate(name):
            shaped = (*shape[:2], 1, 1)
        elif name == "acc":
            shaped = (shape[0], shape[1] + 6, *shape[2:])
        else:
            shaped = (shape[1],)
        if name not in made:
            made[name] = rng.normal(size=shaped).astype(np.float32)
    return made


def described(op, shape, rows, columns):
    """What the kernel is told, and the tables that it reads in place of the matrices."""
    attributes, tables = {}, {}
    for name, matrix in (("row", rows), ("column", columns)):
        said, found = tables_of(matrix.T if op.is_gradient else matrix, name)
        attributes |= said
        tables |= found
    if "Clip" in op.name:
        attributes |= {"min": -0.5, "max": 0.75}
    if "QuickGelu" in op.name:
        attributes |= {"alpha": 1.0}
    if "grad_start" in op.attributes:
        attributes |= {"grad_start": 4, "grad_stop": 4 + shape[1]}
    if "acc_start" in op.attributes:
        attributes |= {"acc_start": 1, "acc_stop": 1 + shape[1]}
    return attributes, tables
