"""Random masks of a training graph (drop path, stochastic depth, dropout written out), taken out for inference.

    mask = Div(Cast(Less(u, keep)), keep)
    y = Mul(x, mask)                               ->      y's readers read x

A gate that is a mask leaves the operator that reads it: NormalizeGateAddPointwise becomes NormalizeAddPointwise. What
makes up for a mask may be a gate, too, a constant one: of the operator that writes what is masked, or of one that reads
the product.

Frameworks leave out a multiplication by a mask of two values, 0 and c, where it keeps what it multiplies on average
(c = 1/keep, or c = 1 with a scale by 1/keep beside it), and where c = 1 (timm's scale_by_keep=False). How a mask is
spelt does not matter: whatever follows from one draw and constants, element by element, is computed over the quantiles
of the draw, which gives its values and how often each occurs. All else that is drawn (noise that is added, a latent
that is sampled, a mask of another mean) has no place in inference that would be known: it is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from bnfuse.analysis.ancestors import ancestors
from bnfuse.core.errors import at_node
from bnfuse.graph.constants import evaluate
from bnfuse.graph.drawing import DROPOUTS, FED, LIKE, constant, distribution_of, draws, one_number
from bnfuse.graph.sampling import Random
from bnfuse.graph.training_graph import put_in_place
from bnfuse.graph.values import static_shape
from bnfuse.opset.spec import DOMAIN, OpSpec, parse, skip_activation
from bnfuse.opset.traffic import SHAPE_READERS

QUANTILES = 4096
CLOSE = 1e-3  # to 1: of what a mask keeps on average, as far as so many quantiles tell it
MOVES = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Tile", "Transpose"})
POINTWISE = frozenset(
    (
        *(
            "Abs",
            "Add",
            "And",
            "Cast",
            "CastLike",
            "Ceil",
            "Clip",
            "Div",
            "Equal",
            "Floor",
            "Greater",
            "GreaterOrEqual",
        ),
        *("Less", "LessOrEqual", "Max", "Min", "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal", "Relu", "Round"),
        *("Sign", "Sqrt", "Sub", "Sum", "Where", "Xor"),
    )
)
TYPE_ONLY = {"CastLike": 1}  # op -> operand of which nothing but the type is read


class Unknown(Exception):
    """Why it is not known what a random value becomes in inference."""


@dataclasses.dataclass(frozen=True)
class Mask:
    """A value that is `scale` with probability `keep`, else 0."""

    scale: float
    keep: float

    @property
    def is_plain(self) -> bool:
        """Tell whether what is kept stays as it is, without a factor."""
        return abs(self.scale - 1) < 1e-6

    def balances(self, scale: float) -> bool:
        """Whether it keeps what is multiplied by `scale` too, on average."""
        return abs(scale * self.scale * self.keep - 1) < CLOSE


def without_masks(graph: ir.Graph, opset: int, file: str | None = None) -> None:
    """In place, for the graph's one output. Raises where something is drawn whose place in inference is not known."""
    needed = ancestors(graph.outputs)
    nodes = [node for node in graph if node in needed]
    if not any(draws(node) for node in nodes):
        return
    walk = Walk(opset)
    for node in nodes:
        walk.visit(node)
    for node in nodes:
        at = walk.now(node)
        for index in reversed(walk.ends(at)):
            try:
                at = drop(walk, at, index)
            except Unknown as why:
                require_dropouts(walk, node.inputs[index], str(why), file)
    still = ancestors(graph.outputs)
    for node in nodes:
        if node in still and node.outputs[0] in walk.random:
            require_dropouts(walk, node.outputs[0], "the result itself is random", file)


def require_dropouts(walk: Walk, value: ir.Value | None, why: str, file: str | None) -> None:
    """Raise BnfuseError unless a random value follows from Dropouts alone: those do nothing in inference."""
    source = next((node for node in walk.sources(value) if node.op_type not in DROPOUTS), None)
    if source is not None:
        what = f"draws at random what inference is not known to leave out ({why}): the network trains, but is not"
        remedy = "evaluated or exported here. `bnfuse run` trains it; for the rest use the framework it came from."
        raise at_node(source.name or "", source.op_type, f"{what} {remedy}", file=file)


