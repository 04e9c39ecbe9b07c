"""The way out of a backward convolution: the steps between d, the sum of a core, and dx; the sums over d."""

from __future__ import annotations

import dataclasses
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.opset.spec import WEIGHT_GRADS, OpSpec
from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.common.epilogue import EpiloguePlan, Total, totals_of
from bnfuse.runtime.kernels.common.prologue import ProloguePlan
from bnfuse.runtime.kernels.common.sides import sides
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.partials import Partials
from bnfuse.runtime.kernels.cpu.tir import as_stored, registers, span, store
from bnfuse.runtime.kernels.kernel import Problem

Expr = Any  # a tvm PrimExpr or a Python int
Buffer = Any

CACHE_LINE = 16  # floats
FLOAT64_LANES = 8  # of the last sums: any number is right


@dataclasses.dataclass(frozen=True)
class Elements:
    """The arguments of a kernel under construction, element by element: TIR buffers by name, offsets of the maps."""

    problem: Problem
    threads: int
    arguments: dict[str, Buffer]
    offsets: dict[str, Expr]

    @property
    def spec(self) -> OpSpec:
        """Give the spec of the problem's operator."""
        return self.problem.spec

    @property
    def attributes(self) -> dict[str, Any]:
        """Give the operator's attributes by name."""
        return dict(self.problem.attributes)

    @property
    def wants_input(self) -> bool:
        """Tell whether a map is made: dx, or y of a transposed convolution."""
        return self.spec.core not in WEIGHT_GRADS

    @property
    def wants_weight(self) -> bool:
        """Tell whether dweight is made."""
        return self.spec.weighs

    @property
    def result(self) -> str:
        """Name the map that is made."""
        return EpiloguePlan(self.problem).result

    @property
    def channels(self) -> int:
        """Count the channels, of all groups, of the map that is made; else of the map at the convolution's input."""
        return self.problem.map(self.result if self.wants_input else sides(self.spec)[0]).c

    @property
    def reductions(self) -> tuple[Total, ...]:
        """List what is summed over dx. The sum of dy is taken where dy is packed."""
        return tuple(total for total in totals_of(self.spec) if not total.of_bias)

    @property
    def takes_statistics(self) -> bool:
        """Tell whether mean and variance of the map that is made are results."""
        return "Statistics" in self.spec.epilogue

    @property
    def sums_size(self) -> int:
        """Count the float64 sums of a thread: [reduction][channel], of y and y^2 where statistics are taken."""
        return (2 if self.takes_statistics else len(self.reductions)) * self.channels

    def index(self, name: str, pixel: Expr, channel: Expr) -> Expr:
        """Write where a channel of a pixel lies in the flat buffer of a map."""
        kind = self.problem.map(name)
        return self.offsets[name] + kind.pixel(pixel) * kind.stride + channel

    def load(self, name: str, pixel: Expr, channel: Expr) -> Expr:
        """Read an element of a map."""
        return self.arguments[name][self.index(name, pixel, channel)]

    def loader(self, pixel: Expr, channel: Expr) -> steps.Load:
        """Give the `load` of kernels/common/steps.py at one pixel and channel."""
        return lambda name, is_vector: self.arguments[name][channel] if is_vector else self.load(name, pixel, channel)

    def gradient(self, pixel: Expr, channel: Expr) -> Expr:
        """Write what is read at the convolution's output: dy after its prologue, or a transposed one's x."""
        return ProloguePlan.at_output(self.problem).value(self.loader(pixel, channel))

    def activated(self, pixel: Expr, channel: Expr) -> Expr:
        """Write what is read at the convolution's input: x after its prologue, or a transposed one's dy."""
        return ProloguePlan.at_input(self.problem).value(self.loader(pixel, channel))


MOMENTS = 4  # rows of registers that statistics take: count, shift, sum e, sum e*e


