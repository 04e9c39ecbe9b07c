"""The least that a step must move of feature maps: every map written once, and read once by each that needs it.

    anchors        convolutions, poolings, matrix products, ...    read what their operands are made of, write results
    elementwise    activations, normalising, gates, masks          happen on the way into or out of an anchor
    views          Concat, Split, Reshape, shuffles                say where elements lie
    sums           the anchor that writes the last term reads the others; else stored by a pass of their own
    reductions     on the way out of the anchor that wrote last what they read

A BatchNorm's statistics, and the reductions of its gradient, are waited for: what lies behind them cannot be done by
the anchor that writes their map, so what is summed up behind two of them takes a pass over the maps in between. Of its
input gradient p*dz + q*x + w only q and w are waited for: what several of them over one x add up to is the sum of p*dz,
which the anchors that write dz accumulate, and x, read with it.

Sums of the forward pass are stored, or computed anew by what reads them, whatever moves less, and so is a gradient
that is made of several maps, as one that such a sum masks. What is summed of one map is summed in one pass. The bound
is that of the operators as they stand; a schedule that does two convolutions in one may move less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from bnfuse.analysis.ancestors import forward_nodes
from bnfuse.analysis.provenance import is_channel_concat, is_channel_split
from bnfuse.analysis.traffic import node_maps
from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.opset.sources import SOURCES
from bnfuse.opset.spec import DOMAIN, OpSpec, find, is_unfused
from bnfuse.opset.traffic import RESHAPES, Touched

VIEWS = ("Concat", "Split", "Slice", "Pad", "Transpose", "Expand", "Cast", *RESHAPES)
ARITHMETIC = ("Sub", "Mul", "Div", "Neg", "Abs", "Sqrt", "Exp", "Pow", "Where", "Dropout", "Clip", "PRelu")
COMPARED = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", "And", "Or", "Not", "Min", "Max")
REDUCTIONS = ("ReduceSum", "ReduceMean")
SUMS = ("Sum", "Add")
# of a pixel's channels, which are at hand where one of its maps is written
LAYER_NORMS = ("LayerNorm", "LayerNormGrad")

Sizes = dict[ir.Value, int]  # stored maps, and how many bytes of each


@dataclasses.dataclass(frozen=True)
class Bound:
    """Bytes that the forward and the backward pass read and write at the least."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        """Both directions together."""
        return self.forward + self.backward


@dataclasses.dataclass(frozen=True)
class Segment:
    """Neighbouring channels of a value, and the stored maps that they are made of."""

    channels: int
    maps: Sizes

    def part(self, channels: int) -> Segment:
        """Give some of the channels."""
        return Segment(channels, {value: size * channels // self.channels for value, size in self.maps.items()})


Made = tuple[Segment, ...]


@dataclasses.dataclass(eq=False)
class Pass:
    """One pass over maps: what it reads and writes, in bytes."""

    forward: bool
    reads: Sizes
    writes: Sizes

    def read(self, made: Made) -> None:
        """Read more on the way; what is written here is at hand."""
        for value, size in maps_of(made).items():
            if value not in self.writes:
                self.reads[value] = max(size, self.reads.get(value, 0))

    @property
    def bytes(self) -> int:
        """Count what is read and what is written."""
        return sum(self.reads.values()) + sum(self.writes.values())


def least_traffic(graph: TrainingGraph) -> Bound | None:
    """Find the least that a training graph must move, as its operators stand; None of one with fused operators."""
    own = [find(node.op_type) for node in graph.model.graph if node.domain == DOMAIN]
    if not all(op is not None and is_unfused(op) for op in own):
        return None
    choices: dict[ir.Value, bool] = {}
    plan = planned(graph, choices)
    for value, stored in plan.chosen.items():  # by rules that do not see what else is at hand where a value is read
        other = planned(graph, choices | {value: not stored})
        if other.bytes() < plan.bytes():
            choices, plan = choices | {value: not stored}, other
    return Bound(plan.bytes(True), plan.bytes(False))


def planned(graph: TrainingGraph, choices: Mapping[ir.Value, bool]) -> _Plan:
    """Plan a graph's step, in which these values are stored, or are not."""
    plan = _Plan(graph, choices)
    for node in graph.model.graph:
        plan.add(node)
    return plan


