"""Both gradients of a convolution. Stages: towards the input and its sums, towards the weight and its shares, the bias.
Those of some 1x1 windows are made in one stage, which has the weight's name (weight_both.py).

The input gradient is the forward convolution's tile with source and destination exchanged (conv_tile.py), the weight
gradient a product over pixels (weight_tile.py). Both bring dy through BatchNormGrad on the way in, so that the input
gradient of the BN that follows is never in memory.

A ConvTranspose is an input gradient of which dx is called y, with a forward epilogue; in its weight's gradient x and
dy have changed places (common/sides.py). Here they have the names of a Conv's gradient.
"""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from bnfuse.core.errors import BnfuseError
from bnfuse.opset.spec import WEIGHT_GRADS, OpSpec
from bnfuse.runtime.kernels.common.epilogue import EpiloguePlan
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.sides import TOWARDS_INPUT
from bnfuse.runtime.kernels.common.tails import params_with_tail
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda import partials
from bnfuse.runtime.kernels.cuda.both_sizes import BothPlan, BothTile, both_tile_of
from bnfuse.runtime.kernels.cuda.conv_forward import shared_bytes, takes_packed
from bnfuse.runtime.kernels.cuda.conv_group import emit
from bnfuse.runtime.kernels.cuda.conv_plan import tile_plans
from bnfuse.runtime.kernels.cuda.conv_sizes import Tile, tile_of
from bnfuse.runtime.kernels.cuda.correlation import forward_correlation, gradient_correlation, with_groups_aligned
from bnfuse.runtime.kernels.cuda.depthwise_backward import depthwise_backward
from bnfuse.runtime.kernels.cuda.device import Expr, Stage
from bnfuse.runtime.kernels.cuda.operand import Operand
from bnfuse.runtime.kernels.cuda.partials import Team
from bnfuse.runtime.kernels.cuda.vector import Reader, Reductions, width_of
from bnfuse.runtime.kernels.cuda.weight_both import BothEmitter
from bnfuse.runtime.kernels.cuda.weight_group import GroupEmitter
from bnfuse.runtime.kernels.cuda.weight_plan import both_plans, weight_plans
from bnfuse.runtime.kernels.cuda.weight_sizes import (
    GroupTile,
    Shares,
    Sized,
    SlideTile,
    StripTile,
    WeightTile,
    weight_tile_of,
)
from bnfuse.runtime.kernels.cuda.weight_slide import SlideEmitter
from bnfuse.runtime.kernels.cuda.weight_strip import StripEmitter
from bnfuse.runtime.kernels.cuda.weight_tile import WeightEmitter
from bnfuse.runtime.kernels.cuda.weights import BACKWARD, packed_elements
from bnfuse.runtime.kernels.kernel import Choice, Kernel, Param, Problem
from bnfuse.runtime.targets.target import CudaTarget

MERGE_THREADS = 256
BIAS_ROWS = 8  # partial rows of the bias gradient for each multiprocessor, at most, and
FEW_PIXELS = 128  # of which it has one: both chosen by hand
EMITTERS: dict[type, Any] = {
    SlideTile: SlideEmitter,
    GroupTile: GroupEmitter,
    StripTile: StripEmitter,
    WeightTile: WeightEmitter,
}


def choices(problem: Problem, target: CudaTarget) -> tuple[Choice, ...]:
    """List all ways to do a problem that are worth measuring, that of the rule first.

    A choice has a plan for each of the two tiles.
    """
    if not takes_packed(problem):
        return (Choice("depthwise"),)
    problem = with_groups_aligned(problem, target)
    c = forward_correlation(problem, target)
    if plans := list(both_plans(c, problem, target)):
        return tuple(Choice("tile", (None, plan)) for plan in plans)
    inputs = (
        list(tile_plans(gradient_correlation(problem, target), Operand(problem, True), target, forward=False))
        if wants_input(problem)
        else [None]
    )
    weights = list(weight_plans(c, problem, target)) if wants_weight(problem) else [None]
    pairs = [(inputs[0], weight) for weight in weights] + [(plan, weights[0]) for plan in inputs[1:]]
    return tuple(Choice("tile", pair) for pair in pairs)


def wants_input(problem: Problem) -> bool:
    """Tell whether dx is a result, or y of a transposed convolution."""
    return problem.spec.core not in WEIGHT_GRADS


