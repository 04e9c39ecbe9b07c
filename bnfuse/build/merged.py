"""Tensors of equal values that an optimiser wrote once, though the module has several: each reader gets its own back.

    bn1(x, ones, zeros, zeros, ones), bn2(y, ones, zeros, zeros, ones)    to    four tensors for each BN

Trained, they would be one weight; a running statistic cannot even be shared. What the module itself shares stays one:
torch's exporter says which argument an operand was. Where nothing says so, a tensor is one weight unless it is
statistic and weight at once, or the other operands show that its readers are two.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import onnx
from onnx import numpy_helper

from bnfuse.core.text import some
from bnfuse.graph.module_state import MODULE_KEY

from .exporters import Tensor, argument_of, has_argument, signature_of
from .graph import Forward
from .variables import parameter_places

Place = tuple[onnx.NodeProto, int]
SHARED = "shared"
ROLES = {"BatchNormalization": ("", "scale", "bias", "running_mean", "running_var")}


def separate_merged(forward: Forward) -> dict[str, str]:
    """Return the new tensors and which one each is a copy of."""
    if any(entry.key == MODULE_KEY for entry in forward.model.metadata_props):
        return {}  # written of a module here, and nothing was merged
    known, signature = forward.initializers(), signature_of(forward.model)
    keys = {tensor.target: key for key, tensor in signature.items()}
    readers: dict[str, list[Place]] = {}
    for node, index, name in parameter_places(forward):
        readers.setdefault(name, []).append((node, index))
    copies: dict[str, str] = {}
    for name, places in readers.items():
        owners: dict[Hashable, list[Place]] = {}
        for place in places:
            owners.setdefault(_owner(place, known[name], keys.get(name, SHARED)), []).append(place)
        if len(owners) == 1:
            continue
        names = [_name(forward, owner, group[0], signature) for owner, group in owners.items()]
        known_first = next(iter(owners)) in signature
        keeper = names.index(name) if name in names else None if known_first else 0  # the others are copies
        for position, group in enumerate(owners.values()):
            if position == keeper:
                continue
            copy = forward.fresh(names[position])
            forward.set_initializer(copy, numpy_helper.to_array(known[name]))
            copies[copy] = name
            for node, index in group:
                node.input[index] = copy
    if copies:
        forward.note(
            f"gave {len(copies)} tensors that were merged with others of equal values a copy of their own "
            f"({some(list(copies))})"
        )
    return copies


def _owner(place: Place, tensor: onnx.TensorProto, own: str) -> Hashable:
    """Tell what the tensor is to a reader; two readers of one tensor have it in common where this is equal.

    A reader that an exporter made of an operator of another kind does not say which argument it reads: that is the
    parameter of the tensor's name (`own`), unless another may well have the same values.
    """
    node, index = place
    if has_argument(node, index):
        return argument_of(node, index) or ((node.name, index) if _is_uniform(tensor) else own)
    if node.op_type == "BatchNormalization":
        weights, statistics = tuple(node.input[1:3]), tuple(node.input[3:5])
        if {*weights} & {*statistics} or len({*statistics}) == 1:
            return node.name, index  # merged by values: no BatchNorm is made like that
        return (index, weights, statistics) if index in (3, 4) else SHARED
    if node.op_type in ("Conv", "ConvTranspose", "Gemm") and index == 2 and _is_uniform(tensor):
        return node.op_type, node.input[1]  # biases of different weights
    return SHARED


def _is_uniform(tensor: onnx.TensorProto) -> bool:
    values = numpy_helper.to_array(tensor)
    return bool(np.all(values == values.flat[0])) if values.size else True


def _name(forward: Forward, owner: Hashable, place: Place, signature: dict[str, Tensor]) -> str:
    if isinstance(owner, str) and owner in signature:
        return signature[owner].target
    node, index = place
    if owner == SHARED:
        return node.input[index]
    kinds = ROLES.get(node.op_type, ("", "weight", "bias"))
    return f"{node.name}/{kinds[index] if index < len(kinds) else index}"
