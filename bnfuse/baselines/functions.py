"""Nodes that are a function in torch: op -> how it is written."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from bnfuse.baselines.layers import plain
from bnfuse.baselines.writer import Convert, Writer, attribute, present, torch_pads
from bnfuse.graph.drawing import FED, distribution_of, type_of


def named(name: str) -> Convert:
    """Give a function of torch's under this name, of all operands."""
    return lambda w, node: w.call(getattr(w.torch, name), *operands(w, node))


def operands(w: Writer, node: ir.Node) -> list[Any]:
    """Write all operands of a node."""
    return [w.value(node, index) for index in range(len(node.inputs))]


def binary(function: Callable[..., Any]) -> Convert:
    """Write a function of torch's of all operands."""
    return lambda w, node: w.call(function, *operands(w, node))


def chain(function: str) -> Convert:
    """Write an operator of any number of operands, two at a time."""

    def write(w: Writer, node: ir.Node) -> Any:
        step = operator.add if function == "add" else getattr(w.torch, function)
        return functools.reduce(lambda x, y: w.call(step, x, y), operands(w, node))

    return write


def affine(w: Writer, node: ir.Node) -> Any:
    """Write the affine map of a frozen BatchNorm: a*x + b by channel."""
    x, a, b = operands(w, node)
    wide = (1, -1, 1, 1)
    return w.call(operator.add, w.call(operator.mul, x, w.method("reshape", a, wide)), w.method("reshape", b, wide))


def divide(w: Writer, node: ir.Node) -> Any:
    """Write Div of floats. Raises BnfuseError for integers, which ONNX rounds otherwise than torch."""
    dtype = node.inputs[0].dtype if node.inputs[0] is not None else None
    if dtype is not None and dtype.is_integer():
        raise w.error(node, "divides integers: only floats are taken here")
    return w.call(operator.truediv, *operands(w, node))


def concat(w: Writer, node: ir.Node) -> Any:
    """Write Concat; one of a single operand is that operand."""
    parts = operands(w, node)
    return parts[0] if len(parts) == 1 else w.call(w.torch.cat, parts, attribute(node, "axis"))


def flatten(w: Writer, node: ir.Node) -> Any:
    """Write Flatten as torch.flatten, or as a reshape where the batch is not its first axis."""
    axis, shape = attribute(node, "axis", 1) % (len(w.shape(node, node.inputs[0])) + 1), w.shape(node, node.inputs[0])
    x = w.value(node, 0)
    if axis == 1:
        return w.call(w.torch.flatten, x, 1)
    return w.call(w.torch.reshape, x, (math.prod(shape[:axis]), math.prod(shape[axis:])))


def reshape(w: Writer, node: ir.Node) -> Any:
    """Write Reshape, as `flatten` where it is one."""
    before, after = w.shape(node, node.inputs[0]), w.shape(node, node.outputs[0])
    if len(after) == 2 and len(before) > 1 and before[0] == after[0]:
        return w.call(w.torch.flatten, w.value(node, 0), 1)
    return w.call(w.torch.reshape, w.value(node, 0), after)


def axes_of(w: Writer, node: ir.Node, index: int = 1) -> list[int] | None:
    """Give the axes of an operator, an operand or an attribute by its opset; None where all are meant."""
    return w.numbers(node, index) if present(node, index) else attribute(node, "axes")


def reduce(function: str) -> Convert:
    """Write a reduction over axes; over all where none are named."""

    def write(w: Writer, node: ir.Node) -> Any:
        axes, x = axes_of(w, node), w.value(node, 0)
        if not axes:
            if attribute(node, "noop_with_empty_axes", 0):
                return x
            axes = list(range(len(w.shape(node, node.inputs[0]))))
        return w.call(getattr(w.torch, function), x, tuple(axes), keepdim=bool(attribute(node, "keepdims", 1)))

    return write


def transpose(w: Writer, node: ir.Node) -> Any:
    """Write Transpose as a permutation."""
    rank = len(w.shape(node, node.inputs[0]))
    return w.call(w.torch.permute, w.value(node, 0), tuple(attribute(node, "perm", list(range(rank))[::-1])))


def like_result(w: Writer, node: ir.Node) -> Any:
    """Write Squeeze or Unsqueeze, of which only the shape is another."""
    return w.call(w.torch.reshape, w.value(node, 0), w.shape(node, node.outputs[0]))


