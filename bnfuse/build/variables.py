"""Which initializers of a forward graph are parameters, which of them train, and which are running statistics.

A tensor of floats that a gradient reaches is a parameter, unless the file says that it is none: it was a Constant node,
torch's exporter lists it otherwise, or it is a number (shape []) that no exporter lists. Not every constant that stands
where a parameter may stand is one: torch writes BatchNorm without affine as a BatchNorm with a scale of ones, and a
buffer as a weight. Those stay as they are, unless `train` names them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from bnfuse.autodiff import differentiable
from bnfuse.autodiff.rules import FLAT
from bnfuse.core.text import some

from .batch_norms import is_training
from .decompose import DECOMPOSITIONS
from .exporters import PARAMETER, argument_of, has_argument, is_generated, signature_of
from .forward import FLOATS
from .graph import Forward
from .training import Variables

ALWAYS = {  # operand positions that hold a parameter wherever a constant stands there
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "DeformConv": (1, 3),
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
_DIFFERENTIABLE = frozenset({*differentiable(), *DECOMPOSITIONS})
WITHOUT_GRADIENT = {  # operands of floats that no gradient reaches: types, rates, sizes, weights of a loss's classes
    "CastLike": (1,),
    "Dropout": (1,),
    "NegativeLogLikelihoodLoss": (2,),
    "Resize": (1, 2),
    "SoftmaxCrossEntropyLoss": (2,),
    "Upsample": (1,),
}
FOLDED_INTO = ("Add", "Concat", "Div", "Gather", "InstanceNormalization", "Mul", "Sub", "Where")  # parts of parameters


def choose_variables(
    forward: Forward,
    constants: set[str],
    fixed: set[str],
    train: Sequence[str] = ("*",),
    freeze: Sequence[str] = (),
    untracked: set[str] | frozenset[str] = frozenset(),
    held: Collection[str] = (),
    *,
    required: bool = True,
) -> Variables:
    """Choose as trainable the parameters that a pattern of `train` and none of `freeze` matches; all others are frozen.

    `constants` are the initializers that were Constant nodes in the file. Of `fixed`, and of `held`, which the module
    does not train, trains what a pattern other than the default `*` matches. `untracked` are in the place of running
    statistics and are none. The statistics of frozen BatchNorms are frozen variables. Raises where nothing is left to
    train, or a pattern matches nothing, unless `required` is False.
    """
    running = running_statistics(forward, untracked)
    chosen_by_name = [pattern for pattern in train if pattern != "*"]
    numbers = unsaid_numbers(forward, constants)
    asked = {name for name in numbers if matches(name, chosen_by_name)}
    names = parameters(forward, constants, set(running), asked)
    for option, patterns in (("--train", chosen_by_name), ("--freeze", freeze)):
        for pattern in patterns:
            if required and not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise forward.error(f"{option} '{pattern}' matches no parameter (there are {some(names)})")
    trainable = [
        name
        for name in names
        if matches(name, chosen_by_name if name in fixed or name in held else train) and not matches(name, freeze)
    ]
    if not trainable and required:
        raise forward.error("nothing is left to train: --train and --freeze leave no parameter")
    chosen = set(trainable)
    kept = [name for name in names if name in fixed and name not in chosen]
    if kept:
        forward.note(
            f"{len(kept)} constants in the place of parameters stay as they are ({some(kept)}): the network has no "
            "parameter there (affine=False, buffers). --train '*' --train NAME trains them"
        )
    resting = [name for name in names if name in held and name not in chosen and name not in fixed]
    if resting:
        forward.note(
            f"{len(resting)} parameters that the module does not train (requires_grad=False) stay as they are "
            f"({some(resting)}). --train '*' --train NAME trains them"
        )
    left = [name for name in numbers if name not in asked]
    if left:
        forward.note(
            f"single numbers are taken as constants ({some(left)}), as the file does not say what they are: "
            "--train '*' --train NAME trains them"
        )
    frozen = [name for name in names if name not in chosen]
    return Variables(tuple(trainable), (*frozen, *frozen_statistics(forward, {*names, *running})), running)


def warn_of_lost_parameters(forward: Forward) -> None:
    """Warn of parameters that the exporter lists and the file has not, where nothing stands in for them as a weight."""
    known = forward.initializers()
    operands = {name for node in forward.graph.node for name in weights_of(node)}
    if forward.lost and not any(name in known and name not in forward.signed for name in operands):
        forward.warn(
            f"the exporter lists parameters that the file does not have ({some(sorted(forward.lost))}): nothing reads "
            "them, or it folded them into constants, which are not trained. torch.onnx.export(..., dynamo=True, "
            "optimize=False) keeps them"
        )


def weights_of(node: onnx.NodeProto) -> list[str]:
    """List the operands of a node that are parameters wherever they are constants."""
    return [node.input[index] for index in ALWAYS.get(node.op_type, ()) if index < len(node.input)]


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
            if name in known and (
                _is_parameter(forward, node, index, known[name], False) or _is_statistic(node, index)
            ):
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


def unsaid_numbers(forward: Forward, constants: set[str]) -> list[str]:
    """List the numbers (shape []) of which the file does not say whether they are parameters: named initializers of
    other exporters than torch's."""
    known, found = forward.initializers(), dict[str, None]()
    for node in forward.graph.node if forward.model.producer_name != "pytorch" else ():
        for index, name in enumerate(node.input):
            is_number = name in known and not known[name].dims and known[name].data_type in FLOATS
            is_number = is_number and node.op_type != "Clip"  # its bounds: ReLU6's, say
            if is_number and name not in constants and not is_generated(name) and reaches(node, index):
                found[name] = None
    return list(found)


