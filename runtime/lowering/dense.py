"""Lowering of matrix products and of the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.values import static_shape
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.common.dense import BatchAxis, GemmProblem, batch_axes
from bnfuse.runtime.kernels.common.loss import LossGradProblem, LossProblem
from bnfuse.runtime.lowering.sparse import lower_sparse
from bnfuse.runtime.lowering.state import Lowering, Ref
from bnfuse.runtime.lowering.values import attributes_of

Values = Mapping[str, ir.Value]


def lower_gemm(low: Lowering, node: ir.Node) -> None:
    """Lower y = alpha * a * b + beta * c, of matrices."""
    a, b, *rest = node.inputs
    assert a is not None and b is not None
    c = rest[0] if rest and rest[0] is not None and rest[0].name else None
    given = attributes_of(node)
    trans = bool(given.get("transA", 0)), bool(given.get("transB", 0))
    beta = float(given.get("beta", 1.0))
    bias = low.shape(c) if c is not None else None
    rows, inner = low.shape(a)[::-1] if trans[0] else low.shape(a)
    columns = low.shape(b)[0 if trans[1] else 1]
    problem = GemmProblem(rows, columns, inner, *trans, float(given.get("alpha", 1.0)), beta, bias)
    _gemm(low, problem, a, b, c, node.outputs[0], (rows, columns))


def lower_matmul(low: Lowering, node: ir.Node) -> None:
    """Lower a product of operands of any ranks, by numpy's rule; by a sparse constant as few taps."""
    (a, trans_a), (b, trans_b) = operands = [_untransposed(low, low.operand(node, i)) for i in range(2)]
    if not low.shape(a) or not low.shape(b):
        raise low.error(node, "multiplies a scalar: build the graph anew")
    if not lower_sparse(low, node, *operands):
        _product(low, node, (a, trans_a), (b, trans_b), None, node.outputs[0])


def lower_biased(low: Lowering, node: ir.Node) -> None:
    """Lower the sum of a product and a vector as one Gemm."""
    product = low.products[node]
    bias = next(value for value in node.inputs if value is not None and value.producer() is not product)
    a, b = (_untransposed(low, low.operand(product, i)) for i in range(2))
    _product(low, product, a, b, bias, node.outputs[0])


def biased_product(low: Lowering, node: ir.Node) -> ir.Node | None:
    """Find the MatMul that an Add of a vector alone reads, and that is one product of two matrices."""
    if (node.domain, node.op_type) != ("", "Add"):
        return None
    for value, bias in (node.inputs, node.inputs[::-1]):
        product = value.producer() if value is not None else None
        if value is None or bias is None or product is None or (product.domain, product.op_type) != ("", "MatMul"):
            continue
        a, b = product.inputs
        whole, vector = static_shape(value), static_shape(bias)
        shape_a, shape_b = (static_shape(v) if v is not None else None for v in (a, b))
        if a is None or whole is None or vector is None or shape_a is None or shape_b is None:
            continue
        alone = len(value.uses()) == 1 and not value.is_graph_output()
        flat = len(shape_b) == 2 and (len(shape_a) == 2 or (len(shape_a) > 2 and a not in low.exchanged))
        if alone and flat and vector == whole[-1:] and low.constant(a) is None and low.constant(b) is None:
            return product
    return None


Matrices = tuple[ir.Value, bool]  # as they lie, and whether their last axes are exchanged


def _product(
    low: Lowering, node: ir.Node, left: Matrices, right: Matrices, bias: ir.Value | None, result: ir.Value
) -> None:
    (a, trans_a), (b, trans_b) = left, right
    shape_a, shape_b = _seen(low.shape(a), trans_a), _seen(low.shape(b), trans_b)
    whole_a = (1, *shape_a) if len(shape_a) == 1 else shape_a
    whole_b = (*shape_b, 1) if len(shape_b) == 1 else shape_b
    (*batch_a, rows, inner), (*batch_b, inner_b, columns) = whole_a, whole_b
    try:
        batch = batch_axes(batch_a, batch_b)
    except BnfuseError as error:
        raise low.error(node, f"{error}: build the graph anew") from None
    if inner != inner_b:
        raise low.error(node, f"multiplies {list(shape_a)} by {list(shape_b)}, which do not fit: build the graph anew")
    shape = (*np.broadcast_shapes(tuple(batch_a), tuple(batch_b)), *shape_a[-2:-1], *shape_b[-1:][: len(shape_b) - 1])
    if is_of_one_matrix(batch) and not trans_a:
        rows, batch = rows * batch[0].size, ()
    vector = low.shape(bias) if bias is not None else None
    problem = GemmProblem(rows, columns, inner, trans_a, trans_b, bias=vector, batch=batch)
    _gemm(low, problem, a, b, bias, result, shape)


