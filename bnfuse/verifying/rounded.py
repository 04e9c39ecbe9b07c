"""The source graph in fewer bits, as autocast has it: the yardstick of a step that computes in them.

    y = Conv(x, w)      ->      y = rounded(Conv(rounded(x), rounded(w)))

Each operand of a product is rounded, and in bf16 and fp16 each map of more than one pixel as it is written: those that
a step stores, and those that a fused one never does. Statistics, vectors and sums stay float32. Rounding is written as
three operators (Veltkamp's: c = (2^s + 1) x, c - (c - x)), to the nearest, for any number of bits in float32's range.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from bnfuse.runtime.targets.target import HALVES

FLOAT32_BITS = 24
BITS = {"tf32": 11, "bf16": 8, "fp16": 11}  # of a significand
PRODUCTS = ("Gemm", "MatMul")  # and all that have Conv in their names
KEEPING = ("Concat", "Split", "Slice", "Identity", "Relu", "MaxPool")  # what they give is as round as what they take


def rounded(model: ir.Model, precision: str) -> ir.Model:
    """Copy the model with what a step in this precision rounds rounded to the nearest."""
    copy = model.clone()
    graph = copy.graph
    factor = ir.Value(name="bnfuse.rounding", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([]))
    factor.const_value = ir.tensor(np.array(2.0 ** (FLOAT32_BITS - BITS[precision]) + 1, np.float32))
    graph.register_initializer(factor)
    first = graph[0]
    for value, readers in list(rounded_values(graph, storing=precision in HALVES).items()):
        times, less, result = rounding(value, factor)
        producer = value.producer()
        if producer is None:
            graph.insert_before(first, [times, less, result])
        else:
            graph.insert_after(producer, [times, less, result])
        for reader, place in readers:
            reader.replace_input_with(place, result.outputs[0])
    return copy


def rounded_values(graph: ir.Graph, *, storing: bool) -> dict[ir.Value, list[tuple[ir.Node, int]]]:
    """Find what is rounded, and the readers that get it so: of a stored map all, of else products."""
    found = {}
    outputs = {*graph.outputs}
    for value in values_of(graph):
        stored = storing and is_map(value) and value.producer() is not None
        if stored and (value in outputs or value.producer().op_type in KEEPING):  # type: ignore[union-attr]
            continue
        readers = [(use.node, use.idx) for use in value.uses() if stored or is_product(use.node)]
        if readers and is_operand(value):
            found[value] = readers
    return found


def values_of(graph: ir.Graph) -> Iterable[ir.Value]:
    """Go through all values of a graph: its inputs, its initial values, and what nodes give."""
    yield from dict.fromkeys((*graph.inputs, *graph.initializers.values()))
    for node in list(graph):
        yield from node.outputs


def is_operand(value: ir.Value) -> bool:
    """Tell whether it is float32 of two axes or more: no vector of channels."""
    return value.dtype == ir.DataType.FLOAT and value.shape is not None and len(value.shape) >= 2


def is_map(value: ir.Value) -> bool:
    """Tell whether it is float32 and has more than one pixel."""
    if not is_operand(value) or value.shape is None:
        return False
    return math.prod(d if isinstance(d, int) else 1 for d in value.shape[2:]) > 1


def is_product(node: ir.Node) -> bool:
    """Tell whether it multiplies operands and sums."""
    return node.op_type in PRODUCTS or "Conv" in node.op_type


def rounding(value: ir.Value, factor: ir.Value) -> tuple[ir.Node, ir.Node, ir.Node]:
    """Make the three operators; the last gives the rounded value."""
    times = ir.node("Mul", [value, factor])
    less = ir.node("Sub", [times.outputs[0], value])
    result = ir.node("Sub", [times.outputs[0], less.outputs[0]])
    for node, what in ((times, "times"), (less, "less"), (result, "rounded")):
        node.name = node.outputs[0].name = f"{value.name}/{what}"
        node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
    return times, less, result
