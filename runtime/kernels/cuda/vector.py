"""An operator's elementwise steps at a pixel and a vector of channels, for every kernel of the GPU target.

    open(channel, left)           once a thread: its per-channel vectors, into registers
    fetch(i, pixel, valid)        the maps' channels at a pixel, raw, into the registers of pass i: only loads
    finish(i, values, ...)        the steps of bnfuse/opset/spec.py in float32, the store, the sums
    close(row)                    the tile's sums become a row of the partials

Several passes are fetched before the first is finished, so that many bytes are on their way. What the core of the
operator made (a convolution's sums, a pool's window, or nothing but the map) comes as float32 registers `values`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.opset.spec import OpSpec
from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.common.coefficients import Member
from bnfuse.runtime.kernels.common.epilogue import EpiloguePlan, Total, totals_of
from bnfuse.runtime.kernels.common.tails import is_of_tail
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda import partials
from bnfuse.runtime.kernels.cuda.device import Block, Buffer, Expr, Lanes, Map, Stage
from bnfuse.runtime.kernels.cuda.operand import load_vector, unpack_words, words_of
from bnfuse.runtime.kernels.cuda.partials import Team
from bnfuse.runtime.kernels.kernel import MapType, Param, Problem


def width_of(kinds: Iterable[MapType]) -> int:
    """Count the channels that a thread takes at a time: 16 bytes of the narrowest of the maps."""
    return 8 if any(d.size_of(kind.dtype) == 2 for kind in kinds) else 4


class Reader:
    """Registers for vectors of channels of some maps, at `passes` pixels, and of per-channel vectors."""

    def __init__(
        self, block: Block, maps: Mapping[str, MapType], vectors: Sequence[str], width: int, passes: int = 1
    ) -> None:
        self.block, self.kinds, self.width = block, dict(maps), width
        self.raw = {n: d.registers(passes * words_of(kind, width), "uint32") for n, kind in maps.items()}
        self.values = {n: d.registers(width) for n in maps}
        self.vectors = {n: d.registers(width) for n in vectors}
        self.channel: Expr = 0
        self.left: Expr | None = None

    def open(self, channel: Expr, left: Expr | None, aligned: bool) -> None:
        """Load the per-channel vectors of this thread's channels.

        They are those from `channel` on, of which `left` exist (None: all). `aligned`: `channel` and the number of
        channels are multiples of 4.
        """
        self.channel, self.left = channel, left
        for name, held in self.vectors.items():
            load_vector(self.block[name], channel, self.width, held, aligned, left)

    def fetch(self, index: Expr, pixel: Expr, valid: Expr = True) -> None:
        """Load the maps' channels at a pixel, raw, for pass `index`; nothing where not `valid`."""

        def load() -> None:
            for name, kind in self.kinds.items():
                source, count = self.block.map(name, kind), words_of(kind, self.width)
                lanes = Lanes.of(self.width, kind)
                d.fetch(source, source.at(pixel, self.channel), lanes, self.raw[name], index * count, self.left)

        d.when(valid, load)

    def unpack(self, index: Expr) -> None:
        """Unpack pass `index` to float32, for `load`."""
        for name, kind in self.kinds.items():
            unpack_words(self.raw[name], index * words_of(kind, self.width), kind, self.width, self.values[name])

    def load(self, j: int) -> steps.Load:
        """Give the `load` of kernels/common/steps.py at channel j of the vector."""
        return lambda name, is_vector: (self.vectors if is_vector else self.values)[name][j]