def wants_weight(problem: Problem) -> bool:
    """Tell whether dweight is a result."""
    return problem.spec.weighs


def conv_backward(problem: Problem, target: CudaTarget, algorithm: str | None = None, plan: Any = None) -> Kernel:
    """Make the kernel of a convolution's gradients. `weight` is packed (weights.py), but for depthwise ones.

    `plan` is a pair of `choices`: that of dx's tile and that of dweight's, None where there is no such result.
    BnfuseError where the operator is no convolution's gradient.
    """
    spec = problem.spec
    if spec.core not in TOWARDS_INPUT:
        raise BnfuseError(f"{problem.op} is not the gradient of a convolution; ask for it from another generator")
    if not takes_packed(problem):
        return depthwise_backward(problem, target)
    problem = with_groups_aligned(problem, target)
    made = Stages(problem, target, plan)
    name = unique_name(problem.op, (problem, plan), target)
    return Kernel(name, problem, target, made.params, lambda: made.build(name), plan)


class Stages:
    """The stages of a problem, and the scratch memory between them."""

    def __init__(self, problem: Problem, target: CudaTarget, plan: Any) -> None:
        self.problem, self.target = problem, target
        self.input: Tile | None = None
        self.weight: Sized | None = None
        scratch: list[Param] = []
        c = forward_correlation(problem, target)
        input_plan, weight_plan = plan or (None, next(both_plans(c, problem, target), None))
        weight = packed_elements(problem.weight, problem.attribute("group"), BACKWARD, c.merged), target.map_dtype
        self.own = params_with_tail(problem, weight=weight, unread=() if wants_input(problem) else ("weight",))
        if wants_input(problem) and not isinstance(weight_plan, BothPlan):
            back, operand = gradient_correlation(problem, target), Operand(problem, True)
            chosen = input_plan or next(tile_plans(back, operand, target, forward=False))
            self.input = tile_of(back, chosen, target.precision, operand)
            scratch += self.scratch_of_sums(self.input.rows_of_partials)
        if wants_weight(problem):
            planned = weight_plan or next(weight_plans(c, problem, target))
            operands = Operand(problem, True), Operand(problem, False)
            if isinstance(planned, BothPlan):
                self.weight = both_tile_of(c, planned, target.precision, *operands)
            else:
                self.weight = weight_tile_of(c, planned, target.precision, *operands)
            if isinstance(self.weight, BothTile):
                scratch += self.scratch_of_sums(self.weight.shares)
            if not self.weight.is_result:
                scratch.append(Param("weight_partials", "out", self.weight.shares * self.weight.elements))
        if "BiasGrad" in problem.spec.epilogue and self.bias_rows > 1:
            scratch.append(partials.partials_param(self.bias_rows, 1, problem.map("dy").c, name="bias_partials"))
        self.params = (*self.own, *scratch)

    @property
    def result(self) -> str:
        """Name the map that is made."""
        return EpiloguePlan(self.problem).result

    @property
    def epilogue(self) -> Problem:
        """Give the problem as the input gradient's epilogue sees it: the bias is not its business."""
        return without(self.problem, "BiasGrad")

    @property
    def reductions(self) -> Reductions:
        """Give what the input gradient's epilogue sums."""
        return Reductions.of(self.epilogue.spec)

    def scratch_of_sums(self, rows: int) -> tuple[Param, ...]:
        """List the parameter of the partials of dx's sums, if it has any."""
        return self.reductions.scratch(rows, self.problem.map(self.result).c)

    def taken(self, *names: str) -> list[Param]:
        """Pick the parameters of these names, in the kernel's order."""
        return [param for param in self.params if param.name in names]

    def build(self, name: str) -> tuple[Stage, ...]:
        """Build all stages of a kernel `name`: the weight's, the bias's, the input's."""
        stages: list[Stage] = []
        # the weight gradient reads dy and x, which the input gradient may share its accumulator's buffer with
        if self.weight is not None:
            stages += self.weight_stages(name, self.weight)
        if "BiasGrad" in self.problem.spec.epilogue:
            stages += self.bias_stages(name)
        if self.input is not None:
            stages += self.input_stages(name, self.input)
        return tuple(stages)

    @property
    def read_by_input(self) -> set[str]:
        """Name what the stage of dx takes."""
        plan = EpiloguePlan(self.problem)
        names = {*Operand(self.problem, True).names, "weight", self.result, "partials", *plan.maps, *plan.vectors}
        return names | {n for n in self.epilogue.spec.operands if n.startswith("inv_std")}

    def input_stages(self, name: str, tile: Tile) -> tuple[Stage, ...]:
        """Build the stage of dx and, where dx has sums, the one that merges their partials."""
        launch: dict[str, Any] = {"grid": tile.grid, "threads": tile.plan.threads, "min_blocks": tile.plan.min_blocks}
        shared = shared_bytes(tile, self.reductions)
        with d.stage(f"{name}_input", self.taken(*self.read_by_input), **launch, shared=shared) as block:
            emit(block, tile, Operand(self.problem, True), self.epilogue)
        return (block.stage, *self.merged_sums(name, tile.rows_of_partials, tile.plan.pixels))

    def merged_sums(self, name: str, tiles: int, rows: int) -> tuple[Stage, ...]:
        """Build the stage that merges the partials of dx's sums, if it has any."""
        made = self.problem.map(self.result)
        sizes = {"tiles": tiles, "rows": rows, "total": made.pixels, "channels": made.c}
        return self.reductions.merge(f"{name}_merge", self.params, **sizes, tail=self.problem.tail)

    def weight_stages(self, name: str, tile: Sized) -> tuple[Stage, ...]:
        """Build the stage of dweight's shares, of dx too where one tile gives both, and those that add them up."""
        gradient, source = Operand(self.problem, True), Operand(self.problem, False)
        names = {*gradient.names, *source.names, "dweight" if tile.is_result else "weight_partials"}
        plan = tile.plan
        merge: tuple[Stage, ...] = ()
        if isinstance(tile, BothTile):
            names |= self.read_by_input
            assert self.reductions.shared_bytes(tile.team) <= tile.shared
            merge = self.merged_sums(name, tile.shares, tile.share * plan.pixels)
        launch: dict[str, Any] = {"grid": tile.grid, "threads": plan.threads, "min_blocks": plan.min_blocks}
        with d.stage(f"{name}_weight", self.taken(*names), **launch, shared=tile.shared) as block:
            if isinstance(tile, BothTile):
                BothEmitter(block, tile, gradient, source, self.epilogue).run()
            else:
                EMITTERS[type(tile)](block, tile, gradient, source).run()
        if tile.is_result:
            return block.stage, *merge
        return block.stage, merge_weight(f"{name}_shares", self.taken("weight_partials", "dweight"), tile), *merge

    # -- the bias --------------------------------------------------------------------------------------------------

    @property
    def gradient(self) -> Operand:
        """Give dy and its prologue: at the convolution's output, or a transposed one's input."""
        return Operand(self.problem, not self.problem.spec.is_transposed)

    @property
    def bias_team(self) -> Team:
        """Lay out a block of the bias's sweep: up to 64 vectors of channels side by side, up to 256 threads."""
        kinds = self.gradient.maps.values()
        width = width_of(kinds)
        across = min(-(-self.problem.map("dy").c // width), 64)
        return Team(across, max(256 // across, 1), width)

    @property
    def bias_rows(self) -> int:
        """Count the partial rows of dbias: up to BIAS_ROWS a multiprocessor, of 4 pixels a thread or more.

        A single one is the result.
        """
        pixels = self.problem.map("dy").pixels
        return (
            1
            if pixels <= FEW_PIXELS
            else max(1, min(BIAS_ROWS * self.target.multiprocessors, pixels // (4 * self.bias_team.down)))
        )

    def bias_stages(self, name: str) -> tuple[Stage, ...]:
        """Build the sweep of dbias, the sum of dy behind BatchNormGrad, and the stage that merges several rows."""
        operand, team, rows = self.gradient, self.bias_team, self.bias_rows
        kind = self.problem.map("dy")
        columns = -(-kind.c // (team.across * team.width))
        share = -(-kind.pixels // rows)
        shared = max(team.sums_bytes(1), 16)
        held = "bias_partials" if rows > 1 else "dbias"
        taken = self.taken(*operand.names, held)
        launch: dict[str, Any] = {"grid": (rows * columns, 1, 1), "threads": team.threads, "shared": shared}
        with d.stage(f"{name}_bias", taken, **launch) as block:
            row = T.bind(block.x // columns)
            channel = T.bind((block.x % columns * team.across + team.vector(block.tid)) * team.width)
            left = None if kind.c % (team.across * team.width) == 0 else T.bind(kind.c - channel)
            reader = Reader(block, operand.maps, operand.vectors, team.width)
            reader.open(channel, left, kind.c % 4 == 0)
            sums = d.registers(team.width)
            for j in range(team.width):
                d.put(sums, j, T.float32(0))
            with T.serial(0, -(-share // team.down)) as i:
                inner = T.bind(i * team.down + team.lane(block.tid))
                pixel = T.bind(row * share + inner)

                def add(pixel: Expr = pixel) -> None:
                    reader.fetch(0, pixel)
                    reader.unpack(0)
                    for j in range(team.width):
                        d.put(sums, j, sums[j] + operand.value(reader.load(j)))

                d.when(d.all_of(inner < share, pixel < kind.pixels), add)
            partials.join_sums(team, block.tid, d.shared_memory(shared).view("float32"), sums, 1)
            target = block[held]

            def write() -> None:
                partials.write_row(target, row, 1, kind.c, channel, team.width, sums, left, kind.c % 4 == 0)

            d.when(True if team.down == 1 else team.lane(block.tid) == 0, write)
        if rows == 1:
            return (block.stage,)
        merge = partials.sums_stage(
            f"{name}_bias_merge",
            self.taken("bias_partials", "dbias"),
            tiles=rows,
            channels=kind.c,
            results=["dbias"],
            held="bias_partials",
        )
        return block.stage, merge


def without(problem: Problem, step: str) -> Problem:
    """Leave one step out of a problem's epilogue."""
    spec = problem.spec
    if step not in spec.epilogue:
        return problem
    kept = OpSpec(spec.prologue, spec.core, tuple(s for s in spec.epilogue if s != step))
    return Problem(kept.name, problem.maps, problem.attributes, problem.weight)


def merge_weight(name: str, params: list[Param], tile: Shares) -> Stage:
    """Add the shares, rows of [tap][input] or flat ones, in their order, into OIHW."""
    c, flat = tile.correlation, tile.plan.read == "flat"
    # a thread an element fills the GPU with large weights; of small ones several threads take shares each (from how
    # many threads on the GPU counts as filled was chosen by hand)
    lanes = 1
    while lanes < 32 and lanes * 2 <= tile.shares and tile.elements * lanes < 1 << 17:
        lanes *= 2
    columns = MERGE_THREADS // lanes
    grid = -(-tile.elements // columns), 1, 1
    shared = MERGE_THREADS * 4
    with d.stage(name, params, grid=grid, threads=MERGE_THREADS, shared=shared) as block:
        held, result = block["weight_partials"], block["dweight"]
        column, lane = block.tid % columns, block.tid // columns
        index = T.bind(block.x * columns + column)
        total = d.registers(1)
        d.put(total, 0, T.float32(0))

        def add() -> None:
            count = -(-tile.shares // lanes)
            with T.serial(0, count, annotations={"pragma_unroll": 8}) as i:
                share = lane + i * lanes
                value = held[share * tile.elements + index]
                if tile.shares % lanes:
                    d.when(share < tile.shares, lambda: d.put(total, 0, total[0] + value))
                else:
                    d.put(total, 0, total[0] + value)

        d.when(d.below(index, tile.elements, tile.elements % columns == 0), add)
        if lanes > 1:
            space = d.shared_memory(shared).view("float32")
            d.put(space, block.tid, total[0])
            d.sync()

        def store() -> None:
            if lanes > 1:
                with T.serial(1, lanes) as i:
                    d.put(total, 0, total[0] + space[i * columns + column])
            output, rest = T.bind(index // tile.row), T.bind(index % tile.row)
            if flat:
                down, element = T.bind(rest // c.flat_row), T.bind(rest % c.flat_row)
                tap, channel = down * c.horizontal.window + element // c.inputs, element % c.inputs
            else:
                tap, channel = rest // c.own_inputs, rest % c.own_inputs
            place = (output * c.own_inputs + channel) * c.taps + tap
            exists = element < c.horizontal.window * c.inputs if flat else True
            d.when(exists, lambda: d.put(result, place, total[0]))

        first = True if lanes == 1 else lane == 0
        d.when(d.all_of(first, d.below(index, tile.elements, tile.elements % columns == 0)), store)
    return block.stage
