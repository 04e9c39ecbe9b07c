"""Steps that passes took across Concats, Splits and channel shuffles, taken back to where they were.

A step may read a concatenation of maps as convolutions wrote them, with coefficients for each range of channels. Other
runtimes fold a BatchNorm into the convolution before it, if it stands there: so each map is given its steps first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from bnfuse.analysis.provenance import channels, is_channel_concat, is_channel_split


@dataclasses.dataclass(frozen=True)
class Entry:
    """What happens to a map on its way in, by channel: a*x + b, and where the activation holds."""

    a: npt.NDArray[np.float32]
    b: npt.NDArray[np.float32]
    active: npt.NDArray[np.bool_]

    def cut(self, start: int, stop: int) -> Entry:
        """Give that of the channels [start, stop)."""
        return Entry(self.a[start:stop], self.b[start:stop], self.active[start:stop])

    def ordered(self, order: npt.NDArray[np.int64]) -> Entry:
        """Give that of the channels in this order."""
        return Entry(self.a[order], self.b[order], self.active[order])

    @property
    def is_identity(self) -> bool:
        """Whether a*x + b is x."""
        return bool((self.a == 1).all() and (self.b == 0).all())

    def matches(self, a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> bool:
        """Tell whether these are the coefficients."""
        return np.array_equal(self.a, a) and np.array_equal(self.b, b)


def parts_of(value: ir.Value, entry: Entry) -> list[tuple[ir.Value, Entry]] | None:
    """List what a map is concatenated from, each with its steps; None where it is no concatenation of channels."""
    writer = value.producer()
    if not is_channel_concat(writer):
        return None
    found, start = [], 0
    for part in writer.inputs:
        assert part is not None
        stop = start + channels(part)
        found.append((part, entry.cut(start, stop)))
        start = stop
    return found


def shuffled(
    value: ir.Value, entry: Entry, constants: Mapping[ir.Value, np.ndarray]
) -> tuple[ir.Value, Entry, ir.Value] | None:
    """Give what a map is a permutation of, with its steps, and the order; None where it is none."""
    writer = value.producer()
    if writer is None or writer.op_type != "Gather" or writer.domain:
        return None
    source, order = writer.inputs[:2]
    axis = writer.attributes["axis"].as_int() if "axis" in writer.attributes else 0
    if source is None or order is None or axis != 1 or len(source.shape or ()) != 4:
        return None
    known = constants.get(order, order.const_value.numpy() if order.const_value is not None else None)
    if known is None or not np.array_equal(np.sort(known), np.arange(len(entry.a))):
        return None
    return source, entry.ordered(np.argsort(known)), order


def whole_of(value: ir.Value) -> tuple[ir.Value, int] | None:
    """Give what a map is a piece of, and the channel where it starts; None where it is none."""
    writer = value.producer()
    if not is_channel_split(writer) or writer.inputs[0] is None:
        return None
    before = writer.outputs[: writer.outputs.index(value)]
    return writer.inputs[0], sum(channels(piece) for piece in before)


def is_placed(value: ir.Value) -> bool:
    """Tell whether a map is put together, cut or gathered from others."""
    writer = value.producer()
    return writer is not None and not writer.domain and writer.op_type in ("Concat", "Split", "Gather")
