"""Both gradients of a depthwise convolution on a GPU, in one sweep: windows of dy slide down strips of inputs.

    a thread takes E channels of `strip` units side by side (a unit: the stride x stride inputs that start at a
    multiple of the stride) and, tile by tile, `rows` of them from top to bottom:
        slide: the window's rows of dy that are left move up, the next, loaded one slide ago, gets its BatchNormGrad
               once and joins them; the one after it is asked for
        for each input of the units:
            y <- the prologue of x
            for the taps that reach an output:  dweight[tap] += y * window;  dx += window * weight[tap]
            other, mask, sums, acc; store dx; x and the other maps of the next row are asked for
    a block joins dweight, the sum of dy and the sums of dx in shared memory and writes one row of partials of each
    merge: dweight and dbias; dbeta and dgamma

So each map is read once. dweight, weights and the window are registers; weights go to shared memory where those do
not suffice. Where the window itself does not fit, or several outputs share a channel, two plain stages gather: one
thread an input for dx, and one thread an output channel and a tap for dweight.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import product

from tvm.script.ir_builder import tirx as T

from bnfuse.core.errors import BnfuseError
from bnfuse.opset.spec import CONV_GRADS
from bnfuse.runtime.kernels.common.epilogue import EpiloguePlan
from bnfuse.runtime.kernels.common.geometry import spatial_axes
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.prologue import ProloguePlan
from bnfuse.runtime.kernels.common.tails import is_of_tail, params_with_tail
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.depthwise_epilogue import DepthwiseEpilogue, own_taps, quantities_of, reductions_of
from bnfuse.runtime.kernels.cuda.depthwise_gather import input_stage, weight_stage
from bnfuse.runtime.kernels.cuda.depthwise_shape import (
    Plan,
    Work,
    backward_line,
    choose_plan,
    gathering_plan,
    words_per_channel,
)
from bnfuse.runtime.kernels.cuda.depthwise_sums import team_of, weights_stage, zeroed
from bnfuse.runtime.kernels.cuda.depthwise_window import (
    Channels,
    Tile,
    Vectors,
    Weights,
    Window,
    each_tile,
    is_depthwise,
)
from bnfuse.runtime.kernels.cuda.device import Block, Buffer, Expr, Lanes, Stage
from bnfuse.runtime.kernels.cuda.operand import Operand
from bnfuse.runtime.kernels.cuda.partials import join_sums, partials_param, write_row
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Param, Problem
from bnfuse.runtime.targets.target import CudaTarget


def depthwise_backward(problem: Problem, target: CudaTarget) -> Kernel:
    """Make the kernel of dx and dweight of a convolution whose weight is [O, 1, kh, kw], O a multiple of x's channels.

    Parameters as on a CPU (maps NHWC in their own types, weight and dweight float32 OIHW), then `partials` (sums of
    dx) and `weight_partials` (dweight and the sum of dy) where there are such. BnfuseError for another operator.
    """
    spec = problem.spec
    plain = spec.core in CONV_GRADS and not spec.is_transposed
    if not plain or not is_depthwise(problem.weight, problem.attribute("group"), problem.map("x").c):
        raise BnfuseError(f"{problem.op} is no depthwise convolution's gradient; ask for it from another generator")
    params = params_with_tail(problem)
    scratch = []
    inputs, weights = plans_of(problem, target)
    if reductions_of(spec):
        scratch.append(partials_param(inputs.blocks, reductions_of(spec).quantities, problem.map("x").c))
    if quantities_of(problem):
        elements = weights.blocks, quantities_of(problem), problem.map("dy").c
        scratch.append(partials_param(*elements, name="weight_partials"))
    name = unique_name(problem.op, problem, target)
    params = (*params, *scratch)
    return Kernel(name, problem, target, params, partial(_stages, name, problem, target, params))


def inlet_maps(problem: Problem) -> dict[str, MapType]:
    """Give, by name, the maps that are read at an input: by the prologue of x and by the epilogue of dx."""
    spec, known = problem.spec, dict(problem.maps)
    names = EpiloguePlan(problem).maps if spec.core != "ConvGradWeight" else ()
    if spec.core != "ConvGradInput":
        names = (*names, *Operand(problem, gradient=False).maps)
    return {name: known[name] for name in dict.fromkeys(names)}


def work_of(problem: Problem) -> Work:
    """Describe the convolution as windows of dy over units of inputs."""
    rows, columns = spatial_axes(problem)
    spec, x = problem.spec, problem.map("x")
    gradient, inlets = Operand(problem, gradient=True), inlet_maps(problem)
    inputs = rows.stride * columns.stride
    sums = quantities_of(problem) + reductions_of(spec).quantities
    halves = (spec.core != "ConvGradWeight") + (spec.core != "ConvGradInput")
    return Work(
        images=x.n,
        rows=backward_line(rows),
        columns=backward_line(columns),
        channels=x.c,
        taps=rows.kernel * columns.kernel,
        stored=sums + len(gradient.vectors) + len(spec.operands) - len(problem.maps),
        raw=sum(words_per_channel(kind) for kind in gradient.maps.values()),
        unit=inputs * sum(words_per_channel(kind) for kind in inlets.values()),
        per_source=2 * len(gradient.maps),
        per_unit=halves * rows.kernel * columns.kernel + 4 * inputs * (1 + len(inlets)),
        bytes_per_source=sum(d.size_of(kind.dtype) for kind in gradient.maps.values()),
        bytes_per_unit=inputs * sum(d.size_of(kind.dtype) for kind in (*inlets.values(), x)),
        base=48,
    )


def plan_of(problem: Problem, target: CudaTarget) -> Plan | None:
    """Plan how windows slide; None where they cannot."""
    x, dy = problem.map("x"), problem.map("dy")
    if x.c != dy.c:
        return None
    size = d.size_of(dy.dtype)
    return choose_plan(work_of(problem), target, size)


def plans_of(problem: Problem, target: CudaTarget) -> tuple[Plan, Plan]:
    """Plan the stage that sums dx, and the one that sums dweight: one plan where windows slide."""
    plan = plan_of(problem, target)
    if plan is not None:
        return plan, plan
    work, x, dy = work_of(problem), problem.map("x"), problem.map("dy")

    def of(kind: MapType) -> Plan:
        rows = dataclasses.replace(work.rows, units=kind.h)
        columns = dataclasses.replace(work.columns, units=kind.w)
        return gathering_plan(dataclasses.replace(work, rows=rows, columns=columns, channels=kind.c), target)

    return of(x), of(dy)


def _stages(name: str, problem: Problem, target: CudaTarget, params: tuple[Param, ...]) -> tuple[Stage, ...]:
    spec = problem.spec
    inputs, weights = plans_of(problem, target)
    results = {*reductions_of(spec).results, "dweight", "dbias"}
    used = [p for p in params if p.name not in results and not is_of_tail(p.name)]
    stages = []
    if plan_of(problem, target) is not None:
        stages.append(_main_stage(name, problem, inputs, used))
    else:
        if spec.core != "ConvGradWeight":
            stages.append(input_stage(name, problem, inputs, [p for p in used if p.name != "weight_partials"]))
        if quantities_of(problem):
            stages.append(weight_stage(f"{name}_weight", problem, weights, used))
    reductions = reductions_of(spec)
    x = problem.map("x")
    rows = {"tiles": inputs.blocks, "rows": 1, "total": inputs.blocks, "channels": x.c}
    stages += reductions.merge(f"{name}_merge", params, **rows, tail=problem.tail)
    if quantities_of(problem):
        taken = [p for p in params if p.name in ("weight_partials", "dweight", "dbias")]
        sizes = {"tiles": weights.blocks, "taps": own_taps(problem), "channels": problem.map("dy").c}
        stages.append(weights_stage(f"{name}_merge_weight", taken, **sizes))
    return tuple(stages)


def _main_stage(name: str, problem: Problem, plan: Plan, params: list[Param]) -> Stage:
    work, spec = work_of(problem), problem.spec
    own, team = quantities_of(problem), team_of(plan)
    needs_weight = spec.core != "ConvGradWeight"
    shared = max(
        4 * work.taps * plan.vectors * plan.lanes if plan.shared and needs_weight else 0,
        team.sums_bytes(own),
        reductions_of(spec).shared_bytes(team),
    )
    grid = (plan.blocks, plan.chunks(work), 1)
    with d.stage(name, params, grid=grid, threads=plan.threads, shared=shared, min_blocks=plan.resident) as block:
        memory = d.shared_memory(shared).view("float32") if shared else None
        channels = Channels.of(block, plan, work.channels)
        aligned = plan.lanes % 4 == 0 and work.channels % 4 == 0
        own_sums = zeroed(own * plan.lanes) if own else None
        epilogue = None
        if spec.core != "ConvGradWeight":
            epilogue = DepthwiseEpilogue(block, problem, team, memory)
            epilogue.open(channels.first, channels.guard, aligned)
        weights = None
        if plan.shared and needs_weight:
            weights = Weights.in_shared(block, plan, work.taps, work.channels, memory)

        def run() -> None:
            nest = _Backward.make(problem, work, plan, block, channels, epilogue, own_sums, weights)
            each_tile(block, plan, work, nest.tile)

        d.when(channels.is_any(plan, work.channels), run)
        if plan.shared:
            d.sync()
        if epilogue is not None:
            epilogue.close(block.x)
        if own_sums is not None:
            join_sums(team, block.tid, memory, own_sums, own)
            d.when(
                block.tid < plan.vectors,
                lambda: write_row(
                    block["weight_partials"],
                    block.x,
                    own,
                    work.channels,
                    channels.first,
                    plan.lanes,
                    own_sums,
                    channels.guard,
                    aligned,
                ),
            )
    return block.stage


@dataclasses.dataclass
class _Backward:
    """What a thread that has channels holds."""

    problem: Problem
    work: Work
    plan: Plan
    block: Block
    channels: Channels
    window: Window
    inlets: Vectors
    values: dict[str, Buffer]  # of the inlets' maps at an input
    coefficients: dict[str, Buffer]  # of the prologue of x
    epilogue: DepthwiseEpilogue | None
    own_sums: Buffer  # [tap, then the sum of dy][lane], where there are any
    weights: Weights | None
    read: Buffer  # the prologue of x at an input
    made: Buffer  # dx at an input

    @staticmethod
    def make(
        problem: Problem,
        work: Work,
        plan: Plan,
        block: Block,
        channels: Channels,
        epilogue: DepthwiseEpilogue | None,
        own_sums: Buffer,
        weights: Weights | None,
    ) -> _Backward:
        rows, columns = spatial_axes(problem)
        lines = (work.rows, work.columns)
        window = Window.make(block, Operand(problem, gradient=True), lines, plan, channels)
        maps = inlet_maps(problem)
        inlets = Vectors.make(block, maps, channels, rows.stride * columns.stride * plan.strip)
        values = {name: d.registers(channels.count) for name in maps}
        coefficients: dict[str, Buffer] = {}
        if epilogue is not None:
            epilogue.reader.values.update(values)
            coefficients.update(epilogue.reader.vectors)
            weights = weights or Weights.in_registers(block, plan, channels, work.taps, work.channels)
        if problem.spec.core != "ConvGradInput":
            for name in Operand(problem, gradient=False).vectors:
                if name not in coefficients:
                    coefficients[name] = channels.vector(block[name])
        read, made = d.registers(channels.count), d.registers(channels.count)
        held = (values, coefficients, epilogue, own_sums, weights, read, made)
        return _Backward(problem, work, plan, block, channels, window, inlets, *held)

    def tile(self, tile: Tile) -> None:
        self.window.sweep(tile, self.work.rows.units, self._row, self._ask)

    # Which inputs there are

    def _inputs(self) -> list[tuple[int, int]]:
        """List the rows and columns of a unit."""
        rows, columns = spatial_axes(self.problem)
        return list(product(range(rows.stride), range(columns.stride)))

    def _number(self, j: Expr, e: tuple[int, int]) -> Expr:
        """Give the number of an input among those that are loaded ahead."""
        return (e[0] * self.plan.strip + j) * spatial_axes(self.problem)[1].stride + e[1]

    def _place(self, tile: Tile, row: Expr, j: Expr, e: tuple[int, int]) -> tuple[Expr, Expr]:
        """Find the pixel of an input, and whether it exists."""
        rows, columns = spatial_axes(self.problem)
        x, plan, work = self.problem.map("x"), self.plan, self.work
        h, w = row * rows.stride + e[0], (tile.column + j) * columns.stride + e[1]
        high = (work.rows.units - 1) * rows.stride + e[0] < x.h
        wide = (plan.strips(work) * plan.strip - 1) * columns.stride + e[1] < x.w
        return (tile.image * x.h + h) * x.w + w, d.all_of(d.below(h, x.h, high), d.below(w, x.w, wide))

    def _ask(self, tile: Tile, row: Expr, wanted: Expr) -> None:
        """Start loading the maps at the inputs of a row of units."""

        def column(j: Expr) -> None:
            for e in self._inputs():
                pixel, exists = self._place(tile, row, j, e)
                self.inlets.load(self._number(j, e), pixel, d.all_of(exists, wanted))

        d.unrolled(self.plan.strip, column)

    # The work at an input

    def _row(self, tile: Tile, row: Expr) -> None:
        d.unrolled(self.plan.strip, lambda j: self._unit(tile, row, j))

    def _unit(self, tile: Tile, row: Expr, j: Expr) -> None:
        count = self.channels.count
        if "BiasGrad" in self.problem.spec.epilogue:
            place = own_taps(self.problem) * count
            at = self.window.at(-self.work.rows.first, j - self.work.columns.first)
            self.channels.each(lambda c: self._add_own(place + c, self.window.values[at + c]))
        for e in self._inputs():
            pixel, exists = self._place(tile, row, j, e)
            d.when(exists, lambda e=e, pixel=pixel: self._input(pixel, j, e))  # type: ignore[misc]

    def _add_own(self, at: Expr, value: Expr) -> None:
        d.put(self.own_sums, at, self.own_sums[at] + value)

    def _input(self, pixel: Expr, j: Expr, e: tuple[int, int]) -> None:
        """Do the work at one input: y, the taps that reach an output from it, dx."""
        rows, columns = spatial_axes(self.problem)
        plan = ProloguePlan.of_input(self.problem)
        self.inlets.unpack(self._number(j, e), self.values)
        if self.problem.spec.core != "ConvGradInput":

            def prologue(c: Expr) -> None:
                def load(name: str, is_vector: bool) -> Expr:
                    return (self.coefficients if is_vector else self.values)[name][c]

                d.put(self.read, c, plan.value(load))

            self.channels.each(prologue)
        self.channels.each(lambda c: d.put(self.made, c, T.float32(0)))
        for r, s in product(range(rows.kernel), range(columns.kernel)):
            up, left = rows.offset(e[0], r), columns.offset(e[1], s)
            if up is not None and left is not None:
                at = self.window.at(up - self.work.rows.first, j + (left - self.work.columns.first))
                tap = r * columns.kernel + s
                self.channels.each(lambda c, at=at, tap=tap: self._tap(at, tap, c))  # type: ignore[misc]
        if self.epilogue is not None:
            self.epilogue.steps(self.made)
            dx = self.problem.map("dx")
            target = self.block.map("dx", dx)
            place = target.at(pixel, self.channels.first)
            d.write(target, place, Lanes.of(self.channels.count, dx), self.made, 0, self.channels.left)

    def _tap(self, at: Expr, tap: int, c: Expr) -> None:
        grad = self.window.values[at + c]
        if own_taps(self.problem):
            place = tap * self.channels.count + c
            d.put(self.own_sums, place, d.fma(self.read[c], grad, self.own_sums[place]))
        if self.epilogue is not None:
            assert self.weights is not None
            d.put(self.made, c, d.fma(grad, self.weights.of(tap, c), self.made[c]))
