"""Which axis of every value runs over the batch, so that a graph can be given a larger one.

    axes = batch_axes(graph, [data, labels])           # {value: axis}; values that are not in it do not have one

Followed from the inputs on, an operator at a time. What is computed from shapes at run time (Shape, Gather, ...) adapts
by itself and is only watched. An operator that mixes the rows of the batch in another way than a sum for the gradient
of a parameter, or that holds the batch where it cannot be told from other sizes, raises an error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import onnx_ir as ir

from bnfuse.core.errors import BnfuseError, at_node
from bnfuse.graph.drawing import FED, LIKE
from bnfuse.opset.sources import SOURCES
from bnfuse.opset.spec import DOMAIN, OpSpec, find
from bnfuse.passes.dialect.source_ops import constant_of, is_map

Axis = int | None
Rule = Callable[["Walk", ir.Node], list[Axis]]

ELEMENTWISE = (
    *("Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Clip", "Div", "Dropout", "Elu", "Equal", "Erf", "Exp"),
    *("Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "Identity", "LeakyRelu", "Less", "LessOrEqual"),
    *("Log", "Max", "Min", "Mul", "Neg", "Not", "Or", "Pow", "PRelu", "Reciprocal", "Sigmoid"),
    *(name for domain, name in SOURCES if not domain),
    *("Sign", "Softplus", "Sqrt", "Sub", "Sum", "Tanh", "Where"),
)
OF_THE_BATCH = {"count", "extent", "samples"}  # attributes
SHAPE_ARITHMETIC = ("Cast", "Concat", "Gather", "Identity", "Slice", "Squeeze", "Unsqueeze")


def batch_axes(graph: ir.Graph, inputs: Iterable[ir.Value], counted: ir.Value | None = None) -> dict[ir.Value, int]:
    """Find the batch axis of every value that has one; `inputs` have theirs in front. The size of `counted`, one of
    them, stays what it is: it is that of the real samples.

    Raises BnfuseError that names the first operator through which the batch cannot be followed.
    """
    walk = Walk(dict.fromkeys(inputs, 0))
    for node in graph:
        if counted is None or node.op_type != "Size" or node.inputs[0] is not counted:
            walk.visit(node)
    return walk.axes


class Walk:
    """What is known so far: batch axes, and values that hold a shape or a size that the batch is part of."""

    def __init__(self, axes: dict[ir.Value, int]) -> None:
        self.axes = axes
        self.shapes: set[ir.Value] = set()
        self.sizes: set[ir.Value] = set()

    def visit(self, node: ir.Node) -> None:
        """Follow the batch through one node. Raises BnfuseError where its rows cannot be kept apart."""
        measured = {v for v in node.inputs if v is not None} & (self.shapes | self.sizes)
        if measured and not self._measures(node, measured):
            return
        if not any(value in self.axes for value in node.inputs if value is not None) and not measured:
            return
        rule = OWN.get(node.op_type, _own) if node.domain == DOMAIN else RULES.get(node.op_type)
        if rule is None:
            raise refusal(node, "is not known to keep the rows of a batch apart")
        for value, axis in zip(node.outputs, rule(self, node), strict=False):
            if axis is not None and value.name:
                self.axes[value] = axis

    def _measures(self, node: ir.Node, measured: set[ir.Value]) -> bool:
        """Arithmetic on shapes stays a shape. Gives whether the node does anything else with them."""
        if measured & self.sizes:
            if node.op_type == "Cast":
                self.sizes.add(node.outputs[0])
            elif node.op_type != "Div" or not {*node.inputs} <= self.sizes:  # in a ratio of two sizes the batch cancels
                raise refusal(node, "computes with the number of elements of the batch")
            return False
        if node.op_type in SHAPE_ARITHMETIC and not {*node.inputs} & {*self.axes}:
            self.shapes.add(node.outputs[0])
            return False
        if node.op_type not in ("Reshape", "Expand", "ConstantOfShape"):
            raise refusal(node, "computes with the size of the batch")
        return True

    def claim(self, value: ir.Value, distance: int) -> bool:
        """Claim for the batch a value that is not made of it but has as many rows; False where it cannot have more.

        So it is with random masks, a row of which is drawn for each sample, and with constants of one value. The batch
        is `distance` axes from the end.
        """
        if value in self.axes or (value.shape is not None and not _wide(value, distance)):
            return True
        if value.shape is None or value in self.shapes | self.sizes:
            return False
        axis, node = len(value.shape) - distance, value.producer()
        if node is None or node.op_type == "Constant":
            rows = constant_of(value)
            more = rows is not None and bool((rows == rows.take([0], axis)).all())
        elif node.op_type in FED and node.op_type != "Bernoulli" and node.inputs:
            more = node.inputs[0] is not None and self.claim(node.inputs[0], distance)
        elif node.op_type == "Expand":  # of one number
            more = node.inputs[0] is not None and set(node.inputs[0].shape or ()) <= {1}
        else:
            known = node.op_type in ELEMENTWISE or node.op_type in FED
            more = known and all(self.claim(operand, distance) for operand in node.inputs if operand is not None)
        if more:
            self.axes[value] = axis
        return more

    def axis(self, node: ir.Node, index: int) -> Axis:
        """Give the batch axis of a node's operand; None where it has none or there is no such operand."""
        value = node.inputs[index] if index < len(node.inputs) else None
        return self.axes.get(value) if value is not None else None


