"""Which initializers of a forward graph are parameters, which of them train, and which are running statistics.

Not every constant that stands where a parameter may stand is one: torch writes BatchNorm without affine as a BatchNorm
with a scale of ones, and a buffer as a weight. Those stay as they are, unless `train` names them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence

import onnx
from onnx import TensorProto, numpy_helper

from bnfuse.core.text import some

from .exporters import PARAMETER, argument_of, has_argument, is_generated, signature_of
from .graph import Forward
from .training import Variables

ALWAYS = {  # operand positions that hold a parameter wherever a constant stands there
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "Gemm": (0, 1, 2),
    "MatMul": (0, 1),
    "BatchNormalization": (1, 2),
    "Einsum": (0, 1),
    "GRU": (1, 2, 3),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LSTM": (1, 2, 3, 7),
    "LayerNormalization": (1, 2),
    "PRelu": (1,),
    "RMSNormalization": (1,),
    "RNN": (1, 2, 3),
}
ELEMENTWISE = (
    "Add",
    "Sub",
    "Mul",
    "Div",
)  # a tensor of rank >= 1 there is a parameter unless the file had it as Constant


def choose_variables(
    forward: Forward,
    constants: set[str],
    fixed: set[str],
    train: Sequence[str] = ("*",),
    freeze: Sequence[str] = (),
) -> Variables:
    """Choose as trainable the parameters that a pattern of `train` and none of `freeze` matches; all others are frozen.

    `constants` are the initializers that were Constant nodes in the file. Of `fixed` trains what a pattern other than
    the default `*` matches.
    """
    running = running_statistics(forward)
    names = parameters(forward, constants, set(running))
    chosen_by_name = [pattern for pattern in train if pattern != "*"]
    for option, patterns in (("--train", chosen_by_name), ("--freeze", freeze)):
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise forward.error(f"{option} '{pattern}' matches no parameter (there are {some(names)})")
    trainable = [
        name
        for name in names
        if matches(name, chosen_by_name if name in fixed else train) and not matches(name, freeze)
    ]
    if not trainable:
        raise forward.error("nothing is left to train: --train and --freeze leave no parameter")
    chosen = set(trainable)
    kept = [name for name in names if name in fixed and name not in chosen]
    if kept:
        forward.note(
            f"{len(kept)} constants in the place of parameters stay as they are ({some(kept)}): the network has no "
            "parameter there (affine=False, buffers). --train '*' --train NAME trains them"
        )
    return Variables(tuple(trainable), tuple(name for name in names if name not in chosen), running)


def fixed_by_exporter(forward: Forward) -> set[str]:
    """List the operands that torch's exporter says to have been no parameters: buffers, and what a call did not have at
    all."""
    kinds = {tensor.target: tensor.kind for tensor in signature_of(forward.model).values()}
    fixed = {name for name, kind in kinds.items() if kind != PARAMETER}
    for node in forward.graph.node:
        for index in ALWAYS.get(node.op_type, ()):
            if index < len(node.input) and has_argument(node, index) and argument_of(node, index) is None:
                fixed.add(node.input[index])
    return fixed


def fixed_by_form(forward: Forward, constants: set[str]) -> set[str]:
    """List the constants that stand where parameters may stand, and by their form were none.

    Scales of ones and biases of zeros, written as Constant nodes or without a name, of a BatchNorm whose statistics are
    not (affine=False); in files of torch, whose parameters are initializers, other weights from Constant nodes.
    """
    known = forward.initializers()
    from_torch = forward.model.producer_name == "pytorch"
    fixed: set[str] = set()
    for node, index, name in parameter_places(forward):
        if node.op_type == "BatchNormalization":
            if index < 3 and _is_identity(node, index, known[name], constants):
                fixed.add(name)
        elif from_torch and name in constants and index in ALWAYS.get(node.op_type, ()):
            fixed.add(name)
    return fixed


def _is_identity(node: onnx.NodeProto, index: int, tensor: onnx.TensorProto, constants: set[str]) -> bool:
    """Tell whether it is a scale of ones or a bias of zeros that nobody named, beside statistics with names."""
    unnamed = [name in constants or is_generated(name) for name in node.input]
    if not unnamed[index] or any(unnamed[3:5]):
        return False
    return bool((numpy_helper.to_array(tensor) == (1.0 if index == 1 else 0.0)).all())


def parameter_places(forward: Forward) -> Iterator[tuple[onnx.NodeProto, int, str]]:
    """Find where a float initializer stands as a parameter or a running statistic may: node, operand, name."""
    known = forward.initializers()
    for node in forward.graph.node:
        for index, name in enumerate(node.input):
            if name in known and (_is_parameter(node, index, known[name], False) or _is_statistic(node, index)):
                yield node, index, name


def _is_statistic(node: onnx.NodeProto, index: int) -> bool:
    return node.op_type == "BatchNormalization" and index in (3, 4)


def running_statistics(forward: Forward) -> dict[str, str]:
    """Map the running mean and variance of every training BN to the outputs that replace them."""
    pairs: dict[str, str] = {}
    known = forward.initializers()
    for node in forward.graph.node:
        if node.op_type != "BatchNormalization":
            continue
        for statistic, output in zip(node.input[3:5], node.output[1:3], strict=True):
            if statistic not in known:
                raise forward.error_at(
                    node,
                    f"has no running statistics: it computes '{statistic}' from the batch. Export it with statistics "
                    "(track_running_stats=True).",
                )
            if statistic in pairs:
                raise forward.error_at(
                    node,
                    f"is called a second time with the running statistic '{statistic}', which one step cannot change "
                    "twice. Call it once, on the samples of all calls as one batch, or give each its own BatchNorm.",
                )
            pairs[statistic] = output
    return pairs


def parameters(forward: Forward, constants: set[str], running: set[str]) -> list[str]:
    """List the parameters in the order of the nodes that read them."""
    known, random = forward.initializers(), forward.random_names()
    found: dict[str, None] = {}
    for node in forward.graph.node:
        if random & {*node.output}:
            continue  # a mask has no parameters: what it is compared with and divided by is the rate of dropping
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


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a name is like one of the globs."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
