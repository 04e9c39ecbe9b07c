"""A node under conversion: its operands, what is known of them, and ways to write other nodes in its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError, at_node
from bnfuse.graph.constants import Known
from bnfuse.graph.names import Names
from bnfuse.graph.values import static_shape
from bnfuse.opset.plain import PlainOp
from bnfuse.opset.spec import DOMAIN, VERSION, OpSpec

Dims = Sequence[int | str | None]


class Source:
    """One node under conversion. What is written goes in front of it, under names that begin with its own."""

    def __init__(self, model: ir.Model, node: ir.Node, names: Names, file: str | None) -> None:
        self.model, self.graph, self.node, self.names, self.file = model, model.graph, node, names, file
        self.opset = model.opset_imports.get("", 1)
        self.made: list[ir.Node] = []

    # what the node is

    def error(self, what: str) -> BnfuseError:
        """Make an error about the node."""
        return at_node(self.node.name or "", self.node.op_type, what, file=self.file)

    def operand(self, place: int) -> ir.Value:
        """Give an operand that the node must have."""
        value = self.optional(place)
        if value is None:
            raise self.error(f"lacks its operand {place + 1}: the graph is damaged. Build it anew.")
        return value

    def optional(self, place: int) -> ir.Value | None:
        """Give an operand; None where the node leaves it out."""
        value = self.node.inputs[place] if place < len(self.node.inputs) else None
        return value if value is not None and value.name else None

    def result(self, place: int) -> ir.Value | None:
        """Give a result; None where the node does not have it, or nothing wants it."""
        value = self.node.outputs[place] if place < len(self.node.outputs) else None
        return value if value is not None and value.name else None

    def attribute(self, name: str, default: Any) -> Any:
        """Give an attribute; lists as tuples."""
        return attribute_of(self.node, name, default)

    def dtype(self, value: ir.Value) -> ir.DataType:
        """Give the element type, float32 where none is stated."""
        return value.dtype or ir.DataType.FLOAT

    def is_float32(self, *values: ir.Value) -> bool:
        """Tell whether our own operators take values of these types."""
        return all(self.dtype(value) == ir.DataType.FLOAT for value in values)

    def require_float32(self, *values: ir.Value) -> None:
        """Raise BnfuseError for another element type."""
        for value in values:
            if not self.is_float32(value):
                kind = self.dtype(value).name.lower()
                raise self.error(f"reads '{value.name}', which is {kind}: convert the model to float32.")

    def rank(self, value: ir.Value) -> int:
        """Count the dimensions. Raises BnfuseError where the file does not say them."""
        return len(self.dims(value))

    def dims(self, value: ir.Value) -> Dims:
        """List the dimensions: numbers, or names where they are symbolic."""
        if value.shape is None:
            raise self.error(f"reads '{value.name}', whose shape the file does not say: build it anew, with --batch N.")
        return [size if isinstance(size, int) else size.value for size in value.shape]

    def sizes(self, value: ir.Value) -> tuple[int, ...]:
        """Give a shape that must be static."""
        shape = static_shape(value)
        if shape is None:
            raise self.error(f"reads '{value.name}', which has no fixed shape: build it anew, with --batch N.")
        return shape

    def known(self, value: ir.Value | None) -> np.ndarray | None:
        """Give the elements of what follows from constants and static shapes alone; None for any other value."""
        return Known(self.opset, self.file)(value)  # anew: nodes are exchanged beside this one

    def constant_operand(self, place: int, what: str) -> np.ndarray:
        """Give the elements of an operand that must be constant. `what` is what it says."""
        found = self.known(self.operand(place))
        if found is None:
            raise self.error(f"computes its {what}: build the graph anew, with --batch N.")
        return found

    # writing

    def node_of(
        self,
        op_type: str,
        inputs: Iterable[ir.Value | None],
        results: Sequence[tuple[Dims | None, ir.DataType]],
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
    ) -> list[ir.Value]:
        """Write a node; gives its results, of the shapes and types that are said."""
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in (attributes or {}).items()}
        name = self.names.fresh(f"{self.node.name or self.node.op_type}/{op_type.lower()}")
        values = []
        for place, (shape, dtype) in enumerate(results):
            base = f"{name}_{place}" if place else f"{name}_out"
            value = ir.Value(name=self.names.fresh(base), type=ir.TensorType(dtype))
            value.shape = None if shape is None else ir.Shape(shape)
            values.append(value)
        node = ir.node(op_type, list(inputs), plain, domain=domain, outputs=values, name=name)
        node.metadata_props.update(self.node.metadata_props)
        self.graph.insert_before(self.node, node)
        self.made.append(node)
        return values

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        shape: Dims | None = None,
        dtype: ir.DataType | None = None,
        **attributes: Any,
    ) -> ir.Value:
        """Write a standard node of one result; its shape and type are the first operand's unless they are said."""
        first = inputs[0]
        assert first is not None
        shape = self._dims_or_none(first) if shape is None else shape
        return self.node_of(op_type, inputs, [(shape, dtype or self.dtype(first))], attributes)[0]

    def own(
        self,
        spec: OpSpec | PlainOp,
        operands: Mapping[str, ir.Value],
        shapes: Mapping[str, Dims | None],
        attributes: Mapping[str, Any] | None = None,
    ) -> dict[str, ir.Value]:
        """Write an operator of ours, float32; gives its results by name. `shapes` are theirs."""
        inputs = [operands[name] for name in spec.operands]
        given = attributes or {}
        results = [(shapes[name], ir.DataType.FLOAT) for name in spec.results]
        chosen = {name: given[name] for name in spec.attributes}
        values = self.node_of(spec.name, inputs, results, chosen, domain=DOMAIN)
        self.model.opset_imports[DOMAIN] = VERSION
        return dict(zip(spec.results, values, strict=True))

    def _dims_or_none(self, value: ir.Value) -> Dims | None:
        return None if value.shape is None else self.dims(value)

    def constant(self, array: Any, what: str, *, name: str | None = None) -> ir.Value:
        """Add an initializer that is no graph input. `name` is one that is free already."""
        array = np.asarray(array)
        name = name or self.names.fresh(f"{self.node.name or self.node.op_type}/{what}")
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        value.shape, value.type = ir.Shape(array.shape), ir.TensorType(ir.DataType.from_numpy(array.dtype))
        self.graph.register_initializer(value)
        return value

    def ints(self, values: Iterable[int], what: str) -> ir.Value:
        """Add a constant int64 vector: axes, a shape."""
        return self.constant(np.array([*values], np.int64), what)

    def number(self, value: float, like: ir.Value, what: str) -> ir.Value:
        """Add a constant scalar of the element type of `like`."""
        return self.constant(np.array(value, self.dtype(like).numpy()), what)

    def sum(self, value: ir.Value, axes: Iterable[int], *, keepdims: bool = False) -> ir.Value:
        """Write a sum over axes; no axes leave the value as it is."""
        axes = sorted(axes)
        if not axes:
            return value
        dims = self._dims_or_none(value)
        kept = None
        if dims is not None:
            kept = [1 if axis in axes else size for axis, size in enumerate(dims) if keepdims or axis not in axes]
        found = self.ints(axes, "axes")
        return self.node_of("ReduceSum", [value, found], [(kept, self.dtype(value))], {"keepdims": int(keepdims)})[0]

    def fit(self, gradient: ir.Value, operand: ir.Value) -> ir.Value:
        """Write the sum of a gradient over the axes along which its operand was broadcast."""
        ours, wanted = self.sizes(gradient), self.sizes(operand)
        lead = len(ours) - len(wanted)
        axes = [*range(lead), *(lead + i for i, size in enumerate(wanted) if size == 1 and ours[lead + i] != 1)]
        summed = self.sum(gradient, axes, keepdims=not lead)
        if len(self.sizes(summed)) == len(wanted):
            return summed
        return self.op("Reshape", summed, self.ints(wanted, "shape"), shape=wanted)

    def broadcast(self, *values: ir.Value) -> Dims | None:
        """Tell the shape that operands have together; None where that is not known."""
        shapes = [static_shape(value) for value in values]
        if any(shape is None for shape in shapes):
            return None
        try:
            return list(np.broadcast_shapes(*(shape for shape in shapes if shape is not None)))
        except ValueError:
            found = ", ".join(str(list(shape or ())) for shape in shapes)
            raise self.error(f"combines {found}, which do not fit: the graph is damaged. Build it anew.") from None

    def calculate(self, op_type: str, a: ir.Value, b: ir.Value) -> ir.Value:
        """Write a + b, a * b, ... with broadcasting."""
        return self.node_of(op_type, [a, b], [(self.broadcast(a, b), self.dtype(a))])[0]

    def compare(self, op_type: str, a: ir.Value, b: ir.Value) -> ir.Value:
        """Write a comparison with broadcasting."""
        return self.node_of(op_type, [a, b], [(self.broadcast(a, b), ir.DataType.BOOL)])[0]

    def where(self, condition: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
        """Write a where the condition holds, b elsewhere."""
        return self.node_of("Where", [condition, a, b], [(self.broadcast(condition, a, b), self.dtype(a))])[0]

    def shape_of(self, value: ir.Value) -> ir.Value:
        """Give a value's shape as int64: a constant where it is static."""
        shape = static_shape(value)
        if shape is not None:
            return self.ints(shape, "shape")
        return self.op("Shape", value, shape=[self.rank(value)], dtype=ir.DataType.INT64)

    # ending

    def give(self, place: int, value: ir.Value) -> None:
        """Let a value be a result of the node: it takes over its name, type, shape, readers and graph outputs."""
        old = self.result(place)
        if old is None:
            return
        hand_over(self.names, old, value)

    def finish(self) -> None:
        """Take the node out; the last node that was written takes over its name."""
        if self.made:
            last = self.made[-1]
            last.name, last.doc_string = self.node.name, self.node.doc_string
        self.graph.remove(self.node, safe=True)


def hand_over(names: Names, old: ir.Value, new: ir.Value) -> None:
    """Let all that reads `old` read `new`, which gets its name, type and shape; graph outputs stay what they were."""
    name = old.name
    old.name = names.fresh(f"{name}_replaced")
    new.shape, new.type, new.name = old.shape or new.shape, old.type or new.type, name
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def attribute_of(node: ir.Node, name: str, default: Any) -> Any:
    """Give an attribute of a node; lists as tuples."""
    if name not in node.attributes:
        return default
    value = node.attributes[name].value
    return tuple(value) if isinstance(value, (list, tuple)) else value