def slices(w: Writer, node: ir.Node) -> Any:
    """Write Slice by slices of Python."""
    starts, ends = w.numbers(node, 1), w.numbers(node, 2)
    assert starts is not None and ends is not None
    axes = w.numbers(node, 3) or list(range(len(starts)))
    steps = w.numbers(node, 4) or [1] * len(starts)
    shape = w.shape(node, node.inputs[0])
    index = [slice(None)] * len(shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 1:
            raise w.error(node, f"has step {step}: torch slices forward only")
        index[axis] = slice(start, min(end, shape[axis]), step)
    return w.call(operator.getitem, w.value(node, 0), tuple(index))


def split(w: Writer, node: ir.Node) -> Any:
    """Write Split. Gives one tensor for each result."""
    axis = attribute(node, "axis", 0)
    sizes = [w.shape(node, value)[axis] for value in node.outputs]
    parts = w.call(w.torch.split, w.value(node, 0), sizes, axis)
    return tuple(w.call(operator.getitem, parts, index) for index in range(len(sizes)))


def pad(w: Writer, node: ir.Node) -> Any:
    """Write Pad with constants. Raises BnfuseError for any other."""
    pads = w.numbers(node, 1)
    if pads is None or present(node, 3) or attribute(node, "mode", "constant") != "constant":
        raise w.error(node, "pads otherwise than all axes by a constant")
    half = len(pads) // 2
    return w.call(
        w.nn.functional.pad, w.value(node, 0), torch_pads(pads[:half], pads[half:]), value=w.scalar(node, 2, 0.0)
    )


def hard_sigmoid(w: Writer, node: ir.Node) -> Any:
    """Write torch's Hardsigmoid where the numbers are its own, else the formula."""
    alpha, beta = plain(attribute(node, "alpha", 0.2)), plain(attribute(node, "beta", 0.5))
    if abs(alpha - 1 / 6) < 1e-6 and beta == 0.5:
        return w.layer(node, w.nn.Hardsigmoid(), w.value(node, 0))
    line = w.call(operator.add, w.call(operator.mul, w.value(node, 0), alpha), beta)
    return w.call(w.torch.clamp, line, 0, 1)


def prelu(w: Writer, node: ir.Node) -> Any:
    """Write x where x > 0, else slope*x."""
    x, slope = w.value(node, 0), w.value(node, 1)
    return w.call(w.torch.where, w.call(operator.gt, x, 0), x, w.call(operator.mul, slope, x))


def draw(w: Writer, node: ir.Node) -> Any:
    """Write what the node draws, by torch's generator; on the device that the module is moved to."""
    sizes, dtype = type_of(node, w.source.name)
    random = distribution_of(node)
    if random is None:
        raise w.error(node, "draws with a probability that is no number: leave the torch baselines out")
    like = w.buffer(f"{node.name}/like", w.torch.empty(sizes, dtype=torch_type(w, dtype)))
    if random.kind == "bernoulli":
        return w.call(w.torch.bernoulli, like, random.a)
    drawn = w.call(w.torch.rand_like if random.kind == "uniform" else w.torch.randn_like, like)
    factor = random.b - random.a if random.kind == "uniform" else random.b
    if factor != 1:
        drawn = w.call(operator.mul, drawn, factor)
    return w.call(operator.add, drawn, random.a) if random.a else drawn


def cast(w: Writer, node: ir.Node) -> Any:
    """Write Cast or CastLike."""
    if node.op_type == "Cast":
        kind = ir.DataType(attribute(node, "to"))
    else:
        like = node.inputs[1]
        kind = like.dtype if like is not None and like.dtype is not None else ir.DataType.FLOAT
    return w.method("to", w.value(node, 0), torch_type(w, kind))


def torch_type(w: Writer, dtype: ir.DataType) -> Any:
    """Give torch's type of the same name."""
    return getattr(w.torch, dtype.numpy().name)


FUNCTIONS: dict[str, Convert] = {
    **dict.fromkeys(FED, draw),
    "Abs": named("abs"),
    "Add": binary(operator.add),
    "And": named("logical_and"),
    "Cast": cast,
    "CastLike": cast,
    "Ceil": named("ceil"),
    "Concat": concat,
    "Cos": named("cos"),
    "Div": divide,
    "Erf": named("erf"),
    "Exp": named("exp"),
    "Flatten": flatten,
    "Floor": named("floor"),
    "Greater": binary(operator.gt),
    "GreaterOrEqual": binary(operator.ge),
    "HardSigmoid": hard_sigmoid,
    "Identity": lambda w, node: w.value(node, 0),
    "Less": binary(operator.lt),
    "LessOrEqual": binary(operator.le),
    "Log": named("log"),
    "MatMul": named("matmul"),
    "Max": chain("maximum"),
    "Min": chain("minimum"),
    "Mul": binary(operator.mul),
    "Neg": named("neg"),
    "Not": named("logical_not"),
    "Or": named("logical_or"),
    "PRelu": prelu,
    "Pad": pad,
    "Pow": binary(operator.pow),
    "Reciprocal": named("reciprocal"),
    "ReduceMax": reduce("amax"),
    "ReduceMean": reduce("mean"),
    "ReduceSum": reduce("sum"),
    "Reshape": reshape,
    "Sign": named("sign"),
    "Sin": named("sin"),
    "Slice": slices,
    "Split": split,
    "Sqrt": named("sqrt"),
    "Squeeze": like_result,
    "Normalize": affine,
    "Sub": binary(operator.sub),
    "Sum": chain("add"),
    "Transpose": transpose,
    "Unsqueeze": like_result,
    "Where": named("where"),
}
