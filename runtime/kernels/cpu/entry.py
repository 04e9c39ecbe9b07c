"""The way into a forward kernel: the activated value of x at a pixel, packed into a tile or stored as a map."""

from __future__ import annotations

import dataclasses

from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.prologue import ProloguePlan
from bnfuse.runtime.kernels.cpu.tir import Arguments, Buffer, Expr, MapRef, elementwise, share, store, vectors
from bnfuse.runtime.kernels.kernel import Problem
from bnfuse.runtime.targets.target import CpuTarget


@dataclasses.dataclass(frozen=True)
class Entry:
    """The prologue of a problem over the arguments of its kernel."""

    problem: Problem
    arguments: Arguments

    def map(self, name: str) -> MapRef:
        """Give a map by its name in the spec: its buffer, its offset and its type."""
        return self.arguments.map(name, self.problem.map(name))

    def value(self, pixel: Expr, channel: Expr) -> Expr:
        """Write what the core reads at this pixel and channel: a scalar expression, to be used in a vectorised loop."""

        def load(name: str, is_vector: bool) -> Expr:
            if is_vector:
                return self.arguments[name][channel]
            ref = self.map(name)
            return ref.buffer[ref.at(pixel, channel)]

        return ProloguePlan.at_input(self.problem).value(load)

    def pack(
        self, tile: Buffer, index: Expr, pixel: Expr, channel: Expr, width: int, stored: bool, repeat: int = 1
    ) -> None:
        """Put `width` channels of a pixel at `index` of the tile, each `repeat` times, and into the map `stored`."""
        elementwise(width, lambda j: store(tile, index + j * repeat, self.value(pixel, channel + j)))
        for again in range(1, repeat):

            def copy(j: Expr, again: int = again) -> None:
                store(tile, index + j * repeat + again, tile[index + j * repeat])

            elementwise(width, copy)
        if stored:
            ref = self.map("stored")
            elementwise(width, lambda j: store(ref.buffer, ref.at(pixel, channel + j), tile[index + j * repeat]))

    def store_all(self, thread: Expr, target: CpuTarget) -> None:
        """Store the map `stored` in a sweep of its own: for kernels that do not read every input pixel, or not once."""
        ref, kind = self.map("stored"), self.problem.map("x")
        first, count = share(kind.pixels, target.threads, thread)
        with T.serial(0, count) as i:

            def body(channel: Expr, width: int) -> None:
                elementwise(width, lambda j: store(ref.buffer, ref.at(first + i, channel + j), value(channel + j)))

            def value(channel: Expr) -> Expr:
                return self.value(first + i, channel)

            vectors(kind.c, target.lanes, body)
