"""Sums of each image and channel: beside a convolution's threads, and in a sweep of their own.

convolution    a thread adds the float32 sums of a few pixels of one image to float64 sums that are its own,
               [slot][sum][channel], slot = image + thread: threads have runs of images one behind the other, so
               that no two of them share a slot, and there are no more slots than images and threads
sweep          parallel over images and vectors of channels: over the pixels of an image, in float64
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.images import ImagePlan, source_of, sums_params
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.steps import Expr, Load, f64, to_f32
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.sweep import Args, Vector, prim_func, sweep
from bnfuse.runtime.kernels.cpu.tir import Buffer, span, store, workspace, zero
from bnfuse.runtime.kernels.kernel import Kernel, Problem
from bnfuse.runtime.targets.target import CpuTarget

FLOAT64_LANES = 8  # of the last sums: any number is right
Runs = Sequence[tuple[int, int] | None]  # of each thread: its first and last image, None where it has none


@dataclasses.dataclass(frozen=True)
class Slots:
    """The float64 sums of all threads: [image + thread][sum][channel]."""

    buffer: Buffer
    images: int
    threads: int
    sums: int
    channels: int

    @staticmethod
    def allocate(images: int, threads: int, sums: int, channels: int) -> Slots:
        """Allocate the sums and set them to 0, all threads together."""
        made = Slots(workspace((images + threads - 1) * sums * channels, "float64"), images, threads, sums, channels)
        each = sums * channels
        with T.parallel(0, images + threads - 1) as slot:
            zero(made.buffer, slot * each, each, FLOAT64_LANES)
        return made

    def at(self, slot: Expr, number: int, channel: Expr) -> Expr:
        """Write where a sum of a channel lies in a slot."""
        return (slot * self.sums + number) * self.channels + channel

    def add(self, image: Expr, thread: Expr, channel: Expr, values: Sequence[Expr], width: int) -> None:
        """Add float64 vectors, one for each sum, of the `width` channels from `channel` on."""
        for number, value in enumerate(values):
            index = span(self.at(image + thread, number, channel), width)
            store(self.buffer, index, self.buffer[index] + value)

    def finish(self, runs: Runs, put: Callable[[Expr, Expr, int, list[Expr]], None]) -> None:
        """Call `put(image, channel, width, totals)` for all images and channels, all threads together.

        `runs` says which threads have something of an image; their order is that of the sum.
        """
        with T.parallel(0, self.images) as image:

            def total(channel: Expr, width: int) -> None:
                held = tir.registers(self.sums * width, "float64")
                cells = [span(number * width, width) for number in range(self.sums)]
                for cell in cells:
                    store(held, cell, tir.splat(0, width, "float64"))

                def take(thread: int) -> None:
                    for number, cell in enumerate(cells):
                        part = self.buffer[span(self.at(image + thread, number, channel), width)]
                        store(held, cell, held[cell] + part)

                for thread, run in enumerate(runs):
                    if run is None:
                        continue
                    if run == (0, self.images - 1):
                        take(thread)
                        continue
                    with T.If(tirx.And(image >= run[0], image <= run[1])), T.Then():
                        take(thread)
                put(image, channel, width, [held[cell] for cell in cells])

            tir.vectors(self.channels, FLOAT64_LANES, total)


def runs_of(items: int, threads: int, images_of: Callable[[int, int], tuple[int, int]]) -> Runs:
    """List the images of each thread: `images_of(first, last)` gives those of the items from first to last."""
    runs: list[tuple[int, int] | None] = []
    for thread in range(threads):
        first, count = tir.share(items, threads, thread)
        runs.append(images_of(first, first + count - 1) if count else None)
    return runs


def store_statistics(slots: Slots, runs: Runs, count: int, mean: Buffer, variance: Buffer) -> None:
    """Store mean and variance of each image and channel, over `count` values each, from the sums of y and y^2."""

    def put(image: Expr, channel: Expr, width: int, totals: list[Expr]) -> None:
        first, second = (T.bind(total * tir.splat(1 / count, width, "float64")) for total in totals)
        difference, none = T.bind(second - first * first), tir.splat(0, width, "float64")
        spread = tirx.Select(difference < none, none, difference)  # NaN stays NaN: a diverged run must show it
        for buffer, value in ((mean, first), (variance, spread)):
            store(buffer, span(image * slots.channels + channel, width), narrow(value, width))

    slots.finish(runs, put)


def store_sums(plan: ImagePlan, slots: Slots, runs: Runs, arguments: dict[str, Buffer]) -> None:
    """Store the sums of a gradient, times their factors."""

    def put(image: Expr, channel: Expr, width: int, totals: list[Expr]) -> None:
        for name, total in zip(plan.results, totals, strict=True):
            factor = plan.factor(name)
            if factor is not None:
                total = total * tir.widen(arguments[factor][span(channel, width)], width)
            store(arguments[name], span(image * slots.channels + channel, width), narrow(total, width))

    slots.finish(runs, put)


def narrow(value: Expr, width: int) -> Expr:
    """Write a float64 vector rounded to float32."""
    return tirx.Cast("float32" if width == 1 else f"float32x{width}", value)


@dataclasses.dataclass(frozen=True)
class RowSums:
    """The sums over a few pixels of one image and `block` channels, in registers, on their way to a slot."""

    plan: ImagePlan
    block: int
    held: Buffer

    @staticmethod
    def zero(plan: ImagePlan, block: int) -> RowSums:
        """Begin with zeros, float32 [sum][block]."""
        held = tir.registers(len(plan.results) * block)
        for number in range(len(plan.results)):
            store(held, span(number * block, block), tir.splat(0, block))
        return RowSums(plan, block, held)

    def add(self, value: Expr, load: Load, inner: Expr) -> None:
        """Add an element of dx; `inner` is the channel's place in the block."""
        for number, term in enumerate(self.plan.terms(value, load, T.bind)):
            cell = number * self.block + inner
            store(self.held, cell, self.held[cell] + term)

    def flush(self, slots: Slots, image: Expr, thread: Expr, first: Expr, widths: dict[int, int]) -> None:
        """Add to the slot of an image and a thread; `widths` has the starts and widths of the vectors in the block."""
        for start, width in widths.items():
            cells = [span(number * self.block + start, width) for number in range(slots.sums)]
            slots.add(image, thread, first + start, [tir.widen(self.held[cell], width) for cell in cells], width)


