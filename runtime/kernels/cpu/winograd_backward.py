"""Both gradients of a 3x3 convolution by Winograd's F(2x2, 3x3) in one kernel: 16 multiplications instead of 36.

    weights <- G w' G^T of the rotated weights                          [16][Cin/block][Cout][block]
    parallel over threads, each a fixed share of the chunks (some rows of 2 x 2 tiles of dx and dy):
        grad <- dy after BatchNormGrad, with a border of zeros          as the direct kernel
        read <- x after Normalize and activation, with the padding
        outputs <- A dy A^T, 2 x 2; windows <- B^T dy B, 4 x 4          [16][tile][Cout]
        for blocks of 32 input channels:
            inputs <- B^T x B, 4 x 4                                    [16][tile][32]
            dweight: for place, out block:  8 x 32 registers += inputs[tile, 8] * outputs[tile, 32], over the tiles
            dx:      for 14 tiles, place:  14 x 32 registers += windows[14, k] * weights[k, 32], over k in Cout
                     A^T products A, then other, mask, sums, acc and the store, while the products are in cache
    dweight <- G^T P G of the sum P of the threads' partials, in OIHW; dbeta, dgamma <- the sums

Any padding; no stride, dilation or groups. conv_backward.py chooses between this and the direct kernel. With many
weights all blocks of input channels, and all tiles of a chunk, go through a place before the next one (`in_blocks`,
`together`). With more weights than maps the threads share the blocks of input channels instead, over all tiles, and
each transforms the weights of a block, and makes its dweight, where it multiplies (`by_block`).

Milliseconds with BatchNormGrad, Normalize, ReLU, mask and sums (Sapphire Rapids, two threads, batch 16, minimum):

    layer                  winograd   direct       layer                  winograd   direct
    128 to 32 at 56           15.11    23.68       64 to 64 at 56            14.02    21.32
    128 to 32 at 28            3.35     5.52       256 to 256 at 14          12.32    19.95
    128 to 32 at 14            0.87     1.43       512 to 512 at 7           20.02    26.14
    128 to 32 at 7             0.35     0.39

Errors against float64, as multiples of the direct kernel's: dx 0.6 to 0.7, dweight 0.8 to 1.5 (docs/numerics.md).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.geometry import Convolution
from bnfuse.runtime.kernels.common.images import ImagePlan
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.conv_backward_epilogue import Buffer, Expr, finish
from bnfuse.runtime.kernels.cpu.conv_backward_micro import Place, bias_gradient
from bnfuse.runtime.kernels.cpu.conv_backward_nest import when
from bnfuse.runtime.kernels.cpu.conv_backward_pack import pack_grad, pack_read, pack_read_block
from bnfuse.runtime.kernels.cpu.images import Slots, runs_of, store_sums
from bnfuse.runtime.kernels.cpu.winograd import OUT, PLACES
from bnfuse.runtime.kernels.cpu.winograd_backward_micro import input_gradient, weight_products
from bnfuse.runtime.kernels.cpu.winograd_backward_nest import WinogradNest
from bnfuse.runtime.kernels.cpu.winograd_backward_shape import choose_tiles, shares_blocks
from bnfuse.runtime.kernels.cpu.winograd_backward_transform import (
    transform_block,
    transform_grad,
    transform_read,
    transform_weights,
    unpack_block,
    unpack_weight_gradient,
)
from bnfuse.runtime.kernels.kernel import Kernel, Param, Problem
from bnfuse.runtime.targets.target import CpuTarget

NAME = "winograd_backward"


def winograd_backward(problem: Problem, target: CpuTarget, shape: Convolution, params: tuple[Param, ...]) -> Kernel:
    """Make the kernel of a 3x3 convolution's gradients. `conv_backward` has checked the problem."""
    name = unique_name(NAME, problem, target)
    return Kernel(name, problem, target, params, partial(build, problem, target, shape, params))


def build(problem: Problem, target: CpuTarget, shape: Convolution, params: tuple[Param, ...]) -> Any:
    """Make the TIR function."""
    by_block = shares_blocks(shape, target) and ImagePlan.of(problem) is None  # sums of images are of whole threads
    with tir.function(unique_name(NAME, problem, target), params) as arguments:
        tiles = choose_tiles(shape, target, by_block)
        nest = WinogradNest(problem, target.threads, arguments.buffers, arguments.offsets, shape, tiles)
        (_by_block if by_block else _by_chunk)(nest, *_sums(nest))
    return arguments.result


def _sums(nest: WinogradNest) -> tuple[Buffer | None, Buffer | None]:
    """Allocate the threads' sums, of the reductions and of the bias."""
    sizes = nest.threads * nest.sums_size, nest.threads * nest.bias_size
    sums, bias = (tir.workspace(size, "float64") if size else None for size in sizes)
    return sums, bias


def _clear(nest: WinogradNest, sums: Buffer | None, bias: Buffer | None, thread: Expr) -> None:
    """Write zeros to a thread's sums."""
    for buffer, each in ((sums, nest.sums_size), (bias, nest.bias_size)):
        if buffer is not None:
            tir.zero(buffer, thread * each, each, nest.tiles.lanes)


