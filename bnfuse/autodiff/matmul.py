"""Products of matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from bnfuse.autodiff.emitter import Gradient
from bnfuse.autodiff.rules import Contributions, rule


@rule("Gemm")
def gemm(g: Gradient) -> Contributions:
    """With A' = A or its transpose: dA' = alpha*dy*B'^T, dB' = alpha*A'^T*dy, dC = beta*dy."""
    a, b, c = g.operand(0), g.operand(1), g.optional(2)
    alpha, beta = g.attribute("alpha", 1.0), g.attribute("beta", 1.0)
    turned_a, turned_b = g.attribute("transA", 0), g.attribute("transB", 0)
    scale = {} if alpha == 1.0 else {"alpha": alpha}
    if turned_a:
        da = g.op("Gemm", b, g.dy, transA=turned_b, transB=1, **scale)
    else:
        da = g.op("Gemm", g.dy, b, transB=1 - turned_b, **scale)
    if turned_b:
        db = g.op("Gemm", g.dy, a, transA=1, transB=turned_a, **scale)
    else:
        db = g.op("Gemm", a, g.dy, transA=1 - turned_a, **scale)
    if c is None:
        return da, db
    dc = g.fit(g.dy, c)
    return da, db, dc if beta == 1.0 else g.mul(dc, g.number(beta, c))


@rule("MatMul")
def matmul(g: Gradient) -> Contributions:
    """DA = dy*B^T, dB = A^T*dy, summed over the batch axes that were broadcast; vectors are matrices of one row.

    A constant matrix beside a map mixes its rows or columns: it is turned here, and has no gradient.
    """
    a, b = g.operand(0), g.operand(1)
    shape_a, shape_b = g.shape(a), g.shape(b)
    for matrix, other, place in ((g.known(a), shape_b, 1), (g.known(b), shape_a, 0)):
        if matrix is not None and matrix.ndim == 2 and len(other) == 4:
            turned = g.array(np.ascontiguousarray(matrix.T), matrix.dtype, "matrix")
            return (g.op("MatMul", g.dy, turned), None) if place == 0 else (None, g.op("MatMul", turned, g.dy))
    if len(shape_b) == 2 and len(shape_a) != 1:
        return by_matrix(g, a, b)
    matrix_a = shape_a if len(shape_a) > 1 else (1, *shape_a)
    matrix_b = shape_b if len(shape_b) > 1 else (*shape_b, 1)
    batch = g.shape(g.y)[: max(len(matrix_a), len(matrix_b)) - 2]
    whole = (*batch, matrix_a[-2], matrix_b[-1])
    dy = g.dy if g.shape(g.y) == whole else g.reshape(g.dy, whole)
    a = a if matrix_a == shape_a else g.reshape(a, matrix_a)
    b = b if matrix_b == shape_b else g.reshape(b, matrix_b)
    if not batch:
        da, db = g.op("Gemm", dy, b, transB=1), g.op("Gemm", a, dy, transA=1)
    else:
        da, db = g.op("MatMul", dy, swapped(g, b, len(matrix_b))), g.op("MatMul", swapped(g, a, len(matrix_a)), dy)
    return (
        folded(g, da, (*batch, *matrix_a[-2:]), matrix_a, shape_a),
        folded(g, db, (*batch, *matrix_b[-2:]), matrix_b, shape_b),
    )


def by_matrix(g: Gradient, a: ir.Value, b: ir.Value) -> Contributions:
    """Of many rows times one matrix: two products of matrices, all rows of the batch in one."""
    (*batch, inner), (_, columns) = g.shape(a), g.shape(b)
    if len(batch) == 1:
        return g.op("Gemm", g.dy, b, transB=1), g.op("Gemm", a, g.dy, transA=1)
    count = math.prod(batch)
    rows = g.reshape(g.dy, (count, columns))
    da = g.reshape(g.op("Gemm", rows, b, transB=1), g.shape(a))
    db = g.op("Gemm", g.reshape(a, (count, inner)), rows, transA=1)
    return da, db


def swapped(g: Gradient, value: ir.Value, rank: int) -> ir.Value:
    """Exchange the last two axes."""
    return g.transpose(value, [*range(rank - 2), rank - 1, rank - 2])


def folded(
    g: Gradient, gradient: ir.Value, shape: Sequence[int], matrix: Sequence[int], wanted: Sequence[int]
) -> ir.Value:
    """Sum a gradient of this shape over the broadcast axes of a matrix operand, and give it the operand's own shape."""
    lead = len(shape) - len(matrix)
    axes = [*range(lead)]
    axes += [lead + i for i, size in enumerate(matrix[:-2]) if size == 1 and shape[lead + i] != 1]
    summed = g.sum(gradient, axes, keepdims=not lead)
    remaining = len(shape) - (len(axes) if lead else 0)
    return summed if remaining == len(wanted) and tuple(matrix) == tuple(wanted) else g.reshape(summed, wanted)