@dataclasses.dataclass(frozen=True)
class Sums:
    """The sums over a few pixels of `block` channels, in registers, on their way to the thread's float64 sums.

    Statistics are sums of e = y - shift and of e*e, where shift is the first y: what a large mean would cancel is left
    to float64 (partials.py).
    """

    elements: Elements
    block: int
    lanes: int
    registers: Buffer  # None where nothing is summed

    @classmethod
    def zero(cls, elements: Elements, block: int, lanes: int) -> Sums:
        """Begin with zeros, float32 [reduction][block], or without registers where nothing is summed."""
        size = (MOMENTS if elements.takes_statistics else len(elements.reductions)) * block
        if not size:
            return cls(elements, block, lanes, None)
        part = registers(size)
        for slot in range(0, size, lanes):
            store(part, span(slot, lanes), tir.splat(0, lanes))
        return cls(elements, block, lanes, part)

    def add(self, d: Expr, pixel: Expr, channel: Expr, inner: Expr) -> None:
        """Add d at a pixel and channel; `inner` is the channel's place in the block."""
        if self.elements.takes_statistics:
            self._add_moments(d, inner)
        for q, term in enumerate(self.elements.reductions):
            slot = q * self.block + inner
            load = self.elements.loader(pixel, channel)
            value = EpiloguePlan(self.elements.problem).summed(term, d, load)
            if term.suffix is None:
                store(self.registers, slot, self.registers[slot] + value)
            else:
                store(self.registers, slot, steps.fma(value, term.centred(load), self.registers[slot]))

    def flush(self, sums: Buffer, thread: Expr, first: Expr, widths: dict[int, int]) -> None:
        """Add to the thread's sums of the channels from `first`; `widths` has the vectors' starts and widths."""
        if self.elements.takes_statistics:
            self._flush_moments(sums, thread, first, widths)
        for q in range(len(self.elements.reductions)):
            target = thread * self.elements.sums_size + q * self.elements.channels + first
            for start, width in widths.items():
                index = span(target + start, width)
                more = tir.widen(self.registers[span(q * self.block + start, width)], width)
                store(sums, index, sums[index] + more)

    def _add_moments(self, d: Expr, inner: Expr) -> None:
        count, shift, first, second = (row * self.block + inner for row in range(MOMENTS))
        held = self.registers
        store(held, shift, tirx.Select(held[count] == steps.f32(0), d, held[shift]))
        e = d - held[shift]
        store(held, first, held[first] + e)
        store(held, second, steps.fma(e, e, held[second]))
        store(held, count, held[count] + steps.f32(1))

    def _flush_moments(self, sums: Buffer, thread: Expr, first: Expr, widths: dict[int, int]) -> None:
        """Add the sums of y = shift + e and of y^2."""
        for start, width in widths.items():
            rows = [self.registers[span(row * self.block + start, width)] for row in range(MOMENTS)]
            count, shift, one, two = (T.bind(tir.widen(row, width)) for row in rows)
            whole = T.bind(count * shift)
            added = whole + one, (whole + one + one) * shift + two
            for q, more in enumerate(added):
                index = span(thread * self.elements.sums_size + q * self.elements.channels + first + start, width)
                store(sums, index, sums[index] + more)


def chunks(count: int, lanes: int) -> dict[int, int]:
    """Cut `count` channels into vectors: start and width of each."""
    return {start: min(lanes, count - start) for start in range(0, count, lanes)}


Where = tuple[Expr, Expr, Expr]  # pixel, channel, place of the channel in its block


def write_epilogue(elements: Elements, d: Expr, cell: tuple[Buffer, Expr], sums: Sums, where: Where) -> None:
    """Write the epilogue of one element and store dx, or y; d lies in `cell` = (buffer, index).

    The buffer is written, so that d is computed once.
    """
    pixel, channel, _ = where
    last = epilogue_value(elements, d, cell, sums, where)
    store(elements.arguments[elements.result], elements.index(elements.result, pixel, channel), last)


def epilogue_value(elements: Elements, d: Expr, cell: tuple[Buffer, Expr], sums: Sums, where: Where) -> Expr:
    """Write the epilogue without the store; give what dx, or y, has to be."""
    pixel, channel, inner = where
    plan, load = EpiloguePlan(elements.problem), elements.loader(pixel, channel)
    buffer, index = cell
    is_gradient, result = elements.spec.is_gradient, elements.arguments[elements.result]
    store(buffer, index, plan.changed(d, load) if is_gradient else as_stored(result, plan.finished(d, load)))
    sums.add(buffer[index], pixel, channel, inner)
    return plan.placed(buffer[index], load)  # as it is, of y


def finish(elements: Elements, sums: Buffer | None, bias: Buffer | None) -> None:
    """Write dbeta, dgamma and dbias, or mean and variance, from the threads' float64 sums."""
    arguments = elements.arguments
    if elements.takes_statistics:
        partials = Partials(sums, elements.channels, elements.threads, FLOAT64_LANES)
        partials.finish(elements.problem.map("y").pixels, arguments["mean"], arguments["variance"])
    if bias is not None:
        _total(elements, bias, arguments["dbias"], elements.problem.map("dy").c, 0, None)
    for q, total in enumerate(elements.reductions):
        factor = None if total.factor is None else arguments[total.factor]
        for result in total.results:
            _total(elements, sums, arguments[result], elements.sums_size, q, factor)


def _total(elements: Elements, sums: Buffer, result: Buffer, size: int, q: int, factor: Buffer | None) -> None:
    """Write a result as the sum over the threads' sums number q, times `factor`."""
    channels = int(result.shape[0])

    def body(start: Expr, width: int) -> None:
        total = sums[span(q * channels + start, width)]
        for thread in range(1, elements.threads):
            total = total + sums[span(thread * size + q * channels + start, width)]
        if factor is not None:
            total = total * tir.widen(factor[span(start, width)], width)
        dtype = "float32" if width == 1 else f"float32x{width}"
        store(result, span(start, width), tirx.Cast(dtype, total))

    tir.vectors(channels, FLOAT64_LANES, body)
