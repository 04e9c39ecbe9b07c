"""The order in which layers run: as the file has them, or depth first to the joins ([Tsai21], section 4.2.2).

Depth first: after a layer comes its first reader, and so on down the branch, until a layer also needs another branch;
then the next branch is taken up from where the network forked. The layer at the join runs when its last branch is done.
"""

from __future__ import annotations

from collections.abc import Sequence

from bnfuse.core.errors import BnfuseError
from bnfuse.estimating.options import Order
from bnfuse.estimating.workload import Layer


def arranged(layers: Sequence[Layer], order: Order) -> tuple[Layer, ...]:
    """Arrange `layers`, which are in an order that works, in `order`."""
    if order not in ("file", "dfs"):
        raise BnfuseError(f"order '{order}' is unknown: it is file or dfs")
    if order == "file":
        return tuple(layers)
    return tuple(layers[index] for index in depth_first(dependencies(layers)))


def dependencies(layers: Sequence[Layer]) -> list[list[int]]:
    """List for each layer the earlier ones that it must follow: the writers of what it reads, and the readers and
    writers of what it writes over."""
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    before = []
    for index, layer in enumerate(layers):
        wanted = {writer[a.tensor] for a in layer.accesses if a.tensor in writer}
        for access in layer.writes:
            wanted.update(readers.pop(access.tensor, ()))
        for access in layer.reads:
            readers.setdefault(access.tensor, []).append(index)
        for access in layer.writes:
            writer[access.tensor] = index
        before.append(sorted(wanted - {index}))
    return before


def depth_first(before: Sequence[Sequence[int]]) -> list[int]:
    """Order indices as the module says; `before[i]` are the indices that i waits for, all below i."""
    after: list[list[int]] = [[] for _ in before]
    for index, earlier in enumerate(before):
        for other in earlier:
            after[other].append(index)
    missing = [len(earlier) for earlier in before]
    found = []
    stack = [index for index in range(len(before) - 1, -1, -1) if not missing[index]]
    while stack:
        index = stack.pop()
        found.append(index)
        ready = []
        for other in after[index]:
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)
        stack.extend(reversed(ready))
    return found
