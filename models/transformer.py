"""The Transformer (Vaswani et al. 2017), its big form by default: H = 1024 as [Tsai21], table 5.1, has it.

Shapes only, for estimates. As published: 6 + 6 layers, each sublayer `LayerNorm(x + Dropout(sublayer(x)))`, 16 heads
of 64, feed-forward layers of 4096, one table of word vectors for both inputs and the output. The factors 1/sqrt(64)
and sqrt(H) and the masks of the softmaxes are left out: they are part of their neighbours wherever it runs.

Dropout is on each sublayer's result and on the inputs, as published; `attention_dropout` and `relu_dropout` put it on
the softmax's shares and behind the ReLU too, as training scripts do. `projection_relu` puts a ReLU behind queries, keys
and values, and `attention_output=false` leaves out the layer behind the heads: some implementations have it so, and
[Tsai21]'s figures come out best this way, with feed_forward=1024. `vocabulary=0` leaves out the word vectors and the
output layer: both inputs are then [N, T, H].
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_graphsurgeon as gs

from bnfuse.core.errors import BnfuseError

from .layers import Network, finish
from .sequence import Weights, new_input, tokens, zeros


def transformer(
    batch: int,
    *,
    layers: int = 6,
    hidden: int = 1024,
    heads: int = 16,
    feed_forward: int = 4096,
    steps: int = 50,
    vocabulary: int = 32000,
    dropout: float = 0.1,
    attention_dropout: float = 0.0,
    relu_dropout: float = 0.0,
    projection_relu: bool = False,
    attention_output: bool = True,
) -> Network:
    """Build a Transformer, encoder and decoder."""
    if min(layers, hidden, heads, feed_forward, steps) < 1 or hidden % heads:
        raise BnfuseError("layers, hidden, heads, feed_forward and steps must be at least 1, and heads divide hidden")
    graph = Network("transformer", None)
    dropouts = (dropout, attention_dropout, relu_dropout)
    size = Size(batch, steps, hidden, heads, feed_forward, *dropouts, projection_relu, attention_output)
    table = zeros("embedding/table", vocabulary, hidden) if vocabulary else None
    memory = side_input(graph, size, table, "source")
    for index in range(layers):
        memory = encoder_layer(graph, size, memory, f"encoder/layer{index + 1}")
    y = side_input(graph, size, table, "target")
    for index in range(layers):
        y = decoder_layer(graph, size, y, memory, f"decoder/layer{index + 1}")
    return finish(graph, y if table is None else graph.dense_layer(y, Weights(table), name="output"))


@dataclasses.dataclass(frozen=True)
class Size:
    """What every layer has in common. Feature maps are [N*T, H]."""

    batch: int
    steps: int
    hidden: int
    heads: int
    feed_forward: int
    dropout: float
    attention_dropout: float
    relu_dropout: float
    projection_relu: bool
    attention_output: bool

    @property
    def flat(self) -> list[int]:
        """Give the shape of all words, [N*T, H]."""
        return [self.batch * self.steps, self.hidden]

    @property
    def by_head(self) -> list[int]:
        """Give the shape by head, [N, T, heads, H/heads]."""
        return [self.batch, self.steps, self.heads, self.hidden // self.heads]

    @property
    def scores(self) -> list[int]:
        """Give the shape of attention scores, [N, heads, T, T]."""
        return [self.batch, self.heads, self.steps, self.steps]


def side_input(graph: Network, size: Size, table: gs.Constant | None, side: str) -> gs.Variable:
    """Word vectors and positions of the source or the target: [N*T, H]."""
    if table is None:
        x = new_input(graph, side, np.float32, size.batch, size.steps, size.hidden)
        return graph.view_layer(x, size.flat, name=f"{side}/view")
    words = tokens(graph, side, size.batch, size.steps)
    places = new_input(graph, f"{side}/positions", np.float32, size.steps, size.hidden)
    x = graph.embedding_layer(words, table, name=f"{side}/embedding")
    x = graph.add_layer(x, places, name=f"{side}/add")
    x = graph.dropout_layer(x, size.dropout, name=f"{side}/dropout")
    return graph.view_layer(x, size.flat, name=f"{side}/view")


def encoder_layer(graph: Network, size: Size, x: gs.Variable, name: str) -> gs.Variable:
    """Add self-attention and the feed-forward network."""
    x = sublayer(graph, size, x, attention(graph, size, x, x, f"{name}/attention"), f"{name}/attention")
    return sublayer(graph, size, x, feed_forward(graph, size, x, f"{name}/forward"), f"{name}/forward")


def decoder_layer(graph: Network, size: Size, x: gs.Variable, memory: gs.Variable, name: str) -> gs.Variable:
    """Add self-attention, attention to the encoder's output, and the feed-forward network."""
    x = sublayer(graph, size, x, attention(graph, size, x, x, f"{name}/attention"), f"{name}/attention")
    x = sublayer(graph, size, x, attention(graph, size, x, memory, f"{name}/across"), f"{name}/across")
    return sublayer(graph, size, x, feed_forward(graph, size, x, f"{name}/forward"), f"{name}/forward")


def sublayer(graph: Network, size: Size, x: gs.Variable, y: gs.Variable, name: str) -> gs.Variable:
    """Add dropout, the residual sum and the normalisation behind a sublayer."""
    y = graph.dropout_layer(y, size.dropout, name=f"{name}/dropout")
    return graph.layer_norm_layer(graph.add_layer(x, y, name=f"{name}/add"), name=f"{name}/norm")


def attention(graph: Network, size: Size, x: gs.Variable, memory: gs.Variable, name: str) -> gs.Variable:
    """Attend: queries of `x`, keys and values of `memory`, both [N*T, H]."""

    def projected(source: gs.Variable, what: str) -> gs.Variable:
        weights = Weights.make(f"{name}/{what}", size.hidden, size.hidden, bias=False)
        y = graph.dense_layer(source, weights, name=f"{name}/{what}")
        if size.projection_relu:
            y = graph.relu_layer(y, name=f"{name}/{what}/relu")
        return graph.view_layer(y, size.by_head, name=f"{name}/{what}/heads")

    query, key, value = projected(x, "query"), projected(memory, "key"), projected(memory, "value")
    scores = graph.product_layer(query, key, "nqhd,nkhd->nhqk", size.scores, name=f"{name}/scores")
    shares = graph.softmax_layer(scores, name=f"{name}/softmax")
    shares = graph.dropout_layer(shares, size.attention_dropout, name=f"{name}/softmax/dropout")
    mixed = graph.product_layer(shares, value, "nhqk,nkhd->nqhd", size.by_head, name=f"{name}/mix")
    flat = graph.view_layer(mixed, size.flat, name=f"{name}/mix/flat")
    if not size.attention_output:
        return flat
    return graph.dense_layer(
        flat, Weights.make(f"{name}/output", size.hidden, size.hidden, bias=False), name=f"{name}/output"
    )


def feed_forward(graph: Network, size: Size, x: gs.Variable, name: str) -> gs.Variable:
    """Add two linear layers with a ReLU in between."""
    y = graph.dense_layer(x, Weights.make(f"{name}/wide", size.hidden, size.feed_forward), name=f"{name}/wide")
    y = graph.relu_layer(y, name=f"{name}/relu")
    y = graph.dropout_layer(y, size.relu_dropout, name=f"{name}/relu/dropout")
    return graph.dense_layer(y, Weights.make(f"{name}/narrow", size.feed_forward, size.hidden), name=f"{name}/narrow")
