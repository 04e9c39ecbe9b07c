"""Activations that exporters write out by their formula, read as one operator again.

    a = Abs(x), b = Add(a, 1), y = Div(x, b)     ->     y = Softsign(x)

The formula is the entry's own (bnfuse/opset/activations.py). Only activations without attributes are recognised, of
those that are operators of the standard domain and whose gradient is made here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx
from onnx import numpy_helper

from bnfuse.opset.activations import ACTIVATIONS, Activation
from bnfuse.opset.body import OPERATORS
from bnfuse.opset.expressions import Expression

from .graph import Forward

COMMUTATIVE = ("add", "multiply")
Bound = Mapping[str, str]  # tensors by the variables of a formula


def join_written_out(forward: Forward) -> None:
    """Replace what is written out. The nodes in between stay, for whoever else reads them."""
    for activation in ACTIVATIONS.values():
        if not activation.built and not activation.domain and not activation.defaults:
            _join(forward, activation)


def _join(forward: Forward, activation: Activation) -> None:
    makers, numbers = forward.producers(), _numbers(forward)
    found = 0
    for node in forward.graph.node:
        bound = next(_matches(activation.value, node.output[0], {}, makers, numbers), None)
        if bound is not None:
            node.op_type, found = activation.name, found + 1
            del node.input[:], node.attribute[:]
            node.input.append(bound["z"])
    if found:
        forward.note(f"read {found} {activation.name} that the file writes out")


def _numbers(forward: Forward) -> dict[str, float]:
    """Scalars that are known."""
    values = {name: numpy_helper.to_array(tensor) for name, tensor in forward.initializers().items() if not tensor.dims}
    return {name: float(value) for name, value in values.items() if value.dtype.kind == "f"}


def _matches(
    part: Expression, name: str, bound: Bound, makers: Mapping[str, onnx.NodeProto], numbers: Mapping[str, float]
) -> Iterator[Bound]:
    """All ways in which the tensor `name` is that part of a formula."""
    if part.operation == "variable":
        if bound.get(part.name, name) == name:
            yield {**bound, part.name: name}
        return
    if part.operation == "constant":
        if numbers.get(name) == part.constant:
            yield bound
        return
    node = makers.get(name)
    if node is None or node.op_type != OPERATORS.get(part.operation) or len(node.input) != len(part.operands):
        return
    orders = [part.operands, part.operands[::-1]] if part.operation in COMMUTATIVE else [part.operands]
    for operands in orders:
        ways: list[Bound] = [bound]
        for operand, source in zip(operands, node.input, strict=True):
            ways = [more for way in ways for more in _matches(operand, source, way, makers, numbers)]
        yield from ways