def is_of_one_matrix(batch: Sequence[BatchAxis]) -> bool:
    """Tell whether all products have the same B, and one A behind the other: then that is one product."""
    return len(batch) == 1 and (batch[0].a, batch[0].b) == (1, 0)


def _untransposed(low: Lowering, value: ir.Value) -> tuple[ir.Value, bool]:
    """Give the matrices that lie in memory, and whether they are meant with their last axes exchanged."""
    source = low.exchanged.get(value)
    return (value, False) if source is None else (source, True)


def _seen(shape: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2]) if transposed else shape


def exchanges_last_axes(node: ir.Node) -> bool:
    """Tell whether a node is a Transpose of matrices that MatMuls alone read: they take them as they lie."""
    if (node.domain, node.op_type) != ("", "Transpose"):
        return False
    given, value = attributes_of(node).get("perm"), node.outputs[0]
    source = node.inputs[0]
    rank = len(given) if given else len(source.shape) if source is not None and source.shape is not None else 0
    order = tuple(given) if given else (1, 0)
    if rank < 2 or (not given and rank != 2) or order != (*range(rank - 2), rank - 1, rank - 2):
        return False
    readers = [use.node for use in value.uses()]
    return not value.is_graph_output() and all((n.domain, n.op_type) == ("", "MatMul") for n in readers)


def _gemm(
    low: Lowering,
    problem: GemmProblem,
    a: ir.Value,
    b: ir.Value,
    c: ir.Value | None,
    result: ir.Value,
    shape: tuple[int, ...],
) -> None:
    refs: dict[str, Ref] = {"a": low.dense(a), "b": low.dense(b)}
    if c is not None:
        refs["c"] = low.dense(c)
    refs["y"] = low.new_dense(result, shape)
    low.launch(registry.GEMM, (problem, low.target), refs)


def lower_softmax_loss(low: Lowering, node: ir.Node) -> None:
    """scores, labels, [weights] -> loss, log_prob."""
    scores, labels, weights = _three(low, node)
    problem = loss_problem(low, node, scores, labels, weights)
    refs: dict[str, Ref] = {"scores": low.dense(scores), "labels": low.dense(labels)}
    if weights is not None:
        refs["weights"] = low.dense(weights)
    loss_shape = low.shape(labels) if problem.reduction == "none" else ()
    for name, value, shape in zip(("loss", "log_prob"), node.outputs, (loss_shape, low.shape(scores)), strict=False):
        refs[name] = low.new_dense(value if value.name else None, shape)
    low.launch(registry.SOFTMAX_LOSS, (problem, low.target), refs)


def lower_cross_entropy_grad(
    low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Mapping[str, Any]
) -> None:
    """Lower SoftmaxCrossEntropyGrad: log_prob [N, classes, ...], labels and dlosses [N, ...] -> dscores."""
    shape = low.shape(operands["log_prob"])
    n, classes, *inner = shape
    kind = np.dtype(low.form(operands["labels"]).dtype).name
    problem = LossGradProblem(n, classes, math.prod(inner), kind)
    refs: dict[str, Ref] = {name: low.dense(value) for name, value in operands.items()}
    refs["dscores"] = low.new_dense(results["dscores"], shape)
    low.launch(registry.SOFTMAX_LOSS_GRAD, (problem, low.target), refs)


def loss_problem(
    low: Lowering, node: ir.Node, scores: ir.Value, labels: ir.Value, weights: ir.Value | None
) -> LossProblem:
    """Describe a cross-entropy over scores [N, classes, ...]."""
    given = attributes_of(node)
    n, classes, *inner = low.shape(scores)
    ignored = given.get("ignore_index")
    return LossProblem(
        n,
        classes,
        math.prod(inner),
        given.get("reduction", "mean"),
        np.dtype(low.form(labels).dtype).name,
        weights is not None,
        ignored,
    )


def _three(low: Lowering, node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """Scores, labels and perhaps weights."""
    values = [*node.inputs, None]
    if len(values) < 3 or values[0] is None or values[1] is None:
        raise low.error(node, "lacks scores or labels")
    return values[0], values[1], values[2]
