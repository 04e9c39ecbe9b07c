"""Maps of one and three dimensions stay 2-d from one convolution to the next: what is between them follows.

    Conv -> Reshape to [N, C, L] -> BatchNormalization -> Relu -> Reshape to [N, C, 1, L] -> Conv
    Conv -> BatchNormalization -> Relu -> Conv      of [N, C, 1, L] throughout

A map [N, C, L] is [N, C, 1, L], and [N, C, D, H, W] is [N*D, C, H, W] with the depth in the batch: statistics by
channel and everything element by element are the same of both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from bnfuse.graph.protos import attributes

from .writer import Surroundings

DEPTH_OUT = [0, 2, 1, 3, 4]  # [N, C, D, H, W] to [N, D, C, H, W] and back
ELEMENTWISE = (
    *("Abs", "Ceil", "Celu", "Clip", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish"),
    *("LeakyRelu", "Log", "Mish", "Neg", "Pow", "Reciprocal", "Relu", "Selu", "Sigmoid", "Sin", "Softplus", "Softsign"),
    *("Sqrt", "Swish", "Tanh", "ThresholdedRelu", "Add", "Div", "Max", "Min", "Mul", "Sub", "Sum"),
)


def keep_flat(around: Surroundings) -> bool:
    """Move what is between flattened maps to them; tells whether anything moved. Shapes are to be inferred anew."""
    return Flat(around).run()


class Flat:
    """Goes through the nodes with the 2-d twin of each map that has one."""

    def __init__(self, around: Surroundings) -> None:
        self.around, self.shapes = around, dict(around.shapes)
        self.outputs = around.forward.output_names()
        self.twins: dict[str, str] = {}
        self.other_names: dict[str, str] = {}
        self.makers: dict[str, onnx.NodeProto] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.moved = False

    def run(self) -> bool:
        """Write the nodes anew, where any moves."""
        graph = self.around.forward.graph
        for source in graph.node:
            node = onnx.NodeProto()
            node.CopyFrom(source)
            for index, name in enumerate(node.input):
                node.input[index] = self.other_names.get(name, name)
            if not self._moved(node) and not self._joined(node):
                self._append(node)
        if self.moved:
            del graph.node[:]
            graph.node.extend(self.nodes)
            graph.initializer.extend(self.around.added)
            self.around.forward.remove_dead_nodes()
        return self.moved

    def _append(self, node: onnx.NodeProto) -> None:
        self.nodes.append(node)
        self.makers.update(dict.fromkeys(node.output, node))
        x, y = node.input[0] if node.input else "", node.output[0]
        before, after = self.shapes.get(x), self.shapes.get(y)
        if node.op_type == "Reshape" and before and after and len(before) == 4 and len(after) == 3:
            if [*after[:2], 1, after[2]] == before:
                self.twins[y] = x
        elif _turns_depth(node) and (maker := self.makers.get(x)) is not None and maker.op_type == "Reshape":
            flat = self.shapes.get(maker.input[0])
            if before and flat == [before[0] * before[1], *before[2:]]:
                self.twins[y] = maker.input[0]

    def _joined(self, node: onnx.NodeProto) -> bool:
        """Take the twin where a node flattens a map, or makes a Reshape of a Reshape."""
        x, y = node.input[0] if node.input else "", node.output[0]
        if _turns_depth(node) and x in self.twins:
            self._reshape(node.name, self.twins[x], y)
            return self._done()
        if node.op_type != "Reshape" or y in self.outputs:
            return False
        maker, wanted = self.makers.get(x), self.shapes.get(y)
        source = self.twins.get(x) or (maker.input[0] if maker is not None and maker.op_type == "Reshape" else None)
        if source is None or wanted is None or self.shapes.get(source) != wanted:
            return False
        self.other_names[y] = source
        return self._done()

    def _done(self) -> bool:
        self.moved = True
        return True

    def _moved(self, node: onnx.NodeProto) -> bool:
        data = self._operands(node)
        if not data:
            return False
        y = node.output[0]
        shape = self.shapes.get(y)
        ranks = {len(self.shapes.get(name) or []) for name in data}
        if shape is None or any(name not in self.twins for name in data) or ranks != {len(shape)}:
            return False
        shapes = [self.shapes.get(self.twins[name]) or [] for name in data]
        flat = list(shapes[0])
        if node.op_type == "Concat":
            flat[1] = sum(one[1] for one in shapes)
        elif any(one != flat for one in shapes):
            return False
        for index, name in enumerate(node.input):
            if name in data:
                node.input[index] = self.twins[name]
        twin = node.output[0] = self.around.fresh(f"{y}/2d")
        self.shapes[twin] = flat
        self._append(node)
        if len(shape) == 3:
            self._reshape(f"{node.name}/1d", twin, y)
        else:
            turned = self.around.fresh(f"{y}/turned")
            self.shapes[turned] = [shape[0], shape[2], shape[1], *shape[3:]]
            self._reshape(f"{node.name}/3d", twin, turned)
            name = self.around.fresh(f"{node.name}/turned")
            self._append(helper.make_node("Transpose", [turned], [y], name=name, perm=DEPTH_OUT))
        self.twins[y] = twin
        return self._done()

    def _operands(self, node: onnx.NodeProto) -> list[str]:
        """Give the operands that are maps, where the node is one that can move."""
        if node.domain not in ("", "ai.onnx"):
            return []
        if node.op_type == "BatchNormalization":
            return [node.input[0]]
        if node.op_type == "Dropout":
            return [node.input[0]] if self.around.read.isdisjoint(node.output[1:]) else []
        if node.op_type == "Concat":
            axis, rank = attributes(node)["axis"], len(self.shapes.get(node.output[0]) or [])
            return list(node.input) if rank and axis % rank == 1 else []
        if node.op_type not in ELEMENTWISE:
            return []
        maps = [name for name in node.input if name and np.prod(self.shapes.get(name) or [1]) != 1]
        return maps if all(self.shapes.get(name) == self.shapes.get(node.output[0]) for name in maps) else []

    def _reshape(self, name: str, x: str, y: str) -> None:
        wanted: Sequence[int] = self.shapes.get(y) or []
        shape = self.around.fresh(f"{name}/shape")
        self.around.added.append(numpy_helper.from_array(np.array(wanted, np.int64), shape))
        self._append(helper.make_node("Reshape", [x, shape], [y], name=self.around.fresh(name)))


def _turns_depth(node: onnx.NodeProto) -> bool:
    return node.op_type == "Transpose" and list(attributes(node).get("perm", [])) == DEPTH_OUT
