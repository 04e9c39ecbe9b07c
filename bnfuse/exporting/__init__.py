"""A trained network as a standard ONNX model for inference.

    export_model(step, "model.onnx")                     # what `bnfuse.export_inference` and `train --export` do

The graph that evaluates is cut out of the training graph (runtime/lowering/inference.py), whatever its level; `expand`
turns `ai.bnfuse` operators back into BatchNormalization, Relu, Conv and their like; `rows` takes virtual samples out
and frees constants of the batch. Operators are those of ai.onnx alone, statistics the running ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError, first_line
from bnfuse.core.tensor_files import read_safetensors
from bnfuse.exporting.expand import Expansion
from bnfuse.exporting.rows import whole_rows
from bnfuse.fromtorch.tensors import as_array
from bnfuse.fromtorch.weights import is_pickle, read_weights
from bnfuse.graph.initial_values import with_values
from bnfuse.graph.io import save
from bnfuse.graph.module_state import ModuleState
from bnfuse.graph.state_matching import fitted, matched
from bnfuse.graph.training_graph import TrainingGraph, open_graph

if TYPE_CHECKING:
    from bnfuse.runtime import Step

MEAN_KEY, STD_KEY, SCALE_KEY = "bnfuse.input_mean", "bnfuse.input_std", "bnfuse.input_scale"
SHARE_KEY = "bnfuse.input_crop_share"
CLASSES_KEY = "bnfuse.classes"
BATCH = "N"
AVERAGE = "optimizer.average."  # what names of averages begin with in a checkpoint
MOMENTS = "optimizer."  # what names of the optimiser's state begin with in a checkpoint


def export_model(
    source: Any,
    path: str | os.PathLike[str],
    *,
    state: Mapping[str, np.ndarray] | str | os.PathLike[str] | None = None,
    ema: bool = False,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    scale: float | None = None,
    classes: Sequence[str] = (),
    crop_share: float | None = None,
    **signature: Any,
) -> str | None:
    """Write it (bnfuse.api.export_inference says what the arguments mean; `crop_share` says which part of images it was
    scored on, the middle, by its share of the shorter side). Gives why its batch is fixed, None where it is open."""
    graph, values = opened(source, **signature)
    if state is not None:
        values = checked_state(read_state(state, ema=ema), graph, values, graph.name)
    elif ema:
        values = averages_of(source)
    require_finite(graph, values)
    model = inference_model(graph, values)
    about = {MEAN_KEY: mean and list(mean), STD_KEY: std and list(std), SCALE_KEY: scale, CLASSES_KEY: list(classes)}
    about[SHARE_KEY] = crop_share
    onnx.helper.set_model_props(model, {key: json.dumps(value) for key, value in about.items() if value})
    save(model, path)
    return why_fixed(model)


def averages_of(source: Any) -> dict[str, np.ndarray]:
    """Give the averages that a step keeps. Raises BnfuseError for what keeps none."""
    if not hasattr(source, "state_dict"):
        raise BnfuseError("ema: a graph has no average of its weights: give a step, or a checkpoint as state")
    return dict(source.state_dict(ema=True))


def require_finite(graph: TrainingGraph, values: Mapping[str, np.ndarray]) -> None:
    """Raise where a network has diverged: it gives no answer that means anything."""
    for name in (*graph.signature.trainable, *graph.signature.running):
        if not np.isfinite(values[name]).all():
            raise BnfuseError(
                f"{graph.name}: '{name}' is not finite: the training diverged, so there is nothing to export. Train "
                "with a smaller --lr, or export an earlier checkpoint."
            )


def require_exportable(graph: TrainingGraph) -> None:
    """Raise where `export_model` would fail for the graph itself: before a training, not after it."""
    inference_model(graph, graph.state())


def require_state(graph: TrainingGraph, path: str | os.PathLike[str] | None) -> None:
    """Raise where values are missing: of the graph's own, or in the file that they are to be read from."""
    own = graph.state()
    if path is not None:
        checked_state(read_state(path), graph, own, os.fspath(path))