class _Plan:
    """What each value is made of, and the passes that there must be."""

    def __init__(self, graph: TrainingGraph, choices: Mapping[ir.Value, bool]) -> None:
        self.graph, self.choices = graph, choices
        self.chosen: dict[ir.Value, bool] = {}  # gradients that are stored, sums that are computed where they are read
        self.forward = forward_nodes(graph.model.graph, graph.signature)
        self.passes: list[Pass] = []
        self.made: dict[ir.Value, Made] = {}
        self.late: set[ir.Value] = set()  # behind what is waited for: no epilogue of what writes their maps
        self.scaled: dict[ir.Value, Made] = {}  # of a BatchNorm's input gradient: what p*dz is made of
        self.rest: dict[ir.Value, Made] = {}  # and what q*x + w is
        self.writer: dict[ir.Value, Pass] = {}
        self.order: dict[ir.Value, int] = {}  # stored maps, as they are written
        self.summing: dict[tuple[ir.Value, bool], Pass] = {}  # passes that there are for sums of a value, by phase

    def bytes(self, forward: bool | None = None) -> int:
        """Count what is moved, in one direction or in both."""
        return sum(each.bytes for each in self.passes if forward in (None, each.forward))

    def add(self, node: ir.Node) -> None:
        """Add what a node moves."""
        read, written = node_maps(node, self.graph)
        if not read and not written:
            return
        for value, size in read:
            if value not in self.made:
                self.store(value, size)
        operands, kind = [value for value, _ in read], kind_of(node)
        if not operands:
            self.source(node, written)
        elif kind == "view":
            self.view(node, operands, written)
        elif kind == "batch norm":
            self.batch_norm(node, operands, written)
        elif kind == "gradient":
            self.batch_norm_grad(node, operands, written)
        elif kind == "reduction" and (not written or self.sums_gradient(node, written)):
            self.reduce(node, operands)
            for value, size in written:
                self.store(value, size)
        elif kind == "sum" and (wide := self.wide_term(read)) is not None:
            for value, _ in written:
                self.made[value] = self.made[wide]
                self.late.update([value] if wide in self.late else [])
        elif kind == "sum" and len(largest(read)) > 1:
            self.sum(node, read, written)
        elif kind in ("sum", "elementwise"):
            self.elementwise(node, read, written)
        else:
            self.anchor(node, operands, written)

    def sums_gradient(self, node: ir.Node, written: Touched) -> bool:
        """Tell whether a node of the backward pass sums over each image: a gate's gradient."""
        return node not in self.forward and all(is_one_pixel(value) for value, _ in written)

    def wide_term(self, read: Touched) -> ir.Value | None:
        """Find the one term of a sum that is no pixel repeated over each image, where all others are.

        What a pooling passes back to all pixels need not be waited for by sums over the images' other gradients.
        """
        terms = largest(read)
        wide = [v for v in terms if sum(maps_of(self.made[v]).values()) >= dict(read)[v]]
        return wide[0] if len(wide) == 1 < len(terms) else None

    def store(self, value: ir.Value, size: int) -> None:
        """Have a map be there as it is."""
        self.made[value] = (Segment(int(value.shape[1]), {value: size}),)  # type: ignore[index, arg-type]
        self.order[value] = len(self.order)

    def source(self, node: ir.Node, written: Touched) -> None:
        """Have a map be there that is made of none: another shape of what is no map; zeros and what is drawn are no map
        to read."""
        for value, size in written:
            if kind_of(node) == "view":
                self.store(value, size)
            else:
                self.made[value] = (Segment(int(value.shape[1]), {}),)  # type: ignore[index, arg-type]

    def anchor(self, node: ir.Node, operands: list[ir.Value], written: Touched) -> None:
        """Make a pass of a node."""
        made = Pass(node in self.forward, {}, dict(written))
        self.passes.append(made)
        for value in operands:
            made.read(self.made[value])
        for value, size in written:
            self.store(value, size)
            self.writer[value] = made

    def view(self, node: ir.Node, operands: list[ir.Value], written: Touched) -> None:
        """Have results be made of the operands' channels."""
        for table in (self.made, self.scaled, self.rest):
            if all(value in table for value in operands):
                for (value, _), made in zip(written, viewed(node, [table[v] for v in operands], written), strict=True):
                    table[value] = made
        self.late.update(value for value, _ in written if self.waits(operands))

    def elementwise(self, node: ir.Node, read: Touched, written: Touched) -> None:
        """Have results be made of all operands.

        What changes one gradient by other maps is done where that is written, if nothing else reads it. Results that
        much reads are stored, where reading all that they are made of each time would move more.
        """
        operands, maps = [value for value, _ in read], largest(read)
        made = joined([self.made[value] for value in operands])
        late = self.waits(operands)
        if len(maps) > 1 and (writer := self.taker(maps[0], self.made, forward=False)):
            writer.read(made)
            made = self.made[maps[0]]
        elif node not in self.forward and len(written) == 1 and self.is_worth_storing(*written[0], made):
            self.anchor(node, operands, written)
            return
        for value, _ in written:
            self.made[value] = made
            self.late.update([value] if late else [])

    def is_worth_storing(self, value: ir.Value, size: int, made: Made) -> bool:
        """Choose whether a gradient that is made of several maps is stored, as it is where that moves less.

        What sums it up does so where it is stored, or reads what it is made of in any case.
        """
        if value in self.choices:
            return self.choices[value]
        terms = sum(maps_of(made).values())
        if terms <= size:
            return False
        sums, others = self.gradient_readers(value)
        worth = (not sums) * terms + size + others * size < others * terms
        self.chosen.update({value: True} if worth else {})
        return worth

    def gradient_readers(self, value: ir.Value) -> tuple[bool, int]:
        """Tell whether a gradient is summed up, and count what else reads it or what is elementwise of it."""
        values, found = [value], dict[ir.Node, str]()
        for each in values:
            for node in {use.node: None for use in each.uses() if use.node not in found}:
                if any(v is each for v, _ in node_maps(node, self.graph)[0]):
                    found[node] = "elementwise" if self.adds_a_number(node) else kind_of(node)
                    if found[node] == "view":
                        values += node.outputs[:1]  # of a cut gradient each reader has a part
                    elif found[node] in ("elementwise", "gradient"):
                        values += node.outputs
        kinds = [*found.values()]
        passed = ("view", "elementwise", "gradient", "reduction")
        return bool({"reduction", "gradient"} & {*kinds}), sum(kind not in passed for kind in kinds)

    def batch_norm(self, node: ir.Node, operands: list[ir.Value], written: Touched) -> None:
        """Take the statistics where each part of x is written, or in a pass where x is behind other statistics."""
        if self.waits(operands):
            self.reduce(node, operands)
        for value, _ in written:
            self.made[value] = self.made[operands[0]]
            self.late.add(value)

    def batch_norm_grad(self, node: ir.Node, operands: list[ir.Value], written: Touched) -> None:
        """Take the reductions where dy is written; dx is made of dy and x."""
        self.reduce(node, operands)
        dz, x = (self.made[value] for value in operands[:2])
        if len(written) == 1 and self.is_worth_storing(*written[0], joined([dz, x])):
            self.anchor(node, operands, written)
            return
        for value, _ in written:
            self.made[value], self.scaled[value], self.rest[value] = joined([dz, x]), dz, x
            self.late.add(value)

    def reduce(self, node: ir.Node, operands: list[ir.Value]) -> None:
        """Sum up where the last of the maps is written, or in a pass of its own where nothing can."""
        made = joined([self.made[value] for value in operands])
        writer = self.writer_of(made)
        if writer is None or self.waits(operands) or writer.forward != (node in self.forward):
            writer = self.sums_of(operands[0], node in self.forward)
        writer.read(made)

    def sums_of(self, value: ir.Value, forward: bool) -> Pass:
        """Find the pass that sums a value up, or begin one."""
        if (value, forward) not in self.summing:
            self.summing[value, forward] = Pass(forward, {}, {})
            self.passes.append(self.summing[value, forward])
        return self.summing[value, forward]

    def sum(self, node: ir.Node, read: Touched, written: Touched) -> None:
        """Add the other terms where the last one is written, or store the sum in a pass of its own."""
        terms, forward = largest(read), node in self.forward
        made = self.made
        if overlap([made[value] for value in terms]) < 2:  # zeros but for one, in each channel
            self.elementwise(node, read, written)
            return
        takers = [value for value in terms if value not in self.late and self.taker(value, made, forward)]
        alike = all(value in self.rest and maps_of(self.rest[value]) == maps_of(self.rest[terms[0]]) for value in terms)
        if not takers and alike:
            made = self.scaled
            takers = [value for value in terms if self.taker(value, made, forward)]
        if not takers and forward and self.is_computed_anew(written[0][0], read):
            self.elementwise(node, read, written)
            return
        if not takers:
            self.anchor(node, terms, written)
            return
        last = max(takers, key=lambda value: self.order[self.last(made[value])])  # type: ignore[index]
        for value in terms:
            self.taker(last, made, forward).read(made[value])  # type: ignore[union-attr]
        for value, _ in written:
            self.made[value] = made[last]
            if made is self.scaled:
                self.scaled[value], self.rest[value] = made[last], self.rest[last]
                self.made[value] = joined([made[last], self.rest[last]])
                self.late.add(value)

    def is_computed_anew(self, total: ir.Value, read: Touched) -> bool:
        """Choose whether a sum is computed by what reads it; a term of another sum alone is."""
        if total in self.choices:
            return not self.choices[total]
        anew = self.is_read_seldom(total, read)
        if anew and {kind_of(use.node) for use in total.uses()} != {"sum"}:
            self.chosen[total] = False
        return anew

    def is_read_seldom(self, total: ir.Value, read: Touched) -> bool:
        """Tell whether reading the terms as often as the sum is read moves less than storing it."""
        terms = sum(maps_of(joined([self.made[value] for value, _ in read])).values())
        readers, size = self.readers(total), max(size for _, size in read)
        return readers * terms < terms + size + readers * size

    def readers(self, value: ir.Value) -> int:
        """Count what reads a value's elements, or what is elementwise of it; not masks, where they are at hand."""
        found = 0
        for node in dict.fromkeys(use.node for use in value.uses()):
            if node not in self.forward:
                found += not is_mask(node) and any(v is value for v, _ in node_maps(node, self.graph)[0])
            elif kind_of(node) in ("view", "elementwise", "batch norm") or self.adds_a_number(node):
                found += sum(self.readers(each) for each in node.outputs)
            else:
                found += 1
        return found

    def adds_a_number(self, node: ir.Node) -> bool:
        """Tell whether a sum is of one map and what is repeated over it, as elementwise as any other operator."""
        return kind_of(node) == "sum" and len(largest(node_maps(node, self.graph)[0])) < 2

    def taker(self, value: ir.Value, made: Mapping[ir.Value, Made], forward: bool) -> Pass | None:
        """Find what writes a value and may change it: it is (part of) one map, in this phase, and has one reader."""
        maps = maps_of(made[value])
        writer = self.writer_of(made[value])
        waited = value in self.late and made is self.made
        if waited or len(maps) != 1 or len([*value.uses()]) != 1 or writer is None or writer.forward != forward:
            return None
        return writer

    def waits(self, operands: Iterable[ir.Value]) -> bool:
        """Tell whether that of them which is made of the map written last is behind what is waited for."""
        operands = [*operands]
        last = self.last(joined([self.made[value] for value in operands]))
        return any(value in self.late and last in maps_of(self.made[value]) for value in operands)

    def last(self, made: Made) -> ir.Value | None:
        """Find the stored map that was written last."""
        return max(maps_of(made), key=self.order.__getitem__, default=None)

    def writer_of(self, made: Made) -> Pass | None:
        """Find what writes the last of the maps; None of a graph input."""
        last = self.last(made)
        return self.writer.get(last) if last is not None else None


