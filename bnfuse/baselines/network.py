"""The forward part of a training graph as a torch module, and its loss as another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from bnfuse.analysis.ancestors import ancestors
from bnfuse.baselines.functions import FUNCTIONS
from bnfuse.baselines.in_place import write_in_place
from bnfuse.baselines.layers import LAYERS
from bnfuse.baselines.losses import LOSSES, written_mse
from bnfuse.baselines.writer import Writer
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.training_graph import TrainingGraph, loss_inputs

if TYPE_CHECKING:
    import torch

CONVERTERS = {**FUNCTIONS, **LAYERS}


def torch_module(graph: TrainingGraph) -> torch.nn.Module:
    """Write `module(images) -> logits`, images NCHW, the data inputs in the order of the roles.

    Its parameters and running statistics have the file's initial values; frozen parameters have no gradient, and a
    BatchNormalization for inference is in eval mode, which `module.train()` would end. `module.names` says the torch
    name of each of the file's parameters and running statistics, `module.code` shows the module as Python.
    """
    logits = logits_of(graph)
    data = [graph.input(name) for name in graph.signature.data]
    writer = Writer(graph, CONVERTERS)
    module = written(writer, data, ancestors([logits]), logits, "Network")
    module.names = writer.names
    return module


def torch_loss(graph: TrainingGraph) -> torch.nn.Module:
    """Write `loss(logits, *labels)`: what the file computes between them and its loss."""
    logits, loss = logits_of(graph), output_of(graph, graph.loss)
    labels = [graph.input(name) for name in graph.signature.labels]
    nodes = ancestors([loss], [logits])
    known = {logits, *labels, *(value for node in nodes for value in node.outputs)}
    inputs = {value.name for value in graph.model.graph.inputs}
    for node in nodes:
        for value in node.inputs:
            if value is not None and value not in known and (value.producer() or value.name in inputs):
                raise BnfuseError(
                    f"{graph.name}: node '{node.name}' ({node.op_type}) of the loss reads '{value.name}', which is"
                    " neither logits nor labels: leave the torch baselines out"
                )
    writer = Writer(graph, {**CONVERTERS, **LOSSES})
    if (mse := written_mse(loss)) is not None:
        for value in (logits, *labels):
            writer.placeholder(value)
        writer.values[loss] = writer.call(writer.nn.functional.mse_loss, *(writer.values[value] for value in mse))
        return finished(writer, loss, "Loss")
    return written(writer, [logits, *labels], nodes, loss, "Loss")


def written(writer: Writer, inputs: Sequence[ir.Value], nodes: set[ir.Node], end: ir.Value, name: str) -> Any:
    """Write the part of a graph between these inputs and `end` as an fx module."""
    for value in inputs:
        writer.placeholder(value)
    for node in writer.source.model.graph:
        if node in nodes:
            writer.node(node)
    return finished(writer, end, name)


def finished(writer: Writer, end: ir.Value, name: str) -> Any:
    """Close the fx graph with its output. Gives the module."""
    writer.output(end)
    write_in_place(writer.graph, writer.root, writer.torch.cat)
    writer.graph.lint()
    return writer.torch.fx.GraphModule(writer.root, writer.graph, name)


def logits_of(graph: TrainingGraph) -> ir.Value:
    """Find what the roles call the logits, or else what a node reads together with the labels."""
    if graph.signature.logits is not None:
        return output_of(graph, graph.signature.logits)
    labels = {*graph.signature.labels}
    for node in graph.model.graph:
        if labels & {value.name for value in node.inputs if value is not None}:
            found = [value for value in node.inputs if value is not None and value.name not in labels]
            if found:
                return found[0]
    found = loss_inputs(graph.model, graph.signature.loss)
    if not found:
        raise BnfuseError(f"{graph.name}: which value is the logits cannot be told: build it with `bnfuse build`")
    return found[0]


def output_of(graph: TrainingGraph, name: str) -> ir.Value:
    """Find an output of the graph by its name."""
    return next(value for value in graph.model.graph.outputs if value.name == name)
