"""GNMT (Wu et al. 2016), its LSTM layers unrolled in time: H = 1024, T = 50 as [Tsai21], table 5.1, has them.

Shapes only, for estimates. An encoder whose first layer reads in both directions, a decoder whose first layer asks the
attention (one hidden layer, over the encoder's last) for a context that all its other layers read; residual additions
from the third layer of each side on. The decoder's first layer does not read the context, so that in training no layer
waits for another's later steps.

A cell is counted as [Tsai21], section 3.3.4, does: 4 fully connected, 4 sigmoid, 2 tanh, 3 products, 1 sum (the
published LSTM has no sigmoid before the candidate's tanh). Its nodes are named by layer and time step,
`encoder/layer3/step12/forget`, and all steps share the weights `encoder/layer3/forget/weight`; their attribute
`recurrence` is the step.

`unroll=layer` runs a layer through all steps before the next one; `unroll=step` all layers of a side through a step
before the next (the bidirectional layer first). `vocabulary=0` leaves out the word vectors and the output layer: the
inputs are then [N, H] a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from bnfuse.core.errors import BnfuseError

from .layers import Network, finish
from .sequence import Weights, new_input, number_steps, tokens, zeros

GATES = ("input", "forget", "candidate", "output")
MAX_CELLS = 1 << 12  # of a side: layers x time steps, ten times those of [Tsai21]
RESIDUAL_FROM = 3  # the first layer whose input is added to its output


def gnmt(
    batch: int,
    *,
    layers: int = 8,
    hidden: int = 1024,
    steps: int = 50,
    vocabulary: int = 32000,
    dropout: float = 0.2,
    unroll: str = "layer",
) -> Network:
    """Build Google's neural machine translation model, unrolled over time steps."""
    if min(hidden, steps) < 1 or layers < 2:
        raise BnfuseError("hidden and steps must be at least 1, layers at least 2")
    if layers * steps > MAX_CELLS:
        raise BnfuseError(f"{layers} layers of {steps} steps are more than {MAX_CELLS:,} cells: take fewer of either")
    if unroll not in ("layer", "step"):
        raise BnfuseError(f"unroll={unroll} is unknown: it is layer or step")
    graph = Network("gnmt", None)
    zero = new_input(graph, "zero_state", np.float32, batch, hidden)
    words = [side_input(graph, batch, hidden, steps, vocabulary, side) for side in ("source", "target")]
    memory = encoder(graph, words[0], zero, layers, dropout, unroll)
    tops = decoder(graph, words[1], memory, zero, layers, dropout, unroll)
    joined = graph.join_layer(tops, name="decoder/join")
    y = graph.view_layer(joined, [batch * steps, hidden], name="decoder/flat")
    if vocabulary:
        y = graph.dense_layer(y, Weights.make("output", hidden, vocabulary), name="output")
    number_steps(graph)
    return finish(graph, y)


def side_input(graph: Network, batch: int, hidden: int, steps: int, vocabulary: int, side: str) -> list[gs.Variable]:
    """Word vectors of the source or the target, [N, H] for each step."""
    names = [f"{side}/step{step + 1}" for step in range(steps)]
    if not vocabulary:
        return [new_input(graph, name, np.float32, batch, hidden) for name in names]
    table = zeros(f"{side}/table", vocabulary, hidden)
    return [
        graph.embedding_layer(tokens(graph, f"{name}/words", batch), table, name=f"{name}/embedding") for name in names
    ]


class Layer:
    """An LSTM layer: the weights of its cell, its state, and its node names."""

    def __init__(self, graph: Network, name: str, inputs: int, zero: gs.Variable, dropout: float) -> None:
        self.graph, self.name, self.dropout = graph, name, dropout
        self.h = self.c = zero
        width = inputs + zero.shape[1]
        self.weights = {gate: Weights.make(f"{name}/{gate}", width, zero.shape[1]) for gate in GATES}

    def step(self, number: int, inputs: Sequence[gs.Variable], residual: gs.Variable | None = None) -> gs.Variable:
        """Tell what the next layer reads, [N, H]: h with dropout, and `residual` added."""
        graph, name = self.graph, f"{self.name}/step{number + 1}"
        x = graph.join_layer([*inputs, self.h], name=f"{name}/join")
        gates = {}
        for gate, weights in self.weights.items():
            y = graph.dense_layer(x, weights, name=f"{name}/{gate}")
            gates[gate] = graph.sigmoid_layer(y, name=f"{name}/{gate}/sigmoid")
        candidate = graph.tanh_layer(gates["candidate"], name=f"{name}/candidate/tanh")
        kept = graph.multiply_layer(gates["forget"], self.c, name=f"{name}/forget/mul")
        new = graph.multiply_layer(gates["input"], candidate, name=f"{name}/input/mul")
        self.c = graph.add_layer(kept, new, name=f"{name}/cell")
        shown = graph.tanh_layer(self.c, name=f"{name}/cell/tanh")
        self.h = graph.multiply_layer(gates["output"], shown, name=f"{name}/output/mul")
        y = graph.dropout_layer(self.h, self.dropout, name=f"{name}/dropout")
        return y if residual is None else graph.add_layer(y, residual, name=f"{name}/residual")


