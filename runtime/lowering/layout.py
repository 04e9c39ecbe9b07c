"""Where feature maps lie: NHWC, and the channels of a Concat side by side in one buffer.

A Concat costs nothing where its operands are written into their channel slots to begin with. Nested pairs,
cat(cat(x, y1), y2), and flat lists, where each layer concatenates all earlier maps anew, come to the same: the
largest concatenation gets a buffer (it is a *root*), the tensors that were produced get slots in it, and each other
concatenation whose leaves are a contiguous run of the root's leaves is a range of channels of it:

    T3 = cat(T2, y3)   T2 = cat(x, y1)        root T3: [ x | y1 | y3 ],  T2 = channels [0, C(x) + C(y1)) of it

A tensor can lie in one place only. What a second root wants is copied there, as soon as it is produced.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from bnfuse.analysis.provenance import Leaf, is_channel_concat, leaves
from bnfuse.opset.spec import DOMAIN, parse, parts_of
from bnfuse.opset.traffic import RESHAPES
from bnfuse.runtime.kernels.kernel import MapType
from bnfuse.runtime.targets.target import Target

HALVES = ("bfloat16", "float16")  # the types in which maps are stored that are float32 in the file
ALIGN = 8  # elements: the most that a MapType's `align` promises
LINE = 16  # float32 elements of a cache line: where a storage may start
VIEWS = ("Split", *RESHAPES)  # they produce no buffer: the result is the operand's storage


@dataclasses.dataclass(frozen=True)
class MapRef:
    """A feature map in memory: `type` within the storage, from element `offset` on."""

    storage: int
    offset: int
    type: MapType

    def channels(self, start: int, stop: int) -> MapRef:
        """Give the map of the channels [start, stop)."""
        assert 0 <= start < stop <= self.type.c, (start, stop, self)
        offset = self.offset + start
        return MapRef(self.storage, offset, realigned(dataclasses.replace(self.type, c=stop - start), offset))

    def images(self, start: int, stop: int) -> MapRef:
        """Give the map of the images [start, stop)."""
        assert 0 <= start < stop <= self.type.n, (start, stop, self)
        kind = dataclasses.replace(self.type, n=stop - start, whole=self.type.elements)
        offset = self.offset + start * self.type.h * self.type.w * self.type.stride
        return MapRef(self.storage, offset, realigned(kind, offset))

    @property
    def is_dense(self) -> bool:
        """Whether the map fills its storage."""
        return self.offset == 0 and self.type.stride == self.type.c

    @property
    def is_file_layout(self) -> bool:
        """Whether this is the same sequence of elements as NCHW, in the type of the file."""
        return self.is_dense and (self.type.h * self.type.w == 1 or self.type.c == 1) and self.type.dtype not in HALVES

    def overlaps(self, other: MapRef) -> bool:
        """Whether two maps of one storage share channels."""
        return self.offset < other.offset + other.type.c and other.offset < self.offset + self.type.c


@dataclasses.dataclass(frozen=True)
class Guards:
    """Elements of a storage before its map and behind it: a kernel that reads the map beside a wider one meets them."""

    before: int = 0
    after: int = 0

    def __or__(self, other: Guards) -> Guards:
        return Guards(max(self.before, other.before), max(self.after, other.after))

    def around(self, kind: MapType) -> tuple[int, MapType]:
        """Give the offset of a map that begins on a cache line behind them, and its type."""
        offset = -(-max(self.before, 1) // LINE) * LINE
        return offset, realigned(dataclasses.replace(kind, whole=offset + kind.elements + self.after), offset)


@dataclasses.dataclass(frozen=True)
class Slot:
    """Channels from `start` on of the buffer of `root`."""

    root: ir.Value
    start: int


@dataclasses.dataclass
class Slots:
    """The slot of each map that has one (a root has slot 0 of itself), and what must be copied to a second place."""

    of: dict[ir.Value, Slot] = dataclasses.field(default_factory=dict)
    copies: dict[ir.Value, list[Slot]] = dataclasses.field(default_factory=dict)


def assign_slots(nodes: Iterable[ir.Node]) -> Slots:
    """Slots for the channel concatenations of maps among the nodes."""
    return _assign({node.outputs[0]: leaves(node.outputs[0]) for node in nodes if is_channel_concat(node)})


def assign_vector_slots(nodes: Iterable[ir.Node]) -> Slots:
    """Assign slots to concatenations of per-channel vectors (statistics), where all parts start on a cache line."""
    concats = {node.outputs[0]: vector_leaves(node.outputs[0]) for node in nodes if is_vector_concat(node)}
    return _assign({v: parts for v, parts in concats.items() if all(leaf.start % LINE == 0 for leaf in parts)})


def _assign(concats: dict[ir.Value, tuple[Leaf, ...]]) -> Slots:
    slots = Slots()
    roots: dict[ir.Value, tuple[Leaf, ...]] = {}
    for value, parts in sorted(concats.items(), key=lambda item: (len(item[1]), item[1][-1].stop), reverse=True):
        found = _find_run([leaf.value for leaf in parts], roots)
        if found is None:
            roots[value] = parts
            slots.of[value] = Slot(value, 0)
            _place_leaves(value, parts, slots)
        else:
            slots.of[value] = found
    return slots


def assign_guards(nodes: Iterable[ir.Node], slots: Slots) -> dict[ir.Value, Guards]:
    """Find the maps of fewer channels that operators read beside their dx, or the roots that have them in their slots,
    and what those need around them."""
    found: dict[ir.Value, Guards] = {}
    for node in nodes:
        spec = parse(node.op_type) if node.domain == DOMAIN and "Part" in node.op_type else None
        for number in parts_of(spec.epilogue) if spec is not None else ():
            operands = dict(zip(spec.operands, node.inputs, strict=True)) if spec is not None else {}
            x, part = operands[f"x_{number}"], operands[f"part_{number}"]
            assert x is not None and part is not None and x.shape is not None and part.shape is not None
            start = node.attributes[f"start_{number}"].as_int()
            after = int(part.shape[0]) - start - int(x.shape[1])  # type: ignore[arg-type]
            owner = _owner(x, slots)
            found[owner] = found.get(owner, Guards()) | Guards(start, after)
    return found


def _owner(value: ir.Value, slots: Slots) -> ir.Value:
    """Find the value whose storage holds another one."""
    while value not in slots.of and (node := value.producer()) is not None and node.op_type == "Split":
        assert node.inputs[0] is not None
        value = node.inputs[0]
    return slots.of[value].root if value in slots.of else value


def is_vector_concat(node: ir.Node | None) -> bool:
    """Whether the node concatenates vectors of known length."""
    if node is None or node.op_type != "Concat" or node.domain:
        return False
    return all(v is not None and _is_vector(v) for v in (*node.inputs, node.outputs[0]))


def _is_vector(value: ir.Value) -> bool:
    floats = value.dtype in (None, ir.DataType.FLOAT)
    return floats and value.shape is not None and len(value.shape) == 1 and isinstance(value.shape[0], int)


def vector_leaves(value: ir.Value) -> tuple[Leaf, ...]:
    """List the vectors that a concatenation consists of, nested ones resolved, with their elements [start, stop)."""
    found: list[Leaf] = []
    start, pending = 0, [value]
    while pending:
        current = pending.pop()
        node = current.producer()
        if node is not None and is_vector_concat(node):
            pending += [v for v in reversed(node.inputs) if v is not None]
        else:
            assert current.shape is not None
            stop = start + int(current.shape[0])  # type: ignore[arg-type]
            found.append(Leaf(current, start, stop))
            start = stop
    return tuple(found)


def _find_run(parts: list[ir.Value], roots: dict[ir.Value, tuple[Leaf, ...]]) -> Slot | None:
    """Where a root has these leaves side by side."""
    for root, leaves_of_root in roots.items():
        held = [leaf.value for leaf in leaves_of_root]
        for first in range(len(held) - len(parts) + 1):
            if held[first : first + len(parts)] == parts:
                return Slot(root, leaves_of_root[first].start)
    return None


def _place_leaves(root: ir.Value, parts: Sequence[Leaf], slots: Slots) -> None:
    for leaf in parts:
        slot = Slot(root, leaf.start)
        if leaf.value in slots.of or not _can_be_placed(leaf.value):
            slots.copies.setdefault(leaf.value, []).append(slot)
        else:
            slots.of[leaf.value] = slot


def _can_be_placed(value: ir.Value) -> bool:
    """Whether a kernel writes this value, and so can write it anywhere."""
    node = value.producer()
    return node is not None and node.op_type not in VIEWS


def to_nhwc(shape: Sequence[int]) -> tuple[int, ...]:
    """Reorder a rank 4 shape of the file to memory's order of axes."""
    n, c, h, w = shape
    return n, h, w, c


def map_type(shape: Sequence[int], dtype: str, target: Target) -> MapType:
    """Make the map that fills its storage, for a tensor of the file. Only a GPU's kernels look at its alignment, and at
    its type where it is no float32 in the file."""
    n, c, h, w = shape
    if not target.aligns_maps:
        return MapType(n, h, w, c, c, stored_dtype(shape, "float32", target))
    return realigned(MapType(n, h, w, c, c, stored_dtype(shape, dtype, target), ALIGN), 0)


def stored_dtype(shape: Sequence[int], dtype: str, target: Target) -> str:
    """Name the type in which a tensor of the file lies in memory: maps of more than one pixel in that of the target."""
    is_map = len(shape) == 4 and shape[2] * shape[3] > 1
    return target.map_dtype if is_map and dtype == "float32" else dtype


def realigned(kind: MapType, offset: int) -> MapType:
    """Give the type the alignment that it has at an offset; none, if it had none before."""
    if not kind.align:
        return kind
    return dataclasses.replace(kind, align=math.gcd(ALIGN, offset, kind.stride, kind.c))
