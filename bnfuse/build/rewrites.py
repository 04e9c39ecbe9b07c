"""Operators without a gradient, written as ones that have it; each rewrite is the same function.

    Elu(x; a)             Relu(x) + a*Elu(-Relu(-x))                          (Elu of alpha 1 has a definition)
    Selu, Celu            by Elu
    HardSigmoid(x; a, b)  HardSigmoid((6a)*x + 6(b - 1/2))                     (that of 1/6, 1/2 has a definition)
    PRelu(x, s)           Relu(x) - s*Relu(-x)
    GlobalMaxPool         MaxPool over the whole map
    ReduceMax             axes as an operand (opset 18), keepdims = 1, Squeeze where the file had 0
    Bernoulli(p)          Cast(RandomUniformLike(p) < p), where p is not one number that is known
    CastLike(x, y)        Cast(x) to y's type
    LayerNormalization    with its mean and inverse deviation as results

At the kink of a piecewise function the slope is that of Relu at 0, which is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from bnfuse.graph.drawing import one_number
from bnfuse.graph.protos import attributes, fresh

from .activations import makes_gradient
from .forward import element_types, fold_constants, infer_shapes, raise_opset
from .graph import Forward


class Writer:
    """Collects the nodes that replace one node, with names below its own."""

    def __init__(self, forward: Forward, node: onnx.NodeProto) -> None:
        self.forward, self.node = forward, node
        self.nodes: list[onnx.NodeProto] = []
        self.taken = forward.names() | {other.name for other in forward.graph.node}

    def add(self, op: str, inputs: Sequence[str], *, last: bool = False, **attrs: Any) -> str:
        """Add a node, whose output is the replaced node's where it is the `last`. Gives the output's name."""
        name = self.node.name if last else fresh(f"{self.node.name}/{op.lower()}", self.taken)
        output = self.node.output[0] if last else name
        self.taken.add(name)
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=name, **attrs))
        return output

    def constant(self, what: str, values: np.ndarray) -> str:
        """Add an initializer for the node. Gives its name."""
        name = fresh(f"{self.node.name}/{what}", self.taken)
        self.taken.add(name)
        self.forward.set_initializer(name, values)
        return name

    def number(self, what: str, value: float) -> str:
        """Add a scalar, which is no parameter. Gives its name."""
        return self.constant(what, np.array(value, np.float32))


def elu(write: Writer) -> None:
    """Write Elu of any alpha by Elu of alpha 1, whose gradient there is."""
    alpha = float(attributes(write.node).get("alpha", 1.0))
    if alpha == 1.0:
        return
    _scaled_elu(write, write.node.input[0], alpha)


def _scaled_elu(write: Writer, x: str, alpha: float, *, gamma: float = 1.0) -> None:
    """gamma*(relu(x) + alpha*elu(-relu(-x)))."""
    depth = write.add("Neg", [write.add("Relu", [write.add("Neg", [x])])])
    below = write.add("Mul", [write.add("Elu", [depth]), write.number("alpha", alpha)])
    above = write.add("Relu", [x])
    if gamma == 1.0:
        write.add("Add", [above, below], last=True)
    else:
        write.add("Mul", [write.add("Add", [above, below]), write.number("gamma", gamma)], last=True)


def selu(write: Writer) -> None:
    """Write Selu by Elu of alpha 1."""
    given = attributes(write.node)
    alpha = float(given.get("alpha", 1.6732632423543772))
    gamma = float(given.get("gamma", 1.0507009873554805))
    _scaled_elu(write, write.node.input[0], alpha, gamma=gamma)


def celu(write: Writer) -> None:
    """Write Celu as alpha*elu(x/alpha)."""
    alpha = write.number("alpha", float(attributes(write.node).get("alpha", 1.0)))
    x = write.add("Elu", [write.add("Div", [write.node.input[0], alpha])])
    write.add("Mul", [x, alpha], last=True)


def hard_sigmoid(write: Writer) -> None:
    """Write HardSigmoid of any slope by the one whose gradient there is."""
    given = attributes(write.node)
    alpha, beta = float(given.get("alpha", 0.2)), float(given.get("beta", 0.5))
    if np.float32(alpha) == np.float32(1 / 6) and beta == 0.5:
        return
    x = write.add("Mul", [write.node.input[0], write.number("slope", 6 * alpha)])
    x = write.add("Add", [x, write.number("offset", 6 * (beta - 0.5))])
    write.add("HardSigmoid", [x], last=True, alpha=1 / 6, beta=0.5)


def prelu(write: Writer) -> None:
    """Write PRelu as relu(x) - relu(-x) * slope."""
    x, slope = write.node.input
    below = write.add("Relu", [write.add("Neg", [x])])
    write.add("Sub", [write.add("Relu", [x]), write.add("Mul", [below, slope])], last=True)


def global_max_pool(write: Writer) -> None:
    """Write GlobalMaxPool as a MaxPool whose window is the whole image."""
    shape = write.forward.shapes()[write.node.input[0]] or []
    rank = len(shape) - 2
    write.add(
        "MaxPool",
        write.node.input,
        last=True,
        kernel_shape=shape[2:],
        strides=[1] * rank,
        pads=[0] * (2 * rank),
        dilations=[1] * rank,
    )


def reduce_max(write: Writer) -> None:
    """Write ReduceMax with its axes as a constant operand and its dimensions kept; a Squeeze takes them away."""
    x = write.node.input[0]
    rank = len(write.forward.shapes()[x] or [])
    given = attributes(write.node)
    axes: list[int] = list(range(rank))
    if len(write.node.input) > 1 and write.node.input[1]:
        known = write.forward.initializers()
        if write.node.input[1] not in known:
            raise write.forward.error_at(write.node, "computes its axes: they must be constant.")
        axes = numpy_helper.to_array(known[write.node.input[1]]).tolist()
    elif given.get("noop_with_empty_axes"):
        write.add("Identity", [x], last=True)
        return
    operand = write.constant("axes", np.array(sorted(axis % rank for axis in axes), np.int64))
    if given.get("keepdims", 1):
        write.add("ReduceMax", [x, operand], last=True, keepdims=1)
    else:
        write.add("Squeeze", [write.add("ReduceMax", [x, operand], keepdims=1), operand], last=True)


def bernoulli(write: Writer) -> None:
    """Write Bernoulli of a computed probability as a comparison with what is drawn: a gradient goes through none of it,
    as torch has it."""
    chance = write.node.input[0]
    known = write.forward.initializers()
    if chance in known and one_number(numpy_helper.to_array(known[chance])) is not None:
        return
    kind = attributes(write.node).get("dtype") or element_types(write.forward.graph)[chance]
    drawn = write.add("RandomUniformLike", [chance])
    write.add("Cast", [write.add("Less", [drawn, chance])], last=True, to=kind)


def cast_like(write: Writer) -> None:
    """Write CastLike as a Cast to the type of its second operand."""
    x, like = write.node.input
    write.add("Cast", [x], last=True, to=element_types(write.forward.graph)[like])


REWRITES: dict[str, Callable[[Writer], None]] = {
    "Bernoulli": bernoulli,
    "CastLike": cast_like,
    "Celu": celu,
    "Elu": elu,
    "GlobalMaxPool": global_max_pool,
    "HardSigmoid": hard_sigmoid,
    "PRelu": prelu,
    "ReduceMax": reduce_max,
    "Selu": selu,
}


def rewrite_operators(forward: Forward) -> None:
    """Apply REWRITES; shapes must be known, and are to be inferred anew afterwards."""
    if any(node.op_type == "ReduceMax" for node in forward.graph.node):
        raise_opset(forward, 18)
        fold_constants(forward)  # the converter writes axes as Constant nodes
        infer_shapes(forward)
    nodes: list[onnx.NodeProto] = []
    rewritten: dict[str, int] = {}
    for node in forward.graph.node:
        rewrite = REWRITES.get(node.op_type) if node.domain in ("", "ai.onnx") and not makes_gradient(node) else None
        if rewrite is None:
            nodes.append(node)
            continue
        write = Writer(forward, node)
        rewrite(write)
        if write.nodes:
            rewritten[node.op_type] = rewritten.get(node.op_type, 0) + 1
        nodes += write.nodes or [node]
    del forward.graph.node[:]
    forward.graph.node.extend(nodes)
    for op, number in sorted(rewritten.items()):
        if op not in ("CastLike", "ReduceMax"):
            forward.note(f"wrote {number} {op} nodes by operators that have a gradient")


def layer_norm_biases(forward: Forward) -> set[str]:
    """Give LayerNormalization a bias of zeros where it has none, for its gradient asks for one. Gives their names."""
    known, taken, added = forward.initializers(), forward.names(), set()
    for node in forward.graph.node:
        scale = known.get(node.input[1]) if node.op_type == "LayerNormalization" else None
        if scale is None or (len(node.input) > 2 and node.input[2]):
            continue
        name = fresh(f"{node.name}/bias", taken)
        forward.set_initializer(name, np.zeros(tuple(scale.dims), np.float32))
        del node.input[2:]
        node.input.append(name)
        added.add(name)
    return added


def layer_norm_results(forward: Forward) -> None:
    """Give LayerNormalization its mean and inverse deviation as results, for its gradient reads them."""
    for node in forward.graph.node:
        if node.op_type == "LayerNormalization":
            taken = forward.names()
            names = [fresh(f"{node.name}/{what}", taken) for what in ("mean", "inv_std")]
            node.output.extend(names[len(node.output) - 1 :])
