"""The graph that evaluates a trained network, cut out of its training graph.

Statistics come from the running averages, dropout and random masks (masks.py) do nothing, and only the logits are
wanted. Every level of rewriting is served, because statistics reach the maps through `BatchNormFinalize` or a whole
`BatchNorm` alone. Operators keep their form, `Statistics` that nobody reads included, so that no
kernel is needed that training has not.
For the same reason virtual samples stay where they are, as zeros: to the running statistics no row matters to another.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from bnfuse.analysis.ancestors import ancestors
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.drawing import draws
from bnfuse.graph.signature import GraphSignature
from bnfuse.graph.training_graph import TrainingGraph, put_in_place
from bnfuse.graph.values import static_shape
from bnfuse.opset.spec import DOMAIN
from bnfuse.opset.training_ops import batch_norm_constants
from bnfuse.runtime.lowering.masks import without_masks
from bnfuse.runtime.lowering.values import dtype_name


def inference_graph(
    model: ir.Model, signature: GraphSignature, file: str | None = None
) -> tuple[ir.Graph, GraphSignature]:
    """Make a new graph whose one output is the logits, and its signature. State inputs stay the same.

    Raises where there is no such graph: the logits have no name, or something is drawn that belongs into them.
    """
    whole = model.graph
    logits = next((v for n in whole for v in n.outputs if v.name and v.name == signature.logits), None)
    if logits is None:
        raise BnfuseError(
            "the training graph names no logits, so it cannot be evaluated: build it with --logits NAME for that"
        )
    needed = ancestors([logits])
    graph = ir.GraphView(
        whole.inputs,
        [logits],
        nodes=[node for node in whole if node in needed],
        initializers=[*whole.initializers.values()],
        opset_imports=whole.opset_imports,
        name=whole.name,
    ).clone()
    without_masks(graph, model.opset_imports.get("", 1), file)
    for node in list(graph):
        if node.op_type == "LocalFinalize" and node.domain == DOMAIN:
            finalize_for_all(graph, node)
        elif node.op_type == "LocalNormalize" and node.domain == DOMAIN:
            normalize_all(graph, node)
        elif node.op_type == "BatchNormFinalize" and node.domain == DOMAIN:
            node.replace_input_with(2, node.inputs[4])
            node.replace_input_with(3, node.inputs[5])
            leave_running(node.outputs[3:5], node.inputs[4:6])
        elif node.op_type == "BatchNorm" and node.domain == DOMAIN:
            normalize_by_running(graph, node)
        elif node.op_type == "Dropout":
            source = node.inputs[0]
            assert source is not None
            put_in_place(node.outputs[0], source)
    for name in (*signature.offsets, *signature.virtual):
        leave_out(graph, name)
    return graph, dataclasses.replace(
        signature, labels=(), gradients={}, input_gradients={}, loss=graph.outputs[0].name or "", offsets=(), virtual=()
    )


def require_inference(graph: TrainingGraph) -> None:
    """Raise where a trained network could not be evaluated, before it is compiled and trained."""
    if graph.signature.logits is None or any(draws(node) for node in graph.model.graph):
        inference_graph(graph.model, graph.signature, graph.name)


def leave_out(graph: ir.Graph, name: str) -> None:
    """Take out an input of what is drawn: no operator needs its values any more, but perhaps zeros in their place."""
    value = next(value for value in graph.inputs if value.name == name)
    graph.inputs.remove(value)
    shape = static_shape(value)
    if shape is None:
        raise BnfuseError(f"input '{name}' has no static shape: rewrite the source graph anew")
    value.const_value = ir.tensor(np.zeros(shape, dtype_name(value) or "float32"), name=name)
    graph.initializers[name] = value


def finalize_for_all(graph: ir.Graph, node: ir.Node) -> None:
    """Replace a LocalFinalize by the BatchNormFinalize of the running statistics."""
    scale, bias, _, _, mean, variance = node.inputs[:6]
    attributes = [node.attributes["epsilon"], node.attributes["momentum"]]
    operands = [scale, bias, mean, variance, mean, variance]
    finalize = ir.Node(DOMAIN, "BatchNormFinalize", operands, attributes, num_outputs=5, name=node.name)
    graph.insert_after(node, finalize)
    for old, new in zip(node.outputs, finalize.outputs, strict=False):
        new.name = f"{old.name}/inference" if old.name else ""
    for old, new in zip(node.outputs[:3], finalize.outputs, strict=False):
        old.replace_all_uses_with(new)
    leave_running(node.outputs[3:5], (mean, variance))


def normalize_all(graph: ir.Graph, node: ir.Node) -> None:
    """Replace a LocalNormalize by one operator for all groups: they have the same coefficients now."""
    y = node.outputs[0]
    normalize = ir.Node(DOMAIN, "NormalizePointwise", node.inputs[:3], num_outputs=1, name=node.name)
    normalize.outputs[0].name = f"{y.name}/inference"
    normalize.outputs[0].shape, normalize.outputs[0].type = y.shape, y.type
    graph.insert_after(node, normalize)
    put_in_place(y, normalize.outputs[0])


def normalize_by_running(graph: ir.Graph, node: ir.Node) -> None:
    """Replace the use of a BatchNorm's map by that of a NormalizePointwise with the running statistics.

    Maps of other ranks than 2 and 4 are taken to rank 4 and back, as training lowers them.
    """
    x, scale, bias, mean, variance = node.inputs[:5]
    assert x is not None
    attributes = [ir.AttrFloat32(name, value) for name, value in batch_norm_constants(node).items()]
    finalize = ir.Node(
        DOMAIN,
        "BatchNormFinalize",
        [scale, bias, mean, variance, mean, variance],
        attributes,
        num_outputs=5,
        name=node.name,
    )
    y, shape = node.outputs[0], static_shape(x)
    new = [finalize]
    if shape is None or len(shape) in (2, 4):
        new.append(ir.Node(DOMAIN, "NormalizePointwise", [x, *finalize.outputs[:2]], num_outputs=1, name=node.name))
    else:
        new.append(reshape(graph, x, (*shape[:2], math.prod(shape[2:]), 1), f"{node.name}/map"))
        operands = [new[-1].outputs[0], *finalize.outputs[:2]]
        new.append(ir.Node(DOMAIN, "NormalizePointwise", operands, num_outputs=1, name=node.name))
        new.append(reshape(graph, new[-1].outputs[0], shape, f"{node.name}/unmap"))
    for index, value in enumerate(value for each in new for value in each.outputs):
        value.name = f"{y.name}/inference_{index}"
    result = new[-1].outputs[0]
    result.shape, result.type = y.shape, y.type
    graph.insert_after(node, new)
    put_in_place(y, result)
    leave_running(node.outputs[1:3], (mean, variance))


def leave_running(moved: Sequence[ir.Value], running: Sequence[ir.Value | None]) -> None:
    """Let what reads the statistics that a step has moved read them as they are: of a module that is applied twice the
    second BatchNorm moves what the first has."""
    for old, value in zip(moved, running, strict=True):
        if value is not None:
            old.replace_all_uses_with(value)


def reshape(graph: ir.Graph, value: ir.Value, shape: tuple[int, ...], name: str) -> ir.Node:
    """Make a Reshape to a shape that is known now."""
    to = ir.Value(name=f"{name}/shape", const_value=ir.tensor(np.array(shape, np.int64), name=f"{name}/shape"))
    graph.register_initializer(to)
    return ir.Node("", "Reshape", [value, to], num_outputs=1, name=name)
