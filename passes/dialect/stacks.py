"""Canonical form: what is computed of maps stacked along an axis of its own is computed of each map.

    s = Concat <axis = 1> (Unsqueeze(x), Unsqueeze(y))         [N, 2, C, H, W]
    u = ReduceSum <keepdims = 0> (s, [1])                 ->   u = Add(x, y)
    g = Softmax <axis = 1> (...)                               g1, g2 = Split(Reshape(g))
    v = ReduceSum <keepdims = 0> (Mul(s, g), [1])              v = Add(Mul(x, g1), Mul(y, g2))

So branches are chosen from in selective-kernel and split-attention networks; a stack that is a view of one map
[N, 2*C, H, W] is a Split of it along its channels. What is left works on maps [N, C, H, W], as everything else does;
the gradient, which is spelled by the same operators, follows. Stacks of single pixels, such as g, are read and given
back in the shape that they have.

Refuses a stack that something else reads or makes (a Transpose, a product), and one that is an output of the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnfuse.opset.traffic import RESHAPES
from bnfuse.passes.dialect.source_ops import constant_of, is_map, sizes
from bnfuse.passes.rewriter import Editor, FusionResult, sort

MOST = 16  # maps of a stack
ELEMENTWISE = ("Mul", "Add", "Sub", "Div", "Sum")
PIXELS, MAPS = (3, 4), (1,)  # axes of a stack


class UnstackMaps(ir.passes.InPlacePass):
    """Write operators on stacks of maps by operators on the maps."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "canonical")
        for region in regions(model.graph):
            other = next((node for node in region if not is_known(node)), None)
            if other is not None:
                editor.refuse(other, "it works on a stack of maps in a way that is none of each map alone")
            else:
                Unstacking(editor, region).write()
        sort(model.graph)
        return editor.result()


def is_stack(value: ir.Value | None) -> bool:
    """Tell whether a value is a float32 tensor [N, K, C, H, W] of static shape with few K."""
    if value is None or value.dtype != ir.DataType.FLOAT or value.shape is None or len(value.shape) != 5:
        return False
    return all(isinstance(size, int) and size > 0 for size in value.shape) and sizes(value)[1] <= MOST


def is_wide(value: ir.Value | None) -> bool:
    """Tell whether a value is a stack of maps of more than a pixel."""
    return value is not None and is_stack(value) and sizes(value)[3:] != (1, 1)


def regions(graph: ir.Graph) -> list[list[ir.Node]]:
    """List the nodes that touch wide stacks, each region connected by them, in the graph's order."""
    order = {node: index for index, node in enumerate(graph)}
    left = {node for node in graph if any(is_wide(v) for v in (*node.inputs, *node.outputs))}
    found = []
    while left:
        pending = [min(left, key=lambda node: order[node])]
        region = set()
        while pending:
            node = pending.pop()
            if node in region:
                continue
            region.add(node)
            for value in (*node.inputs, *node.outputs):
                if value is not None and is_wide(value):
                    pending += [use.node for use in value.uses()]
                    pending += [producer] if (producer := value.producer()) is not None else []
        left -= region
        found.append(sorted(region, key=lambda node: order[node]))
    return found


def is_known(node: ir.Node) -> bool:
    """Tell whether a node does something to each map of a stack alone, adds the maps up, or joins and parts stacks."""
    x, y = (node.inputs[0] if node.inputs else None), node.outputs[0]
    if node.domain or x is None or any(value.is_graph_output() for value in node.outputs):
        return False
    if any(value is not None and value.is_graph_input() and is_stack(value) for value in node.inputs):
        return False
    if node.op_type in RESHAPES:
        return is_view(x, y) or is_view(y, x)
    if node.op_type in ("Concat", "Split"):
        stacks = all(is_stack(v) for v in (*(node.inputs if node.op_type == "Concat" else [x]), *node.outputs))
        return stacks and node.attributes.get_int("axis", 0) % 5 == 1
    if node.op_type == "ReduceSum":
        axes, keeps = axes_of(node), node.attributes.get_int("keepdims", 1)
        return is_stack(x) and (axes == MAPS or (axes == PIXELS and bool(keeps)))
    if node.op_type == "Expand":
        return is_stack(x) and is_stack(y) and sizes(x)[1] == 1 and sizes(x)[2:] == sizes(y)[2:]
    operands = [value for value in node.inputs if value is not None]
    return node.op_type in ELEMENTWISE and is_stack(y) and all(is_stack(v) or is_scalar(v) for v in operands)


def is_view(map_: ir.Value, stack: ir.Value) -> bool:
    """Tell whether a stack is a view of a map [N, K*C, H, W]."""
    if not is_map(map_) or not is_stack(stack):
        return False
    n, k, c, *size = sizes(stack)
    return sizes(map_) == (n, k * c, *size)


def is_scalar(value: ir.Value) -> bool:
    """Tell whether a value is a single number."""
    return value.shape is not None and len(value.shape) == 0


def axes_of(node: ir.Node) -> tuple[int, ...] | None:
    """Give the axes of a reduction of a stack, in order; None where they are not constant."""
    axes = constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
    return None if axes is None else tuple(sorted(int(axis) % 5 for axis in axes.reshape(-1)))