class Walk:
    """Which values are known, and which are random: they follow from draws and from what is known alone."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.random: dict[ir.Value, ir.Node] = {}  # and the node that gives each
        self._known: dict[ir.Value, np.ndarray | None] = {}
        self._sources: dict[ir.Value, list[ir.Node]] = {}
        self._quantiles: dict[ir.Value, np.ndarray | Unknown] = {}
        self.bare: dict[ir.Node, ir.Node] = {}  # operators that lack a gate now, by those that had it
        self.unscaled: dict[ir.Value, ir.Value] = {}  # what operators write without their gates, for some readers

    def now(self, node: ir.Node) -> ir.Node:
        """Give what is in the place of a node now."""
        while node in self.bare:
            node = self.bare[node]
        return node

    def visit(self, node: ir.Node) -> None:
        """Follow what is drawn through one node: which of its results are random, and where masks meet data."""
        if draws(node) and node.op_type not in DROPOUTS:
            self._record(node)
            return
        values = operands(node)
        mixed = [value for value in values if value in self.random]
        if mixed:
            follows = node.op_type not in SHAPE_READERS and self._follows(node, values)
        else:
            follows = node.op_type in DROPOUTS and bool(values) and self.known(values[0]) is not None
        if follows:
            self._record(node)

    def _record(self, node: ir.Node) -> None:
        """Its results are random. What is asked of them later is told now, from what was told of its operands."""
        sources = [node] if draws(node) else [s for v in operands(node) for s in self.sources(v)]
        try:
            found: np.ndarray | Unknown = self._over_quantiles(node)
        except Unknown as why:
            found = why
        for value in node.outputs[:1] if draws(node) else node.outputs:
            self.random[value] = node
            self._sources[value], self._quantiles[value] = list(dict.fromkeys(sources)), found

    def _follows(self, node: ir.Node, values: Sequence[ir.Value]) -> bool:
        return not node.domain and all(value in self.random or self.known(value) is not None for value in values)

    def ends(self, node: ir.Node) -> list[int]:
        """List the operands of a node that are random where its result is not, for it reads the data too."""
        if node.outputs[0] in self.random or node.op_type in SHAPE_READERS:
            return []
        skipped = {TYPE_ONLY.get(node.op_type)} | ({0} if node.op_type in LIKE - {"Bernoulli"} else set())
        return [i for i, value in enumerate(node.inputs) if value in self.random and i not in skipped]

    def sources(self, value: ir.Value | None) -> list[ir.Node]:
        """List the nodes that draw what a random value follows from."""
        return [] if value is None else self._sources.get(value, [])

    def known(self, value: ir.Value | None) -> np.ndarray | None:
        """Evaluate a value, if it follows from constants and shapes. Networks are deeper than Python's stack."""
        stack = [] if value is None else [value]
        while stack:
            waiting = self._waiting(stack[-1])
            if not waiting:
                last = stack.pop()
                if last not in self._known:
                    self._known[last] = self._compute(last)
            stack.extend(waiting)
        return None if value is None else self._known[value]

    def _waiting(self, value: ir.Value) -> list[ir.Value]:
        """List what is to be looked at before a value is."""
        node = value.producer()
        if value in self._known or node is None or node.domain or draws(node) or node.op_type in SHAPE_READERS:
            return []
        return [v for v in node.inputs if v is not None and v not in self._known]

    def _compute(self, value: ir.Value) -> np.ndarray | None:
        found, node = constant(value), value.producer()
        if found is not None or node is None or node.domain or draws(node):
            return found
        if node.op_type in SHAPE_READERS:
            shape = static_shape(node.inputs[0]) if node.inputs[0] is not None else None
            if shape is None:
                return None
            sizes = np.array(shape, np.int64)
            start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(sizes))
            return np.asarray(sizes.prod()) if node.op_type == "Size" else sizes[start:end]
        inputs = [None if v is None else self._known[v] for v in node.inputs]
        if any(v is not None and x is None for v, x in zip(node.inputs, inputs, strict=True)):
            return None
        results = evaluate(node, inputs, self.opset)
        return results[list(node.outputs).index(value)]

    # -- laws --------------------------------------------------------------------------------------------------------

    def mask(self, value: ir.Value) -> Mask:
        """Find the law of a random value. Raises BnfuseError where it is not that of a mask."""
        if len(self.sources(value)) != 1:
            raise Unknown("it follows from several draws")
        values, counts = np.unique(self.over_quantiles(value).astype(np.float64), return_counts=True)
        scale, keep = float(values[-1]), float(counts[-1]) / float(counts.sum())
        if len(values) > 2 or not np.isfinite(values).all() or (len(values) == 2 and values[0] != 0) or scale == 0:
            raise Unknown("it is no mask of 0 and one other value")
        found = Mask(scale, keep)
        if not found.is_plain and not found.balances(1.0):
            raise Unknown(f"as a mask of 0 and {scale:.4g} that keeps {keep:.1%} it changes the mean")
        return found

    def over_quantiles(self, value: ir.Value) -> np.ndarray:
        """One element of a random value, for each quantile of what is drawn."""
        found = self._quantiles[value]
        if isinstance(found, Unknown):
            raise found
        return found

    def _over_quantiles(self, node: ir.Node) -> np.ndarray:
        if draws(node):
            return self._drawn(node)
        if node.op_type not in MOVES | POINTWISE:
            raise Unknown(f"it goes through {node.op_type}, which is no mask's")
        reads = 1 if node.op_type in MOVES else len(node.inputs)
        inputs = [self._element(v) for v in node.inputs[:reads]]
        if node.op_type in MOVES:
            assert inputs[0] is not None
            return inputs[0]
        typed = TYPE_ONLY.get(node.op_type)
        if typed is not None:
            like = node.inputs[typed]
            dtype = like.dtype if like is not None and like.dtype is not None else ir.DataType.FLOAT
            inputs[typed] = np.zeros(1, dtype.numpy())
        return evaluate(node, inputs, self.opset)[0]

    def _element(self, value: ir.Value | None) -> np.ndarray | None:
        if value in self.random:
            return self.over_quantiles(value)
        known = self.known(value)
        number = one_number(known)
        if known is not None and number is None:
            raise Unknown("its elements are not all drawn alike")
        return None if known is None or number is None else np.asarray(number, known.dtype)

    def _drawn(self, node: ir.Node) -> np.ndarray:
        at = (np.arange(QUANTILES) + 0.5) / QUANTILES
        if node.op_type in DROPOUTS:
            number, ratio = one_number(self.known(node.inputs[0])), self._ratio(node)
            if number is None or node.domain:
                raise Unknown("its elements are not all drawn alike")
            kept = at >= ratio
            return np.where(kept, number / max(1 - ratio, 1e-30), 0.0).astype(np.float32)
        random = distribution_of(node) if node.op_type in FED else None
        if node.op_type == "Bernoulli":
            chance = one_number(self.known(node.inputs[0]))
            random = None if chance is None else Random("bernoulli", chance)
        if random is None or not random.is_sound:
            raise Unknown("how it is drawn follows from the data")
        return random.quantiles(at).astype((node.outputs[0].dtype or ir.DataType.FLOAT).numpy())

    def _ratio(self, node: ir.Node) -> float:
        given = [self.known(value) for value in node.inputs[1:]]
        ratio = 0.5 if not given or given[0] is None else float(given[0])
        return ratio if len(given) > 1 and given[1] is not None and bool(given[1]) else 0.0


