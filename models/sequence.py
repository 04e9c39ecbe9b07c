"""Layers of sequence networks: `graph.dense_layer(x, Weights.make("query", 8, 4), name="query")`.

They serve networks of shapes only (gnmt.py, transformer.py), so parameters are zeros that take no memory. Weights are
values of their own here: the steps of a recurrent cell and the two sides of a Transformer share them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from .initial import kaiming
from .layers import Network, add

LAYER_NORM_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Weights:
    """Of a fully connected layer: `weight` (out, in), `bias` (out) or none."""

    weight: gs.Constant
    bias: gs.Constant | None = None

    @classmethod
    def make(cls, name: str, inputs: int, outputs: int, *, bias: bool = True) -> Weights:
        """Make weights of these sizes."""
        return cls(zeros(f"{name}/weight", outputs, inputs), zeros(f"{name}/bias", outputs) if bias else None)


def zeros(name: str, *shape: int) -> gs.Constant:
    """Make a weight for its shape alone."""
    return gs.Constant(name, kaiming(name, shape, None))


def tokens(graph: Network, name: str, *shape: int) -> gs.Variable:
    """Give a new input of the graph: numbers of words."""
    return new_input(graph, name, np.int64, *shape)


def new_input(graph: Network, name: str, dtype: type, *shape: int) -> gs.Variable:
    """Add an input to the graph."""
    x = gs.Variable(name, dtype, list(shape))
    graph.inputs.append(x)
    return x


def number_steps(graph: Network) -> None:
    """Give each node named after a time step, `.../step12/...`, the attribute `recurrence`: 12."""
    for node in graph.nodes:
        found = re.search(r"(?:^|/)step(\d+)(?:/|$)", node.name)
        if found:
            node.attrs["recurrence"] = int(found[1])


@gs.Graph.register()
def dense_layer(self: Network, x: gs.Variable, weights: Weights, *, name: str) -> gs.Variable:
    """[N, in] -> [N, out]."""
    inputs = [x, weights.weight, *([] if weights.bias is None else [weights.bias])]
    return add(self, "Gemm", inputs, name, [x.shape[0], weights.weight.shape[0]], {"transB": 1})


@gs.Graph.register()
def embedding_layer(self: Network, words: gs.Variable, table: gs.Constant, *, name: str) -> gs.Variable:
    """Give a row of `table` (vocabulary, H) for each word: [...] -> [..., H]."""
    return add(self, "Gather", [table, words], name, [*words.shape, table.shape[1]], {"axis": 0})


@gs.Graph.register()
def layer_norm_layer(self: Network, x: gs.Variable, *, name: str) -> gs.Variable:
    """Over the last axis, with its mean and inverse deviation as second and third output."""
    inputs = [x, zeros(f"{name}/scale", x.shape[-1]), zeros(f"{name}/bias", x.shape[-1])]
    saved = [gs.Variable(f"{name}/{what}", np.float32, [*x.shape[:-1], 1]) for what in ("mean", "inverse_deviation")]
    return add(self, "LayerNormalization", inputs, name, x.shape, {"axis": -1, "epsilon": LAYER_NORM_EPSILON}, saved)


@gs.Graph.register()
def sigmoid_layer(self: Network, x: gs.Variable, *, name: str) -> gs.Variable:
    """Add a Sigmoid."""
    return add(self, "Sigmoid", [x], name, x.shape)


@gs.Graph.register()
def tanh_layer(self: Network, x: gs.Variable, *, name: str) -> gs.Variable:
    """Add a Tanh."""
    return add(self, "Tanh", [x], name, x.shape)


@gs.Graph.register()
def softmax_layer(self: Network, x: gs.Variable, *, name: str) -> gs.Variable:
    """Add a Softmax over the last axis."""
    return add(self, "Softmax", [x], name, x.shape, {"axis": -1})


@gs.Graph.register()
def multiply_layer(self: Network, x: gs.Variable, y: gs.Variable, *, name: str) -> gs.Variable:
    """Multiply two tensors of one shape."""
    return add(self, "Mul", [x, y], name, x.shape)


@gs.Graph.register()
def join_layer(self: Network, xs: Sequence[gs.Variable], *, name: str) -> gs.Variable:
    """Concatenation of [N, .] along their last axis."""
    return add(self, "Concat", xs, name, [xs[0].shape[0], sum(x.shape[1] for x in xs)], {"axis": 1})


@gs.Graph.register()
def view_layer(self: Network, x: gs.Variable, shape: Sequence[int], *, name: str) -> gs.Variable:
    """Add a Reshape."""
    target = gs.Constant(f"{name}/shape", np.array(shape, np.int64))
    return add(self, "Reshape", [x, target], name, shape)


@gs.Graph.register()
def product_layer(
    self: Network, x: gs.Variable, y: gs.Variable, equation: str, shape: Sequence[int], *, name: str
) -> gs.Variable:
    """Give a matrix product in each sample, as an Einsum: in any order of the axes, nothing is transposed in memory."""
    return add(self, "Einsum", [x, y], name, shape, {"equation": equation})