class Unstacking:
    """Writes one region anew."""

    def __init__(self, editor: Editor, region: Sequence[ir.Node]) -> None:
        self.editor, self.region = editor, region
        self.maps: dict[ir.Value, list[ir.Value]] = {}  # of each stack

    def write(self) -> None:
        """Write all nodes, then remove them."""
        for node in self.region:
            made = self.made(node)
            for value, maps in zip(node.outputs, made, strict=True):
                self.maps[value] = maps
                if is_map(value):
                    self.give(value, maps, node)
                elif not is_wide(value):
                    self.give_back(value, maps, node)
        self.editor.fused.append(self.region[0].name or self.region[0].op_type)
        self.editor.remove_dead(self.region)

    def made(self, node: ir.Node) -> list[list[ir.Value]]:
        """Give the maps of each result."""
        x, y = node.inputs[0], node.outputs[0]
        assert x is not None
        if node.op_type in RESHAPES and is_map(x):
            return [self.parts(x, sizes(y)[1], node)]
        if node.op_type in RESHAPES:
            return [self.of(x, node)]
        if node.op_type == "Concat":
            return [[m for value in node.inputs if value is not None for m in self.of(value, node)]]
        if node.op_type == "Split":
            maps, ends = self.of(x, node), np.cumsum([sizes(value)[1] for value in node.outputs]).tolist()
            return [maps[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        if node.op_type == "Expand":
            return [self.of(x, node) * sizes(y)[1]]
        if node.op_type == "ReduceSum" and axes_of(node) == MAPS:
            total, *others = self.of(x, node)
            for other in others:
                total = self.emit("Add", [total, other], node)
            return [[total]]
        if node.op_type == "ReduceSum":
            axes = self.editor.constant(f"{node.name}/axes", np.array([2, 3]))
            return [[self.emit("ReduceSum", [m], node, [axes], keepdims=1) for m in self.of(x, node)]]
        return [self.elementwise(node)]

    def elementwise(self, node: ir.Node) -> list[ir.Value]:
        """Work on each map of the operands; a stack of one map goes with each of another's."""
        count = sizes(node.outputs[0])[1]
        operands = []
        for value in node.inputs:
            assert value is not None
            maps = [value] if is_scalar(value) else self.of(value, node)
            operands.append(maps * count if len(maps) == 1 else maps)
        return [self.emit(node.op_type, list(each), node) for each in zip(*operands, strict=True)]

    def of(self, stack: ir.Value, before: ir.Node) -> list[ir.Value]:
        """Give the maps of a stack; one that comes from elsewhere, of single pixels, is cut into them."""
        if stack not in self.maps:
            n, k, c, *size = sizes(stack)
            self.maps[stack] = self.parts(self.reshape(stack, (n, k * c, *size), before), k, before)
        return self.maps[stack]

    def parts(self, value: ir.Value, count: int, before: ir.Node) -> list[ir.Value]:
        """Cut a map into `count` maps along its channels."""
        if count == 1:
            return [value]
        n, c, *size = sizes(value)
        lengths = self.editor.constant(f"{before.name}/lengths", np.full(count, c // count, np.int64))
        made = self.editor.standard("Split", [value, lengths], count, before=before, of=[before], axis=1)
        for part in made:
            part.shape, part.type = ir.Shape((n, c // count, *size)), value.type
        return made

    def joined(self, maps: Sequence[ir.Value], before: ir.Node) -> ir.Value:
        """Put maps one behind the other along their channels."""
        if len(maps) == 1:
            return maps[0]
        (made,) = self.editor.standard("Concat", maps, 1, before=before, of=[before], axis=1)
        n, _, *size = sizes(maps[0])
        made.shape = ir.Shape((n, sum(sizes(m)[1] for m in maps), *size))
        made.type = maps[0].type
        return made

    def give(self, old: ir.Value, maps: Sequence[ir.Value], node: ir.Node) -> None:
        """Let what reads a map read those that it is made of."""
        old.replace_all_uses_with(self.joined(maps, node))

    def give_back(self, old: ir.Value, maps: Sequence[ir.Value], node: ir.Node) -> None:
        """Let what reads a stack of single pixels elsewhere read it in the shape that it had."""
        if all(use.node in self.region for use in old.uses()):
            return
        back = self.reshape(self.joined(maps, node), sizes(old), node)
        self.editor.take_over(old, back)
        self.maps[back] = list(maps)

    def reshape(self, value: ir.Value, shape: Iterable[int], before: ir.Node) -> ir.Value:
        """Insert a Reshape, which leaves open how many samples there are."""
        shape = list(shape)
        given = self.editor.constant(f"{before.name}/shape", np.array([-1, *shape[1:]], np.int64))
        (made,) = self.editor.standard("Reshape", [value, given], 1, before=before, of=[before])
        made.shape, made.type = ir.Shape(shape), value.type
        return made

    def emit(
        self,
        op_type: str,
        maps: Sequence[ir.Value],
        node: ir.Node,
        more: Sequence[ir.Value] = (),
        **attributes: Any,
    ) -> ir.Value:
        """Insert an operator on maps."""
        (made,) = self.editor.standard(op_type, [*maps, *more], 1, before=node, of=[node], **attributes)
        shapes = [sizes(m) for m in maps if not is_scalar(m)]
        shape = tuple(max(size) for size in zip(*shapes, strict=True))
        made.shape = ir.Shape((*shape[:2], 1, 1) if op_type == "ReduceSum" else shape)
        made.type = node.outputs[0].type
        return made
