"""What a benchmark can be asked for, as text: levels with their options, and peers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from bnfuse.errors import BnfuseError
from bnfuse.passes.manager import LEVELS, is_pool_first
from bnfuse.peers.names import PEERS as TORCH_PEERS

PEERS = ("ort", *TORCH_PEERS)
ON, OFF = "+pool-first", "+no-pool-first"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A level, and whether average pools go before 1x1 convolutions."""

    level: str
    pool_first: bool

    @property
    def name(self) -> str:
        """The level; where the option is not as the level has it by default, with that: none+pool-first."""
        if self.pool_first == is_pool_first(self.level):
            return self.level
        return self.level + (ON if self.pool_first else OFF)


def variants(texts: Iterable[str]) -> tuple[Variant, ...]:
    """["none,icf", "icf+no-pool-first"] -> three variants. What is named twice is measured once."""
    return tuple(dict.fromkeys(variant(text) for text in split(texts)))


def variant(text: str) -> Variant:
    level, plus, option = text.partition("+")
    if level not in LEVELS or (plus and plus + option not in (ON, OFF)):
        raise BnfuseError(
            f"there is no level '{text}': the levels are {', '.join(LEVELS)}, each also with {ON} or {OFF}"
        )
    return Variant(level, plus + option == ON if plus else is_pool_first(level))


def peers(texts: Iterable[str]) -> tuple[str, ...]:
    """["ort,torch", "torch-cl"] -> the three, each once, in this order."""
    named = tuple(dict.fromkeys(split(texts)))
    for name in named:
        if name not in PEERS:
            raise BnfuseError(f"cannot measure against '{name}': there are {', '.join(PEERS)}")
    return named


def split(texts: Iterable[str]) -> Iterator[str]:
    """Comma lists, repeated or not, as one."""
    for text in texts:
        yield from (part.strip() for part in text.split(",") if part.strip())
