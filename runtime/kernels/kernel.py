"""What the lowering and a kernel generator agree on.

A kernel is a TIR function and the list of its parameters. Its generator is a pure function of a frozen
*problem* (shapes, strides, pads, steps) and a target, so the pair is the kernel's key in the cache.

Feature maps are NHWC, float32, bfloat16 or (on a GPU) float16. A map may be a channel slot of a wider buffer: pixel
(n, h, w), channel c lies at  offset + ((n*H + h)*W + w)*stride + c  of a flat buffer. The stride is part of the
problem; the offset is an int32 argument, so that layers that differ only in their slot share one kernel. Other
tensors are dense, in the layout of the ONNX file (weights OIHW), flat.

The TIR function takes, in the order of `params`: each operand and result, in the order of the operator's spec
(operands first); then the offsets of the maps among them, in the same order, named `<map>_offset`. Flat buffers
have the exact number of elements given in `Param.elements` (for a map: that of the whole buffer it lies in).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

from bnfuse.opset.spec import OpSpec, may_be_of_samples, parse
from bnfuse.runtime.targets.target import Target

Access = Literal["in", "out", "inout"]

# gates, and gradients of poolings, by the map that they multiply or are added to; all others are of dx
GATED = {"gate": "x", "skip_gate": "x", "grad_gate": "dy", "grad_other": "dy"}
# coefficients that each sample may have of its own, by the map that they are of; all others are of dx
SAMPLEWISE = {
    **dict.fromkeys(("a", "b", "skip_a", "skip_b"), "x"),
    **dict.fromkeys(("grad_a", "grad_b", "grad_p", "grad_q", "grad_w"), "dy"),
}


@dataclasses.dataclass(frozen=True)
class MapType:
    """A feature map as a kernel sees it: n images of h by w pixels, c channels, `stride` elements between pixels."""

    n: int
    h: int
    w: int
    c: int
    stride: int
    dtype: str = "float32"  # as stored
    align: int = 0  # on a GPU: offset, stride and c are multiples of this power of two (at most 8)
    whole: int = 0  # where the images are some of those in a buffer: the elements of all of it
    spread: int = 1  # pixels of the maps beside it for which one of its own stands: a gate's are whole images

    @property
    def pixels(self) -> int:
        """Count the pixels of all images: n*h*w."""
        return self.n * self.h * self.w

    @property
    def elements(self) -> int:
        """Count the elements of the whole buffer."""
        return self.whole or self.pixels * self.stride

    def pixel(self, number: Any) -> Any:
        """Give the pixel that stands for pixel `number` (counted over n, h, w) of the maps beside it."""
        return number if self.spread == 1 else number // self.spread

    def __repr__(self) -> str:
        """Show all fields by name, `whole` and `spread` where they say something."""
        defaults = {"whole": 0, "spread": 1}
        names = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != defaults.get(f.name)]
        return f"MapType({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


@dataclasses.dataclass(frozen=True)
class Param:
    """One argument of a kernel. `name` is that of the operator's operand or result."""

    name: str
    access: Access
    elements: int
    dtype: str = "float32"
    is_map: bool = False  # maps have an int32 offset among the trailing arguments
    length: str = ""  # where code learns it in each launch: parameters of one name have as many elements


@dataclasses.dataclass(frozen=True)
class Problem:
    """One `ai.bnfuse` operator with everything that is static about it.

    Source operators map onto the same form: a plain Conv with bias is `ConvBias`, a Relu `ReluPointwise`, a ReluGrad
    `PointwiseGradReluGrad`.

    `maps` has every operand and result that is a feature map, by its name in the spec: x, y, skip, stored, dy,
    grad_x, dx, other, x_1, ... and MaxPool's indices; gates too, and coefficients that each sample has of its own: they
    know how many pixels of the map beside them one of theirs stands for. What the lowering resolves, kernels never see:
    after a `Slice`, dy *is* the slot of that channel range; under `Accumulate`, dx *is* the slot
    acc[:, acc_start:acc_stop], updated in place, and `acc` is no parameter. The indices of a MaxPool never leave the
    runtime: they are the position inside the window (row*kernel width + column), in NHWC.

    `tail` are operators on what the operator sums of each channel, done where its sums are joined: each a name in
    kernels/common/coefficients.py with its arguments. Their parameters follow the operator's.
    """

    op: str  # OpSpec.name
    maps: tuple[tuple[str, MapType], ...]
    attributes: tuple[tuple[str, Any], ...] = ()  # name and value; lists as tuples
    weight: tuple[int, ...] = ()  # OIHW, convolutions only
    tail: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "maps", tuple(with_spread(dict(self.maps)).items()))

    def __repr__(self) -> str:
        """Show all fields by name, the tail where there is one."""
        names = ["op", "maps", "attributes", "weight", *(["tail"] if self.tail else [])]
        return f"Problem({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def spec(self) -> OpSpec:
        """Give the spec that the operator's name stands for."""
        spec = parse(self.op)
        assert spec is not None, self.op
        return spec

    def map(self, name: str) -> MapType:
        """Give a map by its name in the spec; KeyError where the problem has none of that name."""
        return dict(self.maps)[name]

    def attribute(self, name: str) -> Any:
        """Give an attribute's value, a list as a tuple; KeyError where the problem has none of that name."""
        return dict(self.attributes)[name]


def is_gate(name: str) -> bool:
    """Tell whether an operand is, or may be, a map of which a pixel stands for those of an image, or of all images."""
    return name in (*GATED, "other_gate") or name.startswith("gate_")


def with_spread(maps: Mapping[str, MapType]) -> dict[str, MapType]:
    """Say of each gate, and of coefficients of each sample, how many pixels of the map beside it one of its own stands
    for."""
    found = dict(maps)
    for name in maps:
        if not is_gate(name) and not may_be_of_samples(name):
            continue
        of = GATED.get(name) or SAMPLEWISE.get(name, "dx")
        beside = next(maps[near] for near in (of, "dx", "x") if near in maps)
        found[name] = dataclasses.replace(maps[name], spread=beside.pixels // maps[name].pixels)
    return found


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of the ways to do a problem, all of which compute the same: an algorithm and how it cuts up the work.

    A generator that has several names them in a function `choices(problem, target)` of its module, that of its rule
    first, and takes `algorithm` and `plan` as further arguments. `plan` is a frozen dataclass of the generator's; None
    stands for the rule's.
    """

    algorithm: str
    plan: Any = None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel to be compiled.

    For a CPU `build()` makes the TIR function (a tvm PrimFunc named `name`), for a GPU a tuple of stages
    (kernels/cuda/device.py) that run one after the other. `scalars` are run-time arguments behind all others.
    """

    name: str
    problem: Any
    target: Target
    params: tuple[Param, ...]
    build: Callable[[], Any]
    plan: Any = None  # of a choice that is not the rule's
    scalars: tuple[tuple[str, str], ...] = ()  # name and dtype, on a GPU

    @functools.cached_property
    def key(self) -> str:
        """Give everything the generated code depends on, as text; the cache hashes it with the generators' sources."""
        return f"{self.name} {self.problem!r} {self.target!r}" + (f" {self.plan!r}" if self.plan is not None else "")