def refusal(node: ir.Node, why: str) -> BnfuseError:
    """Make the error that says why virtual samples cannot go through a node."""
    return at_node(node.name or "", node.op_type, f"{why}: virtual samples cannot go through it. Leave vdn out.")


def rank(value: ir.Value | None, node: ir.Node) -> int:
    """Give the rank of a node's operand. Raises BnfuseError where it is not known."""
    if value is None or value.shape is None:
        raise refusal(node, "works on a value of unknown rank")
    return len(value.shape)


def attribute(node: ir.Node, name: str, default: int) -> int:
    """Read an integer attribute."""
    return node.attributes[name].as_int() if name in node.attributes else default


def constant_axes(node: ir.Node, at: int) -> list[int] | None:
    """Read the axes of a reduction or the like, counted from the front; None where there are none."""
    count = rank(node.inputs[0], node)
    if "axes" in node.attributes:
        axes = list(node.attributes["axes"].as_ints())
    elif at < len(node.inputs) and node.inputs[at] is not None:
        constant = constant_of(node.inputs[at])
        if constant is None:
            raise refusal(node, "has axes that are not constant")
        axes = [int(axis) for axis in constant.reshape(-1)]
    else:
        return None
    return [axis % count for axis in axes]


def _own(walk: Walk, node: ir.Node) -> list[Axis]:
    """Follow an operator of ours: it keeps rows apart in its maps; coefficients have none.

    A BatchNorm that was taken apart counts the batch's elements in attributes, and one that is sampled has its place
    among the rows.
    """
    if "Statistics" in node.op_type or OF_THE_BATCH & {*node.attributes}:
        raise refusal(node, "belongs to statistics of the batch as it is")
    axes = [walk.axis(node, index) for index in range(len(node.inputs))]
    if any(axis not in (0, None) for axis in axes):
        raise refusal(node, "has the batch on another axis than the first")
    op = find(node.op_type)
    results = op.results if op is not None else ("",) * len(node.outputs)
    if isinstance(op, OpSpec) and op.core in ("Pointwise", "PointwiseGrad") and axes[0] is None:
        raise refusal(node, "has the batch in a parameter")

    def axis(name: str, value: ir.Value) -> Axis:
        count = len(value.shape) if value.shape is not None else 0
        return 0 if name in ("y", "dx", "stored") or (count == 4 and name != "dweight") else None

    return [axis(name, value) for name, value in zip(results, node.outputs, strict=False)]


def _elementwise(walk: Walk, node: ir.Node) -> list[Axis]:
    """Align the operands at their last axes."""
    values = [value for value in node.inputs if value is not None]
    behind = {rank(value, node) - walk.axes[value] for value in values if value in walk.axes}
    if len(behind) != 1:
        raise refusal(node, "combines the batch with itself across rows")
    (distance,) = behind
    for value in values:
        if value not in walk.axes and not walk.claim(value, distance):
            raise refusal(node, f"reads '{value.name}', which is as long as the batch but not made of it")
    most = max(rank(value, node) for value in values)
    return [most - distance] * len(node.outputs)


def _wide(value: ir.Value, distance: int) -> bool:
    """Whether an operand without a batch axis has another size than 1 where the batch is."""
    shape = tuple(value.shape or ())
    return len(shape) >= distance and shape[len(shape) - distance] != 1


def _maps(*results: Axis) -> Rule:
    """Make the rule of an operator on maps with the batch in front: the axes of its results."""

    def rule(walk: Walk, node: ir.Node) -> list[Axis]:
        for index in range(len(node.inputs)):
            if walk.axis(node, index) not in (0, None):
                raise refusal(node, "has the batch on another axis than the first")
        if walk.axis(node, 0) is None:
            raise refusal(node, "has the batch in a parameter")
        return list(results)

    return rule


