"""The body of a function under construction: what the bodies of all operators are written with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from bnfuse.opset.expressions import Expression, interpret
from bnfuse.opset.plain import PlainOp
from bnfuse.opset.spec import OpSpec, attribute_type

OPERATORS = {
    "add": "Add",
    "subtract": "Sub",
    "multiply": "Mul",
    "divide": "Div",
    "absolute": "Abs",
    "sign": "Sign",
    "relu": "Relu",
    "clamp": "Clip",
    "minimum": "Min",
    "exp": "Exp",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "erf": "Erf",
    "softplus": "Softplus",
    "elu": "Elu",
    "greater": "Greater",
    "at_least": "GreaterOrEqual",
    "at_most": "LessOrEqual",
    "both": "And",
    "where": "Where",
}


class Body:
    """The nodes of a function under construction. Calling it adds a node and returns its (first) output."""

    def __init__(self, op: OpSpec | PlainOp) -> None:
        self.operands = {name: ir.Value(name=name) for name in op.operands}
        self.nodes: list[ir.Node] = []
        self._count = 0  # of all nodes, those in loops too
        self._made: dict[object, ir.Value] = {}  # what one node gives, by that node: each is made once

    def __getitem__(self, operand: str) -> ir.Value:
        return self.operands[operand]

    def __call__(self, op_type: str, *inputs: ir.Value | None, **attributes: ir.Attr | int | str) -> ir.Value:
        """Give the (first) output of a node, which is added unless there is one like it."""
        key = (op_type, *map(id, inputs), *((name, attribute_key(value)) for name, value in attributes.items()))
        if key not in self._made:
            self._made[key] = self.node(op_type, inputs, attributes)[0]
        return self._made[key]

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: dict[str, ir.Attr | int | str] | None = None,
        *,
        wanted: tuple[bool, ...] = (True,),
    ) -> Sequence[ir.Value]:
        """Add a node; outputs that are not wanted have no name."""
        count, self._count = self._count, self._count + 1
        outputs = [
            ir.Value(name=f"{op_type.lower()}_{count}" + (f"_{place}" if place else "") if named else "")
            for place, named in enumerate(wanted)
        ]
        self.nodes.append(ir.node(op_type, inputs, attributes, outputs=outputs))
        return outputs

    def total(self, count: ir.Value, start: ir.Value, step: Callable[[ir.Value], ir.Value]) -> ir.Value:
        """Add up start + step(0) + ... + step(count - 1); `count` is a scalar, `step` adds nodes to this body."""
        outside, made, self.nodes = self.nodes, dict(self._made), []
        turn = ir.Value(name=f"turn_{self._count}", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(()))
        going = ir.Value(name=f"going_{self._count}", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape(()))
        total = ir.Value(name=f"total_{self._count}")
        outputs = [self("Identity", going), self("Add", total, step(turn))]
        inner = ir.Graph([turn, going, total], outputs, nodes=self.nodes, name="step")
        self.nodes, self._made = outside, made  # what was made inside is not known outside
        always = self("Constant", value=ir.AttrTensor("value", ir.tensor(np.array(True))))
        return self.node("Loop", [count, always, start], {"body": ir.AttrGraph("body", inner)})[0]

    def results(self, values: Sequence[ir.Value]) -> list[ir.Value]:
        """Give the outputs of the function: each its own value, and none an input."""
        outputs: list[ir.Value] = []
        for value in values:
            taken = value in outputs or value in self.operands.values()
            outputs.append(self.node("Identity", [value])[0] if taken else value)
        return outputs

    def constant(self, value: float | Sequence[int]) -> ir.Value:
        """Give a float or an int64 scalar, or an int64 vector.

        What float32 does not have exactly is rounded to it where it runs.
        """
        key = ("constant", type(value), value) if isinstance(value, float | int) else tuple(value)
        if key not in self._made:
            is_rounded = isinstance(value, float) and float(np.float32(value)) != value
            dtype = np.float64 if is_rounded else np.float32 if isinstance(value, float) else np.int64
            made = self("Constant", value=ir.AttrTensor("value", ir.tensor(np.array(value, dtype))))
            self._made[key] = self("Cast", made, to=int(ir.DataType.FLOAT)) if is_rounded else made
        return self._made[key]

    def attribute(self, name: str) -> ir.Value:
        """Give an attribute of the node as a tensor: a float scalar, or an int64 vector."""
        key = ("attribute", name)
        if key not in self._made:
            kind = attribute_type(name)
            value = self("Constant", **{f"value_{kind.lower()}": reference(name, f"value_{kind.lower()}")})
            self._made[key] = self("Reshape", value, self.constant([1])) if kind == "INT" else value
        return self._made[key]

    def per_channel(self, name: str) -> ir.Value:
        """Give an operand [C] as [1, C, 1, 1]."""
        return self("Reshape", self[name], self.constant([1, -1, 1, 1]))

    def coefficient(self, name: str) -> ir.Value:
        """Give an operand [C] or [N, C] as what meets a map channel by channel: [C, 1, 1] or [N, C, 1, 1]."""
        return self("Unsqueeze", self[name], self.constant([-2, -1]))

    def formula(self, expression: Expression, **variables: ir.Value) -> ir.Value:
        """Give the nodes of a formula; its attributes are those of the node."""

        def leaf(part: Expression) -> ir.Value:
            if part.operation == "constant":
                return self.constant(part.constant)
            return self.attribute(part.name) if part.operation == "attribute" else variables[part.name]

        algebra: dict[str, Callable[..., ir.Value]] = {
            name: functools.partial(self, op_type) for name, op_type in OPERATORS.items()
        }
        algebra["fma"] = lambda x, y, z: self("Add", self("Mul", x, y), z)
        value = interpret(expression, algebra, leaf)
        assert isinstance(value, ir.Value)
        return value

    def power(self, x: ir.Value, exponent: float) -> ir.Value:
        """Raise x to a power. Of infinity, which a variance can be, onnxruntime's Sqrt is NaN, and its Pow is right."""
        return self("Pow", x, self.constant(exponent))

    def sum(self, x: ir.Value) -> ir.Value:
        """Sum over N, H, W, as [C]."""
        return self("ReduceSum", x, self.constant([0, 2, 3]), keepdims=0)

    def slice(self, x: ir.Value, start: ir.Value, stop: ir.Value, axis: int) -> ir.Value:
        """Add the range [start, stop) along an axis."""
        return self("Slice", x, start, stop, self.constant([axis]))


def attribute_key(value: ir.Attr | int | str) -> object:
    """Give what tells the attributes of two nodes apart; tensors and graphs are like no other."""
    if not isinstance(value, ir.Attr):
        return value
    if value.is_ref():
        return value.name, value.ref_attr_name
    known = value.type in (ir.AttributeType.INT, ir.AttributeType.FLOAT, ir.AttributeType.STRING)
    if value.type == ir.AttributeType.INTS:
        return tuple(value.as_ints())
    return value.value if known else object()


def reference(name: str, attribute: str | None = None) -> ir.Attr:
    """Give the node's attribute `name`, as an attribute (of the same name, or another) of a node in the body."""
    return ir.RefAttr(attribute or name, name, ir.AttributeType[attribute_type(name)])
