"""What the two forward convolutions have in common: weights first, then tiles, then the statistics."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cpu.entry import Entry
from bnfuse.runtime.kernels.cpu.nest import covers_input
from bnfuse.runtime.kernels.cpu.partials import Partials
from bnfuse.runtime.kernels.cpu.tiles import ConvShape
from bnfuse.runtime.kernels.cpu.tir import Arguments, Expr, with_width, workspace
from bnfuse.runtime.kernels.kernel import Problem
from bnfuse.runtime.targets.target import CpuTarget


class ForwardNest:
    """The body of a forward convolution's function; subclasses fill in the packing of weights and the tiles."""

    width: int  # output channels of a block of weights
    out_blocks: int  # such blocks of a group

    def __init__(self, problem: Problem, target: CpuTarget, arguments: Arguments, shape: ConvShape) -> None:
        self.target, self.arguments, self.shape = target, arguments, shape
        self.epilogue = problem.spec.epilogue
        self.entry = Entry(problem, arguments)
        self.y = self.entry.map("y")
        self.lanes = target.lanes
        self.stores_in_passing = "StoreInput" in self.epilogue and covers_input(shape)

    @property
    def packed_weights(self) -> int:
        """Count the floats of the packed weights."""
        raise NotImplementedError

    def pack_weights(self, thread: Expr) -> None:
        """Pack a thread's share of the weights into `self.weights`."""
        raise NotImplementedError

    def work(self, thread: Expr) -> None:
        """Write a thread's share of the tiles."""
        raise NotImplementedError

    def emit(self) -> None:
        """Write the function's body: all weights, then all tiles, then the threads' statistics."""
        shape, threads = self.shape, self.target.threads
        self.weights = workspace(self.packed_weights)
        statistics = "Statistics" in self.epilogue
        if statistics:
            self.partials = Partials.allocate(shape.cout, threads, self.lanes)
        with T.parallel(0, threads) as thread:
            self.pack_weights(thread)
            if "StoreInput" in self.epilogue and not self.stores_in_passing:
                self.entry.store_all(thread, self.target)
        with T.parallel(0, threads) as thread:
            if statistics:
                self.partials.clear(thread)
            self.work(thread)
        if statistics:
            count = shape.n * shape.oh * shape.ow
            self.partials.finish(count, self.arguments["mean"], self.arguments["variance"])

    def with_output_width(self, block: Expr, body: Callable[[int], None]) -> None:
        """Call `body` with the channels of output block `block`, which are fewer in the last."""
        with_width(block, self.width, self.shape.group_cout, body)