def operands(node: ir.Node) -> list[ir.Value]:
    """List the inputs whose values are read."""
    skipped = TYPE_ONLY.get(node.op_type)
    return [value for index, value in enumerate(node.inputs) if value is not None and index != skipped]


def drop(walk: Walk, node: ir.Node, index: int) -> ir.Node:
    """Let what read the product of data and mask read the data; gives the node that is in the place of this one."""
    random, y = node.inputs[index], node.outputs[0]
    assert random is not None
    if (spec := without_gate(node, index)) is not None:
        return drop_gate(walk, node, index, spec)
    x = masked(walk, node, index)
    mask = walk.mask(random)
    if node.op_type == "Where" and index == 0 and x is node.inputs[2]:
        mask = Mask(1.0, 1 - mask.keep)
    if x.shape is not None and y.shape is not None and list(x.shape) != list(y.shape):
        raise Unknown("the mask is of a larger shape than what it multiplies")
    if mask.is_plain:
        drop_scales(walk, y, mask)
        x = unscaled(walk, x, mask)
    put_in_place(y, x)
    return node


def without_gate(node: ir.Node, index: int) -> OpSpec | None:
    """Give the operator of steps that lacks the gate which a node of ours reads there; None where it reads no gate."""
    spec = parse(node.op_type) if node.domain == DOMAIN else None
    step = {"gate": "Gate", "skip_gate": "SkipGate"}.get(spec.operands[index]) if spec is not None else None
    if spec is None or step is None or spec.is_gradient:
        return None
    return OpSpec(tuple(other for other in spec.prologue if other != step), spec.core, spec.epilogue)


def drop_gate(walk: Walk, node: ir.Node, index: int, bare: OpSpec) -> ir.Node:
    """Put an operator without its gate in the place of one whose gate is a mask, and leave out what scales for it."""
    gate, gated = node.inputs[index], parse(node.op_type)
    assert gate is not None and gated is not None
    mask = walk.mask(gate)
    if mask.is_plain:
        if gated.operands[index] == "gate" and writes_product(gated):
            drop_scales(walk, node.outputs[0], mask)
        for place, x in enumerate(node.inputs):
            if x is not None and gate_of(gated, gated.operands[place]) == index:
                node.replace_input_with(place, unscaled(walk, x, mask))
    return put_bare(walk, node, index, bare)


def put_bare(walk: Walk, node: ir.Node, index: int, spec: OpSpec) -> ir.Node:
    """Put the operator without the gate that it reads there in the place of a node."""
    operands = [value for place, value in enumerate(node.inputs) if place != index]
    bare = ir.Node(DOMAIN, spec.name, operands, node.attributes.values(), num_outputs=len(node.outputs), name=node.name)
    assert node.graph is not None
    node.graph.insert_after(node, bare)
    for old, new in zip(node.outputs, bare.outputs, strict=True):
        new.name, new.shape, new.type = f"{old.name}/inference" if old.name else "", old.shape, old.type
        put_in_place(old, new)
    walk.bare[node] = bare
    return bare


