"""What the forward convolutions have in common: weights first, then tiles, then the statistics.

They make dx of a transposed convolution too, and then leave by the epilogue of a gradient (conv_backward_epilogue.py).
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.cpu.conv_backward_epilogue import Elements, Sums, finish, write_epilogue
from bnfuse.runtime.kernels.cpu.entry import Entry
from bnfuse.runtime.kernels.cpu.images import Slots, runs_of, store_statistics
from bnfuse.runtime.kernels.cpu.nest import MicroTile, Place, covers_input, cut
from bnfuse.runtime.kernels.cpu.partials import Partials
from bnfuse.runtime.kernels.cpu.tiles import ConvShape
from bnfuse.runtime.kernels.cpu.tir import Arguments, Buffer, Expr, as_stored, span, splat, with_width, workspace, zero
from bnfuse.runtime.kernels.kernel import Problem
from bnfuse.runtime.targets.target import CpuTarget

Write = Callable[[Expr, Expr], None]  # number of a pixel where its values wait, and in the map


class ForwardNest:
    """The body of a forward convolution's function; subclasses fill in the packing of weights and the tiles."""

    width: int  # output channels of a block of weights
    out_blocks: int  # such blocks of a group
    images: Slots | None  # the sums over images
    packed_dtype = "float32"  # of the packed weights

    def __init__(self, problem: Problem, target: CpuTarget, arguments: Arguments, shape: ConvShape) -> None:
        self.target, self.arguments, self.shape = target, arguments, shape
        self.epilogue = problem.spec.epilogue
        self.entry = Entry(problem, arguments)
        self.elements = Elements(problem, target.threads, arguments.buffers, arguments.offsets)
        self.is_gradient = problem.spec.is_gradient
        self.y = self.entry.map(self.elements.result)
        self.lanes = target.lanes
        self.stores_in_passing = "StoreInput" in self.epilogue and covers_input(shape)

    @property
    def packed_weights(self) -> int:
        """Count the floats of the packed weights; 0 where threads pack them as they go."""
        raise NotImplementedError

    def pack_weights(self, thread: Expr) -> None:
        """Pack a thread's share of the weights into `self.weights`."""
        raise NotImplementedError

    @property
    def items(self) -> int:
        """Count the tiles that the threads share."""
        raise NotImplementedError

    def images_of(self, first: int, last: int) -> tuple[int, int]:
        """Give the first and the last image of the tiles from `first` to `last`."""
        raise NotImplementedError

    def work(self, thread: Expr) -> None:
        """Write a thread's share of the tiles."""
        raise NotImplementedError

    def emit(self) -> None:
        """Write the function's body: all weights, then all tiles, then the threads' statistics."""
        shape, threads = self.shape, self.target.threads
        if self.packed_weights:
            self.weights = workspace(self.packed_weights, self.packed_dtype)
        statistics = "Statistics" in self.epilogue
        own = self.elements.sums_size if self.is_gradient else 0
        self.totals = workspace(threads * own, "float64") if own else None
        if statistics:
            self.partials = Partials.allocate(shape.cout, threads, self.lanes)
        self.images = None
        if "ImageStatistics" in self.epilogue:
            self.images = Slots.allocate(shape.n, threads, 2, shape.cout)
        stores = "StoreInput" in self.epilogue and not self.stores_in_passing
        if self.packed_weights or stores:
            with T.parallel(0, threads) as thread:
                if self.packed_weights:
                    self.pack_weights(thread)
                if stores:
                    self.entry.store_all(thread, self.target)
        with T.parallel(0, threads) as thread:
            if statistics:
                self.partials.clear(thread)
            if own:
                zero(self.totals, thread * own, own, self.lanes)
            self.work(thread)
        if statistics:
            count = shape.n * shape.oh * shape.ow
            self.partials.finish(count, self.arguments["mean"], self.arguments["variance"])
        if self.images is not None:
            runs, area = runs_of(self.items, threads, self.images_of), shape.oh * shape.ow
            results = (self.arguments[name] for name in ("image_mean", "image_variance"))
            store_statistics(self.images, runs, area, *results)
        if self.is_gradient:
            finish(self.elements, self.totals, None)

    def finished(self, values: list[Expr], channel: Expr, lanes: int) -> list[Expr]:
        """Give vectors of what is made of the channels from `channel` on with their bias, and behind the activation.

        Where they are summed they are as the map will hold them.
        """
        if "Bias" in self.epilogue:
            bias = T.bind(self.arguments["bias"][span(channel, lanes)])
            values = [T.bind(value + bias) for value in values]
        if "Relu" in self.epilogue:
            values = [T.bind(steps.maximum(value, splat(0, lanes))) for value in values]
        if {"Statistics", "ImageStatistics"} & {*self.epilogue}:
            values = [as_stored(self.y.buffer, value) for value in values]
        return values

    def leave(
        self, scratch: Buffer, width: int, thread: Expr, channel: Expr, count: int, each: Callable[[Write], None]
    ) -> None:
        """Write the epilogue of a gradient for `count` channels from `channel` on.

        `each` calls what it is given for the pixels: with their number in `scratch`, [number][width], and in the map.
        """
        sums = Sums.zero(self.elements, width, self.lanes)
        parts = dict(cut(count, self.lanes))

        def write(number: Expr, pixel: Expr) -> None:
            for start, lanes in parts.items():
                with T.vectorized(0, lanes) as lane:
                    inner = start + lane
                    at = number * width + inner
                    write_epilogue(self.elements, scratch[at], (scratch, at), sums, (pixel, channel + inner, inner))

        each(write)
        sums.flush(self.totals, thread, channel, parts)

    def each_pixel(self, place: Place, micro: MicroTile, write: Write) -> None:
        """Write loops over the output pixels of a micro tile; `write` is given their numbers in it and in the map."""
        shape, rows, columns = self.shape, micro.row.size, micro.column.size
        first = T.bind(place.output_pixels(micro, shape)[0])
        with T.serial(0, micro.image.size) as i, T.serial(0, rows) as h, T.serial(0, columns) as w:
            write(T.bind((i * rows + h) * columns + w), T.bind(first + (i * shape.oh + h) * shape.ow + w))

    def with_output_width(self, block: Expr, body: Callable[[int], None]) -> None:
        """Call `body` with the channels of output block `block`, which are fewer in the last."""
        with_width(block, self.width, self.shape.group_cout, body)