def inference_model(graph: TrainingGraph, state: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """Make the model, with the batch left open where shapes allow. It has passed onnx's full check."""
    from bnfuse.runtime.lowering.inference import inference_graph

    cut, signature = inference_graph(graph.model, graph.signature, graph.name)
    whole_rows(cut, signature.data, graph.signature.virtual)
    expansion = Expansion(cut, state, opset=graph.model.opset_imports[""], file=graph.name)
    expansion.run()
    for batch in (BATCH, None):
        model = assembled(expansion, signature.data, graph, batch)
        try:
            onnx.checker.check_model(model, full_check=True)
        except Exception as error:
            if batch is None:
                raise BnfuseError(f"{graph.name}: exports to no valid model: {first_line(error)}") from None
            continue
        if batch is None or is_open(model):
            return model
    raise AssertionError("one of the two is returned")


def why_fixed(model: onnx.ModelProto) -> str | None:
    """Tell why a model takes one batch alone, None for one that takes any: it names the first node whose result has as
    many rows whatever comes in."""
    sizes = [value.type.tensor_type.shape.dim[0] for value in model.graph.input]
    if any(size.HasField("dim_param") for size in sizes):
        return None
    bare, batch = onnx.ModelProto(), sizes[0].dim_value
    bare.CopyFrom(model)
    for value in bare.graph.input:
        value.type.tensor_type.shape.dim[0].dim_param = BATCH
    for value in bare.graph.output:
        value.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(bare, data_prop=True)
    shapes = {v.name: v.type.tensor_type.shape.dim for v in (*inferred.graph.value_info, *inferred.graph.output)}
    fed = {value.name for value in model.graph.input}
    for node in model.graph.node:
        if fed & {*node.input}:
            fed |= {*node.output}
            dims = next((shapes[name] for name in node.output if shapes.get(name)), ())
            if any(dim.dim_value and dim.dim_value % batch == 0 for dim in dims[:1]):
                return f"node '{node.name}' ({node.op_type}) has the batch of {batch} in a constant"
    return f"the rows of output '{model.graph.output[0].name}' do not follow from those of the input"


def assembled(expansion: Expansion, data: Sequence[str], graph: TrainingGraph, batch: str | None) -> onnx.ModelProto:
    """Make inputs, output and nodes a model; the batch is that of the training graph, or a name."""
    (logits,) = expansion.graph.outputs
    inputs = [_info(graph.input(name), name, batch) for name in data]
    output = _info(logits, expansion.output, batch, rows=inputs)
    made = onnx.helper.make_graph(expansion.nodes, "inference", inputs, [output], expansion.initializers())
    imports = [onnx.helper.make_opsetid("", graph.model.opset_imports[""])]
    return onnx.helper.make_model(
        made, opset_imports=imports, ir_version=min(graph.model.ir_version, 10), producer_name="bnfuse"
    )


def _info(
    value: ir.Value, name: str, batch: str | None, rows: Sequence[onnx.ValueInfoProto] = ()
) -> onnx.ValueInfoProto:
    """Give the type of an input or output. Without virtual samples an output has as many rows as the input."""
    dims: list[Any] = [int(d) if isinstance(d, int) else None for d in value.shape or ()]
    if rows and dims:
        dims[0] = rows[0].type.tensor_type.shape.dim[0].dim_value
    if batch is not None and dims:
        dims[0] = batch
    return onnx.helper.make_tensor_value_info(name, int(value.dtype or ir.DataType.FLOAT), dims)


def is_open(model: onnx.ModelProto) -> bool:
    """Tell whether the rows of the output follow from those of the input, as onnx infers shapes."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    for output in bare.graph.output:
        output.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(bare, strict_mode=True, data_prop=True)
    dims = [output.type.tensor_type.shape.dim for output in inferred.graph.output]
    return all(len(dim) > 0 and not dim[0].HasField("dim_value") for dim in dims)


def opened(source: Any, **signature: Any) -> tuple[TrainingGraph, dict[str, np.ndarray]]:
    """Open the training graph behind a step or any form of a model. Gives it, and the values of its parameters."""
    if hasattr(source, "state_dict") and hasattr(source, "model"):
        step: Step = source
        if not step.model:
            raise BnfuseError(
                "the step was made without its model: export the training graph with state=step.state_dict()"
            )
        state = step.state_dict()
        return with_values(step.model, state), state
    graph = open_graph(source, **signature)
    return graph, graph.state()


def read_state(state: Mapping[str, np.ndarray] | str | os.PathLike[str], *, ema: bool = False) -> dict[str, np.ndarray]:
    """Give the values by name, of a checkpoint's file without those of the optimiser, or of a file of torch; with `ema`
    the averages in a checkpoint."""
    if isinstance(state, Mapping):
        return dict(state)
    if ema:
        found = read_safetensors(state, lambda name: name.startswith(AVERAGE))[0]
        if not found:
            raise BnfuseError(f"{os.fspath(state)}: holds no average of the weights: train with --ema to have one")
        return {name.removeprefix(AVERAGE): value for name, value in found.items()}
    if is_pickle(state):
        return read_weights(state)
    return read_safetensors(state, lambda name: not name.startswith(MOMENTS))[0]


def checked_state(
    state: Mapping[str, Any], graph: TrainingGraph, own: Mapping[str, np.ndarray], file: str
) -> dict[str, np.ndarray]:
    """Give the values that the graph has, from those of a state, under the names of the graph or of the torch module
    behind it. Raises BnfuseError where one is missing, or of another shape."""
    try:
        found = matched(state, own, ModuleState.from_metadata(graph.model.metadata_props), as_array)
        if found.missing:
            raise BnfuseError(f"the state lacks '{found.missing[0]}': is it of this network?")
        arrays = {name: as_array(value, f"the state's '{name}'") for name, value in found.values.items()}
        fitted(arrays, {name: (value.shape, value.dtype) for name, value in own.items()}, None)
    except BnfuseError as error:
        raise BnfuseError(f"{file}: {error}") from None
    return {name: np.asarray(arrays.get(name, value), value.dtype) for name, value in own.items()}
