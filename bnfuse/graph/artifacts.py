"""Graphs and checkpoints that onnxruntime's `generate_artifacts` wrote.

Its training graph adds every gradient to a buffer in place and gives back a flag instead of the gradient:

    InPlaceAccumulatorV2(w_grad.accumulation.buffer, w_grad, lazy_reset_grad) -> w_grad.accumulation.out

and its running statistics are updated in place too. Here the gradients, the logits and the new running statistics
become outputs, and the buffers go. The values of the parameters are in a checkpoint beside it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.shapes import complete_shapes
from bnfuse.graph.signature import LOSSES as STANDARD_LOSSES
from bnfuse.ort.process import OrtError, borrowed

ACCUMULATOR = "InPlaceAccumulatorV2"
LOSSES = (*STANDARD_LOSSES, "SoftmaxCrossEntropyLossInternal")
LOSS_STEP = re.compile(r"onnx::.*::\d+$")  # the tensors of its own losses
MAGIC = b"ODTC"  # the file identifier of a checkpoint, at byte 4


def expose_results(model: onnx.ModelProto, file: str | None = None) -> None:
    """Turn what the graph does in place into outputs."""
    graph = model.graph
    accumulators = [node for node in graph.node if node.op_type == ACCUMULATOR]
    flags = {name for node in accumulators for name in node.output}
    gone = {name for node in accumulators for name in (node.input[0], *node.input[2:])}
    for node in accumulators:
        graph.node.remove(node)
    kept = [value for value in graph.output if value.name not in flags]
    present = {value.name for value in kept}
    wanted = [*_logits(graph), *(node.input[1] for node in accumulators), *_running(graph)]
    kept += [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in wanted if n not in present]
    inputs = [value for value in graph.input if value.name not in gone]
    del graph.output[:], graph.input[:]
    graph.output.extend(kept)
    graph.input.extend(inputs)
    _adopt_known_shapes(graph)
    complete_shapes(model, file)


def _logits(graph: onnx.GraphProto) -> list[str]:
    """Tell what the loss reads: a loss operator, or steps that generate_artifacts added (MSE, BCE, L1) and named
    itself."""
    found = [node.input[0] for node in graph.node if node.op_type in LOSSES]
    if found or not graph.output:
        return found
    producers = {name: node for node in graph.node for name in node.output}
    read: dict[str, None] = {}
    pending = [graph.output[0].name]
    while pending:
        name = pending.pop()
        if name in producers and name not in read:
            read[name] = None
            if LOSS_STEP.match(name):
                pending += producers[name].input
    return [name for name in read if not LOSS_STEP.match(name)]


def _running(graph: onnx.GraphProto) -> list[str]:
    return [name for node in graph.node if node.op_type == "BatchNormInternal" for name in node.output[1:3] if name]


def _adopt_known_shapes(graph: onnx.GraphProto) -> None:
    """Move the types of tensors that became outputs from value_info to the outputs."""
    known = {value.name: value for value in graph.value_info}
    for value in graph.output:
        if value.name in known:
            value.CopyFrom(known[value.name])
    outputs = {value.name for value in graph.output}
    kept = [value for value in graph.value_info if value.name not in outputs]
    del graph.value_info[:]
    graph.value_info.extend(kept)


def fill_from_checkpoint(model: ir.Model, path: str | os.PathLike[str]) -> None:
    """Add initializers for the graph inputs that the checkpoint has a value for."""
    file, names = str(os.fspath(path)), [str(value.name) for value in model.graph.inputs]
    _require_checkpoint(Path(path))
    try:
        with borrowed() as process:
            _, stored = process.ask("checkpoint", {"path": str(Path(path).resolve()), "names": names})
    except BnfuseError as error:  # onnxruntime is not there, or not the one that reads checkpoints
        raise BnfuseError(f"{file}: {error}") from None
    except OrtError:
        raise BnfuseError(f"{file}: is damaged or cut short: onnxruntime cannot read the checkpoint") from None
    found = 0
    for value in model.graph.inputs:
        values = stored.get(str(value.name))
        if values is None:
            continue
        shape = None if value.shape is None else tuple(value.shape)
        if shape != values.shape:
            raise BnfuseError(f"{file}: '{value.name}' has the shape {list(values.shape)}, the graph's input {shape}")
        value.const_value = ir.tensor(values, name=value.name)
        model.graph.initializers[str(value.name)] = value
        found += 1
    if not found:
        raise BnfuseError(f"{file}: has no value for any input of the graph: it belongs to another model")


def _require_checkpoint(path: Path) -> None:
    try:
        with path.open("rb") as stream:
            head = stream.read(8)
    except OSError as error:
        raise BnfuseError(f"{path}: cannot be read: {error.strerror or error}") from None
    if head[4:8] != MAGIC:
        raise BnfuseError(f"{path}: is no checkpoint of onnxruntime-training")