def gate_of(spec: OpSpec, operand: str) -> int | None:
    """Find which operand is the gate that multiplies this one as it is; None where none does."""
    if operand == "x" and spec.prologue[:1] == ("Gate",):
        return spec.operands.index("gate")
    plain = "AddNormalized" not in spec.prologue and skip_activation(spec.prologue) is None
    return spec.operands.index("skip_gate") if operand == "skip" and "SkipGate" in spec.prologue and plain else None


def writes_product(spec: OpSpec) -> bool:
    """Tell whether y is the product of an operator's gate and what comes before it."""
    return spec.core == "Pointwise" and spec.prologue[-1:] == ("Gate",) and not {"Bias", "Relu"} & {*spec.epilogue}


def drop_scales(walk: Walk, y: ir.Value, mask: Mask) -> None:
    """Let what reads the product of y and a number that makes up for a mask read y."""
    for use, place in list(y.uses()):
        spec = parse(use.op_type) if use.domain == DOMAIN else None
        if spec is None:
            if scaling(walk, use, place, mask):
                put_in_place(use.outputs[0], y)
            continue
        if spec.is_gradient:
            continue
        reader = walk.now(use)
        now = parse(reader.op_type)
        index = gate_of(now, spec.operands[place]) if now is not None else None
        bare = without_gate(reader, index) if index is not None else None
        if index is not None and bare is not None and makes_up(walk, reader.inputs[index], mask):
            put_bare(walk, reader, index, bare)


def unscaled(walk: Walk, x: ir.Value, mask: Mask) -> ir.Value:
    """Give what a value is a multiple of, where its producer scales it by what makes up for a mask; else the value."""
    source = x.producer()
    spec = parse(source.op_type) if source is not None and source.domain == DOMAIN else None
    if source is None:
        return x
    if spec is None:
        return next((v for i, v in enumerate(source.inputs[:2]) if v is not None and scaling(walk, source, i, mask)), x)
    if source.outputs[0] is not x or spec.is_gradient or not writes_product(spec):
        return x
    index = spec.operands.index("gate")
    if not makes_up(walk, source.inputs[index], mask):
        return x
    if x not in walk.unscaled:
        walk.unscaled[x] = bare_copy(source, index, OpSpec(spec.prologue[:-1], "Pointwise"))
    return walk.unscaled[x]


def bare_copy(node: ir.Node, index: int, spec: OpSpec) -> ir.Value:
    """Make what an operator writes without its gate, beside it: others may read the product."""
    y, x = node.outputs[0], node.inputs[0]
    assert node.graph is not None and x is not None
    if not spec.prologue:
        return x
    operands = [value for place, value in enumerate(node.inputs) if place != index]
    bare = ir.Node(DOMAIN, spec.name, operands, node.attributes.values(), num_outputs=1, name=node.name)
    node.graph.insert_after(node, bare)
    made = bare.outputs[0]
    made.name, made.shape, made.type = f"{y.name}/unscaled", y.shape, y.type
    return made


def masked(walk: Walk, node: ir.Node, index: int) -> ir.Value:
    """Find what a node multiplies by the mask: Mul(x, mask), Where(mask, x, 0), Where(mask, 0, x)."""
    if not node.domain and node.op_type == "Mul" and node.inputs[1 - index] is not None:
        return node.inputs[1 - index]  # type: ignore[return-value]
    if not node.domain and node.op_type == "Where" and index == 0:
        for zeros, x in ((2, 1), (1, 2)):
            if one_number(walk.known(node.inputs[zeros])) == 0 and node.inputs[x] is not None:
                return node.inputs[x]  # type: ignore[return-value]
    raise Unknown(f"{node.op_type} '{node.name}' reads it together with the data, and multiplies by no mask")


def scaling(walk: Walk, node: ir.Node, place: int, mask: Mask) -> bool:
    """Whether the node scales its operand at `place` by what makes up for the mask."""
    if node.domain or node.op_type not in ("Mul", "Div") or (node.op_type == "Div" and place != 0):
        return False
    return makes_up(walk, node.inputs[1 - place], mask, divides=node.op_type == "Div")


def makes_up(walk: Walk, factor: ir.Value | None, mask: Mask, *, divides: bool = False) -> bool:
    """Whether a factor (a divisor, where it divides) is one number that makes up for the mask."""
    number = one_number(walk.known(factor))
    if number is None or number == 0 or mask.keep > 1 - CLOSE:
        return False
    return mask.balances(1 / number if divides else number)
