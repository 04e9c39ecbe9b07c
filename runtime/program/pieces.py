"""The backward phase in a few runs of launches: when one is done, the gradients of its parameters are final.

    launches of the backward phase   |----- piece 0 -----|-- piece 1 --|---------- piece 2 ----------|
    gradients that are final then     fc, layer4.1.*       layer4.0.*    layer3.*, ..., conv1

Whoever averages gradients over processes begins with the first ones while the others are still computed.
"""

from __future__ import annotations

import dataclasses

from bnfuse.runtime.program.program import GRADIENTS, Part, Program, Storage


@dataclasses.dataclass(frozen=True)
class Piece:
    """Launches of the backward phase from `start` to before `stop`, the `index`th of `count` such pieces (`asked` for
    were at most so many).

    When they are done the gradients of `parameters` are final, `bytes` of them.
    """

    index: int
    count: int
    asked: int
    start: int
    stop: int
    parameters: tuple[str, ...]
    bytes: int

    @property
    def part(self) -> Part:
        """Give the launches as what a runner runs."""
        return Part("backward", self.start, self.stop)


def cut(program: Program, count: int) -> tuple[Piece, ...]:
    """Cut the backward phase into at most `count` pieces with about the same bytes of gradients.

    There are fewer where gradients become final together. Parameters are in the order in which theirs become final.
    """
    final = last_writes(program)
    sizes = {name: program.storages[program.gradients[name].storage].bytes for name in final}
    order = sorted(final, key=lambda name: final[name])  # stable: as in the program where they are final together
    launches = len(program.phase("backward"))
    bounds: list[int] = []
    done, total = 0, max(sum(sizes.values()), 1)
    for name in order:
        before, done = done, done + sizes[name]
        if before * count // total < done * count // total:  # one of the shares is full
            bounds.append(final[name] + 1)
    ends = sorted({bound for bound in bounds if 0 < bound < launches and any(last >= bound for last in final.values())})
    ranges = list(zip([0, *ends], [*ends, launches], strict=True))
    found = []
    for index, (start, stop) in enumerate(ranges):
        names = tuple(name for name in order if start <= max(final[name], 0) < stop or (not launches and not index))
        found.append(Piece(index, len(ranges), count, start, stop, names, sum(sizes[name] for name in names)))
    return tuple(found)


def last_writes(program: Program) -> dict[str, int]:
    """Find for each gradient the last launch of the backward phase that writes it; -1 where none does (a constant)."""
    written: list[tuple[int, int, int]] = []  # the launch, and the bytes of the region that it writes
    for index, launch in enumerate(program.phase("backward")):
        for buffer in launch.buffers:
            held = program.storages[buffer.storage]
            if held.region == GRADIENTS and buffer.access != "in":
                written.append((index, held.offset, held.offset + held.bytes))

    def last(held: Storage) -> int:
        stop = held.offset + held.bytes
        return max((index for index, start, end in written if start < stop and held.offset < end), default=-1)

    return {name: last(program.storages[tensor.storage]) for name, tensor in program.gradients.items()}
