"""What a step is compiled for where several processes run it: the same on all of them."""

from __future__ import annotations

import dataclasses

from bnfuse.core.ranges import check_whole

BUCKET = 4 << 20  # bytes of gradients in one exchange


@dataclasses.dataclass(frozen=True)
class Ranks:
    """How many ranks there are, and how many bytes of gradients, at least, go on their way together.

    A step of one rank exchanges nothing. Raises BnfuseError for numbers that are none.
    """

    size: int = 1
    bucket: int = BUCKET

    def __post_init__(self) -> None:
        check_whole("ranks", self.size, 1)
        check_whole("bucket", self.bucket, 1)


ONE = Ranks()
