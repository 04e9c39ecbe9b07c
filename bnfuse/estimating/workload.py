"""What an estimate is made from: the layers of one training iteration in order, and the tensors that each touches.

Whole tensors are the units ([Tsai21], sections 3.2 and 4.2.3). A workload comes from a training graph, where every
node is a layer (training.py), from a forward graph, whose backward pass follows by the paper's table 3.1
(layerwise.py), or from the launches of a compiled step (launches.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

from bnfuse.runtime.targets.target import HALVES

Phase = Literal["forward", "backward", "update"]
Kind = Literal["data", "weight", "map", "map_gradient", "weight_gradient", "vector"]
NEVER = 1 << 60  # the next use of what is not used again


@dataclasses.dataclass(frozen=True)
class Tensor:
    """`bytes` at the stored type. `vector` is what has an entry per channel or less: statistics, coefficients.

    `given`: off-chip memory holds it before the iteration (data, weights). `kept`: off-chip memory must hold it
    after the iteration (weight gradients, running statistics, the loss). `is_image`: it has more than one pixel, so a
    precision of 16 bits stores it in these.
    """

    name: str
    bytes: int
    kind: Kind
    given: bool = False
    kept: bool = False
    is_image: bool = False


@dataclasses.dataclass(frozen=True)
class Access:
    """One tensor that a layer reads or writes, by its index in the workload.

    `bytes` may be less than the tensor's (a range of channels, a sample). `sweeps` is how many times the layer passes
    over them: what does not fit into the cache is fetched anew each time.
    """

    tensor: int
    bytes: int
    sweeps: int = 1


@dataclasses.dataclass(frozen=True)
class Layer:
    """One step of the iteration. `type` is the kind that times are summed by (Conv2D, BatchNorm, ...), `part` the layer
    of the network that it belongs to: a backward layer has its forward layer's name there.

    `flops`: a multiply-add counts as two; elementwise operations are counted too. `recurrence` numbers the time steps
    of a recurrent cell that share their weights (None elsewhere). `exchange` says how data-parallel workers make
    what it writes of what each of them has; empty for what each does by itself.
    """

    name: str
    type: str
    phase: Phase
    flops: int
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    part: str = ""
    recurrence: int | None = None
    exchange: Literal["", "sum", "gather"] = ""

    @property
    def accesses(self) -> tuple[Access, ...]:
        """All accesses, reads first."""
        return (*self.reads, *self.writes)

    @property
    def is_dense(self) -> bool:
        """Type I of [Tsai21], section 5.2: each output element is made of many input elements."""
        return self.type in DENSE_TYPES


# Type-I layers: convolutions and matrix products. Every other type is pointwise, a pooling or a copy: type II.
DENSE_TYPES = frozenset({"Conv2D", "DepthwiseConv2D", "Dense", "MatMul"})


class Touch(NamedTuple):
    """What one layer does with one tensor.

    `size` is what it holds of it; `until` the layer that needs its value next (NEVER: its value is dead here); `kept`:
    memory must have this value in the end.

    `swept_in` and `swept_out` are the bytes that cross the bus if it streams, all sweeps together.
    """

    tensor: int
    read: int
    written: int
    size: int
    swept_in: int
    swept_out: int
    until: int
    kept: bool
    weight: bool


@dataclasses.dataclass(frozen=True)
class Workload:
    """`batch` samples an iteration; `precision` is what maps are stored in, and products computed."""

    name: str
    batch: int
    tensors: tuple[Tensor, ...]
    layers: tuple[Layer, ...]
    precision: str = "fp32"

    @property
    def flops(self) -> int:
        """Operations of the iteration."""
        return sum(layer.flops for layer in self.layers)

    @functools.cached_property
    def touches(self) -> list[list[Touch]]:
        """For each layer its tensors, merged where it reads and writes the same."""
        found: list[list[Touch]] = []
        later: dict[int, tuple[int, bool]] = {}  # tensor -> next layer that touches it, whether it needs the value
        for index in range(len(self.layers) - 1, -1, -1):
            touches = merged(self, self.layers[index], later)
            for touch in touches:
                covers = touch.written >= self.tensors[touch.tensor].bytes
                later[touch.tensor] = (index, touch.read > 0 or not covers)
            found.append(touches)
        found.reverse()
        return found


def in_precision(workload: Workload, precision: str) -> Workload:
    """Give the workload of a step in a precision: in bf16 and fp16 maps of more than one pixel have half of the bytes,
    and all else is float32."""
    if precision not in HALVES:
        return dataclasses.replace(workload, precision=precision)
    tensors = workload.tensors

    def halved(accesses: tuple[Access, ...]) -> tuple[Access, ...]:
        return tuple(dataclasses.replace(a, bytes=a.bytes // 2) if tensors[a.tensor].is_image else a for a in accesses)

    return dataclasses.replace(
        workload,
        tensors=tuple(dataclasses.replace(t, bytes=t.bytes // 2) if t.is_image else t for t in tensors),
        layers=tuple(
            dataclasses.replace(layer, reads=halved(layer.reads), writes=halved(layer.writes))
            for layer in workload.layers
        ),
        precision=precision,
    )


def is_stored_image(kind: Kind, shape: Sequence[int]) -> bool:
    """Tell whether a tensor is a map, or a map's gradient, of more than one pixel."""
    return kind in ("map", "map_gradient") and len(shape) == 4 and shape[2] * shape[3] > 1


def merged(workload: Workload, layer: Layer, later: dict[int, tuple[int, bool]]) -> list[Touch]:
    """Merge a layer's accesses by tensor; `later` says who touches each next."""
    sums: dict[int, list[int]] = {}
    for position, accesses in ((0, layer.reads), (1, layer.writes)):
        for access in accesses:
            entry = sums.setdefault(access.tensor, [0, 0, 0, 0])
            entry[position] += access.bytes
            entry[position + 2] += access.bytes * access.sweeps
    touches = []
    for index, (read, written, swept_in, swept_out) in sums.items():
        tensor = workload.tensors[index]
        until, needed = later.get(index, (NEVER, False))
        kept = tensor.kept and index not in later
        read, written = min(read, tensor.bytes), min(written, tensor.bytes)
        size, weight = max(read, written), tensor.kind == "weight"
        until = until if needed else NEVER
        touches.append(Touch(index, read, written, size, swept_in, swept_out, until, kept, weight))
    return touches
