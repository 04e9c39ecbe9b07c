"""The way out of a backward convolution: the steps between d, the sum of a core, and dx; the sums over d."""

from __future__ import annotations

import dataclasses
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.opset.spec import OpSpec
from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.common.epilogue import EpiloguePlan, Total, totals_of
from bnfuse.runtime.kernels.common.prologue import ProloguePlan
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.tir import registers, span, store
from bnfuse.runtime.kernels.kernel import Problem

Expr = Any  # a tvm PrimExpr or a Python int
Buffer = Any

CACHE_LINE = 16  # floats
READ, WRITE, KEEP, DATA = 0, 1, 3, 1  # arguments of llvm.prefetch
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
        """Tell whether dx is made."""
        return self.spec.core != "ConvGradWeight"

    @property
    def wants_weight(self) -> bool:
        """Tell whether dweight is made."""
        return self.spec.core != "ConvGradInput"

    @property
    def channels(self) -> int:
        """Count the input channels of all groups."""
        return self.problem.map("x").c

    @property
    def reductions(self) -> tuple[Total, ...]:
        """List what is summed over dx. The sum of dy is taken where dy is packed."""
        return tuple(total for total in totals_of(self.spec) if not total.of_bias)

    @property
    def sums_size(self) -> int:
        """Count the float64 sums of a thread: [reduction][channel]."""
        return len(self.reductions) * self.channels

    def index(self, name: str, pixel: Expr, channel: Expr) -> Expr:
        """Write where a channel of a pixel lies in the flat buffer of a map."""
        return self.offsets[name] + pixel * self.problem.map(name).stride + channel

    def load(self, name: str, pixel: Expr, channel: Expr) -> Expr:
        """Read an element of a map."""
        return self.arguments[name][self.index(name, pixel, channel)]

    def loader(self, pixel: Expr, channel: Expr) -> steps.Load:
        """Give the `load` of kernels/common/steps.py at one pixel and channel."""
        return lambda name, is_vector: self.arguments[name][channel] if is_vector else self.load(name, pixel, channel)

    def gradient(self, pixel: Expr, channel: Expr) -> Expr:
        """Write dy after its prologue."""
        return ProloguePlan.of_gradient(self.problem).value(self.loader(pixel, channel))

    def activated(self, pixel: Expr, channel: Expr) -> Expr:
        """Write what the convolution read."""
        return ProloguePlan.of_input(self.problem).value(self.loader(pixel, channel))


@dataclasses.dataclass(frozen=True)
class Sums:
    """The sums over a few pixels of `block` channels, in registers, on their way to the thread's float64 sums."""

    elements: Elements
    block: int
    lanes: int
    registers: Buffer  # None where nothing is summed

    @classmethod
    def zero(cls, elements: Elements, block: int, lanes: int) -> Sums:
        """Begin with zeros, float32 [reduction][block], or without registers where nothing is summed."""
        size = len(elements.reductions) * block
        if not size:
            return cls(elements, block, lanes, None)
        part = registers(size)
        for slot in range(0, size, lanes):
            store(part, span(slot, lanes), tir.splat(0, lanes))
        return cls(elements, block, lanes, part)

    def add(self, d: Expr, pixel: Expr, channel: Expr, inner: Expr) -> None:
        """Add d at a pixel and channel; `inner` is the channel's place in the block."""
        for q, term in enumerate(self.elements.reductions):
            slot = q * self.block + inner
            if term.suffix is None:
                store(self.registers, slot, self.registers[slot] + d)
            else:
                centred = term.centred(self.elements.loader(pixel, channel))
                store(self.registers, slot, steps.fma(d, centred, self.registers[slot]))

    def flush(self, sums: Buffer, thread: Expr, first: Expr, widths: dict[int, int]) -> None:
        """Add to the thread's sums of the channels from `first`; `widths` has the vectors' starts and widths."""
        for q in range(len(self.elements.reductions)):
            target = thread * self.elements.sums_size + q * self.elements.channels + first
            for start, width in widths.items():
                index = span(target + start, width)
                more = tir.widen(self.registers[span(q * self.block + start, width)], width)
                store(sums, index, sums[index] + more)


def prefetch(buffer: Buffer, index: Expr, purpose: int) -> None:
    """Ask for the cache line of an element; one outside of the buffer does no harm."""
    hint = (T.int32(k) for k in (purpose, KEEP, DATA))
    T.evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", tirx.address_of(buffer[index]), *hint))


def chunks(count: int, lanes: int) -> dict[int, int]:
    """Cut `count` channels into vectors: start and width of each."""
    return {start: min(lanes, count - start) for start in range(0, count, lanes)}


Where = tuple[Expr, Expr, Expr]  # pixel, channel, place of the channel in its block


def write_epilogue(elements: Elements, d: Expr, cell: tuple[Buffer, Expr], sums: Sums, where: Where) -> None:
    """Write the epilogue of one element and store dx; d lies in `cell` = (buffer, index).

    The buffer is written, so that d is computed once.
    """
    pixel, channel, _ = where
    last = epilogue_value(elements, d, cell, sums, where)
    store(elements.arguments["dx"], elements.index("dx", pixel, channel), last)


def epilogue_value(elements: Elements, d: Expr, cell: tuple[Buffer, Expr], sums: Sums, where: Where) -> Expr:
    """Write the epilogue without the store; give what dx has to be."""
    pixel, channel, inner = where
    plan, load = EpiloguePlan(elements.problem), elements.loader(pixel, channel)
    buffer, index = cell
    store(buffer, index, plan.changed(d, load))
    sums.add(buffer[index], pixel, channel, inner)
    return plan.placed(buffer[index], load)


def finish(elements: Elements, sums: Buffer | None, bias: Buffer | None) -> None:
    """Write dbeta, dgamma and dbias from the threads' float64 sums."""
    arguments = elements.arguments
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
