"""Which layer of the network each node of the backward pass belongs to: the node of the forward graph whose gradient it
computes.

That is the layer that its name, or the names of the nodes it was made of, begin with; else the one that it shares most
feature maps with; where it shares none, no layer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from bnfuse.analysis.match import label, sources
from bnfuse.graph.values import declared_shape

OWN_NAME = re.compile(r"(?P<forward>.+)/grad(_\d+)?(/.*)?|(?P<tensor>.+)_grad(_\d+)?")
HALVES = ("/statistics", "/finalize")  # what splitting a BatchNorm puts behind its name

Touching = Mapping[ir.Value, Sequence[ir.Node]]


def owners(nodes: Iterable[ir.Node], layers: Sequence[ir.Node]) -> dict[ir.Node, ir.Node | None]:
    """Map backward nodes to layers, which are the nodes of the forward graph."""
    named: dict[str, ir.Node] = {}
    for names in (own_names, sources):
        for layer in layers:
            for name in names(layer):
                named.setdefault(name, layer)
    touching: dict[ir.Value, list[ir.Node]] = {}
    for layer in layers:
        for value in maps_of(layer):
            touching.setdefault(value, []).append(layer)
    return {node: owner(node, named, touching) for node in nodes}


def owner(node: ir.Node, named: Mapping[str, ir.Node], touching: Touching) -> ir.Node | None:
    """Find the layer that a node of the backward graph belongs to: by name, else by the maps that both touch."""
    for name in (node.name or "", *sources(node)):
        layer = named.get(forward_name(name))
        if layer is not None:
            return layer
    shared = Counter(layer for value in maps_of(node) for layer in touching.get(value, ()))
    return max(shared, key=lambda layer: shared[layer], default=None)


def own_names(node: ir.Node) -> list[str]:
    """List the names that a node goes by: its own and those of its results."""
    return [name for name in (node.name, *(v.name for v in node.outputs)) if name]


def maps_of(node: ir.Node) -> list[ir.Value]:
    """List the feature maps that a node reads or writes, each once."""
    values = dict.fromkeys((*node.inputs, *node.outputs))
    return [value for value in values if value is not None and len(declared_shape(value)) >= 4]


def layer_name(layer: ir.Node) -> str:
    """Name the layer that a node is part of: of a half of a BatchNorm the BatchNorm."""
    name = label(layer)
    for half in HALVES:
        name = name.removesuffix(half)
    return name


def forward_name(name: str) -> str:
    """Tell what the name of a backward node was made of: the forward node's name, or the tensor's whose gradients are
    summed.

    conv1/grad -> conv1, conv1/grad/mul -> conv1, x_grad -> x; as onnxruntime makes them: conv1_Grad/ConvGrad_0 ->
    conv1, norm1_BatchNormInternal_Grad/... -> norm1, AccumulateGrad_x_grad -> x
    """
    if name.startswith("AccumulateGrad_"):
        return name.removeprefix("AccumulateGrad_").removesuffix("_grad")
    if found := OWN_NAME.fullmatch(name):
        return found["forward"] or found["tensor"]
    return re.sub(r"(/ConcatReplacement/|_BatchNormInternal)?_Grad/.*$", "", name)
