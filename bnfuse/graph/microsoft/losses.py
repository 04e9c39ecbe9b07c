"""Cross-entropy: the loss of onnxruntime's own, and the gradients of both."""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.graph.microsoft.source import Source
from bnfuse.opset.plain import PLAIN_OPS

REDUCTIONS = ("mean", "sum", "none")


def loss(source: Source) -> None:
    """SoftmaxCrossEntropyLossInternal(scores, labels, weights, ignore_index): the standard loss."""
    inputs = [source.operand(0), source.operand(1), *([] if source.optional(2) is None else [source.optional(2)])]
    given = {"reduction": _reduction(source)}
    ignored = _ignored(source, 3)
    if ignored is not None:
        given["ignore_index"] = ignored  # type: ignore[assignment]
    outputs = source.node.outputs[: 2 if source.result(1) is not None else 1]
    results = [(None if v.shape is None else source.dims(v), source.dtype(inputs[0])) for v in outputs]  # type: ignore[arg-type]
    for place, value in enumerate(source.node_of("SoftmaxCrossEntropyLoss", inputs, results, given)):
        source.give(place, value)


def loss_grad(source: Source) -> None:
    """SoftmaxCrossEntropyLossGrad(dloss, log_prob, labels, weights, bias): ours, with the gradient of each row's loss.

    That is its weight, 0 where its label is ignored, times dloss, over the sum of the weights where the loss is a mean.
    """
    dloss, log_prob, labels = (source.operand(place) for place in range(3))
    source.require_float32(dloss, log_prob)
    internal = source.node.op_type.startswith("SoftmaxCrossEntropyLossInternal")
    bias = source.optional(5 if internal else 4)
    dlosses = of_rows(source, dloss, labels, source.optional(3), _ignored(source, 4 if internal else None))
    operands = {"dlosses": dlosses, "log_prob": log_prob, "labels": labels}
    op = PLAIN_OPS["SoftmaxCrossEntropyGrad"]
    dscores = source.own(op, operands, {"dscores": source.dims(log_prob)})["dscores"]
    source.give(0, dscores if bias is None else source.calculate("Add", dscores, bias))


def _reduction(source: Source) -> str:
    found = str(source.attribute("reduction", "mean"))
    if found not in REDUCTIONS:
        raise source.error(f"has reduction '{found}': it is mean, sum or none.")
    return found


def _ignored(source: Source, place: int | None) -> int | None:
    """Give the label that does not count: an attribute, or an operand of onnxruntime's own operators."""
    if place is not None and source.optional(place) is not None:
        return int(source.constant_operand(place, "ignored label").item())
    found = source.attribute("ignore_index", None)
    return None if found is None else int(found)


def of_rows(
    source: Source, dloss: ir.Value, labels: ir.Value, weights: ir.Value | None, ignored: int | None
) -> ir.Value:
    """Write the gradient of each row's loss, in the shape of the labels."""
    reduction, dims = _reduction(source), source.dims(labels)
    kind = source.dtype(dloss)
    if weights is None and ignored is None:
        if reduction == "none":
            return dloss
        if reduction == "mean":
            dloss = _mean(source, dloss, labels, kind)
        return source.op("Expand", _scalar(source, dloss), source.shape_of(labels), shape=dims)
    row = _row_weights(source, labels, weights, ignored, kind)
    if reduction == "mean":
        dloss = source.calculate("Div", dloss, source.sum(row, range(len(dims))))
    return source.node_of("Mul", [row, dloss], [(dims, kind)])[0]


def _mean(source: Source, dloss: ir.Value, labels: ir.Value, kind: ir.DataType) -> ir.Value:
    """Write dloss over the number of labels."""
    return source.calculate("Div", dloss, _count(source, labels, kind))


def _scalar(source: Source, value: ir.Value) -> ir.Value:
    """Write a loss of one element as a scalar."""
    if value.shape is None or not source.dims(value):
        return value
    return source.op("Reshape", value, source.ints([], "scalar"), shape=[])


def _count(source: Source, labels: ir.Value, kind: ir.DataType) -> ir.Value:
    """Write how many labels there are. It is no constant, so that it holds for any batch."""
    size = source.op("Size", labels, shape=[], dtype=ir.DataType.INT64)
    return source.op("Cast", size, shape=[], dtype=kind, to=int(kind))


def _row_weights(
    source: Source, labels: ir.Value, weights: ir.Value | None, ignored: int | None, kind: ir.DataType
) -> ir.Value:
    """Write what each label counts, in their shape."""
    dims, safe, counts = source.dims(labels), labels, None
    if ignored is not None:
        mark = source.number(ignored, labels, "ignored")
        counts = source.op("Not", source.op("Equal", labels, mark, dtype=ir.DataType.BOOL))
        safe = source.op("Where", counts, labels, source.number(0, labels, "zero"), dtype=source.dtype(labels))
    if weights is None:
        assert counts is not None
        return source.op("Cast", counts, dtype=kind, to=int(kind))
    row = source.op("Gather", weights, safe, shape=dims, axis=0)
    if counts is None:
        return row
    return source.op("Where", counts, row, source.number(0.0, row, "nothing"), shape=dims, dtype=kind)


CONVERSIONS = {
    "SoftmaxCrossEntropyLossInternal": loss,
    "SoftmaxCrossEntropyLossGrad": loss_grad,
    "SoftmaxCrossEntropyLossInternalGrad": loss_grad,
}
