"""Small operators one behind the other become one launch: most of what a gate computes by image and channel.

    Mul(beta, g)  Mul(slope, s)  Add  ReduceSum  ReluGrad conv     ->     chain(beta, g, slope, s)  ReluGrad conv

A launch of a few thousand elements takes the time of its call, and on a GPU that of waiting for the one before. So an
operator on vectors, or on what there is one of for each image and channel, waits for those behind it, until something
else reads what it makes. Operators join those that wait if they read what these make, or what these read, element by
element; sums over rows join what they sum. A result that nobody else reads is not stored (kernels/common/chain.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.common.chain import (
    FORMULAS,
    SUMS,
    ChainProblem,
    Member,
    Operand,
    Read,
    Total,
    is_elementwise,
    operand_shapes,
    seen,
    shape_of,
    squeezed,
)
from bnfuse.runtime.kernels.common.generic import GenericProblem, Shape
from bnfuse.runtime.kernels.common.generic_reduce import FOLDINGS, accumulator_of, reduced_axes
from bnfuse.runtime.kernels.kernel import Problem
from bnfuse.runtime.kernels.request import Request
from bnfuse.runtime.lowering.state import Lowering
from bnfuse.runtime.program import program as p

FEW = 1 << 18  # elements: more than that is worth a launch, and memory that is held longer
MOST = 12  # operators of a chain, and
LARGEST = 48  # of the formula of one result, in which what occurs twice is there twice
MOST_ROWS = 4096  # of a sum, for a thread goes down many of them: all chosen by hand


@dataclasses.dataclass(frozen=True)
class Small:
    """A launch that may be part of a chain: what it reads, in the order of its operands, and where its result goes.

    `space` is that of its elements, without axes of size 1; of a sum that of what it sums.
    """

    launch: p.Launch
    problem: GenericProblem | Problem
    space: Shape
    reads: tuple[tuple[int, Shape, Shape], ...]  # storage, shape, and the shape that it is broadcast to
    result: int
    is_sum: bool = False


def join_chains(low: Lowering) -> None:
    """Make chains of the launches of a lowering. What the program has no launch of any more is left to whoever
    counts its kernels."""
    readers = _readers(low)
    launches: list[p.Launch] = []
    for phase in p.ALL_PHASES:
        launches += Joining(low, readers).joined([launch for launch in low.launches if launch.phase == phase])
    low.launches = launches


def _readers(low: Lowering) -> dict[int, set[int]]:
    """Find the launches, by their identity, that read each storage."""
    found: dict[int, set[int]] = {}
    for launch in low.launches:
        for buffer in launch.buffers:
            if buffer.access != "out":
                found.setdefault(base_of(low, buffer.storage), set()).add(id(launch))
    return found


def base_of(low: Lowering, storage: int) -> int:
    """Give the storage that another one is a part of, or itself."""
    return low.parts[storage][0] if storage in low.parts else storage


class Waiting:
    """Operators that wait to be launched together. What they write no other group that waits touches."""

    def __init__(self, low: Lowering, first: Small) -> None:
        self.low, self.space = low, first.space
        self.members: list[Small] = []
        self.sizes: dict[int, int] = {}  # of the formula of what is made, by its storage
        self.read: set[int] = set()
        self.written: set[int] = set()
        self.add(first)

    def add(self, small: Small) -> None:
        """Let one more wait."""
        self.members.append(small)
        self.sizes[small.result] = self.size_of(small)
        self.read |= {base_of(self.low, storage) for storage, _, _ in small.reads}
        self.written.add(base_of(self.low, small.result))

    def size_of(self, small: Small) -> int:
        """Count the operators in the formula of a result."""
        return 1 + sum(self.sizes.get(storage, 0) for storage, _, _ in small.reads)

    def is_near(self, small: Small) -> bool:
        """Tell whether one more has the same elements, and reads what is read or made here."""
        near = {base_of(self.low, storage) for storage, _, _ in small.reads}
        return small.space == self.space and bool(near & (self.read | self.written))

    def takes(self, small: Small) -> bool:
        """Tell whether one that is near may join: it is not too much, and takes what is made here as it is made."""
        if len(self.members) == MOST or self.size_of(small) > LARGEST:
            return False
        wholes = {m.result for m in self.members if not m.is_sum}
        made = [read for read in small.reads if base_of(self.low, read[0]) in self.written]
        if any(storage not in wholes or squeezed(shape) != small.space for storage, shape, _ in made):
            return False
        return base_of(self.low, small.result) not in self.read | self.written

    def with_members(self, other: Waiting) -> Waiting:
        """Put two groups together; neither depends on the other."""
        both = Waiting(self.low, self.members[0])
        for small in (*self.members[1:], *other.members):
            both.add(small)
        return both

    def meets(self, launch: p.Launch) -> bool:
        """Tell whether a launch must stay behind those that wait: one writes what the other reads or writes."""
        for buffer in launch.buffers:
            base = base_of(self.low, buffer.storage)
            if base in self.written or (buffer.access != "in" and base in self.read):
                return True
        return False


class Joining:
    """The launches of one phase, in order, on their way into chains."""

    def __init__(self, low: Lowering, readers: Mapping[int, set[int]]) -> None:
        self.low, self.readers = low, readers
        self.done: list[p.Launch] = []
        self.waiting: list[Waiting] = []

    def joined(self, launches: Sequence[p.Launch]) -> list[p.Launch]:
        """Give the launches with chains in the place of their operators, where these wait no longer."""
        for launch in launches:
            small = small_of(self.low, launch)
            home = self.home_of(small) if small is not None else None
            for group in [group for group in self.waiting if group is not home and group.meets(launch)]:
                self.flush(group)
            if small is None:
                self.done.append(launch)
            elif home is None:
                self.waiting.append(Waiting(self.low, small))
            else:
                home.add(small)
        for group in list(self.waiting):
            self.flush(group)
        return self.done

    def home_of(self, small: Small) -> Waiting | None:
        """Find the group that an operator joins: all those near it put together, as far as one launch has room."""
        home: Waiting | None = None
        for group in [group for group in self.waiting if group.is_near(small)]:
            if home is None:
                home = group
            elif len(home.members) + len(group.members) < MOST:
                both = home.with_members(group)
                self.waiting[self.waiting.index(home)] = both
                self.waiting.remove(group)
                home = both
        return home if home is not None and home.takes(small) else None

    def flush(self, group: Waiting) -> None:
        """Launch a group that waits."""
        self.waiting.remove(group)
        self.done.extend(chained(self.low, group.members, self.readers))


# -- what may be part of a chain -------------------------------------------------------------------------------------


def small_of(low: Lowering, launch: p.Launch) -> Small | None:
    """Describe a launch that may be part of a chain; None for any other."""
    request = low.request_of(launch)
    if request is None:
        return None
    problem = request.arguments[0]
    if any(isinstance(argument, p.Scalar) or argument for argument in launch.arguments[len(launch.buffers) :]):
        return None  # drawn, or a map in a wider buffer
    if request.kind == registry.GENERIC:
        return _generic(launch, problem)
    if request.kind in (registry.POINTWISE_FORWARD, registry.POINTWISE_BACKWARD) and is_elementwise(problem):
        shape = shape_of(problem)
        return (
            None
            if shape[1:3] != (1, 1)
            else _small(launch, problem, shape, [own for _, own in operand_shapes(problem)])
        )
    return None


def _generic(launch: p.Launch, problem: GenericProblem) -> Small | None:
    if problem.op_type in FORMULAS and len(problem.outputs) == 1:
        return _small(launch, problem, problem.out_shape, [shape for shape, _ in problem.inputs])
    if problem.op_type not in SUMS or len(problem.inputs) != 1:
        return None
    axes = reduced_axes(problem)
    space = squeezed(problem.shape())
    if len(space) != 2 or axes.reduced != ((space[0], space[1]),) or space[0] > MOST_ROWS:
        return None
    if accumulator_of(FOLDINGS[problem.op_type], problem) != "float64":
        return None
    small = _small(launch, problem, problem.shape(), [problem.shape()])
    return small and dataclasses.replace(small, is_sum=True)


def _small(launch: p.Launch, problem: GenericProblem | Problem, shape: Shape, operands: list[Shape]) -> Small | None:
    if not 0 < math.prod(shape) <= FEW or len(squeezed(shape)) > 2:
        return None
    *read, written = launch.buffers
    if [buffer.access for buffer in launch.buffers] != ["in"] * len(operands) + ["out"]:
        return None
    reads = tuple((buffer.storage, own, shape) for buffer, own in zip(read, operands, strict=True))
    return Small(launch, problem, squeezed(shape), reads, written.storage)


# -- making a chain ----------------------------------------------------------------------------------------------------


def chained(low: Lowering, group: Sequence[Small], readers: Mapping[int, set[int]]) -> Iterator[p.Launch]:
    """Yield the launch of a chain, or the launches that there were where there is nothing to join."""
    if len(group) == 1:
        yield group[0].launch
        return
    own = {id(small.launch) for small in group}
    inputs: dict[int, tuple[int, str]] = {}  # storage -> elements, dtype
    made: dict[int, int] = {}  # storage -> member
    members: list[Member] = []
    totals: list[tuple[Total, int]] = []
    for small in group:
        operands = tuple(_operand(low, read, made, inputs) for read in small.reads)
        if small.is_sum:
            assert isinstance(small.problem, GenericProblem)
            totals.append((Total(small.problem, operands[0]), small.result))
        else:
            made[small.result] = len(members)
            members.append(Member(small.problem, operands))
    stored = {
        storage: number
        for storage, number in made.items()
        if low.storages[storage].region != p.ARENA or readers.get(base_of(low, storage), set()) - own
    }
    if not stored and not totals:  # nobody reads any of it
        return
    problem = ChainProblem(
        group[0].space,
        tuple(members),
        tuple(inputs.values()),
        tuple(stored.values()),
        tuple(total for total, _ in totals),
        group[0].space[0] if totals else 1,
    )
    kernel = low.kernel(Request(registry.CHAIN, (problem, low.target)))
    written = (*stored, *(result for _, result in totals))
    buffers = [p.Buffer(s, "in") for s in inputs] + [p.Buffer(s, "out") for s in written]
    first = group[0].launch
    node = f"{first.node} and {len(group) - 1} more"
    yield p.Launch(first.phase, low.kernels[kernel.key], node, tuple(buffers))


def _operand(
    low: Lowering,
    read: tuple[int, Shape, Shape],
    made: Mapping[int, int],
    inputs: dict[int, tuple[int, str]],
) -> Operand:
    storage, shape, broadcast = read
    if storage in made:
        return made[storage]
    held = low.storages[storage]
    inputs.setdefault(storage, (held.elements, held.dtype))
    return Read(list(inputs).index(storage), seen(shape, broadcast))
