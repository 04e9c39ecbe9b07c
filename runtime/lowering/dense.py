"""Lowering of the classifier and the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.common.dense import GemmProblem
from bnfuse.runtime.kernels.common.loss import LossProblem
from bnfuse.runtime.lowering.state import Lowering, Ref
from bnfuse.runtime.lowering.values import attributes_of
from bnfuse.runtime.program import program as p

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
    _gemm(low, node, GemmProblem(rows, columns, inner, *trans, float(given.get("alpha", 1.0)), beta, bias), a, b, c)


def lower_matmul(low: Lowering, node: ir.Node) -> None:
    """Of two matrices a Gemm."""
    a, b = node.inputs
    assert a is not None and b is not None
    if len(low.shape(a)) != 2 or len(low.shape(b)) != 2:
        what = f"multiplies ranks {len(low.shape(a))} and {len(low.shape(b))}: only matrices are compiled"
        raise low.error(node, f"{what}. Reshape its operands to matrices in front of it, and its result back.")
    (rows, inner), (_, columns) = low.shape(a), low.shape(b)
    _gemm(low, node, GemmProblem(rows, columns, inner), a, b, None)


def _gemm(low: Lowering, node: ir.Node, problem: GemmProblem, a: ir.Value, b: ir.Value, c: ir.Value | None) -> None:
    refs: dict[str, Ref] = {"a": low.dense(a), "b": low.dense(b)}
    if c is not None:
        refs["c"] = low.dense(c)
    refs["y"] = low.new_dense(node.outputs[0], (problem.m, problem.n))
    low.launch(registry.GEMM, (problem, low.target), refs)


def lower_softmax_loss(low: Lowering, node: ir.Node) -> None:
    """scores, labels, [weights] -> loss, log_prob."""
    scores, labels, weights = _three(low, node, 0)
    problem = loss_problem(low, node, scores, labels, weights)
    refs: dict[str, Ref] = {"scores": low.dense(scores), "labels": low.dense(labels)}
    if weights is not None:
        refs["weights"] = low.dense(weights)
    loss_shape = low.shape(labels) if problem.reduction == "none" else ()
    for name, value, shape in zip(("loss", "log_prob"), node.outputs, (loss_shape, low.shape(scores)), strict=False):
        refs[name] = low.new_dense(value if value.name else None, shape)
    low.launch(registry.SOFTMAX_LOSS, (problem, low.target), refs)


def lower_softmax_loss_grad(low: Lowering, node: ir.Node) -> None:
    """dloss, log_prob, labels, [weights] -> dscores."""
    dloss = node.inputs[0]
    assert dloss is not None
    log_prob, labels, weights = _three(low, node, 1)
    problem = loss_problem(low, node, log_prob, labels, weights)
    refs: dict[str, Ref] = {"log_prob": low.dense(log_prob), "labels": low.dense(labels), "dloss": low.dense(dloss)}
    if weights is not None:
        refs["weights"] = low.dense(weights)
    refs["dscores"] = low.new_dense(node.outputs[0], low.shape(log_prob))
    low.launch(registry.SOFTMAX_LOSS_GRAD, (problem, low.target), refs, loss_scale(low))
    low.is_loss_scaled = True


def lower_cross_entropy_grad(
    low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Mapping[str, Any]
) -> None:
    """Lower SoftmaxCrossEntropyGrad: log_prob [N, classes, ...], labels and dlosses [N, ...] -> dscores."""
    shape = low.shape(operands["log_prob"])
    n, classes, *inner = shape
    kind = np.dtype(low.form(operands["labels"]).dtype).name
    problem = LossProblem(n, classes, math.prod(inner), "none", kind, gaps=True)
    names = {"dloss": "dlosses", "log_prob": "log_prob", "labels": "labels"}
    refs: dict[str, Ref] = {name: low.dense(operands[theirs]) for name, theirs in names.items()}
    refs["dscores"] = low.new_dense(results["dscores"], shape)
    low.launch(registry.SOFTMAX_LOSS_GRAD, (problem, low.target), refs, loss_scale(low))
    low.is_loss_scaled = True


def loss_scale(low: Lowering) -> list[p.Argument]:
    """Give the factor of all gradients between the loss and the optimiser, where small ones would else be lost."""
    return [p.Scalar("loss_scale")] if low.target.precision == "fp16" else []


def check_scaled(low: Lowering) -> None:
    """In fp16 gradients start from a loss that scales them: the optimiser takes the factor out of all."""
    if low.target.precision == "fp16" and low.signature.gradients and not low.is_loss_scaled:
        raise BnfuseError("precision fp16 scales the gradient of SoftmaxCrossEntropyLoss, and there is none: use bf16")


def loss_problem(
    low: Lowering, node: ir.Node, scores: ir.Value, labels: ir.Value, weights: ir.Value | None
) -> LossProblem:
    """Describe a cross-entropy over scores [N, classes, ...]; notes the label that it ignores."""
    given = attributes_of(node)
    n, classes, *inner = low.shape(scores)
    ignored = given.get("ignore_index")
    low.ignored_label = ignored
    return LossProblem(
        n,
        classes,
        math.prod(inner),
        given.get("reduction", "mean"),
        np.dtype(low.form(labels).dtype).name,
        weights is not None,
        ignored,
    )


def _three(low: Lowering, node: ir.Node, first: int) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """Scores (or log_prob), labels and perhaps weights: the inputs from `first` on."""
    values = [*node.inputs[first:], None]
    if len(values) < 3 or values[0] is None or values[1] is None:
        raise low.error(node, "lacks scores or labels")
    return values[0], values[1], values[2]
