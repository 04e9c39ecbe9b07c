"""What rules emit nodes with, and what they see of the node that they differentiate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError, at_node
from bnfuse.graph.constants import Known
from bnfuse.graph.names import Names
from bnfuse.graph.values import static_shape
from bnfuse.opset.plain import PlainOp
from bnfuse.opset.shapes import result_shapes
from bnfuse.opset.spec import DOMAIN, INTEGERS, VERSION, OpSpec

ELEMENTWISE = frozenset({"Add", "Div", "Mul", "Neg", "Sub"})


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a value is, with zeros before and behind it along one axis."""

    value: ir.Value
    axis: int
    before: int
    after: int


class Emitter:
    """Appends nodes to a graph, with names that nothing else has and each constant once.

    `variables` are no constants, even where the graph has a value for them.
    """

    def __init__(self, model: ir.Model, variables: Iterable[ir.Value] = ()) -> None:
        self.model, self.graph = model, model.graph
        self._names = Names(model.graph)
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._nodes: list[ir.Node] = []
        self._made: set[ir.Value] = set()
        self.pieces: dict[ir.Value, Piece] = {}  # of values that are emitted
        self.spread: dict[ir.Value, tuple[ir.Value, tuple[int, ...]]] = {}  # what was broadcast, and to which shape
        self.known = Known(model.opset_imports.get("", 1), variables=variables)

    def fresh(self, base: str) -> str:
        """Make a name that no value and no node has."""
        return self._names.fresh(base)

    def made(self, value: ir.Value) -> bool:
        """Tell whether a node emitted here gives the value."""
        return value in self._made

    def rename(self, value: ir.Value, base: str) -> None:
        """Give a value another name."""
        value.name = self.fresh(base)

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any],
        *,
        name: str,
        outputs: Sequence[ir.Value],
        domain: str = "",
    ) -> Sequence[ir.Value]:
        """Append a node; gives its outputs."""
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in attributes.items()}
        node = ir.node(op_type, list(inputs), plain, domain=domain, outputs=list(outputs), name=name)
        self.graph.append(node)
        self._nodes.append(node)
        self._made.update(outputs)
        return outputs

    def constant(self, array: np.ndarray, base: str) -> ir.Value:
        """Register an initializer, or give the one that has these elements already."""
        array = np.asarray(array)
        key = (array.dtype.str + array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            name = self.fresh(base)
            value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
            value.shape, value.type = ir.Shape(array.shape), ir.TensorType(ir.DataType.from_numpy(array.dtype))
            self.graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    def seed(self, dtype: ir.DataType, base: str) -> ir.Value:
        """Register the 1 that a gradient begins with: a constant of its own, so that it can be exchanged for another
        factor of all gradients."""
        name = self.fresh(base)
        value = ir.Value(name=name, shape=ir.Shape(()), type=ir.TensorType(dtype))
        value.const_value = ir.tensor(np.array(1, dtype.numpy()), name=name)
        self.graph.register_initializer(value)
        self._constants["seed", (), name.encode()] = value
        return value

    def zeros(self, shape: tuple[int, ...], dtype: ir.DataType, base: str) -> ir.Value:
        """Append a ConstantOfShape."""
        sizes = self.constant(np.array(shape, np.int64), "shape")
        name = self.fresh(base)
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        fill = ir.AttrTensor("value", ir.tensor(np.zeros(1, dtype.numpy())))
        return self.node("ConstantOfShape", [sizes], {"value": fill}, name=name, outputs=[value])[0]

    def narrowed(self, inputs: Sequence[ir.Value | None]) -> tuple[list[ir.Value | None], tuple[int, ...] | None]:
        """Give what an elementwise operator can read in place of operands that were broadcast to the result's shape.

        That is what they were before, where another operand has the shape; where none has (numbers aside), the result
        is to be broadcast to the shape that is given with them.
        """
        shapes = {self.spread[value][1] for value in inputs if value in self.spread}
        if len(shapes) != 1:
            return list(inputs), None
        (shape,) = shapes
        narrow = [self.spread[value][0] if value in self.spread else value for value in inputs]
        others = [static_shape(value) for value in inputs if value is not None and value not in self.spread]
        if shape in others:
            return narrow, None
        numbers = all(other is not None and math.prod(other) == 1 and len(other) <= len(shape) for other in others)
        return (narrow, shape) if numbers else (list(inputs), None)

    def remove_unused(self, kept: Iterable[ir.Value]) -> None:
        """Remove the emitted nodes and constants that nothing reads and that give nothing kept."""
        kept = set(kept)
        gone = []
        for node in reversed(self._nodes):
            if not any(value in kept or value.uses() or value.is_graph_output() for value in node.outputs):
                for place in range(len(node.inputs)):
                    node.replace_input_with(place, None)
                gone.append(node)
        self.graph.remove(gone)
        for value in self._constants.values():
            if not value.uses() and value not in kept:
                del self.graph.initializers[str(value.name)]


class Gradient:
    """One node under differentiation, for its rule: operands, results, the gradients at them, and ways to emit nodes.

    `x` and `y` are the first operand and result, `dy` the gradient at it. Shapes are static.
    """

    def __init__(
        self,
        emitter: Emitter,
        node: ir.Node,
        gradients: Sequence[ir.Value | None],
        wanted: Sequence[bool],
        file: str | None,
    ) -> None:
        self.emitter, self.node, self.gradients, self._wanted, self.file = emitter, node, gradients, wanted, file

    # what the node is

    @property
    def x(self) -> ir.Value:
        """The first operand."""
        return self.operand(0)

    @property
    def y(self) -> ir.Value:
        """The first result."""
        return self.node.outputs[0]

    @property
    def dy(self) -> ir.Value:
        """The gradient at the first result; zeros where only others have one."""
        return self.gradient(0)

    def operand(self, place: int) -> ir.Value:
        """Give an operand that the node must have."""
        value = self.optional(place)
        if value is None:
            raise self.error(f"lacks its operand {place + 1}: export it anew.")
        return value

    @property
    def operands(self) -> list[ir.Value]:
        """All operands, of a node whose list of them has none left out."""
        return [self.operand(place) for place in range(len(self.node.inputs))]

    def optional(self, place: int) -> ir.Value | None:
        """Give an operand, None where the node leaves it out."""
        return self.node.inputs[place] if place < len(self.node.inputs) else None

    def gradient(self, place: int) -> ir.Value:
        """Give the gradient at a result; zeros where it has none."""
        given = self.gradients[place]
        if given is not None:
            return given
        value = self.node.outputs[place]
        return self.emitter.zeros(self.shape(value), self.dtype(value), f"{self.node.name}/grad/zeros")

    def wants(self, place: int) -> bool:
        """Tell whether the gradient of an operand is needed."""
        return place < len(self._wanted) and self._wanted[place]

    def result(self, place: int, shape: Sequence[int], dtype: ir.DataType, what: str) -> ir.Value:
        """Give a result of the node that its gradient reads; where the node leaves it out, it gives it from now on."""
        if len(self.node.outputs) <= place:
            self.node.resize_outputs(place + 1)
        value = self.node.outputs[place]
        if not value.name:
            value.name = self.emitter.fresh(f"{self.node.name}/{what}")
        value.shape, value.type = value.shape or ir.Shape(shape), value.type or ir.TensorType(dtype)
        return value

    def given(self, place: int, default: np.ndarray, what: str) -> ir.Value:
        """Give an operand that has a default; where the node leaves it out, it reads it from now on."""
        value = self.optional(place)
        if value is None:
            value = self.emitter.constant(default, f"{self.node.name}/{what}")
            self.node.resize_inputs(max(place + 1, len(self.node.inputs)))
            self.node.replace_input_with(place, value)
        return value

    def attribute(self, name: str, default: Any) -> Any:
        """Give an attribute; lists as tuples."""
        if name not in self.node.attributes:
            return default
        value = self.node.attributes[name].value
        return tuple(value) if isinstance(value, (list, tuple)) else value

    def known(self, value: ir.Value | None) -> np.ndarray | None:
        """Give the elements of a constant, or of what follows from constants and shapes; None for any other value."""
        return self.emitter.known(value)

    def constant(self, place: int, what: str) -> np.ndarray:
        """Give the elements of an operand that must be constant."""
        found = self.known(self.operand(place))
        if found is None:
            raise self.error(f"computes its {what}: it must be constant.")
        return found

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        """Give the static shape of a forward value, or of a gradient that has the shape of one."""
        shape = static_shape(value)
        if shape is None:
            raise self.error(f"has a value without a static shape ('{value.name}'): build it with --batch.")
        return shape

    def rank(self, value: ir.Value) -> int:
        """Count the dimensions."""
        return len(self.shape(value))

    def dtype(self, value: ir.Value) -> ir.DataType:
        """Give the element type; that of the node's first result where none is stated, as of what was emitted."""
        return value.dtype or self.y.dtype or ir.DataType.FLOAT

    def error(self, what: str) -> BnfuseError:
        """Make an error about the node."""
        return at_node(self.node.name or "?", self.node.op_type, what, file=self.file)

    # emitting

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Emit a standard node with one result."""
        return self.ops(op_type, inputs, 1, **attributes)[0]

    def ops(
        self, op_type: str, inputs: Sequence[ir.Value | None], results: int, **attributes: Any
    ) -> Sequence[ir.Value]:
        """Emit a standard node with so many results."""
        if op_type in ELEMENTWISE:
            inputs, shape = self.emitter.narrowed(inputs)
            if shape is not None:
                return [self.expand(self.op(op_type, *inputs, **attributes), shape)]
        name = self.emitter.fresh(f"{self.node.name}/grad/{op_type.lower()}")
        names = [name, *(self.emitter.fresh(f"{name}_{i}") for i in range(1, results))]
        return self.emitter.node(op_type, inputs, attributes, name=name, outputs=[ir.Value(name=n) for n in names])

    def own(
        self,
        spec: OpSpec | PlainOp,
        operands: Mapping[str, ir.Value],
        attributes: Mapping[str, Any] | None = None,
    ) -> dict[str, ir.Value]:
        """Emit an operator of ours; gives its results by name, all of which are there, wanted or not."""
        name = self.emitter.fresh(f"{self.node.name}/grad")
        given = dict(attributes or {})
        shapes: dict[str, Any] = {key: static_shape(value) for key, value in operands.items()}
        found = result_shapes(spec, shapes, given)
        results = {}
        for result in spec.results:
            value = ir.Value(name=self.emitter.fresh(f"{name}/{result}"))
            shape = found[result]
            value.shape = None if shape is None else ir.Shape(shape)
            value.type = ir.TensorType(ir.DataType.INT64 if result in INTEGERS else self.dtype(self.y))
            results[result] = value
        inputs = [operands[key] for key in spec.operands]
        chosen = {key: given[key] for key in spec.attributes}
        self.emitter.node(spec.name, inputs, chosen, name=name, outputs=list(results.values()), domain=DOMAIN)
        self.emitter.model.opset_imports[DOMAIN] = VERSION
        return results

    def number(self, value: float, like: ir.Value) -> ir.Value:
        """Give a constant scalar of the element type of `like`."""
        dtype = self.dtype(like).numpy()
        return self.emitter.constant(np.array(value, dtype), f"constant_{value:g}")

    def count(self, value: ir.Value, result: ir.Value | None = None) -> ir.Value:
        """Emit how many elements a value has, for each of a result's where that has several, as a scalar of floats.

        It is no constant, so that it holds for any batch (bnfuse/graph/batches.py).
        """
        size = self.op("Size", value)
        if result is not None and math.prod(self.shape(result)) != 1:
            size = self.op("Div", size, self.op("Size", result))
        return self.op("Cast", size, to=int(self.dtype(self.x)))

    def array(self, values: Any, dtype: Any, what: str = "constant") -> ir.Value:
        """Give a constant tensor."""
        return self.emitter.constant(np.asarray(values, dtype), f"{self.node.name}/grad/{what}")

    def ints(self, values: Sequence[int]) -> ir.Value:
        """Give a constant int64 vector: axes, a shape."""
        base = "ints" + "".join(f"_{value}" for value in values) if len(values) <= 6 else "ints"
        return self.emitter.constant(np.array(values, np.int64), base)

    def add(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Emit a + b."""
        return self.op("Add", a, b)

    def sub(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Emit a - b."""
        return self.op("Sub", a, b)

    def mul(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Emit a * b."""
        return self.op("Mul", a, b)

    def div(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Emit a / b."""
        return self.op("Div", a, b)

    def neg(self, a: ir.Value) -> ir.Value:
        """Emit -a."""
        return self.op("Neg", a)

    def where(self, condition: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
        """Emit a where the condition holds, b elsewhere."""
        return self.op("Where", condition, a, b)

    def reshape(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        """Emit the same elements in another shape (-1 and 0 as ONNX has them)."""
        return self.op("Reshape", value, self.ints(shape))

    def transpose(self, value: ir.Value, perm: Sequence[int]) -> ir.Value:
        """Emit a permutation of axes."""
        return self.op("Transpose", value, perm=list(perm))

    def sum(self, value: ir.Value, axes: Sequence[int], *, keepdims: bool = False) -> ir.Value:
        """Emit a sum over axes; no axes leave the value as it is."""
        return self.op("ReduceSum", value, self.ints(axes), keepdims=int(keepdims)) if axes else value

    def expand(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        """Emit a value broadcast to a shape."""
        whole = self.op("Expand", value, self.ints(shape))
        self.emitter.spread[whole] = (value, tuple(shape))
        return whole

    def pad(self, value: ir.Value, before: Sequence[int], after: Sequence[int]) -> ir.Value:
        """Emit a value with so many zeros around it along each axis, cut where a number is negative."""
        cut = [axis for axis, sides in enumerate(zip(before, after, strict=True)) if min(sides) < 0]
        if cut:
            starts = [max(0, -before[axis]) for axis in cut]
            ends = [min(0, after[axis]) or 2**31 - 1 for axis in cut]
            value = self.op("Slice", value, self.ints(starts), self.ints(ends), self.ints(cut))
        pads = [max(0, number) for number in (*before, *after)]
        axes = [axis for axis in range(len(before)) if pads[axis] or pads[axis + len(before)]]
        if not axes:
            return value
        whole = self.op("Pad", value, self.ints(pads))
        if len(axes) == 1:
            self.emitter.pieces[whole] = Piece(value, axes[0], before[axes[0]], after[axes[0]])
        return whole

    def fit(self, gradient: ir.Value, operand: ir.Value, shape: Sequence[int] | None = None) -> ir.Value:
        """Emit the sum of a gradient over the axes along which its operand was broadcast.

        `shape` is that of the gradient: the first result's, where it is left out.
        """
        of_gradient = self.shape(self.y) if shape is None else tuple(shape)
        wanted = self.shape(operand)
        if of_gradient == wanted:
            return gradient
        lead = len(of_gradient) - len(wanted)
        axes = [*range(lead)]
        axes += [lead + i for i, size in enumerate(wanted) if size == 1 and of_gradient[lead + i] != 1]
        summed = self.sum(gradient, axes, keepdims=not lead)
        return self.reshape(summed, wanted) if lead and len(of_gradient) - len(axes) != len(wanted) else summed
