"""A model whose float32 numbers are float64: what it computes by the interpreter of the tests is free of rounding."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
import interpreted

Arrays = Mapping[str, np.ndarray]


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """Copy the model with float64 for float32 in tensors, casts and types. Operators of ours keep their definitions:
    the interpreter computes them in the type of their operands."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        widen(tensor)
    for attribute in (each for node in copy.graph.node for each in node.attribute):
        if attribute.name == "to" and attribute.i == TensorProto.FLOAT:
            attribute.i = TensorProto.DOUBLE
        if attribute.HasField("t"):
            widen(attribute.t)
    del copy.graph.value_info[:]
    for value in (*copy.graph.input, *copy.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    return copy


def widen(tensor: TensorProto) -> None:
    """Change a float32 tensor in place."""
    if tensor.data_type == TensorProto.FLOAT:
        values = numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def run(model: onnx.ModelProto, feeds: Arrays) -> dict[str, np.ndarray]:
    """Compute all outputs in float64; inputs that are not fed take their initial values."""
    wide = widened(model)
    inputs = {value.name for value in wide.graph.input}
    given = {t.name: numpy_helper.to_array(t) for t in wide.graph.initializer if t.name in inputs}
    wide_feeds = {n: v.astype(np.float64) if v.dtype == np.float32 else v for n, v in feeds.items()}
    return interpreted.run(wide, {**given, **wide_feeds})
