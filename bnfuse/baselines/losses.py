"""Loss nodes: op -> how it is written."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from bnfuse.baselines.writer import Convert, Writer, attribute, present

IGNORED = -100  # torch's default of ignore_index; a file without one ignores no label, and no label is negative


def classes_loss(function: str) -> Convert:
    """Write the cross-entropy of logits [N, K, ...] and labels int64 [N, ...], with class weights where there are."""

    def write(w: Writer, node: ir.Node) -> Any:
        how: dict[str, Any] = {}
        if (reduction := attribute(node, "reduction", "mean")) != "mean":
            how["reduction"] = reduction
        if present(node, 2):
            how["weight"] = w.value(node, 2)
        ignored = w.scalar(node, 3, attribute(node, "ignore_index", IGNORED))
        if ignored != IGNORED:
            how["ignore_index"] = ignored
        return w.call(getattr(w.nn.functional, function), w.value(node, 0), w.value(node, 1), **how)

    return write


def written_mse(loss: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Give the two operands where the loss is the mean of the square of their difference, as `bnfuse build` writes
    it."""
    mean = loss.producer()
    square = single_operand(mean, "ReduceMean") if mean is not None and not attribute(mean, "axes") else None
    if square is None or square.op_type != "Mul" or square.inputs[0] is not square.inputs[1]:
        return None
    difference = single_operand(square, "Mul")
    if difference is None or difference.op_type != "Sub":
        return None
    first, second = difference.inputs
    if first is None or second is None or first.shape != second.shape:
        return None
    return first, second


def single_operand(node: ir.Node, op: str) -> ir.Node | None:
    """Give the producer of the first operand of a node of this op."""
    if node.op_type != op or node.inputs[0] is None:
        return None
    return node.inputs[0].producer()


LOSSES: dict[str, Convert] = {
    "SoftmaxCrossEntropyLoss": classes_loss("cross_entropy"),
    "SoftmaxCrossEntropyLossInternal": classes_loss("cross_entropy"),
    "NegativeLogLikelihoodLoss": classes_loss("nll_loss"),
}
