"""The backward phase in a few runs of launches: when one is done, the gradients of its parameters are final.

    launches of the backward phase   |----- piece 0 -----|-- piece 1 --|---------- piece 2 ----------|
    gradients that are final then     fc, layer4.1.*       layer4.0.*    layer3.*, ..., conv1

Whoever averages gradients over processes begins with the first ones while the others are still computed.
"""

from __future__ import annotations

import dataclasses

from bnfuse.runtime.program.program import GRADIENTS, PARAMETERS, Part, Program, Storage


@dataclasses.dataclass(frozen=True)
class Piece:
    """Launches of the backward phase from `start` to before `stop`, the `index`th of `count` such pieces (`asked` for
    were at most so many).

    When they are done the gradients of `parameters` are final, `bytes` of them, and later pieces read neither these nor
    the parameters: both may be changed.
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
    final = last_uses(program)
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


def last_uses(program: Program) -> dict[str, int]:
    """Find for each gradient the last launch of the backward phase that touches it or its parameter; -1 where none does
    (a constant).

    What is handed out is averaged, clipped and stepped by, in place: a BatchNorm's gradients are read by the layer
    before it, and the weight of a Gemm is by the launch behind that of its gradient.
    """
    touched: list[tuple[int, Storage]] = []
    for index, launch in enumerate(program.phase("backward")):
        held = [program.storages[buffer.storage] for buffer in launch.buffers]
        touched += [(index, storage) for storage in held if storage.region in (GRADIENTS, PARAMETERS)]

    def last(name: str) -> int:
        own = [program.storages[of[name].storage] for of in (program.gradients, program.parameters) if name in of]
        return max((index for index, storage in touched if any(meet(storage, one) for one in own)), default=-1)

    return {name: last(name) for name in program.gradients}


def meet(a: Storage, b: Storage) -> bool:
    """Tell whether two storages have bytes in common."""
    return a.region == b.region and a.offset < b.offset + b.bytes and b.offset < a.offset + a.bytes
