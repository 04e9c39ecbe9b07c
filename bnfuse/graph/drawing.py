"""Operators that draw at random: which they are, and the graph in which what they draw is fed instead.

    u = RandomUniformLike(zeros)                         input u, drawn by who runs the graph
    mask = Cast(Less(u, keep))                  ->       mask = Cast(Less(u, keep))

A file keeps its operators, and onnxruntime draws anew in each run. A compiled step and `verify` run the separated
graph: its values follow from (seed, step, name of the output), so that both sides of a comparison, and a run that is
resumed, have the same. Dropout is not among what is fed: its kernel draws for itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError, at_node
from bnfuse.graph.sampling import Random
from bnfuse.graph.values import static_shape

DROPOUTS = frozenset({"Dropout", "BiasDropout", "BitmaskDropout"})
FED = frozenset({"RandomUniform", "RandomUniformLike", "RandomNormal", "RandomNormalLike", "Bernoulli"})
DRAWING = DROPOUTS | FED | {"Multinomial"}
LIKE = frozenset({"RandomUniformLike", "RandomNormalLike", "Bernoulli"})  # the shape is that of the operand
FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def draws(node: ir.Node) -> bool:
    """Tell whether the node's results may be others in each run, whatever its operands are: such a node is never
    folded."""
    return node.op_type in DRAWING or any(
        draws(inner)
        for attribute in node.attributes.values()
        if attribute.type == ir.AttributeType.GRAPH
        for inner in attribute.as_graph()
    )


def separated(model: ir.Model, file: str | None = None) -> tuple[ir.Model, dict[str, Random]]:
    """Copy the model with an input in the place of each node that draws; and tell what each is drawn from, by its name.

    It is the model itself where there is nothing to feed. Raises where a node draws what cannot be fed.
    """
    if not any(draws(node) and node.op_type not in DROPOUTS for node in called(model, file)):
        return model, {}
    copy = model.clone()
    random: dict[str, Random] = {}
    for node in list(copy.graph):
        if draws(node) and node.op_type not in DROPOUTS:
            if node.op_type not in FED:
                raise refusal(node, "draws at random what a step cannot: feed it as an input instead", file)
            value, distribution = fed(copy.graph, node, file)
            copy.graph.inputs.append(value)
            random[str(value.name)] = distribution
    return copy, random


def called(model: ir.Model, file: str | None) -> list[ir.Node]:
    """List the nodes of the graph. Raises where one calls a function of the file's own that draws."""
    drawing = {key for key, function in model.functions.items() if any(draws(node) for node in function)}
    for node in model.graph:
        if (node.domain, node.op_type, node.overload) in drawing:
            raise refusal(node, "is a function that draws at random: inline it (onnx.inliner)", file)
    return list(model.graph)


def fed(graph: ir.Graph, node: ir.Node, file: str | None) -> tuple[ir.Value, Random]:
    """Take the node out: what read it reads a new value, which is drawn from the distribution."""
    shape, dtype = type_of(node, file)
    random = distribution_of(node)
    if random is None:
        return compared_draw(graph, node, shape, dtype), Random("uniform", 0.0, 1.0)
    if not random.is_sound:
        raise refusal(node, f"draws from no distribution that there is ({random}): correct the file", file)
    result = node.outputs[0]
    value = typed(result.name, shape, dtype)
    result.name = f"{result.name}/drawn"
    result.replace_all_uses_with(value, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    return value, random


def compared_draw(graph: ir.Graph, node: ir.Node, shape: list[int], dtype: ir.DataType) -> ir.Value:
    """Replace a Bernoulli whose probability is computed by Cast(u < p). Gives u."""
    chance, result = node.inputs[0], node.outputs[0]
    assert chance is not None
    uniform = typed(f"{result.name}/uniform", shape, chance.dtype or ir.DataType.FLOAT)
    below = typed(f"{result.name}/below", shape, ir.DataType.BOOL)
    value = typed(result.name, shape, dtype)
    result.name = f"{result.name}/drawn"
    nodes = [
        ir.node("Less", [uniform, chance], outputs=[below], name=f"{node.name}/below"),
        ir.node("Cast", [below], {"to": int(dtype)}, outputs=[value], name=node.name),
    ]
    graph.insert_after(node, nodes)
    result.replace_all_uses_with(value, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    return uniform


def typed(name: str | None, shape: list[int], dtype: ir.DataType) -> ir.Value:
    """Make a value of this name, shape and type, which nothing computes."""
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def type_of(node: ir.Node, file: str | None) -> tuple[list[int], ir.DataType]:
    """Give shape and type of what a node draws."""
    operand = node.inputs[0] if node.op_type in LIKE and node.inputs else None
    like: ir.DataType | None = ir.DataType.FLOAT
    sizes: tuple[int, ...] | None = tuple(node.attributes.get_ints("shape", []))
    if node.op_type in LIKE:
        sizes, like = static_shape(operand), operand.dtype if operand is not None else None
    sizes = static_shape(node.outputs[0]) if sizes is None else sizes
    if sizes is None or any(size < 0 for size in sizes):
        raise refusal(node, "draws values of no fixed shape. Build the graph with --batch.", file)
    number = node.attributes.get_int("dtype", 0)
    dtype = ir.DataType(number) if number else like or node.outputs[0].dtype
    if dtype is None or (dtype not in FLOATS and node.op_type != "Bernoulli"):
        raise refusal(node, f"draws values of the type {dtype}: let it draw floats", file)
    return list(sizes), dtype


def distribution_of(node: ir.Node) -> Random | None:
    """Tell what the node draws from; None for a Bernoulli whose probability is not one number that is known."""
    attributes = node.attributes
    if node.op_type.startswith("RandomUniform"):
        return Random("uniform", attributes.get_float("low", 0.0), attributes.get_float("high", 1.0))
    if node.op_type.startswith("RandomNormal"):
        return Random("normal", attributes.get_float("mean", 0.0), attributes.get_float("scale", 1.0))
    chance = one_number(constant(node.inputs[0]))
    return None if chance is None else Random("bernoulli", chance)


def constant(value: ir.Value | None) -> np.ndarray | None:
    """Give the value, where the file holds it and no step changes it."""
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def one_number(array: np.ndarray | None) -> float | None:
    """Give the number that all elements are, if they are one."""
    if array is None or array.size == 0 or array.dtype.kind not in "biuf":
        return None
    first = array.reshape(-1)[0]
    return float(first) if math.isfinite(first) and bool((array == first).all()) else None


def refusal(node: ir.Node, what: str, file: str | None) -> BnfuseError:
    """Make the error of a node that draws what it must not."""
    return at_node(node.name or "", node.op_type, what, file=file)


Drawn = Callable[[int], dict[str, np.ndarray]]  # of a step's number


def drawer(model: ir.Model, random: dict[str, Random], seed: int) -> Drawn:
    """Draw what a separated model is fed with."""
    types = {
        value.name: (list(static_shape(value) or ()), np.dtype(value.dtype.numpy()).name)
        for value in model.graph.inputs
        if value.name in random and value.dtype is not None
    }

    def drawn(step: int) -> dict[str, np.ndarray]:
        return {name: one.draw(*types[name], seed=seed, step=step, name=name) for name, one in random.items()}

    return drawn
