"""Activations that exporters write out, operator by operator, read as one operator again.

    a = Abs(x), b = Add(a, 1), y = Div(x, b)                ->     y = Softsign(x)
    a = Mul(x, 1.5), b = Sigmoid(a), y = Mul(x, b)          ->     y = ai.bnfuse::QuickGeluPointwise(x; alpha = 1.5)
    a = Add(x, 3), b = Clip(a, 0, 6), y = Div(b, 6)         ->     y = HardSigmoid(x; alpha = 1/6, beta = 1/2)

SPELLINGS lists how each may be written: in the trees `x` is what the activation is of, `alpha` and `beta` are numbers
that become attributes, other numbers are themselves to the precision of float32. Sums and products may be either way
round. Where the file's opset has no operator for the activation, ours is written (bnfuse/opset/sources.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from bnfuse.graph.protos import attributes
from bnfuse.opset.activations import ACTIVATIONS, Activation
from bnfuse.opset.schemas import register
from bnfuse.opset.sources import forward_of, standard_node
from bnfuse.opset.spec import DOMAIN, VERSION

from .forward import NEWEST, element_types
from .graph import Forward

COMMUTATIVE = ("Add", "Mul", "Max", "Min")
CLOSE = 1e-6  # relative, of numbers that exporters round in one way or another

Found = Mapping[str, "str | float"]  # x: a tensor; alpha, ...: numbers


@dataclasses.dataclass(frozen=True)
class Call:
    """A node with these operands, and with attributes close to these."""

    operator: str
    operands: tuple[Call | str | float, ...]
    given: tuple[tuple[str, float], ...] = ()


def call(operator: str, *operands: Call | str | float, **given: float) -> Call:
    """Write a node of a tree."""
    return Call(operator, operands, tuple(given.items()))


def scaled(tree: Call | str, by: float) -> tuple[Call, Call]:
    """Write a product with a number, and the quotient by its reciprocal."""
    return call("Mul", tree, by), call("Div", tree, 1 / by)


def halved_products(factor: Call) -> tuple[Call, ...]:
    """Write x*factor/2 in every order of the factors."""
    return (
        *scaled(call("Mul", "x", factor), 0.5),
        *(call("Mul", half, factor) for half in scaled("x", 0.5)),
        *(call("Mul", "x", half) for half in scaled(factor, 0.5)),
    )


RELU6 = call("Clip", call("Add", "x", 3.0), 0.0, 6.0)
CUBES = (call("Pow", "x", 3.0), call("Mul", call("Mul", "x", "x"), "x"))
CUBICS = (
    *(call("Add", "x", call("Mul", cube, 0.044715)) for cube in CUBES),
    call("Add", "x", call("Mul", "x", call("Mul", call("Mul", "x", "x"), 0.044715))),
    call("Add", "x", call("Mul", call("Mul", call("Mul", "x", 0.044715), "x"), "x")),
    *(
        call("Mul", "x", call("Add", call("Mul", square, 0.044715), 1.0))
        for square in (call("Mul", "x", "x"), call("Pow", "x", 2.0))
    ),
)
SOFTPLUS = call("Log", call("Add", call("Exp", "x"), 1.0))

# what is made -> its attributes, where they are no numbers of the trees, and the trees; what is part of another first
SPELLINGS: tuple[tuple[str, dict[str, float], tuple[Call, ...]], ...] = (
    ("Relu", {}, (call("Max", "x", 0.0),)),
    ("Softsign", {}, (call("Div", "x", call("Add", call("Abs", "x"), 1.0)),)),
    ("Softplus", {}, (SOFTPLUS,)),
    ("Mish", {}, (call("Mul", "x", call("Tanh", call("Softplus", "x"))),)),
    ("QuickGelu", {"alpha": 1.0}, (call("Mul", "x", call("Sigmoid", "x")),)),
    ("QuickGelu", {}, (call("Mul", "x", call("Sigmoid", call("Mul", "x", "alpha"))),)),
    ("HardSwish", {}, (*scaled(call("Mul", "x", RELU6), 1 / 6), *(call("Mul", "x", s) for s in scaled(RELU6, 1 / 6)))),
    ("HardSigmoid", {"alpha": 1 / 6, "beta": 0.5}, scaled(RELU6, 1 / 6)),
    ("HardSigmoid", {}, (call("Clip", call("Add", call("Mul", "x", "alpha"), "beta"), 0.0, 1.0),)),
    ("HardSwish", {}, (call("Mul", "x", call("HardSigmoid", "x", alpha=1 / 6, beta=0.5)),)),
    ("LeakyRelu", {}, (call("Max", "x", call("Mul", "x", "alpha")),)),
    (
        "Gelu",
        {},
        tuple(
            whole
            for inner in scaled("x", math.sqrt(0.5))
            for whole in halved_products(call("Add", call("Erf", inner), 1.0))
        ),
    ),
    (
        "GeluTanh",
        {},
        tuple(
            whole
            for cubic in CUBICS
            for whole in halved_products(call("Add", call("Tanh", call("Mul", cubic, math.sqrt(2 / math.pi))), 1.0))
        ),
    ),
)
ATTRIBUTES = {"HardSigmoid": {"alpha": 0.2, "beta": 0.5}}  # with defaults, of operators in the trees
BELOW_ONE = ("LeakyRelu",)  # Max(x, alpha*x) is one where 0 <= alpha <= 1


def join_written_out(forward: Forward, constants: Collection[str] = ()) -> None:
    """Replace what is written out. The nodes in between stay, for whoever else reads them.

    `constants` are initializers that are no parameters though they have an axis, as some exporters write numbers.
    """
    for node in forward.graph.node:
        if node.op_type == "Swish" and node.domain in ("", "ai.onnx"):  # of an opset that build brings down
            alpha = float(attributes(node).get("alpha", 1.0))
            write(forward, node, ACTIVATIONS["QuickGelu"], node.input[0], {"alpha": alpha})
    reader = _Reader(forward, constants)
    for name, fixed, trees in SPELLINGS:
        found = 0
        for node in forward.graph.node:
            matches = (match for tree in trees for match in reader.matches(tree, node.output[0] if node.output else ""))
            match = next(matches, None)
            if match is not None and reader.is_taken(name, match):
                write(forward, node, ACTIVATIONS[name], str(match["x"]), {**fixed, **_numbers_of(match)})
                found += 1
        if found:
            forward.note(f"read {found} {name} that the file writes out")


def _numbers_of(match: Found) -> dict[str, float]:
    return {name: value for name, value in match.items() if not isinstance(value, str)}


def write(forward: Forward, node: onnx.NodeProto, activation: Activation, x: str, numbers: dict[str, float]) -> None:
    """Make a node an activation of x: the standard operator, where the opset that is trained in has it, or ours."""
    found = standard_node(activation, numbers, min(forward.opset, NEWEST))
    if found is None:
        spec = forward_of(activation)
        found = (spec.name, numbers)
        register([spec.name])
        if DOMAIN not in {entry.domain for entry in forward.model.opset_import}:
            forward.model.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))
        node.domain = DOMAIN
    node.op_type, given = found
    del node.input[:], node.attribute[:]
    node.input.append(x)
    node.attribute.extend(helper.make_attribute(name, value) for name, value in given.items())


class _Reader:
    """What is known of a graph's tensors: the nodes that make them, numbers, types."""

    def __init__(self, forward: Forward, constants: Collection[str]) -> None:
        self.makers, self.types, self.shapes = forward.producers(), element_types(forward.graph), forward.shapes()
        self.numbers: dict[str, float] = {}
        for name, tensor in forward.initializers().items():
            if not tensor.dims or (name in constants and list(tensor.dims) == [1]):
                value = numpy_helper.to_array(tensor)
                if value.dtype.kind == "f":
                    self.numbers[name] = float(value.item())

    def is_taken(self, name: str, match: Found) -> bool:
        """Tell whether a match is the activation: of float32, and with numbers that leave it what it is."""
        alpha = match.get("alpha", 0.0)
        within = name not in BELOW_ONE or (isinstance(alpha, float) and 0 <= alpha <= 1)
        return within and self.types.get(str(match["x"])) == TensorProto.FLOAT

    def matches(self, tree: Call | str | float, name: str, found: Found | None = None) -> Iterator[Found]:
        """Give all ways in which the tensor `name` is a tree."""
        found = found or {}
        if isinstance(tree, Call):
            yield from self._calls(tree, name, found)
        elif isinstance(tree, float):
            if name in self.numbers and math.isclose(self.numbers[name], tree, rel_tol=CLOSE):
                yield found
        elif tree == "x":
            if name not in self.numbers and found.get("x", name) == name:
                yield {**found, "x": name}
        elif name in self.numbers:
            yield {**found, tree: self.numbers[name]}

    def _calls(self, tree: Call, name: str, found: Found) -> Iterator[Found]:
        node = self.makers.get(name)
        if node is None or node.op_type != tree.operator or node.domain not in ("", "ai.onnx"):
            return
        given = {**ATTRIBUTES.get(tree.operator, {}), **attributes(node)}
        if len(node.input) != len(tree.operands) or not all(
            math.isclose(np.float32(given[key]), value, rel_tol=CLOSE) for key, value in tree.given
        ):
            return
        orders = itertools.permutations(tree.operands) if tree.operator in COMMUTATIVE else [tree.operands]
        for operands in orders:
            ways: list[Found] = [found]
            for operand, source in zip(operands, node.input, strict=True):
                ways = [more for way in ways for more in self.matches(operand, source, way)]
            yield from ways
