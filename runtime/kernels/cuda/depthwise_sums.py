"""What partials.py lacks for depthwise convolutions.

Moments of strips of pixels, and the merge of a weight gradient, whose result has its channels outside: [channel][tap].
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.depthwise_shape import Plan
from bnfuse.runtime.kernels.cuda.device import Buffer, Expr, Stage
from bnfuse.runtime.kernels.cuda.partials import COLUMNS, Columns, Moments, Team
from bnfuse.runtime.kernels.kernel import Param

LANES = 32  # rows that a merging block reads side by side: chosen by hand


def zeroed(count: int) -> Buffer:
    """Allocate float32 registers, filled with zeros."""
    held = d.registers(count)
    d.unrolled(count, lambda i: d.put(held, i, T.float32(0)))
    return held


def round_as_stored(values: Buffer, count: int, dtype: str) -> None:
    """Round float32 registers to what a map of this type holds."""
    if dtype == "float32":
        return
    word, pair = d.registers(1, "uint32"), d.registers(2)
    for i in range(0, count, 2):
        last = min(i + 1, count - 1)
        d.pack(word, 0, values[i], values[last], dtype)
        d.unpack(word[0], dtype, pair, 0)
        d.put(values, i, pair[0])
        d.put(values, last, pair[last - i])


def team_of(plan: Plan) -> Team:
    """Describe a block of a plan as a team: its tiles are lanes."""
    return Team(plan.vectors, plan.items, plan.lanes)


def add_first(moments: Moments, values: Buffer) -> None:
    """Shift by the first value that a thread has ever seen."""
    is_first = T.bind(moments.count[0] == T.float32(0))
    d.unrolled(moments.width, lambda j: d.put(moments.shift, j, tirx.Select(is_first, values[j], moments.shift[j])))


def add_value(moments: Moments, values: Buffer, at: int) -> None:
    """Take in the pixel whose channels are values[at:]; `add_first` has been called."""

    def one(j: Expr) -> None:
        apart = T.bind(values[at + j] - moments.shift[j])
        d.put(moments.first, j, moments.first[j] + apart)
        d.put(moments.second, j, d.fma(apart, apart, moments.second[j]))

    d.unrolled(moments.width, one)


def weights_stage(name: str, params: Sequence[Param], *, tiles: int, taps: int, channels: int) -> Stage:
    """Merge `weight_partials` [tiles][quantities][channels], sums, into "dweight" [channel][tap] and "dbias".

    The quantities are the taps, if any, and behind them the sum of dy if "dbias" is among `params`.
    """
    quantities = taps + any(p.name == "dbias" for p in params)
    total = quantities * channels
    shared = LANES // 2 * COLUMNS * 8
    with d.stage(name, params, grid=(-(-total // COLUMNS), 1, 1), threads=LANES * COLUMNS, shared=shared) as block:
        columns = Columns(block, tiles, total, LANES, d.shared_memory(shared).view("float64"))
        sums = d.registers(1, "float64")
        d.put(sums, 0, tirx.const(0, "float64"))
        columns.sweep(block["weight_partials"], 1, lambda _, values: d.put(sums, 0, sums[0] + values(0)))
        columns.join(sums, 1)

        def store() -> None:
            channel, tap = T.bind(columns.channel % channels), T.bind(columns.channel // channels)
            value = tirx.Cast("float32", sums[0])

            def write_weight() -> None:
                d.put(block["dweight"], channel * taps + tap, value)

            def write_bias() -> None:
                d.put(block["dbias"], channel, value)

            if quantities > taps > 0:
                d.when(tap < taps, write_weight, write_bias)
            else:
                (write_weight if taps else write_bias)()

        columns.first_lane(store)
    return block.stage
