"""Other initial values for a training graph: those of a state by the names of the graph, or of its torch module.

graph, taken = with_state(open_graph("train.onnx"), state)
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from bnfuse.core.errors import BnfuseError
from bnfuse.core.text import count, some
from bnfuse.graph.module_state import MODULE_KEY, ModuleState
from bnfuse.graph.state_matching import fitted, matched, require_all
from bnfuse.graph.training_graph import TrainingGraph, open_graph

from .tensors import as_array


@dataclasses.dataclass(frozen=True)
class Loading:
    """How a state is taken. `leave` has globs of names that keep their values; `options` says of what is asked for in
    messages: how `skip_head` and `partial` are written."""

    skip_head: bool = False
    partial: bool = False  # what is missing keeps its values, what is unexpected is left out
    leave: Sequence[str] = ()
    options: tuple[str, str] = ("skip_head=True", "partial_weights=True")


@dataclasses.dataclass(frozen=True)
class Taken:
    """Arrays of a state by the names of a graph, the module's description with its counts, and a line that tells."""

    arrays: dict[str, np.ndarray]
    module: ModuleState
    about: str


def taken(graph: TrainingGraph, state: Mapping[str, Any], how: Loading, name: str) -> Taken:
    """Find the values of a graph in a state. Raises BnfuseError, which begins with `name`, where they do not fit."""
    signature = graph.signature
    variables = (*signature.trainable, *signature.frozen, *signature.running)
    own = {key: (graph.shape_of(key), graph.dtype_of(key)) for key in variables}
    module = ModuleState.from_metadata(graph.model.metadata_props)
    try:
        found = matched(state, own, module, as_array)
        if not found.values:
            raise BnfuseError(
                f"the state has none of the graph's names (it has {some(list(state))}): a graph that is built of the "
                "torch module of that state has its names (bnfuse build model.py:make)"
            )
        if not how.partial:
            require_all(found.missing, found.unexpected, len(own), f"{how.options[1]} takes what there is of it")
        left = [key for key in found.values if any(fnmatch.fnmatchcase(key, glob) for glob in how.leave)]
        arrays = {key: as_array(value, f"'{key}'") for key, value in found.values.items() if key not in left}
        fit = fitted(arrays, own, classes_of(graph), skip_head=how.skip_head, remedy=how.options[0])
    except BnfuseError as error:
        raise BnfuseError(f"{name}: {error}") from None
    about = f"{name}: {len(fit.arrays)} of {count(len(own), 'tensor')}"
    for what, names in (
        ("not in it", found.missing),
        ("not of this network", found.unexpected),
        ("left as they are", (*fit.head, *left)),
    ):
        about += f"; {what}: {some(list(names))}" if names else ""
    arrays = {key: np.ascontiguousarray(array, own[key][1]) for key, array in fit.arrays.items()}
    counts = {**module.tracked, **{key: each for key, each in found.tracked.items() if key in module.tracked}}
    return Taken(arrays, dataclasses.replace(module, tracked=counts), about)


def classes_of(graph: TrainingGraph) -> int | None:
    """Tell how many classes the logits are of, None where there are none."""
    try:
        return graph.classes()
    except BnfuseError:
        return None


def with_state(
    graph: TrainingGraph, state: Mapping[str, Any], how: Loading | None = None, *, name: str = "the state"
) -> tuple[TrainingGraph, str]:
    """Give a copy of the graph with these initial values, and a line on what was taken."""
    found = taken(graph, state, how or Loading(), name)
    model = graph.model.clone()
    for key, array in found.arrays.items():
        model.graph.initializers[key].const_value = ir.tensor(array, name=key)
    if found.module.is_known:
        model.metadata_props[MODULE_KEY] = found.module.to_json()
    return dataclasses.replace(graph, model=model), found.about


def put_state(proto: onnx.ModelProto, state: Mapping[str, Any], how: Loading, *, name: str) -> str:
    """Write initial values into a training file. Gives a line on what was taken."""
    found = taken(open_graph(proto, name=name), state, how, name)
    for tensor in proto.graph.initializer:
        if tensor.name in found.arrays:
            tensor.CopyFrom(numpy_helper.from_array(found.arrays[tensor.name], tensor.name))
    for entry in proto.metadata_props:
        if entry.key == MODULE_KEY and found.module.is_known:
            entry.value = found.module.to_json()
    return found.about
