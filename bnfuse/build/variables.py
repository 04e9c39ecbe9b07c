"""Which initializers of a forward graph are parameters, which of them train, and which are running statistics.

Not every constant that stands where a parameter may stand is one: torch writes BatchNorm without affine as a BatchNorm
with a scale of ones, and a buffer as a weight. Those stay as they are, unless `train` names them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from bnfuse.core.text import some

from .batch_norms import is_training
from .exporters import PARAMETER, argument_of, has_argument, is_generated, signature_of
from .forward import FLOATS
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
    "LSTM": (1, 2, 3, 7),
    "LayerNormalization": (1, 2),
    "PRelu": (1,),
    "RMSNormalization": (1,),
    "RNN": (1, 2, 3),
}
UNLESS_CONSTANT = {  # positions that hold one where a tensor of rank >= 1 stands there that was no Constant node
    **dict.fromkeys(("Add", "Div", "Mul", "Sub"), (0, 1)),
    "Concat": range(1 << 10),
    "Gather": (0,),
    "InstanceNormalization": (1, 2),  # torch writes GroupNorm with constants there
    "Where": (1, 2),
}


def choose_variables(
    forward: Forward,
    constants: set[str],
    fixed: set[str],
    train: Sequence[str] = ("*",),
    freeze: Sequence[str] = (),
    untracked: set[str] | frozenset[str] = frozenset(),
) -> Variables:
    """Choose as trainable the parameters that a pattern of `train` and none of `freeze` matches; all others are frozen.

    `constants` are the initializers that were Constant nodes in the file. Of `fixed` trains what a pattern other than
    the default `*` matches. `untracked` are in the place of running statistics and are none. The statistics of frozen
    BatchNorms are frozen variables.
    """
    running = running_statistics(forward, untracked)
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
    frozen = [name for name in names if name not in chosen]
    return Variables(tuple(trainable), (*frozen, *frozen_statistics(forward, {*names, *running})), running)


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


def running_statistics(forward: Forward, untracked: set[str] | frozenset[str] = frozenset()) -> dict[str, str]:
    """Map the running mean and variance of every training BN of the data to the outputs that replace them.

    A BN that is called several times has those of its last call.
    """
    pairs: dict[str, str] = {}
    first: dict[str, str] = {}  # what the statistic that a call gives is the new value of
    known, from_data = forward.initializers(), forward.from_data()
    for node in forward.graph.node:
        if node.op_type != "BatchNormalization" or not is_training(node) or node.input[0] not in from_data:
            continue
        for statistic, output in zip(node.input[3:5], node.output[1:3], strict=True):
            if statistic in untracked:
                continue
            first[output] = first.get(statistic, statistic)
            if first[output] not in known:
                raise forward.error_at(node, f"computes its running statistic '{statistic}': it must be a constant.")
            pairs[first[output]] = output
    return pairs


def frozen_statistics(forward: Forward, others: set[str]) -> list[str]:
    """List the running statistics of frozen BNs that are none of the `others`."""
    known = forward.initializers()
    found = {
        name: None
        for node in forward.graph.node
        if node.op_type == "BatchNormalization" and not is_training(node)
        for name in node.input[3:5]
        if name in known and name not in others
    }
    return list(found)


def parameters(forward: Forward, constants: set[str], running: set[str]) -> list[str]:
    """List the parameters in the order of the nodes that read them, or what is made of them."""
    known, random = forward.initializers(), forward.random_names()
    found: dict[str, None] = {}
    made = _made_of_weights(forward, constants)
    for node in forward.graph.node:
        if random & {*node.output}:
            continue  # a mask has no parameters: what it is compared with and divided by is the rate of dropping
        for index, name in enumerate(node.input):
            sources = [name]
            if name not in known:
                sources = list(made.get(name, ())) if _has_place(node, index) else []
            elif name in running or not _is_parameter(node, index, known[name], name in constants):
                continue
            for source in sources:
                kind = known[source].data_type
                if kind != TensorProto.FLOAT:
                    text = f"of type {TensorProto.DataType.Name(kind).lower()}: convert the model to float32."
                    raise forward.error_at(node, f"has a parameter '{source}' {text}")
                found[source] = None
    return list(found)


def _made_of_weights(forward: Forward, constants: set[str]) -> dict[str, tuple[str, ...]]:
    """Map what is computed of initializers alone to those of them that may be parameters."""
    known, outside = forward.initializers(), forward.from_data()
    made: dict[str, tuple[str, ...]] = {}
    for node in forward.graph.node:
        if outside.intersection(node.output) or _is_mask(node, known):
            continue
        sources: dict[str, None] = {}
        for index, name in enumerate(node.input):
            if name in known:
                if name not in constants and _is_weight(known[name]) and not _is_statistic(node, index):
                    sources[name] = None
            else:
                sources.update(dict.fromkeys(made.get(name, ())))
        made.update(dict.fromkeys(node.output, tuple(sources)))
    return made


def _is_mask(node: onnx.NodeProto, known: Mapping[str, onnx.TensorProto]) -> bool:
    """Tell whether a Dropout draws a mask: of a constant of which all elements are alike."""
    tensor = known.get(node.input[0]) if node.op_type == "Dropout" else None
    return tensor is not None and np.ptp(numpy_helper.to_array(tensor)) == 0


def _has_place(node: onnx.NodeProto, index: int) -> bool:
    """Tell whether a parameter may stand there, and is none where it was a constant of the file."""
    return index in ALWAYS.get(node.op_type, ()) or index in UNLESS_CONSTANT.get(node.op_type, ())


def _is_weight(tensor: onnx.TensorProto) -> bool:
    return tensor.data_type in FLOATS and bool(tensor.dims)


def _is_parameter(node: onnx.NodeProto, index: int, tensor: onnx.TensorProto, was_constant: bool) -> bool:
    if not _is_weight(tensor):
        return False
    if index in ALWAYS.get(node.op_type, ()):
        return True
    return index in UNLESS_CONSTANT.get(node.op_type, ()) and not was_constant


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a name is like one of the globs."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