def maps_of(made: Made) -> Sizes:
    """Add up the stored maps of all channels."""
    found: Sizes = {}
    for segment in made:
        for value, size in segment.maps.items():
            found[value] = found.get(value, 0) + size
    return found


def joined(all_made: Sequence[Made]) -> Made:
    """Give what values are made of together, channel by channel where they have as many."""
    if not all_made:
        return ()
    counts = [sum(segment.channels for segment in made) for made in all_made]
    if len(set(counts)) > 1:
        maps = [maps_of(made) for made in all_made]
        return (Segment(max(counts), together(maps)),)
    ends = sorted({end for made in all_made for end in ends_of(made)})
    starts = [0, *ends[:-1]]
    pieces = [[between(made, start, stop) for made in all_made] for start, stop in zip(starts, ends, strict=True)]
    return tuple(
        Segment(stop - start, together([maps_of(made) for made in piece]))
        for piece, start, stop in zip(pieces, starts, ends, strict=True)
    )


def overlap(all_made: Sequence[Made]) -> int:
    """Count of how many values a channel is made, at the most."""
    ends = sorted({end for made in all_made for end in ends_of(made)})
    pieces = [[between(made, start, stop) for made in all_made] for start, stop in zip([0, *ends], ends, strict=False)]
    return max((sum(bool(maps_of(made)) for made in piece) for piece in pieces), default=0)