def _by_chunk(nest: WinogradNest, sums: Buffer | None, bias: Buffer | None) -> None:
    """Write the function of threads that share chunks."""
    threads = nest.threads
    weights = tir.workspace(nest.weights_size) if nest.wants_input else None
    partials = tir.workspace(threads * nest.partial_size) if nest.wants_weight else None
    if weights is not None:
        transform_weights(nest, weights)
    plan, images = ImagePlan.of(nest.problem), None
    if plan is not None:
        made = nest.problem.map(nest.result)
        images = Slots.allocate(made.n, threads, len(plan.results), made.c)
    with T.parallel(0, threads) as thread:
        _clear(nest, sums, bias, thread)
        _chunks(nest, weights, partials, sums, bias, images, thread)
    if partials is not None:
        unpack_weight_gradient(nest, partials)
    finish(nest, sums, bias)
    if plan is not None and images is not None:
        store_sums(plan, images, runs_of(nest.items, threads, nest.images_of), nest.arguments)


def _by_block(nest: WinogradNest, sums: Buffer | None, bias: Buffer | None) -> None:
    """Write the function of threads that share blocks of input channels."""
    with T.parallel(0, nest.threads) as thread:
        _clear(nest, sums, bias, thread)
        _blocks(nest, sums, bias, thread)
    finish(nest, sums, bias)


@dataclasses.dataclass(frozen=True)
class _Space:
    """What a thread transforms, in workspaces of its own; None where the gradient that reads it is not wanted."""

    grad: Buffer
    scratch: Buffer
    read: Buffer | None
    inputs: Buffer | None
    outputs: Buffer | None
    windows: Buffer | None
    products: Buffer | None

    @staticmethod
    def allocate(nest: WinogradNest) -> _Space:
        """Allocate them; what packing does not write is zero."""

        def places(size: int, wanted: bool) -> Buffer | None:
            return tir.workspace(PLACES * size) if wanted else None

        zeros = partial(tir.zeros, lanes=nest.tiles.lanes)
        weight, dx = nest.wants_weight, nest.wants_input
        return _Space(
            grad=zeros(nest.grad_size),
            scratch=tir.workspace(OUT * OUT * nest.tiles.block),
            read=zeros(nest.read_size) if weight else None,
            inputs=places(nest.inputs_place, weight),
            outputs=places(nest.outputs_place, weight),
            windows=places(nest.windows_place, dx),
            products=places(nest.products_place, dx),
        )


def _chunks(
    nest: WinogradNest,
    weights: Buffer | None,
    partials: Buffer | None,
    sums: Buffer | None,
    bias: Buffer | None,
    images: Slots | None,
    thread: Expr,
) -> None:
    """Write a thread's share of the chunks."""
    sizes, lanes = nest.tiles, nest.tiles.lanes
    space = _Space.allocate(nest)
    first, count = tir.share(nest.items, nest.threads, thread)
    if partials is not None and nest.items < nest.threads:
        with when(count == 0):
            tir.zero(partials, thread * nest.partial_size, nest.partial_size, lanes)
    with T.serial(0, count) as number:
        item = T.bind(first + number)
        image = T.bind(item // nest.tile_rows * sizes.images)
        unit = T.bind(item % nest.tile_rows * sizes.rows)
        place = Place(thread, 0, image, unit, space.scratch, images)
        tiles = nest.active(unit)
        rows = nest.active_rows(unit)
        pack_grad(nest, space.grad, 0, image, unit)
        if bias is not None:
            bias_gradient(nest, space.grad, bias, place)
        transform_grad(nest, space.grad, space.outputs, space.windows, rows)
        if partials is not None:
            pack_read(nest, space.read, 0, image, unit)
        with T.serial(0, nest.rounds) as turn:
            block = T.bind(turn * sizes.in_blocks)
            if partials is not None:
                with T.serial(0, nest.present(block)) as slot:
                    transform_read(nest, space.read, space.inputs, block + slot, slot, rows)
                weight_products(nest, space.inputs, space.outputs, partials, thread, block, tiles, number == 0)
            if weights is not None:
                input_gradient(nest, space.windows, weights, space.products, sums, place, block, tiles)


def _blocks(nest: WinogradNest, sums: Buffer | None, bias: Buffer | None, thread: Expr) -> None:
    """Write a thread's share of the blocks of input channels, of all tiles."""
    space = _Space.allocate(nest)
    weights = tir.workspace(nest.weights_size) if nest.wants_input else None
    partial = tir.workspace(nest.partial_size) if nest.wants_weight else None
    place = Place(thread, 0, 0, 0, space.scratch)
    pack_grad(nest, space.grad, 0, 0, 0)
    if bias is not None:
        with when(thread == 0):
            bias_gradient(nest, space.grad, bias, place)
    transform_grad(nest, space.grad, space.outputs, space.windows, nest.chunk_rows)
    first, count = tir.share(nest.blocks, nest.threads, thread)
    with T.serial(0, count) as number:
        block = T.bind(first + number)
        if partial is not None:
            pack_read_block(nest, space.read, block)
            transform_read(nest, space.read, space.inputs, block, 0, nest.chunk_rows)
            weight_products(nest, space.inputs, space.outputs, partial, 0, block, nest.count, None)
            unpack_block(nest, partial, block)
        if weights is not None:
            transform_block(nest, weights, block)
            input_gradient(nest, space.windows, weights, space.products, sums, place, block, nest.count)
