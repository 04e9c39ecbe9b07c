"""Both gradients of a convolution in one kernel (ConvGrad, ConvGradInput, ConvGradWeight), any stride, dilation, group.

A ConvTranspose is a ConvGradInput of which dx is called y, with a bias and statistics on the way out; in its weight's
gradient x and dy have changed places (common/sides.py). Here they have the names of a Conv's gradient.

    pack the weights                                                        [Cin/block][R][S][Cout][block]
    parallel over threads, each a fixed share of the tiles (rows of dy, and the rows of x that they meet):
        grad <- dy after BatchNormGrad, with a border of zeros              L2
        read <- x after Normalize and activation, with the padding's zeros  L2
        dweight: for taps, out block:       8 x 32 registers += read[pixel, 8] * grad[pixel, 32], over the tile's pixels
        dx:      for in block, micro-tile: 14 x 32 registers += grad[14, k] * packed[k, 32], over r, s, k in Cout
                 then other, mask, sums, acc, and the store
    dweight <- the sum of the threads' partials, in OIHW; dbeta, dgamma <- the sums

Strided convolutions run the dx loops once per residue of the input position by the stride (conv_backward_shape.py).
The micro-tile's sums of d and d*(x - mean) are taken in registers and added in float64. Tails of pixels are computed
on whatever the tile holds and not stored; tails of channels are zeros in the packed weights.

Takes every shape; groups run one after the other, so that groups of fewer channels than a vector has lanes waste the
others. Depthwise convolutions have their own kernel (depthwise_backward.py), and so have 3x3 ones of stride 1 where
fewer multiplications pay (winograd_backward.py), and those of bfloat16 where the CPU has tiles (amx_backward.py);
`algorithms` chooses.

GFLOP/s of one core (Sapphire Rapids, processor time, batch 8; benchmarks/conv_kernels_backward.py has the layers).
Ours with BatchNormGrad, Normalize, ReLU, mask and sums, torch in channels_last the plain convolution:

    layer                ours   torch       layer                        ours   torch
    1x1 at 56             115     104       transition at 28              152     121
    1x1 at 28             119     116       stem, dweight alone           115     114
    1x1 at 14             126     127       3x3 64 to 64 at 56            158     174
    3x3 at 56             146     158       3x3 512 to 512 at 7           117     120
    3x3 at 28             158     168       3x3 / 2 128 to 128 at 56      129     126
    3x3 at 7              163     119       1x1 / 2 256 to 512 at 56      110     113
    3x3 at 56, 32 groups of 4: 19, torch 23
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm.script.ir_builder import tirx as T

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.kernels.common.geometry import convolution_of
from bnfuse.runtime.kernels.common.images import ImagePlan
from bnfuse.runtime.kernels.common.params import operator_params, unique_name
from bnfuse.runtime.kernels.common.sides import TOWARDS_INPUT
from bnfuse.runtime.kernels.cpu import amx_backward, amx_backward_pack, amx_few_channels, tir
from bnfuse.runtime.kernels.cpu.conv_backward_epilogue import finish
from bnfuse.runtime.kernels.cpu.conv_backward_micro import (
    Place,
    bias_gradient,
    input_gradient,
    weight_gradient,
)
from bnfuse.runtime.kernels.cpu.conv_backward_nest import Nest
from bnfuse.runtime.kernels.cpu.conv_backward_pack import (
    pack_grad,
    pack_read,
    pack_weights,
    unpack_weight_gradient,
)
from bnfuse.runtime.kernels.cpu.conv_backward_shape import Plan, alternatives, choose_tiles, conv_shape
from bnfuse.runtime.kernels.cpu.depthwise_backward import depthwise_backward, is_depthwise
from bnfuse.runtime.kernels.cpu.images import Slots, runs_of, store_sums
from bnfuse.runtime.kernels.cpu.winograd_backward import winograd_backward
from bnfuse.runtime.kernels.cpu.winograd_backward_shape import is_faster, is_possible
from bnfuse.runtime.kernels.kernel import Choice, Kernel, Problem
from bnfuse.runtime.targets.target import CpuTarget

NAME = "conv_backward"


def algorithms(problem: Problem, target: CpuTarget) -> tuple[str, ...]:
    """List the kernels that can make the gradients of a problem, the one of choice first."""
    shape = conv_shape(problem, target.threads)
    if is_depthwise(shape, target):
        return ("depthwise",)
    by_tiles = amx_backward.takes(problem, shape, target) or amx_few_channels.takes(problem, shape, target)
    tiles = ("amx",) if by_tiles else ()
    if not is_possible(shape):
        return (*tiles, "direct")
    return (*tiles, *(("winograd", "direct") if is_faster(shape, target) else ("direct", "winograd")))


def takes_image_sums(problem: Problem, target: CpuTarget) -> bool:
    """Tell whether the sums over images of a gradient are taken on the way out: by all but depthwise convolutions."""
    plan = ImagePlan.of(problem)
    return plan is not None and not plan.statistics and not is_depthwise(conv_shape(problem, target.threads), target)


def choices(problem: Problem, target: CpuTarget) -> tuple[Choice, ...]:
    """List all ways to do a problem that are worth measuring, that of the rules first."""
    possible = algorithms(problem, target)
    plans = alternatives(problem, target) if "direct" in possible else []
    return (*(Choice(name) for name in possible), *(Choice("direct", plan) for plan in plans))


def conv_backward(
    problem: Problem, target: CpuTarget, algorithm: str | None = None, plan: Plan | None = None
) -> Kernel:
    """Make the kernel of a convolution's gradients, or of a transposed one.

    `algorithm` is one of `algorithms`, the first by default; `plan` is of the direct algorithm alone. Raises
    BnfuseError where the operator is not the gradient of a convolution, and for an algorithm that cannot do the shape.
    """
    spec = problem.spec
    if spec.core not in TOWARDS_INPUT:
        raise BnfuseError(f"{problem.op} is not the gradient of a convolution; ask for it from another generator")
    possible = algorithms(problem, target)
    if algorithm is not None and algorithm not in possible:
        raise BnfuseError(f"{problem.op} has no kernel '{algorithm}' for this shape; take {' or '.join(possible)}")
    shape, params = conv_shape(problem, target.threads), operator_params(problem)
    chosen = algorithm or possible[0]
    if chosen == "depthwise":
        return depthwise_backward(problem, target, shape, params)
    if chosen == "winograd":
        return winograd_backward(problem, target, shape, params)
    name = unique_name(NAME, problem, target)
    if chosen == "amx":
        return Kernel(name, problem, target, params, partial(build_amx, problem, target))
    return Kernel(name, problem, target, params, partial(build, problem, target, plan), plan)


def build(problem: Problem, target: CpuTarget, plan: Plan | None = None) -> Any:
    """Make the TIR function of the direct algorithm, by the rule where there is no plan."""
    if plan is None:
        shape = conv_shape(problem, target.threads)
        plan = Plan(shape, choose_tiles(shape, target))
    with tir.function(unique_name(NAME, problem, target), operator_params(problem)) as arguments:
        nest = Nest(problem, target.threads, arguments.buffers, arguments.offsets, plan.shape, plan.tiles)
        _body(nest, pack_weights, _tiles)
    return arguments.result


def build_amx(problem: Problem, target: CpuTarget) -> Any:
    """Make the TIR function that multiplies by tiles."""
    kind: Callable[..., amx_backward.AmxNest]
    work: Callable[..., None]
    if amx_few_channels.takes(problem, convolution_of(problem), target):
        plan, kind, work = amx_few_channels.plan_of(problem, target), amx_few_channels.RowNest, amx_few_channels.work
    else:
        plan, kind, work = amx_backward.plan_of(problem, target), amx_backward.AmxNest, amx_backward.work
        by_block = amx_backward.plan_by_block(problem, plan, target)
        if by_block is not None:
            plan, kind, work = by_block, partial(amx_backward.AmxNest, by_block=True), amx_backward.work_by_block
    with tir.function(unique_name(NAME, problem, target), operator_params(problem)) as arguments:
        nest = kind(problem, target.threads, arguments.buffers, arguments.offsets, plan.shape, plan.tiles)
        _body(nest, None if nest.by_block else amx_backward_pack.pack_weights, work)
    return arguments.result


def _body(nest: Any, pack: Callable[[Any, Any], None] | None, work: Callable[[Any, dict[str, Any], Any], None]) -> None:
    """Write the function's body: all weights, a thread's `work`, the threads' sums. Without `pack` a thread packs the
    weights that it reads, and writes the gradients of weights that it has alone."""
    threads = nest.threads
    sizes = {
        "packed": (nest.packed_size if pack and nest.wants_input else 0, nest.packed_dtype),
        "partial": (threads * nest.partial_size if pack and nest.wants_weight else 0, "float32"),
        "sums": (threads * nest.sums_size, "float64"),
        "bias": (threads * nest.problem.map("dy").c if "BiasGrad" in nest.spec.epilogue else 0, "float64"),
    }
    space: dict[str, Any] = {name: tir.workspace(size, dtype) for name, (size, dtype) in sizes.items() if size}
    if pack and "packed" in space:
        pack(nest, space["packed"])
    plan = ImagePlan.of(nest.problem)
    if plan is not None:
        made = nest.problem.map(nest.result)
        space["images"] = Slots.allocate(made.n, threads, len(plan.results), made.c)
    with T.parallel(0, threads) as thread:
        for name, buffer in space.items():
            if name not in ("packed", "images"):
                each = sizes[name][0] // threads
                tir.zero(buffer, thread * each, each, nest.tiles.lanes)
        work(nest, space, thread)
    if "partial" in space:
        unpack_weight_gradient(nest, space["partial"])
    finish(nest, space.get("sums"), space.get("bias"))
    if plan is not None:
        store_sums(plan, space["images"], runs_of(nest.items, threads, nest.images_of), nest.arguments)


def _tiles(nest: Nest, space: dict[str, Any], thread: Any) -> None:
    """Write a thread's share of the tiles."""
    grad = tir.workspace(nest.grad_size)
    read = tir.workspace(nest.read_size) if nest.wants_weight else None
    tir.zero(grad, 0, nest.grad_size, nest.tiles.lanes)
    if read is not None:
        tir.zero(read, 0, nest.read_size, nest.tiles.lanes)
    scratch = tir.workspace(nest.micro_size)
    first, count = tir.share(nest.items, nest.threads, thread)
    with T.serial(0, count) as number, T.serial(0, nest.shape.groups) as group:
        item = T.bind(first + number)
        image = T.bind(item // nest.tile_rows * nest.tiles.images)
        unit = T.bind(item % nest.tile_rows * nest.tiles.rows)
        place = Place(thread, group, image, unit, scratch, space.get("images"))
        pack_grad(nest, grad, group, image, unit)
        if "bias" in space:
            bias_gradient(nest, grad, space["bias"], place)
        if read is not None:
            pack_read(nest, read, group, image, unit)
            weight_gradient(nest, read, grad, space["partial"], place)
        if nest.wants_input:
            input_gradient(nest, grad, space["packed"], space.get("sums"), place)