def together(maps: Iterable[Sizes]) -> Sizes:
    """Give all maps; of one that several have, the most that one of them has."""
    found: Sizes = {}
    for sizes in maps:
        for value, size in sizes.items():
            found[value] = max(size, found.get(value, 0))
    return found


def ends_of(made: Made) -> list[int]:
    """List where the segments end, in channels."""
    return [sum(segment.channels for segment in made[: index + 1]) for index in range(len(made))]


def between(made: Made, start: int, stop: int) -> Made:
    """Cut out the channels [start, stop)."""
    found, first = [], 0
    for segment in made:
        low, high = max(start, first), min(stop, first + segment.channels)
        if low < high:
            found.append(segment.part(high - low))
        first += segment.channels
    return tuple(found)


def viewed(node: ir.Node, operands: list[Made], written: Touched) -> list[Made]:
    """Give what the results of a view are made of; of a view that is none of channels, in equal shares."""
    if is_channel_concat(node):
        return [tuple(segment for made in operands for segment in made)]
    widths = [int(value.shape[1]) for value, _ in written]  # type: ignore[index, arg-type]
    total = sum(segment.channels for segment in operands[0]) if operands else 0
    if is_channel_split(node) and sum(widths) == total:
        starts = [sum(widths[:index]) for index in range(len(widths))]
        return [between(operands[0], start, start + width) for start, width in zip(starts, widths, strict=True)]
    whole = sum(size for made in operands for size in maps_of(made).values())
    shares = [min(1.0, size / whole) if whole else 1.0 for _, size in written]
    if widths == [total] and shares == [1.0]:
        return [operands[0]]
    maps = together([maps_of(made) for made in operands])
    return [
        (Segment(width, {value: round(size * share) for value, size in maps.items()}),)
        for width, share in zip(widths, shares, strict=True)
    ]


