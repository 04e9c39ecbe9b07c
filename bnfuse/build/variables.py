"""Which initializers of a forward graph are parameters, which of them train, and which are running statistics."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import onnx
from onnx import TensorProto

from .graph import Forward
from .training import Variables

ALWAYS = {  # operand positions that hold a parameter wherever a constant stands there
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "Gemm": (0, 1, 2),
    "MatMul": (0, 1),
    "BatchNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LayerNormalization": (1, 2),
    "PRelu": (1,),
}
ELEMENTWISE = (
    "Add",
    "Sub",
    "Mul",
    "Div",
)  # a tensor of rank >= 1 there is a parameter unless the file had it as Constant


def choose_variables(
    forward: Forward, constants: set[str], train: Sequence[str] = ("*",), freeze: Sequence[str] = ()
) -> Variables:
    """Trainable are the parameters that a pattern of `train` and none of `freeze` matches; all others are frozen.

    `constants` are the initializers that were Constant nodes in the file.
    """
    running = running_statistics(forward)
    names = parameters(forward, constants, set(running))
    for option, patterns in (("--train", [p for p in train if p != "*"]), ("--freeze", freeze)):
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise forward.error(f"{option} '{pattern}' matches no parameter (there are {_some(names)})")
    trainable = [name for name in names if _matches(name, train) and not _matches(name, freeze)]
    if not trainable:
        raise forward.error("nothing is left to train: --train and --freeze leave no parameter")
    chosen = set(trainable)
    return Variables(tuple(trainable), tuple(name for name in names if name not in chosen), running)


def running_statistics(forward: Forward) -> dict[str, str]:
    """Running mean and variance of every training BN -> the output that replaces it."""
    pairs: dict[str, str] = {}
    known = forward.initializers()
    for node in forward.graph.node:
        if node.op_type != "BatchNormalization":
            continue
        for statistic, output in zip(node.input[3:5], node.output[1:3], strict=True):
            if statistic not in known:
                raise forward.error_at(
                    node, f"computes its running statistic '{statistic}': it must be an initializer."
                )
            if statistic in pairs:
                raise forward.error_at(
                    node,
                    f"shares its running statistic '{statistic}' with another node: give each a tensor of its own.",
                )
            pairs[statistic] = output
    return pairs


def parameters(forward: Forward, constants: set[str], running: set[str]) -> list[str]:
    """Parameters in the order of the nodes that read them."""
    known = forward.initializers()
    found: dict[str, None] = {}
    for node in forward.graph.node:
        for index, name in enumerate(node.input):
            tensor = known.get(name)
            if tensor is None or name in running or not _is_parameter(node, index, tensor, name in constants):
                continue
            if tensor.data_type != TensorProto.FLOAT:
                kind = TensorProto.DataType.Name(tensor.data_type).lower()
                raise forward.error_at(node, f"has a parameter '{name}' of type {kind}: convert the model to float32.")
            found[name] = None
    return list(found)


def _is_parameter(node: onnx.NodeProto, index: int, tensor: onnx.TensorProto, was_constant: bool) -> bool:
    floating = tensor.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)
    if not floating or not tensor.dims:
        return False
    if index in ALWAYS.get(node.op_type, ()):
        return True
    return node.op_type in ELEMENTWISE and not was_constant


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
