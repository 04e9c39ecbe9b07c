"""A transposed convolution to be tested, or one of its gradients, on a CPU or a GPU."""

from __future__ import annotations

import dataclasses

from conv_case import ConvCase
from hypothesis import strategies as st

from bnfuse.core.windows import transposed_size
from bnfuse.opset.spec import (
    MAPS_LIKE_DY,
    MAPS_LIKE_X,
    is_numbered_map,
    parse,
)
from bnfuse.runtime.kernels.kernel import MapType, Problem

LIKE_Y = ("y", *MAPS_LIKE_DY)
CHANNELS_OF_Y = ("grad_a", "grad_b", "grad_p", "grad_q", "grad_w", "dbias", "bias")

FORWARD = (
    "ConvTranspose",
    "ConvTransposeStatistics",
    "ConvTransposeBias",
    "NormalizeReluConvTransposeBiasStatistics",
    "NormalizeLeakyReluAddNormalizedConvTransposeStatistics",
)
INPUT = (
    "ConvTransposeGradInput",
    "BatchNormGradConvTransposeGradInputReduce",
    "BatchNormGradNormalizeReluConvTransposeGradInputReluGradReduce",
    "NormalizeTanhConvTransposeGradInputAddGradientTanhGradReduceReduceOtherAccumulate",
    "ConvTransposeGradInputReduceScale",
)
WEIGHT = (
    "ConvTransposeGradWeight",
    "ConvTransposeGradWeightBiasGrad",
    "BatchNormGradNormalizeReluConvTransposeGradWeight",
    "BatchNormGradReluConvTransposeGradWeightBiasGrad",
)


@dataclasses.dataclass(frozen=True)
class TransposedCase(ConvCase):
    """x is [n, cin, h, w]. `slots` widens every map's buffer and moves it inside."""

    @property
    def ranges(self) -> dict[str, int]:
        return {"acc_start": 0, "acc_stop": self.cin}

    @property
    def out(self) -> tuple[int, ...]:
        return transposed_size(dataclasses.replace(self, op="ConvTranspose").attributes, (self.h, self.w), self.more)

    @property
    def more(self) -> tuple[int, int]:
        return self.output_padding

    def shape(self, name: str) -> tuple[int, ...]:
        forward = not parse(self.op).is_gradient
        if name in ("weight", "dweight"):
            return (self.cin, self.cout // self.group, *self.kernel)
        if name in LIKE_Y:
            return (self.n, self.cout, *self.out)
        if name in (*MAPS_LIKE_X, "dx", "acc") or is_numbered_map(name):
            return (self.n, self.cin, self.h, self.w)
        of_y = name in CHANNELS_OF_Y or (forward and name in ("mean", "variance"))
        return (self.cout if of_y else self.cin,)

    def offset(self, name: str) -> int:
        """Each map in a slot of its own, so that no two are at the same place."""
        return 1 + len(name) if self.slots else 0

    def map(self, name: str) -> MapType:
        n, c, h, w = self.shape(name)
        return MapType(n, h, w, c, c + (self.slots and self.slots + self.offset(name)))

    def problem(self) -> Problem:
        spec = parse(self.op)
        names = [name for name in (*spec.operands, *spec.results) if name not in ("weight", "dweight", "acc")]
        maps = tuple((name, self.map(name)) for name in names if len(self.shape(name)) == 4)
        return Problem(self.op, maps, tuple(self.attributes.items()), self.shape("weight"))


@st.composite
def cases(draw: st.DrawFn, ops: tuple[str, ...], most: int = 40) -> TransposedCase:
    """Draw transposed convolutions of any geometry that makes a map."""
    group = draw(st.sampled_from((1, 1, 1, 2, 3)))
    kernel, strides, dilations = (draw(st.tuples(st.integers(1, k), st.integers(1, k))) for k in (4, 3, 2))
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    n, h, w = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    room = [(size - 1) * strides[i] + reach[i] - 1 for i, size in enumerate((h, w))]
    before = [draw(st.integers(0, min(2, room[i]))) for i in (0, 1)]
    behind = [draw(st.integers(0, min(2, room[i] - before[i]))) for i in (0, 1)]
    more = tuple(draw(st.integers(0, max(strides[i], dilations[i]) - 1)) for i in (0, 1))
    cin, cout = (group * draw(st.integers(1, most)) for _ in "io")
    op, slots = draw(st.sampled_from(ops)), draw(st.integers(0, 3))
    pads = (*before, *behind)
    return TransposedCase(op, n, h, w, cin, cout, kernel, strides, pads, dilations, group, slots, more)