def parameters(forward: Forward, constants: set[str], running: set[str], numbers: Collection[str] = ()) -> list[str]:
    """List the parameters in the order of the nodes that read them, or what is made of them.

    `numbers` are initializers of shape [] that are taken as parameters though the file does not say so.
    """
    known, random = forward.initializers(), forward.random_names()
    found: dict[str, None] = {}
    made = _made_of_weights(forward, constants, numbers)
    for node in forward.graph.node:
        if random & {*node.output}:
            continue  # a mask has no parameters: what it is compared with and divided by is the rate of dropping
        for index, name in enumerate(node.input):
            sources = [name]
            if name not in known:
                sources = list(made.get(name, ())) if reaches(node, index) else []
            elif name in numbers and reaches(node, index):
                pass
            elif name in running or not _is_parameter(forward, node, index, known[name], name in constants):
                continue
            for source in sources:
                kind = known[source].data_type
                if kind != TensorProto.FLOAT:
                    text = f"of type {TensorProto.DataType.Name(kind).lower()}: convert the model to float32."
                    raise forward.error_at(node, f"has a parameter '{source}' {text}")
                found[source] = None
    return list(found)


def _made_of_weights(forward: Forward, constants: set[str], numbers: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Map what is computed of initializers alone to those of them that may be parameters."""
    known, outside = forward.initializers(), forward.from_data()
    made: dict[str, tuple[str, ...]] = {}
    for node in forward.graph.node:
        if outside.intersection(node.output) or _is_mask(node, known):
            continue
        sources: dict[str, None] = {}
        for index, name in enumerate(node.input):
            if name in known:
                is_source = name in numbers or (name not in constants and _is_weight(forward, known[name]))
                if is_source and not _is_statistic(node, index):
                    sources[name] = None
            else:
                sources.update(dict.fromkeys(made.get(name, ())))
        made.update(dict.fromkeys(node.output, tuple(sources)))
    return made


def _is_mask(node: onnx.NodeProto, known: Mapping[str, onnx.TensorProto]) -> bool:
    """Tell whether a Dropout draws a mask: of a constant of which all elements are alike."""
    tensor = known.get(node.input[0]) if node.op_type == "Dropout" else None
    return tensor is not None and np.ptp(numpy_helper.to_array(tensor)) == 0


def reaches(node: onnx.NodeProto, index: int) -> bool:
    """Tell whether a gradient reaches an operand of the node that is of floats."""
    op = node.op_type
    return (
        op in (_DIFFERENTIABLE - FLAT) and index not in WITHOUT_GRADIENT.get(op, ()) and not _is_statistic(node, index)
    )


def _is_weight(forward: Forward, tensor: onnx.TensorProto) -> bool:
    return tensor.data_type in FLOATS and (bool(tensor.dims) or tensor.name in forward.numbers)


def _is_parameter(
    forward: Forward, node: onnx.NodeProto, index: int, tensor: onnx.TensorProto, was_constant: bool
) -> bool:
    """Tell whether an initializer is a parameter where it stands: as a weight, or by what the file says of it."""
    if not _is_weight(forward, tensor):
        return False
    if index in ALWAYS.get(node.op_type, ()):
        return True
    if was_constant or not reaches(node, index):
        return False
    if forward.signed and tensor.name not in forward.signed and not forward.lost:
        return False  # the exporter's own: all parameters are elsewhere
    return node.op_type in FOLDED_INTO or not is_generated(tensor.name)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a name is like one of the globs."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
