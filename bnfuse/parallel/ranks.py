"""What a step is compiled for where several processes run it: the same on all of them."""

from __future__ import annotations

import dataclasses

from bnfuse.core.errors import BnfuseError
from bnfuse.core.ranges import check_whole

# bytes of gradients in one exchange: two ranks of a machine sum 4 MiB by MPI at 2.6 to 4 GB/s, 64 KiB, where a message
# takes 0.4 ms by itself, at 0.2, and 64 MiB, which no cache holds, at 0.5
BUCKET = 4 << 20
WIRES = ("fp32", "bf16")  # what gradients are on their way


@dataclasses.dataclass(frozen=True)
class Ranks:
    """How many ranks there are, how many bytes of gradients, at least, go on their way together, and as what; `mapped`
    where all of them are GPUs that reach each other's memory.

    A step of one rank exchanges nothing. Raises BnfuseError for numbers that are none, and for an unknown `wire`.
    """

    size: int = 1
    bucket: int = BUCKET
    wire: str = WIRES[0]
    mapped: bool = False

    def __post_init__(self) -> None:
        check_whole("ranks", self.size, 1)
        check_whole("bucket", self.bucket, 1)
        if self.wire not in WIRES:
            raise BnfuseError(f"wire '{self.wire}' is unknown: gradients go as one of {', '.join(WIRES)}")


ONE = Ranks()
