"""Values for parameters that the file has none for, and for those that are asked to begin anew.

A constant that was computed (ConstantOfShape, as in onnx's light models) is no value: it stands for weights left out.
Any other value is kept, even where all are equal: it may be a filter or a layer that begins at zero.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from bnfuse.core.text import some
from bnfuse.graph.protos import attributes
from bnfuse.models.initial import kaiming

from .graph import Forward
from .variables import matches

LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def fill(forward: Forward, placeholders: set[str], fixed: set[str], init: Sequence[str], seed: int) -> None:
    """Draw `placeholders`, but for `fixed`, and what a pattern of `init` matches.

    Weights Kaiming, biases 0, BN scale 1, bias 0, running mean 0, running variance 1.
    """
    known = forward.initializers()
    filled: list[str] = []
    drawn: list[str] = []
    kept: list[str] = []
    seen: set[str] = set()
    candidates: list[str] = []
    for node in forward.graph.node:
        for index, name in enumerate(node.input):
            tensor = known.get(name)
            if tensor is None or name in seen or tensor.data_type != TensorProto.FLOAT:
                continue
            values = _initial(node, index, name, list(tensor.dims), seed)
            if values is None:
                continue
            seen.add(name)
            candidates.append(name)
            asked, missing = matches(name, init), name in placeholders and name not in fixed
            if asked or missing:
                forward.set_initializer(name, values)
                (filled if missing else drawn).append(name)
            elif name not in fixed and _is_flat_weight(node, index, tensor):
                kept.append(name)
    for pattern in init:
        if not fnmatch.filter(candidates, pattern):
            raise forward.error(
                f"--init '{pattern}' matches no parameter that can be drawn (there are {some(candidates)})"
            )
    if filled:
        forward.note(f"filled {len(filled)} parameters that the file has no values for ({some(filled)}; seed {seed})")
    if drawn:
        forward.note(f"drew {len(drawn)} parameters anew ({some(drawn)}; seed {seed})")
    if kept:
        forward.note(f"kept {len(kept)} weights of equal values ({some(kept)}): --init NAME draws them anew")


def _is_flat_weight(node: onnx.NodeProto, index: int, tensor: onnx.TensorProto) -> bool:
    """Tell whether it is a weight of several values that are all the same."""
    if node.op_type not in LINEAR or index != 1 or int(np.prod(tensor.dims)) < 2:
        return False
    values = numpy_helper.to_array(tensor)
    return bool(values.flat[0] == values.flat[-1] and (values == values.flat[0]).all())


def _initial(node: onnx.NodeProto, index: int, name: str, shape: list[int], seed: int) -> np.ndarray | None:
    """None where the operand is no parameter of a kind with usual initial values."""
    if node.op_type == "BatchNormalization" and 1 <= index <= 4:
        return np.full(shape, 1.0 if index in (1, 4) else 0.0, np.float32)
    if node.op_type not in LINEAR or index not in (1, 2):
        return None
    if index == 2:
        return np.zeros(shape, np.float32)
    if node.op_type == "Conv":
        return kaiming(name, shape, seed)
    outputs_first = node.op_type == "Gemm" and attributes(node).get("transB")
    if outputs_first or len(shape) != 2:
        return kaiming(name, shape, seed, gain=1.0)
    return np.ascontiguousarray(kaiming(name, shape[::-1], seed, gain=1.0).T)
