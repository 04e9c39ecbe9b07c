"""Training BatchNorms that exporters write out, operator by operator, read as one operator again.

    mean = ReduceMean(x)  d = x - mean  variance = ReduceMean(d*d)  r = 1/Sqrt(variance + epsilon) [* scale]
    y = x*r + ([bias] - mean*r)       or   y = d*r [+ bias]       ->   y = BatchNormalization(x, scale, bias, ...)

The means are over all axes but one, the batch's among them. So Keras writes its layers in training, by tf2onnx: vectors
of one value a channel are reshaped at will, and x may be transposed where it is normalised. The running statistics are
not in such a file and begin anew; a scale or a bias that is not there was of ones or zeros, which exporters fold away.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from bnfuse.core.text import some
from bnfuse.graph.protos import attributes, fresh

from .forward import infer_shapes
from .graph import Forward

KEEPING = ("Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")  # may leave a vector what it is
MOMENTUM = 0.99  # of Keras, which is not in the file
_SCOPE = re.compile(r"/(batchnorm|moments)(/[^/]*)?$")


@dataclasses.dataclass(frozen=True)
class Norm:
    """A BatchNorm that was found: operand, axis of its channels, what scales and shifts it, and how its result lies."""

    x: str
    axis: int
    epsilon: float
    scale: str | None
    bias: str | None
    perm: tuple[int, ...] | None  # the result is Transpose(normalised; perm)


def join_written_norms(forward: Forward) -> set[str]:
    """Read them in place. Shapes must be known, and are afterwards. Gives the scales and biases that stay as they are,
    beside another that the file has: the layer has none there."""
    reader = Reader(forward)
    nodes: list[onnx.NodeProto] = []
    names, fixed = [], set[str]()
    anew = 0
    for node in forward.graph.node:
        norm = reader.norm(node) if node.op_type in ("Add", "Mul", "Div") else None
        if norm is None:
            nodes.append(node)
            continue
        made, absent = reader.write(node, norm)
        nodes += made
        names += [other.name for other in made if other.op_type == "BatchNormalization"]
        fixed |= absent
        anew += not absent and norm.scale is None and norm.bias is None
    if not names:
        return fixed
    del forward.graph.node[:]
    forward.graph.node.extend(nodes)
    forward.remove_dead_nodes()
    infer_shapes(forward)
    forward.note(
        f"{len(names)} BatchNorms written out by the exporter are BatchNormalizations again ({some(names)}). Their "
        f"running statistics are not in the file: they begin at 0 and 1, with momentum {MOMENTUM}"
    )
    if anew:
        forward.note(
            f"{anew} of them have neither scale nor bias in the file, as of a fresh network: they begin at 1 and 0"
        )
    return fixed


class Reader:
    """Looks at the operands of a node, and writes what it is."""

    def __init__(self, forward: Forward) -> None:
        self.forward, self.shapes = forward, forward.shapes()
        self.makers, self.values = forward.producers(), forward.initializers()
        self.from_data = forward.from_data()
        self.readers = forward.consumers()
        self.taken = forward.names() | {node.name for node in forward.graph.node}
        self.vectors: dict[str, str] = {}  # what the file has in another shape -> the vector that was made of it

    # -- reading -------------------------------------------------------------------------------------------------

    def norm(self, node: onnx.NodeProto) -> Norm | None:
        """Give the BatchNorm whose result a node gives; a part of a larger one is none."""
        if self._goes_on(node):
            return None
        for scaled, bias in self._sums(node):
            found = self._normalised(scaled, bias)
            if found is not None and self._is_whole(found):
                return found
        return None

    def _is_whole(self, norm: Norm) -> bool:
        """Tell whether its scale and bias have one value for each channel."""
        channels = (self.shapes[norm.x] or [])[norm.axis]
        given = [self._vector(name) for name in (norm.scale, norm.bias) if name is not None]
        return all(math.prod(self.values[name].dims) == channels for name in given)

    def _goes_on(self, node: onnx.NodeProto) -> bool:
        """Tell whether what a product or quotient gives is scaled or shifted by a vector yet: the last one counts."""
        if node.op_type == "Add":
            return False
        readers = self.readers.get(node.output[0], [])
        if len(readers) != 1 or readers[0].op_type not in ("Add", "Mul"):
            return False
        (other,) = [name for name in readers[0].input if name != node.output[0]] or [""]
        return self._is_constant_vector(other)

    def _sums(self, node: onnx.NodeProto) -> Iterator[tuple[str, str | None]]:
        """Split the last node into what is scaled, and the vector that is added."""
        if node.op_type == "Add":
            for scaled, bias in (node.input, reversed(node.input)):
                if self._length(bias) is not None:
                    yield scaled, bias
        else:
            yield node.output[0], None

    def _normalised(self, scaled: str, shift: str | None, *, within: bool = False) -> Norm | None:
        """Read x*r + shift, with shift = [bias] - mean*r, or d*r [+ bias]; not `within` another, also that scaled."""
        maker = self.makers.get(scaled)
        if maker is None or maker.op_type not in ("Mul", "Div"):
            return None
        for value, factor in self._factors(maker):
            if not within and maker.op_type == "Mul" and self._is_constant_vector(factor):
                inner = self._normalised(value, None, within=True)
                vectors = [vector for vector in (factor, shift) if vector is not None]
                meets = inner is not None and all(self._meets(vector, value, inner) for vector in vectors)
                if inner is not None and inner.scale is None and meets:
                    return dataclasses.replace(inner, scale=factor, bias=shift)
            inverse = self._inverse(factor, divided=maker.op_type == "Div")
            if inverse is None:
                continue
            variance, epsilon, scale = inverse
            found = self._moments(variance)
            if found is None:
                continue
            x, mean, centred, axis = found
            whole, perm = self._untransposed(value)
            place = axis if perm is None else perm.index(axis)
            if not all(self._lies_along(vector, value, place) for vector in (factor, shift) if vector is not None):
                continue
            if whole == centred and (shift is None or self._vector(shift) in self.values):
                return Norm(x, axis, epsilon, scale, shift, perm)
            if (
                whole == x
                and maker.op_type == "Mul"
                and shift is not None
                and (bias := self._bias(shift, mean, factor)) is not None
            ):
                return Norm(x, axis, epsilon, scale, bias[0], perm)
        return None

    def _factors(self, node: onnx.NodeProto) -> Iterator[tuple[str, str]]:
        yield node.input[0], node.input[1]
        if node.op_type == "Mul":
            yield node.input[1], node.input[0]

    def _inverse(self, factor: str, *, divided: bool) -> tuple[str, float, str | None] | None:
        """Read 1/Sqrt(variance + epsilon) [* scale], or where one divides by it, its reciprocal."""
        maker = self.makers.get(self._vector(factor))
        if maker is None or maker.op_type != "Mul" or divided:
            return self._root(maker, divided=divided)
        for inner, scale in (maker.input, reversed(maker.input)):
            if self._vector(scale) in self.values:
                found = self._root(self.makers.get(self._vector(inner)), divided=False)
                if found is not None:
                    return found[0], found[1], scale
        return None

    def _root(self, maker: onnx.NodeProto | None, *, divided: bool) -> tuple[str, float, None] | None:
        """Read 1/Sqrt(variance + epsilon), or where one divides by it, Sqrt(variance + epsilon)."""
        if maker is not None and not divided:
            if maker.op_type == "Reciprocal":
                return self._root(self.makers.get(self._vector(maker.input[0])), divided=True)
            if maker.op_type == "Div" and self._number(maker.input[0]) == 1:
                return self._root(self.makers.get(self._vector(maker.input[1])), divided=True)
        if maker is None:
            return None
        power = 0.5 if divided else -0.5
        is_root = (divided and maker.op_type == "Sqrt") or (
            maker.op_type == "Pow" and self._number(maker.input[1]) == power
        )
        return self._shifted(maker.input[0]) if is_root else None

    def _shifted(self, name: str) -> tuple[str, float, None] | None:
        maker = self.makers.get(self._vector(name))
        if maker is None or maker.op_type != "Add":
            return None
        for variance, epsilon in (maker.input, reversed(maker.input)):
            number = self._number(epsilon)
            if number is not None and number > 0:
                return variance, number, None
        return None

    def _moments(self, variance: str) -> tuple[str, str, str, int] | None:
        """Read ReduceMean((x - mean)^2): x, the mean, x - mean, and the axis of the channels."""
        maker = self.makers.get(self._vector(variance))
        over = None if maker is None or maker.op_type != "ReduceMean" else self._axis(maker)
        square = None if over is None or maker is None else self.makers.get(maker.input[0])
        if over is None or square is None:
            return None
        is_square = (square.op_type == "Mul" and square.input[0] == square.input[1]) or (
            square.op_type == "Pow" and self._number(square.input[1]) == 2
        )
        centred = self.makers.get(square.input[0]) if is_square else None
        if centred is None or centred.op_type != "Sub" or centred.input[0] not in self.from_data:
            return None
        x, mean = centred.input[0], self._vector(centred.input[1])
        made = self.makers.get(mean)
        if made is None or made.op_type != "ReduceMean" or made.input[0] != x or self._axis(made) != over:
            return None
        if not self._lies_along(centred.input[1], x, over):
            return None
        return x, mean, centred.output[0], over

    def _axis(self, reduction: onnx.NodeProto) -> int | None:
        """Give the one axis, beside the batch's, that a ReduceMean keeps."""
        shape = self.shapes.get(reduction.input[0])
        given = attributes(reduction)
        if shape is None or len(shape) < 2:
            return None
        if "axes" in given:
            axes = list(given["axes"])
        elif len(reduction.input) > 1 and reduction.input[1] in self.values:
            axes = numpy_helper.to_array(self.values[reduction.input[1]]).reshape(-1).tolist()
        else:
            return None
        kept = {*range(len(shape))} - {axis % len(shape) for axis in axes}
        return kept.pop() if len(kept) == 1 and 0 not in kept else None

    def _bias(self, shift: str, mean: str, factor: str) -> tuple[str | None] | None:
        """Read [bias] - mean*r; gives the bias in a tuple."""
        maker = self.makers.get(self._vector(shift))
        if maker is None:
            return None
        if maker.op_type == "Neg" and self._is_product(maker.input[0], mean, factor):
            return (None,)
        if maker.op_type == "Sub" and self._is_product(maker.input[1], mean, factor):
            return (maker.input[0],) if self._vector(maker.input[0]) in self.values else None
        return None

    def _is_product(self, name: str, first: str, second: str) -> bool:
        maker = self.makers.get(self._vector(name))
        if maker is None or maker.op_type != "Mul":
            return False
        return {self._vector(operand) for operand in maker.input} == {self._vector(first), self._vector(second)}

    def _vector(self, name: str) -> str:
        """Follow a vector, one value a channel, through what leaves its values as they are."""
        while (maker := self.makers.get(name)) is not None and maker.op_type in KEEPING:
            if self._length(maker.input[0]) is None:
                break
            name = maker.input[0]
        return name

    def _length(self, name: str) -> int | None:
        """Count the elements of a tensor with one axis that is not 1, at most; None for others."""
        shape = self.shapes.get(name)
        return None if shape is None or sum(size != 1 for size in shape) > 1 else math.prod(shape)

    def _is_constant_vector(self, name: str) -> bool:
        """Tell whether it is a vector that the file holds."""
        return self._length(name) is not None and self._vector(name) in self.values

    def _lies_along(self, vector: str, value: str, axis: int) -> bool:
        """Tell whether a vector meets a tensor along this axis, where both are operands of one node."""
        small, large = self.shapes.get(vector), self.shapes.get(value)
        if small is None or large is None or len(small) > len(large):
            return False
        whole = [1] * (len(large) - len(small)) + small
        return whole == [size if place == axis else 1 for place, size in enumerate(large)]

    def _meets(self, vector: str, value: str, norm: Norm) -> bool:
        """Tell whether a vector lies along the channels of what a norm gives."""
        return self._lies_along(vector, value, norm.axis if norm.perm is None else norm.perm.index(norm.axis))

    def _untransposed(self, name: str) -> tuple[str, tuple[int, ...] | None]:
        maker = self.makers.get(name)
        if maker is None or maker.op_type != "Transpose":
            return name, None
        rank = len(self.shapes.get(name) or [])
        return maker.input[0], tuple(attributes(maker).get("perm", range(rank - 1, -1, -1)))

    def _number(self, name: str) -> float | None:
        tensor = self.values.get(name)
        if tensor is None or math.prod(tensor.dims) != 1:
            return None
        return float(numpy_helper.to_array(tensor).reshape(-1)[0])

    # -- writing -------------------------------------------------------------------------------------------------

    def write(self, node: onnx.NodeProto, norm: Norm) -> tuple[list[onnx.NodeProto], set[str]]:
        """Write the BatchNormalization of a norm in a node's place, between Transposes where its channels are not on
        axis 1. Gives the nodes, and the scale or bias that only stands in for one."""
        rank, channels = len(self.shapes[norm.x] or []), (self.shapes[norm.x] or [])[norm.axis]
        base = _SCOPE.sub("", node.name)
        absent = set[str]()
        operands = []
        parts = (
            ("gamma", norm.scale, 1.0),
            ("beta", norm.bias, 0.0),
            ("moving_mean", None, 0.0),
            ("moving_variance", None, 1.0),
        )
        for what, given, value in parts:
            name = self._parameter(f"{base}/{what}", given, value, channels)
            operands.append(name)
            if what in ("gamma", "beta") and given is None and (norm.scale or norm.bias):
                absent.add(name)
        first = [0, norm.axis, *(axis for axis in range(1, rank) if axis != norm.axis)]
        turned = tuple(range(rank) if norm.perm is None else norm.perm)
        after = [first.index(axis) for axis in turned]  # of the BatchNorm's result, to lie as the node's
        nodes, x, y = [], norm.x, node.output[0]
        if first != sorted(first):
            x = self._fresh(f"{base}/channels_first")
            nodes.append(helper.make_node("Transpose", [norm.x], [x], self._fresh(f"{base}/transpose"), perm=first))
        result = y if after == sorted(after) else self._fresh(f"{base}/normalised")
        statistics = [self._fresh(f"{base}/new_{what}") for what in ("mean", "variance")]
        attrs: dict[str, Any] = {"epsilon": norm.epsilon, "momentum": MOMENTUM, "training_mode": 1}
        name = self._fresh(base)
        batch_norm = helper.make_node("BatchNormalization", [x, *operands], [result, *statistics], name, **attrs)
        if result == y:
            return [*nodes, batch_norm], absent
        last = helper.make_node("Transpose", [result], [y], self._fresh(f"{base}/transpose"), perm=after)
        return [*nodes, batch_norm, last], absent

    def _parameter(self, name: str, given: str | None, value: float, channels: int) -> str:
        """Give the initializer [C] for an operand: the file's own where it is that."""
        source = self._vector(given) if given is not None else None
        if source is not None and list(self.values[source].dims) == [channels]:
            return source
        if source is not None and source in self.vectors:
            return self.vectors[source]
        values = np.full(channels, value, np.float32)
        if source is not None:
            values = np.broadcast_to(numpy_helper.to_array(self.values[source]).reshape(-1), (channels,)).copy()
        name = self._fresh(name)
        self.forward.set_initializer(name, values)
        if source is not None:
            self.vectors[source] = name
        return name

    def _fresh(self, name: str) -> str:
        name = fresh(name, self.taken)
        self.taken.add(name)
        return name
