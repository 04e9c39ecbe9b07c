"""A training graph of which some parameters are not trained: without their gradients and what leads to these alone.

    x  w1  w2  ->  loss, w1_grad, w2_grad        freeze w1        x  w1  w2  ->  loss, w2_grad

`bnfuse build --freeze` makes such a graph from the start and computes least; here gradients go whose operators give
nothing else. Where all parameters up to a place are frozen, the backward pass ends there. BatchNorms go on normalising
by the batch, and their running statistics move: a graph is built with them frozen (`build --freeze-bn`).
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence

import onnx_ir as ir

from bnfuse.core.errors import BnfuseError
from bnfuse.core.text import some
from bnfuse.graph.signature import METADATA_KEY
from bnfuse.graph.training_graph import TrainingGraph


def frozen(graph: TrainingGraph, globs: Sequence[str]) -> TrainingGraph:
    """Give the graph in which the parameters that the globs match are constants of the training, or itself without any.

    Raises BnfuseError for a glob that matches no parameter that trains, and where none is left.
    """
    if not globs:
        return graph
    trainable = graph.signature.trainable
    for glob in globs:
        if not fnmatch.filter(trainable, glob):
            raise BnfuseError(
                f"{graph.name}: --freeze '{glob}' matches no parameter that trains (there are {some(trainable)})"
            )
    chosen = [name for name in trainable if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]
    kept = tuple(name for name in trainable if name not in set(chosen))
    if not kept:
        raise BnfuseError(f"{graph.name}: --freeze leaves no parameter to train")
    signature = dataclasses.replace(
        graph.signature,
        trainable=kept,
        frozen=(*graph.signature.frozen, *chosen),
        gradients={name: graph.signature.gradients[name] for name in kept if name in graph.signature.gradients},
    )
    model = graph.model.clone()
    gone = {graph.signature.gradients.get(name) for name in chosen}
    left = [value for value in model.graph.outputs if value.name not in gone]
    model.graph.outputs.clear()
    model.graph.outputs.extend(left)
    remove_unneeded(model.graph)
    model.metadata_props[METADATA_KEY] = signature.to_json()
    return TrainingGraph(model, signature, graph.name)


def remove_unneeded(graph: ir.Graph) -> None:
    """Remove the nodes that no output needs, and constants that nothing reads."""
    for node in reversed(list(graph)):
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            graph.remove(node, safe=True)
    inputs = {value.name for value in graph.inputs}
    for name, value in list(graph.initializers.items()):
        if name not in inputs and not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
