"""A torch module as a source: exported as it is, and taken as it is meant.

In the exported graph all BatchNorms look the same. What says that they train is the module's mode: those in training
mode do, others stay frozen, and neither needs --train-bn or --frozen-bn. Parameters without `requires_grad` are not
trained, and running variances move as torch moves them.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import onnx
from onnx import numpy_helper

from bnfuse.core.errors import BnfuseError
from bnfuse.fromtorch.export import batch_norm_modes, exported, is_module, unwrapped
from bnfuse.graph.module_state import COUNT, MODULE_KEY, ModuleState, digest_of

from .exporters import PARAMETER, SIGNATURE, signature_of

_BUFFER = re.compile(r"^\w+: BUFFER target='([^']+)' persistent=True", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Source:
    """What is built, and how its BatchNorms are meant."""

    model: Any
    file: str | None
    train_bn: bool
    frozen_bn: bool
    running_variance: str


def opened(
    source: Any,
    example: Any,
    *,
    file: str | None,
    batch: int | None,
    train_bn: bool,
    frozen_bn: bool,
    running_variance: str | None,
) -> Source:
    """Export a torch module; anything else is a model or its file, and stays as it is.

    Raises BnfuseError where an example is missing or is none for the source, and for a module in evaluation mode of
    which nothing says that it is meant so.
    """
    if not is_module(source):
        if example is not None:
            raise BnfuseError(f"{file or source}: an example is for torch modules: a file has its own shapes")
        return Source(source, file, train_bn, frozen_bn, running_variance or "onnx")
    module = unwrapped(source)
    name = file or type(module).__name__
    if batch is not None:
        raise BnfuseError(f"{name}: a torch module has the batch of its example: leave batch={batch} out")
    is_program = not hasattr(module, "training")
    if is_program and example is not None:
        raise BnfuseError(f"{name}: an exported program has its own example: leave example= out")
    if not is_program and example is None:
        raise BnfuseError(f"{name}: give an example of what it is called with: example=images")
    if not is_program and not module.training and not (train_bn or frozen_bn):
        raise BnfuseError(
            f"{name}: is in evaluation mode, without its Dropouts and with its BatchNorms frozen: call .train() on it, "
            "or say what is meant by frozen_bn=True (--frozen-bn) or train_bn=True (--train-bn)"
        )
    model = exported(module, example, name=name)
    trains, evaluated = batch_norm_modes(model)
    frozen_bn = frozen_bn or (evaluated and not trains and not train_bn and not is_program)
    return Source(model, name, train_bn or trains, frozen_bn, running_variance or "torch")


def module_state(model: onnx.ModelProto) -> ModuleState:
    """Tell what the module behind a forward graph calls its tensors: as `exported` wrote it, or as torch's exporter
    lists them in a file that the user exported."""
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    if MODULE_KEY in metadata:
        return ModuleState.from_metadata(metadata)
    listed = signature_of(model)
    buffers = {
        name
        for entry in (*model.graph.metadata_props, *model.metadata_props)
        if entry.key == SIGNATURE
        for name in _BUFFER.findall(entry.value)
    }
    there = {tensor.name for tensor in model.graph.initializer}
    targets = [tensor.target for tensor in listed.values() if tensor.kind == PARAMETER or tensor.target in buffers]
    return ModuleState(
        names={name: name for name in targets if name in there and not _is_count(name)},
        tracked={name: 0 for name in targets if _is_count(name)},
    )


def _is_count(name: str) -> bool:
    return name.rpartition(".")[2] == COUNT


def buffer_digests(model: onnx.ModelProto) -> dict[str, str]:
    """Give digests of the buffers of the module: those that become constants of the training graph are told by them."""
    listed = {tensor.target for tensor in signature_of(model).values() if tensor.kind != PARAMETER}
    tensors = (tensor for tensor in model.graph.initializer if tensor.name in listed)
    return {tensor.name: digest_of(numpy_helper.to_array(tensor)) for tensor in tensors}