def _along(node: ir.Node, axis: Axis, results: list[Axis]) -> list[Axis]:
    own = attribute(node, "axis", 0) % rank(node.inputs[0], node)
    if own == axis:
        raise refusal(node, "works along the batch")
    return results


def _batch_norm(walk: Walk, node: ir.Node) -> list[Axis]:
    """Statistics of a map are taken from its real rows or from its virtual ones; those of a matrix stay as they are."""
    if not is_map(node.inputs[0]):
        raise refusal(node, "would take statistics of both kinds of rows, for its input is no float32 map of rank 4")
    return _maps(0, None, None, None, None)(walk, node)


def _concat(walk: Walk, node: ir.Node) -> list[Axis]:
    axes = {walk.axis(node, index) for index in range(len(node.inputs))}
    if len(axes) != 1:
        raise refusal(node, "joins values with and without a batch")
    (axis,) = axes
    return _along(node, axis, [axis, None])


def _split(walk: Walk, node: ir.Node) -> list[Axis]:
    axis = walk.axis(node, 0)
    return _along(node, axis, [axis] * len(node.outputs))


def _softmax(walk: Walk, node: ir.Node) -> list[Axis]:
    axis = walk.axis(node, 0)
    own = attribute(node, "axis", -1) % rank(node.inputs[0], node)
    if own == axis:
        raise refusal(node, "works along the batch")
    return [axis]


def _matrix_product(walk: Walk, node: ir.Node) -> list[Axis]:
    """Tell a parameter's gradient, a product over the batch, from one of whose sides one keeps the batch."""
    sides = [walk.axis(node, 0), walk.axis(node, 1)]
    ranks = [rank(value, node) for value in node.inputs[:2]]
    if ranks != [2, 2]:
        if sides[1] is None and sides[0] is not None and sides[0] < ranks[0] - 1 and node.op_type == "MatMul":
            return [sides[0]]
        raise refusal(node, "multiplies batches of matrices")
    turned = [attribute(node, name, 0) for name in ("transA", "transB")]
    left, right = (side if side is None or not turn else 1 - side for side, turn in zip(sides, turned, strict=True))
    if left == 1 and right == 0:
        return [None]
    if (left, right) in ((0, None), (None, 1)) and walk.axis(node, 2) is None:
        return [left if left is not None else right]
    raise refusal(node, "mixes the rows of the batch")


def _reduce_sum(walk: Walk, node: ir.Node) -> list[Axis]:
    axis, axes = walk.axis(node, 0), constant_axes(node, 1)
    if axes is None and attribute(node, "noop_with_empty_axes", 0):
        return [axis]
    if axis is None or axes is None or axis in axes:
        return [None]
    return [axis if attribute(node, "keepdims", 1) else axis - sum(other < axis for other in axes)]


def _reduce(walk: Walk, node: ir.Node) -> list[Axis]:
    (axis,) = _reduce_sum(walk, node)
    if axis is None:
        raise refusal(node, "reduces over the batch")
    return [axis]


def _flatten(walk: Walk, node: ir.Node) -> list[Axis]:
    if walk.axis(node, 0) != 0 or attribute(node, "axis", 1) % rank(node.inputs[0], node) != 1:
        raise refusal(node, "flattens the batch together with other axes")
    return [0]


def _reshape(walk: Walk, node: ir.Node) -> list[Axis]:
    """Refuse a batch that is cut or merged: it is the axis of the result with as many rows and as much before it."""
    x, y, axis = node.inputs[0], node.outputs[0], walk.axis(node, 0)
    if axis is None:
        raise refusal(node, "gives a value without a batch the batch's shape")
    before, after = fixed_shape(x, node), fixed_shape(y, node)
    kept = [
        place
        for place, size in enumerate(after)
        if size == before[axis] and math.prod(after[:place]) == math.prod(before[:axis])
    ]
    if not kept:
        raise refusal(node, "merges the batch with other axes, or cuts it up")
    return [kept[0]]


def fixed_shape(value: ir.Value | None, node: ir.Node) -> list[int]:
    """Give the sizes of a node's operand. Raises BnfuseError where one is not fixed."""
    if value is None or value.shape is None or not all(isinstance(size, int) for size in value.shape):
        raise refusal(node, "works on a value of unknown shape")
    return [int(size) for size in value.shape]  # type: ignore[arg-type]


def _expand(walk: Walk, node: ir.Node) -> list[Axis]:
    axis = walk.axis(node, 0)
    if axis is None:
        raise refusal(node, "repeats a value over the batch")
    return [axis + rank(node.outputs[0], node) - rank(node.inputs[0], node)]