def encoder(
    graph: Network, words: list[gs.Variable], zero: gs.Variable, layers: int, dropout: float, unroll: str
) -> gs.Variable:
    """Give the last layer's output of all steps, [N, T*H]."""
    hidden, steps = zero.shape[1], len(words)
    sides = {way: Layer(graph, f"encoder/layer1/{way}", hidden, zero, dropout) for way in ("onward", "reverse")}
    onward = [sides["onward"].step(t, [words[t]]) for t in range(steps)]
    reverse = [sides["reverse"].step(t, [words[t]]) for t in reversed(range(steps))][::-1]
    upper = [
        Layer(graph, f"encoder/layer{n}", 2 * hidden if n == 2 else hidden, zero, dropout) for n in range(2, layers + 1)
    ]
    tops = stack(upper, [[a, b] for a, b in zip(onward, reverse, strict=True)], None, unroll)
    return graph.join_layer(tops, name="encoder/join")


def decoder(
    graph: Network,
    words: list[gs.Variable],
    memory: gs.Variable,
    zero: gs.Variable,
    layers: int,
    dropout: float,
    unroll: str,
) -> list[gs.Variable]:
    """Give the last layer's output, [N, H] for each step."""
    hidden = zero.shape[1]
    bottom = Layer(graph, "decoder/layer1", hidden, zero, dropout)
    upper = [Layer(graph, f"decoder/layer{n}", 2 * hidden, zero, dropout) for n in range(2, layers + 1)]
    attention = Attention(graph, memory, hidden, len(words))
    if unroll == "layer":
        lowest = [bottom.step(t, [word]) for t, word in enumerate(words)]
        contexts = [attention.step(t, y) for t, y in enumerate(lowest)]
        return stack(upper, [[y] for y in lowest], contexts, unroll)
    tops = []
    for t, word in enumerate(words):
        y = bottom.step(t, [word])
        tops.append(up(upper, t, [y], attention.step(t, y)))
    return tops


def stack(
    upper: list[Layer], below: list[list[gs.Variable]], contexts: list[gs.Variable] | None, unroll: str
) -> list[gs.Variable]:
    """Give the layers 2, 3, ... over what comes from below at each step, and a context where there is one."""
    steps = range(len(below))
    context = dict(enumerate(contexts or []))
    if unroll == "step":
        return [up(upper, t, below[t], context.get(t)) for t in steps]
    for index, layer in enumerate(upper):
        below = [[through(layer, index, t, below[t], context.get(t))] for t in steps]
    return [y for (y,) in below]


def up(upper: list[Layer], step: int, below: list[gs.Variable], context: gs.Variable | None) -> gs.Variable:
    """Run a step through the upper layers."""
    for index, layer in enumerate(upper):
        below = [through(layer, index, step, below, context)]
    return below[0]


def through(layer: Layer, index: int, step: int, below: list[gs.Variable], context: gs.Variable | None) -> gs.Variable:
    """Run a step through one layer; from the third on with a residual from below."""
    residual = below[0] if index + 2 >= RESIDUAL_FROM else None
    return layer.step(step, [*below, *([] if context is None else [context])], residual)


class Attention:
    """Scores v . tanh(W query + U memory) of each encoder step, a softmax, and the memory's mean by these shares."""

    def __init__(self, graph: Network, memory: gs.Variable, hidden: int, steps: int) -> None:
        self.graph, self.batch, self.hidden, self.steps = graph, memory.shape[0], hidden, steps
        name = "decoder/attention"
        flat = graph.view_layer(memory, [self.batch * steps, hidden], name=f"{name}/flat")
        keys = graph.dense_layer(flat, Weights.make(f"{name}/keys", hidden, hidden), name=f"{name}/keys")
        self.keys = graph.view_layer(keys, [self.batch, steps, hidden], name=f"{name}/keys/steps")
        self.memory = graph.view_layer(memory, [self.batch, steps, hidden], name=f"{name}/memory")
        self.query = Weights.make(f"{name}/query", hidden, hidden, bias=False)
        self.vector = zeros(f"{name}/vector", hidden)

    def step(self, number: int, y: gs.Variable) -> gs.Variable:
        """Give the context of a step, [N, H]: the encoder's outputs weighed by their scores."""
        graph, name = self.graph, f"decoder/attention/step{number + 1}"
        query = graph.dense_layer(y, self.query, name=f"{name}/query")
        query = graph.view_layer(query, [self.batch, 1, self.hidden], name=f"{name}/query/view")
        both = graph.add_layer(self.keys, query, name=f"{name}/add")
        both = graph.tanh_layer(both, name=f"{name}/tanh")
        scores = [self.batch, self.steps]
        score = graph.product_layer(both, self.vector, "nth,h->nt", scores, name=f"{name}/scores")
        shares = graph.softmax_layer(score, name=f"{name}/softmax")
        return graph.product_layer(shares, self.memory, "nt,nth->nh", [self.batch, self.hidden], name=f"{name}/mix")