# The sweep


def image_sums(problem: Problem, target: CpuTarget) -> Kernel:
    """Make the kernel of the sums alone, of a problem by `common.images.of_map`: float32 [n, c] each."""
    plan, source, params = ImagePlan.of(problem), source_of(problem), sums_params(problem)
    assert plan is not None, problem.op
    x = problem.map(source)
    area = x.h * x.w
    rows = 2 if plan.statistics else len(plan.results)

    def emit(args: Args) -> None:
        def visit(image: Expr, vector: Vector, is_first: Expr) -> None:
            held, lanes = tir.registers(rows * vector.lanes, "float64"), vector.lanes
            for row in range(rows):
                with vector.each() as j:
                    T.buffer_store(held, f64(0.0), [row * lanes + j])
            first = image * area
            with T.serial(0, area) as i, vector.each() as j:
                channel = vector.base + j
                value = args.read(source, first + i, channel)
                if plan.statistics:
                    e = T.bind(f64(value) - f64(args.read(source, first, channel)))
                    terms: tuple[Any, ...] = (e, e * e)
                else:
                    loader = args.loader(first + i, channel)
                    terms = tuple(f64(term) for term in plan.terms(value, loader, T.bind))
                for row, term in enumerate(terms):
                    T.buffer_store(held, held[row * lanes + j] + term, [row * lanes + j])
            with vector.each() as j:
                channel = vector.base + j
                totals = [held[row * lanes + j] for row in range(rows)]
                if plan.statistics:
                    totals = _moments(totals, f64(args.read(source, first, channel)), area)
                for name, total in zip(plan.results, totals, strict=True):
                    factor = plan.factor(name)
                    scaled = total if factor is None else total * f64(args[factor][channel])
                    T.buffer_store(args[name], to_f32(scaled), [image * x.c + channel])

        sweep(x.n, x.c, target, visit)

    name = unique_name(f"{problem.op}_sums", problem, target)
    return Kernel(name, problem, target, params, lambda: prim_func(name, params, dict(problem.maps), emit))


def _moments(totals: list[Expr], shift: Expr, count: int) -> list[Expr]:
    """Write mean and variance of the sums of e = y - shift and e*e."""
    rest = T.bind(totals[0] / f64(float(count)))
    spread = T.bind(totals[1] / f64(float(count)) - rest * rest)
    return [shift + rest, tirx.Select(spread < f64(0.0), f64(0.0), spread)]  # NaN stays NaN
