"""Where the pixels and taps of a convolution's tile are: in the maps, and among the rows of a halo tile's source.

A tile's rows are its destination pixels: a run of those of the phase, or a patch of an image.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.conv_sizes import Tile, TilePlan
from bnfuse.runtime.kernels.cuda.correlation import Axis, Correlation
from bnfuse.runtime.kernels.cuda.device import Expr


@dataclasses.dataclass(frozen=True)
class Places:
    """Those of a block: `first` is its first pixel, counted in the `phase`; of a patch in row `top`, column `left`."""

    tile: Tile
    phase: Expr
    first: Expr
    top: Expr = 0
    left: Expr = 0

    @staticmethod
    def of(tile: Tile, row: Expr) -> Places:
        """Find those of the block that has a row of the partials."""
        several = tile.correlation.phases > 1
        phase = T.bind(row // tile.pixel_tiles) if several else 0
        number = row % tile.pixel_tiles if several else row
        if not tile.plan.columns:
            return Places(tile, phase, T.bind(number * tile.plan.pixels))
        v, h = tile.correlation.vertical, tile.correlation.horizontal
        across, down = h.source // tile.plan.columns, v.source // tile.patch_rows
        top, left = T.bind(number // across % down * tile.patch_rows), T.bind(number % across * tile.plan.columns)
        first = T.bind((number // (across * down) * v.source + top) * h.source + left)
        return Places(tile, phase, first, top, left)

    @property
    def c(self) -> Correlation:
        """Give the correlation."""
        return self.tile.correlation

    @property
    def plan(self) -> TilePlan:
        """Give the tile's plan."""
        return self.tile.plan

    def pixel(self, row: Expr) -> Expr:
        """Find the destination pixel of a row of the tile, counted in the phase."""
        if not self.plan.columns:
            return self.first + row
        return self.first + row // self.plan.columns * self.c.horizontal.source + row % self.plan.columns

    def count(self) -> Expr:
        """Count the tile's pixels that exist."""
        if self.c.rows % self.plan.pixels == 0:
            return self.plan.pixels
        return T.bind(tirx.Min(T.int32(self.plan.pixels), self.c.rows - self.first))

    # -- of a halo tile --------------------------------------------------------------------------------------------

    def source_row(self, row: Expr) -> Expr:
        """Find the row of the source that has the pixel of a row of the tile."""
        if not self.plan.columns:
            return row + self.tile.before
        return row // self.plan.columns * self.tile.pitch + row % self.plan.columns + self.tile.before

    def source_pixel(self, row: Expr) -> tuple[Expr, Expr]:
        """Find the pixel of a row of the source, and whether the map has it."""
        if not self.plan.columns:
            pixel = T.bind(self.first - self.tile.before + row)
            return pixel, d.within(pixel, self.c.rows)
        v, h, pitch = self.c.vertical, self.c.horizontal, self.tile.pitch
        down, right = T.bind(row // pitch - v.reach), T.bind(row % pitch - h.reach)
        inside = d.all_of(d.within(self.top + down, v.source), d.within(self.left + right, h.source))
        return T.bind(self.first + down * h.source + right), inside

    def tap_distance(self, tap: Expr) -> tuple[Expr, Expr]:
        """Count the rows and columns from a destination pixel to the source pixel of a tap (`same` axes)."""
        v, h = self.c.vertical, self.c.horizontal
        # taps are numbered as in the window: towards the input, later ones are further up and left
        return v.phases[0].base + tap // h.window * v.step, h.phases[0].base + tap % h.window * h.step

    def source_distance(self, tap: Expr) -> Expr:
        """Count the rows of the source from a pixel to the one that a tap of it reads."""
        down, right = self.tap_distance(tap)
        return down * self.tile.pitch + right

    # -- of any ----------------------------------------------------------------------------------------------------

    @property
    def every_phase_has_taps(self) -> bool:
        """Tell whether no phase is without taps, so that every block has a first step."""
        return all(p.count for axis in (self.c.vertical, self.c.horizontal) for p in axis.phases)

    def phase_value(self, vertical: Axis, horizontal: Axis, of: Callable[[Any, Any], int]) -> Expr:
        """Select, by the block's phase, a number that `of` makes of the phases of both axes."""
        numbers = [of(v, h) for v in vertical.phases for h in horizontal.phases]
        found: Expr = numbers[-1]
        for i, number in reversed(list(enumerate(numbers[:-1]))):
            if number != found:
                rest = T.int32(found) if isinstance(found, int) else found
                found = tirx.Select(self.phase == i, T.int32(number), rest)
        return found

    def destination(self, row: Expr) -> tuple[Expr, Expr, Expr, Expr]:
        """Find image, row and column of a destination pixel of the phase, and whether there is such a pixel.

        Row and column are those before `scale` and phase.
        """
        v, h = self.c.vertical, self.c.horizontal
        image, rest = row // (v.rows * h.rows), row % (v.rows * h.rows)
        return image, rest // h.rows, rest % h.rows, d.below(row, self.c.rows, self.c.rows % self.plan.pixels == 0)

    def destination_pixel(self, row: Expr) -> tuple[Expr, Expr]:
        """Find the pixel's index in the destination map, and whether it exists."""
        v, h = self.c.vertical, self.c.horizontal
        if v.scale == 1 and h.scale == 1:
            return row, d.below(row, self.c.rows, self.c.rows % self.plan.pixels == 0)
        image, y, x, valid = self.destination(row)
        phases = len(h.phases)
        y = T.bind(y * v.scale + (self.phase // phases if phases > 1 else self.phase))
        x = T.bind(x * h.scale + (self.phase % phases if phases > 1 else 0))
        pixel = (image * v.destination + y) * h.destination + x
        inside = d.all_of(
            valid,
            d.below(y, v.destination, v.destination % v.scale == 0),
            d.below(x, h.destination, h.destination % h.scale == 0),
        )
        return pixel, inside
