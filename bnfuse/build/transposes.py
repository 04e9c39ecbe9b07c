"""Transposes that cancel, as exporters of NHWC frameworks write them, taken out.

    Conv -> Transpose(0231) -> Relu -> Pad -> Transpose(0312) -> MaxPool    to    Conv -> Relu -> Pad -> MaxPool

Every Transpose waits: what reads it works on its operand, with its own axes turned, and gives a result that waits in
its turn. Two that meet become one, or none. What cannot work on another order of axes gets the Transpose in front of
it. The graph is taken as it was where no fewer elements would be moved.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from bnfuse.graph.protos import attributes, fresh, set_attribute

from .forward import Constants, fold_constants, infer_shapes
from .graph import Forward

ELEMENTWISE = (
    *("Abs", "Add", "And", "Cast", "Ceil", "Celu", "Clip", "Cos", "Div", "Elu", "Equal", "Erf", "Exp", "Floor"),
    *("Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Less"),
    *("LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mul", "Neg", "Not", "Or", "PRelu", "Pow", "Reciprocal"),
    *("Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish"),
    *("Tanh", "ThresholdedRelu", "Where", "Xor"),
)
ALONG_ONE_AXIS = ("LogSoftmax", "Softmax")
REDUCTIONS = ("ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum")
INTEGERS = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
SMALL = 4  # an operand is turned the other way where it has so many times fewer elements than the result


@dataclasses.dataclass(frozen=True)
class Turned:
    """A tensor that is Transpose(source; perm), and is not made yet."""

    source: str
    perm: tuple[int, ...]


def cancel_transposes(
    forward: Forward, constants: Constants, keep: Collection[str] = (), more: Mapping[str, Turn] | None = None
) -> None:
    """Move Transposes behind what reads them until they cancel. Shapes must be known, and are afterwards.

    Tensors in `keep`, and the graph's outputs, stay. Constants that are added are counted among `constants`. `more`
    says of further operators how they work on another order of axes.
    """
    shapes = forward.shapes()
    before = _moved(forward.graph.node, shapes)
    if not before:
        return
    turner = Turner(forward, shapes, {*keep, *forward.output_names()}, {**TURNS, **(more or {})})
    turner.run()
    if _moved(turner.nodes, turner.shapes) >= before:
        return
    count = _count(forward)
    del forward.graph.node[:]
    forward.graph.node.extend(turner.nodes)
    forward.graph.initializer.extend(turner.added.values())
    constants.names.update(turner.added)
    forward.remove_dead_nodes()
    infer_shapes(forward)
    folded = fold_constants(forward, constants)
    constants.names.update(folded.names)
    constants.placeholders.update(folded.placeholders)
    forward.remove_unread_initializers()
    forward.note(f"{count} Transposes moved until {count - _count(forward)} of them cancelled: maps stay in one layout")


def _count(forward: Forward) -> int:
    return sum(node.op_type == "Transpose" for node in forward.graph.node)


def _moved(nodes: Sequence[onnx.NodeProto], shapes: dict[str, list[int] | None]) -> int:
    """Count the elements that Transposes move; one that moves axes of size 1 alone moves none."""
    return sum(
        math.prod(shapes[node.input[0]] or [])
        for node in nodes
        if node.op_type == "Transpose" and not _is_reshape(shapes[node.input[0]] or [], _perm(node, shapes))
    )


def _perm(node: onnx.NodeProto, shapes: dict[str, list[int] | None]) -> tuple[int, ...]:
    rank = len(shapes[node.input[0]] or [])
    return tuple(attributes(node).get("perm", range(rank - 1, -1, -1)))


def _is_reshape(shape: Sequence[int], perm: Sequence[int]) -> bool:
    longer = [axis for axis in perm if shape[axis] != 1]
    return longer == sorted(longer)


def _inverse(perm: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(place) for place in np.argsort(perm))


class Turner:
    """Writes the nodes anew, with the Transposes that wait."""

    def __init__(
        self, forward: Forward, shapes: dict[str, list[int] | None], keep: set[str], turns: Mapping[str, Turn]
    ) -> None:
        self.forward, self.shapes, self.keep, self.turns = forward, dict(shapes), keep, turns
        self.values = {k: v for k, v in forward.initializers().items() if v.data_type in INTEGERS}
        self.taken = forward.names() | {node.name for node in forward.graph.node}
        self.waiting: dict[str, Turned] = {}
        self.made: set[str] = set()  # those that are written all the same
        self.other_way: dict[tuple[str, tuple[int, ...]], str] = {}
        self.same: dict[str, str] = {}  # what a tensor is where Transposes have cancelled
        self.nodes: list[onnx.NodeProto] = []
        self.added: dict[str, onnx.TensorProto] = {}

    @functools.cached_property
    def from_data(self) -> set[str]:
        """The tensors that depend on the data."""
        return self.forward.from_data()

    def run(self) -> None:
        """Go through the graph once."""
        for source in self.forward.graph.node:
            node = onnx.NodeProto()
            node.CopyFrom(source)
            for index, name in enumerate(node.input):
                node.input[index] = self.same.get(name, name)
            if not self._turned(node):
                for name in dict.fromkeys(node.input):
                    self._make(name)
                self.nodes.append(node)
            for name in source.output:
                if name in self.keep:
                    self._make(name)

    def _turned(self, node: onnx.NodeProto) -> bool:
        """Let the node work on the operand of a Transpose that waits. Tells whether it does."""
        if node.domain not in ("", "ai.onnx"):
            return False
        if node.op_type == "Transpose":
            return self._wait_for(node)
        turn = self.turns.get(node.op_type)
        return turn is not None and any(name in self.waiting for name in node.input) and turn(self, node)

    def _wait_for(self, node: onnx.NodeProto) -> bool:
        x, y = node.input[0], node.output[0]
        perm = _perm(node, self.shapes)
        if x in self.waiting:
            inner = self.waiting[x]
            x, perm = inner.source, tuple(inner.perm[axis] for axis in perm)
        if list(perm) != sorted(perm):
            self.waiting[y] = Turned(x, perm)
        elif y not in self.keep:
            self.same[y] = x
        else:
            self.nodes.append(helper.make_node("Identity", [x], [y], name=node.name))
        return True

    def _make(self, name: str) -> None:
        """Write the Transpose of a tensor that waits, for those who need it as it is."""
        turned = self.waiting.get(name)
        if turned is not None and name not in self.made:
            self.made.add(name)
            self.nodes.append(self._rearrange(turned.source, name, turned.perm))

    def _rearrange(self, x: str, y: str, perm: tuple[int, ...]) -> onnx.NodeProto:
        shape = self.shapes[x] or []
        result = [shape[axis] for axis in perm]
        self.shapes[y] = result
        name = self.fresh(f"{y}/transpose")
        if _is_reshape(shape, perm):
            return helper.make_node("Reshape", [x, self.ints(f"{y}/shape", result)], [y], name=name)
        return helper.make_node("Transpose", [x], [y], name=name, perm=perm)

    def fresh(self, name: str) -> str:
        """Give the name, or with a number where it is taken, and take it."""
        name = fresh(name, self.taken)
        self.taken.add(name)
        return name

    def ints(self, name: str, values: Sequence[int], like: str = "") -> str:
        """Add a constant of integers, of the type of the constant `like`. Gives its name."""
        name = self.fresh(name)
        dtype = numpy_helper.to_array(self.values[like]).dtype if like else np.dtype(np.int64)
        self.added[name] = numpy_helper.from_array(np.array(values, dtype), name)
        self.shapes[name] = [len(values)]
        return name

    def floats(self, name: str, values: np.ndarray) -> str:
        """Add a constant of float32. Gives its name."""
        name = self.fresh(name)
        self.added[name] = numpy_helper.from_array(values.astype(np.float32), name)
        self.shapes[name] = list(values.shape)
        return name

    def reshaped(self, x: str, shape: Sequence[int]) -> str:
        """Add a Reshape to a static shape. Gives its result."""
        made = self.fresh(f"{x}/reshaped")
        self.nodes.append(
            helper.make_node("Reshape", [x, self.ints(f"{made}/shape", shape)], [made], name=self.fresh(f"{made}/node"))
        )
        self.shapes[made] = list(shape)
        return made

    def integers(self, node: onnx.NodeProto, index: int) -> list[int] | None:
        """Give the values of an operand of integers, None where it is none or is computed."""
        tensor = self.values.get(node.input[index]) if index < len(node.input) else None
        return None if tensor is None else [int(value) for value in numpy_helper.to_array(tensor).reshape(-1)]

    def of(self, node: onnx.NodeProto, index: int = 0) -> tuple[str, tuple[int, ...]] | None:
        """Give what operand `index` is the Transpose of, and how."""
        turned = self.waiting.get(node.input[index])
        return None if turned is None else (turned.source, turned.perm)

    def gives(self, node: onnx.NodeProto, index: int, perm: tuple[int, ...]) -> None:
        """Give result `index` of a node in the other order: what it was waits, as Transpose(the new one; perm)."""
        y = node.output[index]
        if not y:
            return
        shape = self.shapes[y] or []
        node.output[index] = self.fresh(f"{y}/turned")
        self.shapes[node.output[index]] = [shape[place] for place in _inverse(perm)]
        if list(perm) == sorted(perm):
            node.output[index] = y
            self.shapes[y] = shape
        else:
            self.waiting[y] = Turned(node.output[index], perm)

    def operand(self, node: onnx.NodeProto, index: int, perm: tuple[int, ...], elements: int) -> str | None:
        """Give operand `index` in the order of axes before `perm`; None where that would move a map.

        One of fewer dimensions is aligned at the last ones.
        """
        name = node.input[index]
        shape = self.shapes.get(name)
        if not name or shape == []:
            return name
        if name in self.waiting and self.waiting[name].perm == perm:
            return self.waiting[name].source
        if shape is None or len(shape) > len(perm):
            return None
        whole = [1] * (len(perm) - len(shape)) + shape
        if math.prod(shape) == 1:
            self._make(name)
            return name
        back = _inverse(perm)
        if not _is_reshape(whole, back) and math.prod(shape) * SMALL > elements:
            return None
        if (name, perm) not in self.other_way:
            self.other_way[name, perm] = self._turn_back(name, whole, back)
        return self.other_way[name, perm]

    def _turn_back(self, name: str, whole: list[int], back: tuple[int, ...]) -> str:
        self._make(name)
        made = self.fresh(f"{name}/turned")
        if _is_reshape(whole, back):
            result = [whole[axis] for axis in back]
            shape = self.ints(f"{made}/shape", result)
            self.nodes.append(helper.make_node("Reshape", [name, shape], [made], name=self.fresh(f"{made}/reshape")))
            self.shapes[made] = result
            return made
        if self.shapes[name] != whole:
            wide, shape = self.fresh(f"{name}/wide"), self.ints(f"{name}/wide_shape", whole)
            self.nodes.append(helper.make_node("Reshape", [name, shape], [wide], name=self.fresh(f"{wide}/reshape")))
            self.shapes[wide] = whole
            name = wide
        self.nodes.append(self._rearrange(name, made, back))
        return made


def _elementwise(turner: Turner, node: onnx.NodeProto) -> bool:
    """Turn all operands alike; those that do not wait must be small."""
    perm = next(turner.waiting[name].perm for name in node.input if name in turner.waiting)
    elements = math.prod(turner.shapes[node.output[0]] or [])
    if len(turner.shapes[node.output[0]] or []) != len(perm) or len(node.output) > 1:
        return False
    operands = [turner.operand(node, index, perm, elements) for index in range(len(node.input))]
    if None in operands:
        return False
    del node.input[:]
    node.input.extend(name for name in operands if name is not None)
    turner.gives(node, 0, perm)
    turner.nodes.append(node)
    return True


def _dropout(turner: Turner, node: onnx.NodeProto) -> bool:
    found = turner.of(node)
    if found is None:
        return False
    node.input[0], perm = found
    for index in range(len(node.output)):
        turner.gives(node, index, perm)
    turner.nodes.append(node)
    return True


def _concat(turner: Turner, node: onnx.NodeProto) -> bool:
    found = [turner.of(node, index) for index in range(len(node.input))]
    perms = {turned[1] for turned in found if turned is not None}
    if None in found or len(perms) != 1:
        return False
    (perm,) = perms
    del node.input[:]
    node.input.extend(turned[0] for turned in found if turned is not None)
    return _along_axis(turner, node, perm)


def _along_axis(turner: Turner, node: onnx.NodeProto, perm: tuple[int, ...]) -> bool:
    default = 0 if node.op_type == "Split" else -1
    set_attribute(node, "axis", perm[attributes(node).get("axis", default) % len(perm)])
    for index in range(len(node.output)):
        turner.gives(node, index, perm)
    turner.nodes.append(node)
    return True


def _with_axis(turner: Turner, node: onnx.NodeProto) -> bool:
    found = turner.of(node)
    if found is None:
        return False
    node.input[0], perm = found
    return _along_axis(turner, node, perm)


def _pad(turner: Turner, node: onnx.NodeProto) -> bool:
    found, pads = turner.of(node), turner.integers(node, 1)
    if found is None or pads is None or (len(node.input) > 3 and node.input[3]):
        return False
    node.input[0], perm = found
    back, rank = _inverse(perm), len(perm)
    turned = [pads[place + axis] for place in (0, rank) for axis in back]
    node.input[1] = turner.ints(f"{node.name}/pads", turned)
    turner.gives(node, 0, perm)
    turner.nodes.append(node)
    return True


def _slice(turner: Turner, node: onnx.NodeProto) -> bool:
    found, starts = turner.of(node), turner.integers(node, 1)
    if found is None or starts is None:
        return False
    axes = turner.integers(node, 3) if len(node.input) > 3 and node.input[3] else list(range(len(starts)))
    if axes is None:
        return False
    node.input[0], perm = found
    turned = turner.ints(f"{node.name}/axes", [perm[axis % len(perm)] for axis in axes], like=node.input[1])
    if len(node.input) > 3:
        node.input[3] = turned
    else:
        node.input.append(turned)
    turner.gives(node, 0, perm)
    turner.nodes.append(node)
    return True


def _reduce(turner: Turner, node: onnx.NodeProto) -> bool:
    """Turn a reduction or a Squeeze: axes that go are those of the operand."""
    found = turner.of(node)
    given = attributes(node)
    axes = list(given["axes"]) if "axes" in given else turner.integers(node, 1)
    if found is None or not axes:
        return False
    node.input[0], perm = found
    axes = [axis % len(perm) for axis in axes]
    turned = sorted(perm[axis] for axis in axes)
    if "axes" in given:
        set_attribute(node, "axes", turned)
    else:
        node.input[1] = turner.ints(f"{node.name}/axes", turned)
    if node.op_type != "Squeeze" and given.get("keepdims", 1):
        turner.gives(node, 0, perm)
    else:
        left = [source for axis, source in enumerate(perm) if axis not in axes]  # axes of the source, in y's order
        turner.gives(node, 0, tuple(sorted(left).index(source) for source in left))
    turner.nodes.append(node)
    return True


Turn = Callable[[Turner, onnx.NodeProto], bool]
TURNS: dict[str, Turn] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(REDUCTIONS, _reduce),
    **dict.fromkeys((*ALONG_ONE_AXIS, "Split"), _with_axis),
    "Concat": _concat,
    "Dropout": _dropout,
    "Pad": _pad,
    "Slice": _slice,
    "Squeeze": _reduce,
}