def largest(read: Touched) -> list[ir.Value]:
    """List the operands of the largest size, each once: others are repeated over it."""
    most = max((size for _, size in read), default=0)
    return list(dict.fromkeys(value for value, size in read if size == most))


def is_one_pixel(value: ir.Value) -> bool:
    """Tell whether a map has one pixel in each image."""
    return value.shape is not None and [*value.shape[2:]] == [1, 1]


def is_mask(node: ir.Node) -> bool:
    """Tell whether a node of the backward pass is elementwise, or a BatchNorm's gradient."""
    return kind_of(node) in ("elementwise", "gradient")


def kind_of(node: ir.Node) -> str:
    """Tell what a node does to maps: view, elementwise, sum, reduction, batch norm, gradient (of one), or anchor."""
    if node.domain == DOMAIN:
        spec = find(node.op_type)
        bare = isinstance(spec, OpSpec) and spec.core in ("Pointwise", "PointwiseGrad", "GlobalAveragePoolGrad")
        named = {"BatchNorm": "batch norm", "BatchNormGrad": "gradient", "BatchNormGradReduce": "reduction"}
        named |= dict.fromkeys(LAYER_NORMS, "elementwise")
        named |= {"GroupNorm": "batch norm", "GroupNormGrad": "gradient"}  # which wait alike, by sample
        return named.get(node.op_type, "elementwise" if bare else "anchor")
    for kind, names in (("view", VIEWS), ("sum", SUMS), ("reduction", REDUCTIONS)):
        if node.op_type in names:
            return kind
    known = (node.domain, node.op_type) in SOURCES or node.op_type in (*ARITHMETIC, *COMPARED)
    return "elementwise" if known else "anchor"