def _transpose(walk: Walk, node: ir.Node) -> list[Axis]:
    axis, count = walk.axis(node, 0), rank(node.inputs[0], node)
    order = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else list(reversed(range(count)))
    return [order.index(axis) if axis is not None else None]


def _squeeze(walk: Walk, node: ir.Node) -> list[Axis]:
    axis, axes = walk.axis(node, 0), constant_axes(node, 1)
    if axis is None or axes is None or axis in axes:
        raise refusal(node, "may drop the axis of the batch")
    return [axis - sum(other < axis for other in axes)]


def _unsqueeze(walk: Walk, node: ir.Node) -> list[Axis]:
    axis = walk.axis(node, 0)
    shape = node.outputs[0].shape
    constant = constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
    if axis is None or shape is None or constant is None:
        raise refusal(node, "has axes that are not constant")
    new = {int(other) % len(shape) for other in constant.reshape(-1)}
    return [[place for place in range(len(shape)) if place not in new][axis]]


def _slice(walk: Walk, node: ir.Node) -> list[Axis]:
    axis = walk.axis(node, 0)
    if axis is None or axis in (constant_axes(node, 3) or range(rank(node.inputs[0], node))):
        raise refusal(node, "cuts the batch")
    return [axis]


def _gather(walk: Walk, node: ir.Node) -> list[Axis]:
    axis, index = walk.axis(node, 0), node.inputs[1]
    if walk.axis(node, 1) is not None or axis is None:
        raise refusal(node, "looks rows up by the batch")
    (axis,) = _along(node, axis, [axis])
    own = attribute(node, "axis", 0) % rank(node.inputs[0], node)
    return [axis if axis is None or axis < own else axis + rank(index, node) - 1]


def _pad(walk: Walk, node: ir.Node) -> list[Axis]:
    axis, pads = walk.axis(node, 0), constant_of(node.inputs[1])
    if axis is None or pads is None or len(node.inputs) > 3 or pads[axis] or pads[axis + len(pads) // 2]:
        raise refusal(node, "pads the batch")
    return [axis]


def _shape(walk: Walk, node: ir.Node) -> list[Axis]:
    walk.shapes.add(node.outputs[0])
    return [None]


def _size(walk: Walk, node: ir.Node) -> list[Axis]:
    walk.sizes.add(node.outputs[0])
    return [None]


def _constant_of_shape(walk: Walk, node: ir.Node) -> list[Axis]:
    return [0]


def _loss(walk: Walk, node: ir.Node) -> list[Axis]:
    if attribute_text(node, "reduction", "mean") == "none":
        raise refusal(node, "gives a loss for each row")
    return [None, 0]


def _loss_gradient(walk: Walk, node: ir.Node) -> list[Axis]:
    """Follow the scores; the gradients of the rows' losses are made of one number, or of as many as there are rows."""
    axis, dlosses = walk.axis(node, 1), node.inputs[0]
    if axis != 0 or dlosses is None or not walk.claim(dlosses, rank(dlosses, node)):
        raise refusal(node, "has a gradient for each row that is not made of the batch")
    return [axis]


def attribute_text(node: ir.Node, name: str, default: str) -> str:
    """Read a string attribute."""
    return node.attributes[name].as_string() if name in node.attributes else default


def _drawn_like(walk: Walk, node: ir.Node) -> list[Axis]:
    return [walk.axis(node, 0)]


OWN: dict[str, Rule] = {  # of ai.bnfuse, where the rule of the others does not serve
    "BatchNorm": _batch_norm,
    "BatchNormGrad": _maps(0, None, None),
    "LayerNorm": _maps(0, 0, 0),
    "LayerNormGrad": _maps(0, None, None),
    "SoftmaxCrossEntropyGrad": _loss_gradient,
}
RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(LIKE, _drawn_like),
    **dict.fromkeys(("Conv", "ConvTranspose", "GlobalAveragePool"), _maps(0)),
    **dict.fromkeys(("MaxPool", "AveragePool"), _maps(0, 0)),
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "Gemm": _matrix_product,
    "LogSoftmax": _softmax,
    "MatMul": _matrix_product,
    "Pad": _pad,
    "ReduceMax": _reduce,
    "ReduceMean": _reduce,
    "ReduceMin": _reduce,
    "ReduceSum": _reduce_sum,
    "Reshape": _reshape,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "Softmax": _softmax,
    "SoftmaxCrossEntropyLoss": _loss,
    "Split": _split,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
