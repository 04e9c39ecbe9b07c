"""What an estimate is made from: the layers of one training iteration in order, and the tensors that each touches.

Whole tensors are the units (papers/004, sections 3.2 and 4.2.3). A workload comes from a training graph, where every
node is a layer (training.py), from a forward graph, whose backward pass follows by the paper's table 3.1
(layerwise.py), or from the launches of a compiled step (launches.py).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Phase = Literal["forward", "backward", "update"]
Kind = Literal["data", "weight", "map", "map_gradient", "weight_gradient", "vector"]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """`bytes` at the stored type. `vector` is what has an entry per channel or less: statistics, coefficients.

    `given`: off-chip memory holds it before the iteration (data, weights). `kept`: off-chip memory must hold it
    after the iteration (weight gradients, running statistics, the loss).
    """

    name: str
    bytes: int
    kind: Kind
    given: bool = False
    kept: bool = False


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
    of a recurrent cell that share their weights (None elsewhere).
    """

    name: str
    type: str
    phase: Phase
    flops: int
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    part: str = ""
    recurrence: int | None = None

    @property
    def accesses(self) -> tuple[Access, ...]:
        return (*self.reads, *self.writes)

    @property
    def is_dense(self) -> bool:
        """Type I of papers/004, section 5.2: each output element is made of many input elements."""
        return self.type in DENSE_TYPES


# Type-I layers: convolutions and matrix products. Every other type is pointwise, a pooling or a copy: type II.
DENSE_TYPES = frozenset({"Conv2D", "DepthwiseConv2D", "Dense", "MatMul"})


@dataclasses.dataclass(frozen=True)
class Workload:
    """`batch` samples an iteration."""

    name: str
    batch: int
    tensors: tuple[Tensor, ...]
    layers: tuple[Layer, ...]

    @property
    def flops(self) -> int:
        return sum(layer.flops for layer in self.layers)