def round_words(values: Buffer, kind: MapType, width: int, into: Buffer) -> None:
    """Round `width` float32 to words as a map stores them."""
    if d.size_of(kind.dtype) == 4:
        for j in range(width):
            d.put(into, j, d.bits(values[j]))
    else:
        for j in range(0, width, 2):
            d.pack(into, j // 2, values[j], values[j + 1], kind.dtype)


def store_words(target: Map, index: Expr, lanes: Lanes, words: Buffer, left: Expr | None) -> None:
    """Store `lanes.count` channels, given as words, from `index` on; none from `left` on."""
    per_word = 4 // d.size_of(target.type.dtype)
    view = d.words(target.buffer, target.type.elements, target.type.dtype) if lanes.access >= per_word else None
    for first in range(0, lanes.count, lanes.access):

        def store(first: int = first) -> None:
            if view is None:
                half = words[first // per_word] >> T.uint32(16 * (first % per_word))
                d.put(target.buffer, index + first, tirx.Cast("uint16", tirx.bitwise_and(half, T.uint32(0xFFFF))))
                return
            count = lanes.access // per_word
            place = (index + first) // per_word if per_word > 1 else index + first
            span = (lambda i: i) if count == 1 else (lambda i: T.ramp(i, 1, count))
            T.buffer_store(view, words[span(first // per_word)], [span(place)])

        d.when(True if left is None else first < left, store)


class Writer:
    """Rounds vectors of channels to what a map stores, and stores them."""

    def __init__(self, block: Block, name: str, kind: MapType, width: int) -> None:
        self.target, self.kind, self.width = block.map(name, kind), kind, width
        self.words = d.registers(words_of(kind, width), "uint32")

    def store(self, values: Buffer, pixel: Expr, channel: Expr, left: Expr | None) -> None:
        """Round and store the channels of a pixel from `channel` on, float32 registers; none from `left` on."""
        round_words(values, self.kind, self.width, self.words)
        index = self.target.at(pixel, channel)
        store_words(self.target, index, Lanes.of(self.width, self.kind), self.words, left)

    def stored(self, into: Buffer) -> None:
        """Read what has just been stored, as float32."""
        unpack_words(self.words, 0, self.kind, self.width, into)


# -- reductions ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Reductions:
    """What an operator reduces over pixels, per channel."""

    statistics: bool
    totals: tuple[Total, ...]
    counted: bool = False  # statistics of tiles that have different numbers of pixels

    @staticmethod
    def of(spec: OpSpec) -> Reductions:
        """Find what an operator reduces."""
        return Reductions("Statistics" in spec.epilogue, totals_of(spec), spec.core == "ConvTranspose")

    def __bool__(self) -> bool:
        return self.quantities > 0

    @property
    def quantities(self) -> int:
        """Count the floats of a channel in a row of partials: [count,] mean and M2, or a sum for each total."""
        return 2 + self.counted if self.statistics else len(self.totals)

    @property
    def results(self) -> tuple[str, ...]:
        """Name the results, [c] float32 each."""
        return ("mean", "variance") if self.statistics else tuple(r for total in self.totals for r in total.results)

    def shared_bytes(self, team: Team) -> int:
        """Count the bytes of shared memory that `close` takes."""
        return team.statistics_bytes if self.statistics else team.sums_bytes(self.quantities)

    def scratch(self, tiles: int, channels: int) -> tuple[Param, ...]:
        """List the parameter behind all others through which the stages talk.

        There is none where there is nothing to reduce.
        """
        return (partials.partials_param(tiles, self.quantities, channels),) if self else ()

    def first_stage(self, params: Sequence[Param]) -> tuple[Param, ...]:
        """Pick those of a kernel's parameters that its tiles take."""
        return tuple(p for p in params if p.name not in self.results and not is_of_tail(p.name))

    def merge(
        self,
        name: str,
        params: Sequence[Param],
        *,
        tiles: int,
        rows: int,
        total: int,
        channels: int,
        fewer: int = 0,
        tail: Sequence[Member] = (),
    ) -> tuple[Stage, ...]:
        """Build the stage that merges the rows of partials, where there are any: `total` pixels in tiles of `rows`.

        The last tiles may have `fewer` (partials.py). The stage does the operators of the problem's `tail` with what it
        has merged.
        """
        taken = [p for p in params if p.name == "partials" or p.name in self.results or is_of_tail(p.name)]
        sizes: dict[str, Any] = {"tiles": tiles, "channels": channels}
        if self.statistics and self.counted:
            return (partials.counted_statistics_stage(name, taken, **sizes, total=total, tail=tail),)
        if self.statistics:
            return (partials.statistics_stage(name, taken, **sizes, rows=rows, total=total, fewer=fewer, tail=tail),)
        if not self:
            return ()
        results = [total.results for total in self.totals]
        return (partials.sums_stage(name, taken, **sizes, results=results, tail=tail),)


# -- epilogues -----------------------------------------------------------------------------------------------------


class Epilogue:
    """What becomes of what the core made: the epilogue, the store, the sums.

    `team` is how the block's threads share its channel vectors; `shared` a float32 view of at least
    `Reductions.shared_bytes(team)`, used by `close` alone.
    """

    def __init__(self, block: Block, problem: Problem, team: Team, shared: Buffer | None, passes: int = 1) -> None:
        self.block, self.problem, self.team, self.shared = block, problem, team, shared
        self.plan, self.width = EpiloguePlan(problem), team.width
        self.reductions = Reductions.of(problem.spec)
        result = problem.map(self.plan.result)
        self.channels = result.c
        maps = {name: problem.map(name) for name in self.plan.maps}
        self.reader = Reader(block, maps, self.plan.vectors, team.width, passes)
        self.writer = Writer(block, self.plan.result, result, team.width)

    def open(self, channel: Expr, left: Expr | None, aligned: bool | None = None) -> None:
        """Begin with the channels from `channel` on, `left` of which exist (None: all). Sums are cleared.

        `aligned`: `channel` and the number of channels are multiples of 4 (None: the latter decides).
        """
        self.begin(channel, left, aligned)
        self.reader.open(channel, left, self.aligned)

    def begin(self, channel: Expr, left: Expr | None, aligned: bool | None = None) -> None:
        """Begin as `open`, but the per-channel vectors are left to the caller."""
        self.channel, self.left = channel, left
        self.aligned = self.channels % 4 == 0 if aligned is None else aligned
        self.reader.channel, self.reader.left = channel, left

    def fetch(self, index: Expr, pixel: Expr, valid: Expr = True) -> None:
        """Start loading what pass `index` needs at a pixel."""
        self.reader.fetch(index, pixel, valid)

    def finish(self, index: Expr, values: Buffer, pixel: Expr, valid: Expr = True) -> None:
        """Take `values`, `width` registers that are overwritten, through the epilogue; nothing if not `valid`."""

        def run() -> None:
            self.reader.unpack(index)
            self.steps(values)
            self.writer.store(values, pixel, self.channel, self.left)
            self.account(values)

        d.when(valid, run)

    def visit(self, values: Buffer, pixel: Expr, valid: Expr = True) -> None:
        """Emit `fetch` and `finish` at one pixel."""
        self.fetch(0, pixel, valid)
        self.finish(0, values, pixel, valid)

    def steps(self, values: Buffer) -> None:
        """Emit the steps of a vector, `values` (float32 registers) in place."""
        raise NotImplementedError

    def account(self, values: Buffer) -> None:
        """Take what the reductions need of a vector that has just been stored: nothing by default."""

    def close(self, row: Expr) -> None:
        """Join the block's sums and write row `row` of the partials. All threads of the block take part."""
        if not self.reductions:
            return
        made = self.joined()

        def write() -> None:
            self.scale(made)
            partials.write_row(
                self.block["partials"],
                row,
                self.reductions.quantities,
                self.channels,
                self.channel,
                self.width,
                made,
                self.left,
                self.aligned,
            )

        lane = self.team.lane(self.block.tid)
        d.when(True if self.team.down == 1 else lane == 0, write)

    def joined(self) -> Buffer:
        """Join the block's sums: lane 0 has them in registers [quantities][width]."""
        raise NotImplementedError

    def scale(self, made: Buffer) -> None:
        """Multiply the joined sums by their factors; by default there are none."""


class ForwardEpilogue(Epilogue):
    """[Bias][Relu][Statistics] and the store of y. The statistics are those of y as stored."""

    def begin(self, channel: Expr, left: Expr | None, aligned: bool | None = None) -> None:
        """Begin as `Epilogue.begin`, with moments of no pixels."""
        super().begin(channel, left, aligned)
        if self.reductions:
            self.moments: partials.Moments | partials.SharedMoments = partials.Moments(self.team)
            self.moments.clear()

    def share(self, shift: Buffer, count: Expr) -> None:
        """Take deviations from `shift`, one for all threads of equal channels; the tile has `count` pixels."""
        if self.reductions:
            self.moments = partials.SharedMoments(self.team, shift, count)
            self.moments.clear()

    def steps(self, values: Buffer) -> None:
        """Add the bias and activate, if there is anything to do."""
        if self.plan.changes:
            for j in range(self.width):
                d.put(values, j, self.plan.finished(values[j], self.reader.load(j)))

    def account(self, values: Buffer) -> None:
        """Take the vector, rounded as it is stored, into the moments."""
        if self.reductions:
            self.writer.stored(values)
            self.moments.add(values)

    def joined(self) -> Buffer:
        """Join the moments: mean and M2, behind the count where rows have one."""
        if self.reductions.counted:
            assert isinstance(self.moments, partials.Moments)
            return partials.counted_row(self.moments, self.block.tid, self.shared)
        return self.moments.join(self.block.tid, self.shared)


class BackwardEpilogue(Epilogue):
    """The epilogue of a gradient, as the grammar has it, and the store of dx.

    z, which the mask needs, is recomputed from x by the expression of the forward pass.
    """

    def begin(self, channel: Expr, left: Expr | None, aligned: bool | None = None) -> None:
        """Begin as `Epilogue.begin`, with sums of zero."""
        super().begin(channel, left, aligned)
        if self.reductions:
            self.sums = d.registers(self.reductions.quantities * self.width)
            for k in range(self.reductions.quantities * self.width):
                d.put(self.sums, k, T.float32(0))

    def steps(self, values: Buffer) -> None:
        """Sum dy for a bias, add and mask the gradient, sum that, then scale or accumulate it."""
        for j in range(self.width):
            load = self.reader.load(j)
            self._add(values, j, of_bias=True)
            if self.plan.changes:
                d.put(values, j, self.plan.changed(values[j], load, T.bind))
            self._add(values, j, of_bias=False)
            if self.plan.places:
                d.put(values, j, self.plan.placed(values[j], load))

    def _add(self, values: Buffer, j: int, *, of_bias: bool) -> None:
        for q, total in enumerate(self.reductions.totals):
            if total.of_bias == of_bias:
                at = q * self.width + j
                load = self.reader.load(j)
                value = self.plan.summed(total, values[j], load)
                if total.suffix is None:
                    d.put(self.sums, at, self.sums[at] + value)
                else:
                    d.put(self.sums, at, d.fma(value, total.centred(load), self.sums[at]))

    def joined(self) -> Buffer:
        """Join the sums."""
        partials.join_sums(self.team, self.block.tid, self.shared, self.sums, self.reductions.quantities)
        return self.sums

    def scale(self, made: Buffer) -> None:
        """Multiply the sums that have a factor by that per-channel vector."""
        factor = d.registers(self.width)
        for q, total in enumerate(self.reductions.totals):
            if total.factor is not None:
                load_vector(self.block[total.factor], self.channel, self.width, factor, self.aligned, self.left)
                for j in range(self.width):
                    d.put(made, q * self.width + j, made[q * self.width + j] * factor[j])


def epilogue_of(problem: Problem) -> type[Epilogue]:
    """Choose the class of a problem's epilogue."""
    return BackwardEpilogue if problem.spec.is_gradient else ForwardEpilogue
