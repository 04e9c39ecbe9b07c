"""What a decomposition reads of the graph, and how it writes the nodes that replace one node."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.protos import attributes, fresh
from bnfuse.opset.plain import PlainOp
from bnfuse.opset.schemas import register
from bnfuse.opset.spec import DOMAIN, VERSION, OpSpec

from ..forward import element_types
from ..graph import Forward


class Surroundings:
    """The graph around the nodes of one round: looked up once, and kept up to date by the writers."""

    def __init__(self, forward: Forward, variables: frozenset[str] = frozenset()) -> None:
        self.forward, self.variables = forward, variables
        self.shapes = forward.shapes()
        self.types = element_types(forward.graph)
        self.values = forward.initializers()
        self.taken = forward.names() | {node.name for node in forward.graph.node}
        self.added: list[onnx.TensorProto] = []  # constants of the writers, which are not in the graph yet

    @functools.cached_property
    def from_data(self) -> set[str]:
        """The tensors that depend on the data."""
        return self.forward.from_data()

    @functools.cached_property
    def read(self) -> set[str]:
        """The tensors that a node reads, or that are outputs."""
        return set(self.forward.consumers()) | self.forward.output_names()

    def fresh(self, name: str) -> str:
        """Give the name, or with a number where it is taken, and take it."""
        name = fresh(name, self.taken)
        self.taken.add(name)
        return name


class Writer:
    """Collects the nodes that replace one node, with names below its own."""

    def __init__(self, around: Surroundings, node: onnx.NodeProto) -> None:
        self.around, self.node = around, node
        self.forward = around.forward
        self.given = attributes(node)
        self.nodes: list[onnx.NodeProto] = []
        self._constants: dict[tuple[object, ...], str] = {}

    def operand(self, index: int) -> str:
        """Give the name of an operand; empty where the node has none there."""
        return self.node.input[index] if index < len(self.node.input) else ""

    def has_result(self, index: int) -> bool:
        """Tell whether the node gives a result there."""
        return index < len(self.node.output) and bool(self.node.output[index])

    def shape(self, name: str) -> list[int]:
        """Give the shape of a tensor that the graph had before."""
        shape = self.around.shapes.get(name)
        if shape is None:
            raise self.error(f"reads or gives '{name}', whose shape is not known.")
        return shape

    def known(self, name: str) -> np.ndarray | None:
        """Give the values of a constant, None for what is computed or is a variable of the network."""
        tensor = self.around.values.get(name)
        return None if tensor is None or name in self.around.variables else numpy_helper.to_array(tensor)

    def is_all(self, name: str, value: float) -> bool:
        """Tell whether it is a constant of this value alone."""
        values = self.known(name)
        return values is not None and bool((values == value).all())

    def integers(self, index: int, what: str) -> list[int] | None:
        """Give the integers of a constant operand, None where the node has none there. Raises where it is computed."""
        if not self.operand(index):
            return None
        values = self.known(self.operand(index))
        if values is None:
            raise self.error(f"computes its {what} from the data: they must be constant.")
        return [int(value) for value in values.reshape(-1)]

    def error(self, what: str) -> BnfuseError:
        """Make an error about the node."""
        return self.forward.error_at(self.node, what)

    def set_attributes(self, given: dict[str, Any]) -> None:
        """Write these attributes alone into the node itself."""
        del self.node.attribute[:]
        self.node.attribute.extend(helper.make_attribute(name, value) for name, value in given.items())

    def add(self, op: str, inputs: Sequence[str], *, last: bool = False, **attrs: Any) -> str:
        """Add a node, whose output is the replaced node's where it is the `last`. Gives the output's name."""
        (output,) = self.several(op, inputs, 1, **attrs)
        if last:
            self.give(output)
            return self.node.output[0]
        return output

    def own(self, spec: OpSpec | PlainOp, inputs: Sequence[str], **attrs: Any) -> None:
        """Add an operator of ours, whose first result is that of the replaced node."""
        register([spec.name])
        imports = self.forward.model.opset_import
        if DOMAIN not in {entry.domain for entry in imports}:
            imports.append(helper.make_opsetid(DOMAIN, VERSION))
        self.give(self.several(spec.name, inputs, len(spec.results), domain=DOMAIN, **attrs)[0])

    def several(self, op: str, inputs: Sequence[str], results: int, **attrs: Any) -> list[str]:
        """Add a node of several results. Gives their names."""
        name = self.around.fresh(f"{self.node.name}/{op.lower()}")
        outputs = [name] if results == 1 else [self.around.fresh(f"{name}/{index}") for index in range(results)]
        self.nodes.append(helper.make_node(op, list(inputs), outputs, name=name, **attrs))
        return outputs

    def give(self, name: str, result: int = 0) -> None:
        """Make a tensor the result of the replaced node; its first one has the node's name."""
        wanted = self.node.output[result]
        made = next((node for node in self.nodes if name in node.output), None)
        if made is None or any(name == other for other in self.node.output):
            made = helper.make_node("Identity", [name], [wanted], name=self.around.fresh(f"{self.node.name}/identity"))
            self.nodes.append(made)
        else:
            for node in self.nodes:
                for names in (node.input, node.output):
                    for index, other in enumerate(names):
                        if other == name:
                            names[index] = wanted
        if result == 0:
            made.name = self.node.name

    def constant(self, what: str, values: np.ndarray) -> str:
        """Add an initializer for the node, or give the one that it has of these values. Gives its name."""
        key = (values.dtype.str, values.shape, values.tobytes())
        if key not in self._constants:
            name = self._constants[key] = self.around.fresh(f"{self.node.name}/{what}")
            tensor = numpy_helper.from_array(np.ascontiguousarray(values).reshape(values.shape), name)
            self.around.added.append(tensor)
            self.around.values[name] = tensor
            self.around.shapes[name] = list(values.shape)
        return self._constants[key]

    def number(self, what: str, value: float) -> str:
        """Add a scalar, which is no parameter. Gives its name."""
        return self.constant(what, np.array(value, np.float32))

    def ints(self, what: str, values: Sequence[int]) -> str:
        """Add a vector of integers: axes, lengths, a shape. Gives its name."""
        return self.constant(what, np.array(values, np.int64))

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        """Add a Reshape to a static shape; nothing where a tensor of the graph has it already."""
        if self.around.shapes.get(x) == list(shape):
            return x
        return self.add("Reshape", [x, self.ints("shape", shape)])

    def transpose(self, x: str, perm: Sequence[int]) -> str:
        """Add a Transpose, where it moves anything."""
        return x if list(perm) == sorted(perm) else self.add("Transpose", [x], perm=list(perm))

    def reduce(self, op: str, x: str, axes: Sequence[int], *, keepdims: bool = True) -> str:
        """Add a reduction over constant axes."""
        return self.add(op, [x, self.ints("axes", axes)], keepdims=int(keepdims))

    def slice(self, x: str, axis: int, start: int, end: int, step: int = 1) -> str:
        """Add a Slice along one axis."""
        bounds = [self.ints(what, [v]) for what, v in (("start", start), ("end", end), ("axis", axis), ("step", step))]
        return self.add("Slice", [x, *bounds])

    def pad(self, x: str, before: Sequence[int], after: Sequence[int]) -> str:
        """Add a Pad of zeros, where there are any."""
        pads = [*before, *after]
        return self.add("Pad", [x, self.ints("pads", pads)], mode="constant") if any(pads) else x
