"""Writes nodes of a training graph as a torch.fx graph: plain Python over layers, which torch.compile takes whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from keyword import iskeyword
from typing import Any

import numpy as np
import onnx_ir as ir

from bnfuse.baselines.names import import_torch
from bnfuse.core.errors import BnfuseError, at_node
from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.graph.values import static_shape
from bnfuse.opset.spec import DOMAIN, OpSpec, find, is_unfused

Convert = Callable[["Writer", ir.Node], Any]


class Writer:
    """The fx graph so far, and where the source's values are in it.

    A value is an fx node or, where it is a constant of one element, a Python number. Layers and parameters hang on
    `root` under the sanitised name of their node or input. `names` says which source name became which attribute.
    """

    def __init__(self, source: TrainingGraph, converters: dict[str, Convert]) -> None:
        self.torch = import_torch()
        self.nn = self.torch.nn
        self.source, self.converters = source, converters
        self.state = source.state()
        self.graph = self.torch.fx.Graph()
        self.root = self.nn.Module()
        self.values: dict[ir.Value, Any] = {}
        self.names: dict[str, str] = {}
        self._tensors: dict[str, Any] = {}  # source name -> torch parameter or buffer
        self._taken: set[str] = set()
        self._node_name: str | None = None

    # The graph

    def placeholder(self, value: ir.Value) -> None:
        """Take an input of the module."""
        self.values[value] = self.graph.placeholder(self._attribute(value.name or "x"))
        self._note_shape(value)

    def node(self, node: ir.Node) -> None:
        """Convert a node; what that gives are the node's first results."""
        op = find(node.op_type) if node.domain == DOMAIN else None
        name = op.prologue[0] if isinstance(op, OpSpec) and op.core == "Pointwise" and op.prologue else node.op_type
        convert = self.converters.get(name)
        if op is not None and not is_unfused(op):
            raise self.error(node, "is of a rewritten graph: pass the file that `bnfuse build` wrote")
        if convert is None:
            known = ", ".join(sorted(self.converters))
            raise self.error(
                node, f"has no counterpart in torch here: leave the torch baselines out. There are {known}."
            )
        self._node_name = identifier(node.name or node.op_type)
        results = convert(self, node)
        results = results if isinstance(results, tuple) else (results,)
        for value, result in zip(node.outputs, results, strict=False):
            self.values[value] = result
            self._note_shape(value)

    def _note_shape(self, value: ir.Value) -> None:
        written = self.values[value]
        if isinstance(written, self.torch.fx.Node) and value.shape is not None:
            written.meta["shape"] = tuple(value.shape)

    def output(self, value: ir.Value) -> None:
        """Give a value back as the module's result."""
        self.graph.output(self.values[value])

    def layer(self, node: ir.Node, layer: Any, *inputs: Any, **tensors: ir.Value | None) -> Any:
        """Call a layer, hung on the root under the node's name; `tensors` are its parameters and buffers."""
        target = self._attribute(node.name or node.op_type)
        for key, value in tensors.items():
            if value is not None:
                setattr(layer, key, self.tensor(node, value, running=key.startswith("running_")))
                self.names.setdefault(value.name or "", f"{target}.{key}")
        self.root.add_module(target, layer)
        return self.graph.create_node("call_module", target, inputs, name=target)

    def call(self, function: Callable[..., Any], *inputs: Any, **how: Any) -> Any:
        """Call a function; the result has the source node's name."""
        return self.graph.create_node("call_function", function, inputs, how, name=self._node_name)

    def method(self, name: str, x: Any, *inputs: Any) -> Any:
        """Call a method of a tensor."""
        return self.graph.create_node("call_method", name, (x, *inputs), name=self._node_name)

    def buffer(self, name: str, tensor: Any) -> Any:
        """Give a tensor that moves with the module and is no part of its state."""
        target = self._attribute(name)
        self.root.register_buffer(target, tensor, persistent=False)
        return self.graph.create_node("get_attr", target, name=target)

    # Values

    def value(self, node: ir.Node, index: int) -> Any:
        """Give operand `index`: an fx node or a number."""
        value = node.inputs[index]
        assert value is not None
        if value in self.values:
            return self.values[value]
        array = None if value.name in self.state else self.constant(value)
        if array is not None and array.size == 1 and array.ndim < 2:
            self.values[value] = array.item()
        else:
            self.values[value] = self._attached(node, value)
        return self.values[value]

    def _attached(self, node: ir.Node, value: ir.Value) -> Any:
        """Give a parameter or constant that is an operand of its own."""
        name = self._attribute(value.name or "constant")
        tensor = self.tensor(node, value)
        if isinstance(tensor, self.nn.Parameter):
            self.root.register_parameter(name, tensor)
            self.names.setdefault(value.name or "", name)
        else:
            self.root.register_buffer(name, tensor)
        return self.graph.create_node("get_attr", name, name=name)

    def tensor(self, node: ir.Node, value: ir.Value, *, running: bool = False) -> Any:
        """Give the torch tensor of an input or initializer, one for all its readers: floats but for `running`
        parameters.

        They are copies: training leaves the file's values as they are.
        """
        name = value.name or ""
        if name not in self._tensors:
            array = self.constant(value)
            if array is None:
                raise self.error(node, f"reads '{name}' where a parameter belongs, and it has no value")
            tensor = self.torch.from_numpy(np.array(array))
            if tensor.is_floating_point() and not running:
                tensor = self.nn.Parameter(tensor, requires_grad=name in self.source.signature.trainable)
            self._tensors[name] = tensor
        return self._tensors[name]

    def constant(self, value: ir.Value | None) -> np.ndarray | None:
        """Give the value of an input or initializer, None where it is computed or fed."""
        if value is None:
            return None
        if value.name in self.state:
            return self.state[value.name]
        tensor = ir.convenience.get_const_tensor(value)
        return None if tensor is None else tensor.numpy()

    def scalar(self, node: ir.Node, index: int, default: Any) -> Any:
        """Give operand `index` as a number known beforehand, `default` where it is absent."""
        found = self.numbers(node, index)
        if found is None:
            return default
        if len(found) != 1:
            raise self.error(node, f"has {len(found)} values as operand {index} where one belongs")
        return found[0]

    def numbers(self, node: ir.Node, index: int) -> list[Any] | None:
        """Give operand `index` as a list of numbers known beforehand, None where it is absent."""
        if not present(node, index):
            return None
        array = self.constant(node.inputs[index])
        if array is None:
            raise self.error(node, f"has a computed operand {index}: it must be a constant")
        return array.reshape(-1).tolist()

    def shape(self, node: ir.Node, value: ir.Value | None) -> tuple[int, ...]:
        """Give the static shape of a value that the node reads or writes. Raises BnfuseError where it is not known."""
        found = static_shape(value)
        if found is not None:
            return found
        raise self.error(node, f"reads or writes '{value and value.name}', whose shape is not known. Build it anew.")

    # Names and errors

    def error(self, node: ir.Node, what: str) -> BnfuseError:
        """Make an error about a node of the file."""
        return at_node(node.name or "", node.op_type, what, file=self.source.name)

    def _attribute(self, name: str) -> str:
        """Give a name for an attribute of the root, and no other's."""
        base = identifier(name)
        found, count = base, 1
        while (
            found in self._taken or hasattr(self.torch.fx.GraphModule, found) or found in RESERVED or iskeyword(found)
        ):
            found, count = f"{base}_{count}", count + 1
        self._taken.add(found)
        return found


RESERVED = frozenset(("self", "torch", "names", "training", "input", "meta"))


def identifier(name: str) -> str:
    """Make an identifier of a name."""
    base = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or "layer"
    return f"_{base}" if base[0].isdigit() else base


def present(node: ir.Node, index: int) -> bool:
    """Tell whether a node has the operand at `index`."""
    return len(node.inputs) > index and node.inputs[index] is not None


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """Give the value of an attribute as Python has it, or the default."""
    found = node.attributes.get(name)
    if found is None:
        return default
    return list(found.value) if isinstance(found.value, tuple | list) else found.value


def torch_pads(begin: Sequence[int], end: Sequence[int]) -> list[int]:
    """Turn pads into torch's order: (left, right, top, bottom, ...)."""
    return [side for pair in zip(reversed(begin), reversed(end), strict=True) for side in pair]
