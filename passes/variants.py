"""Levels with their options, as text: `none,icf+no-pool-first`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.passes.pipeline import LEVELS, Rewritten, is_pool_first

ON, OFF = "+pool-first", "+no-pool-first"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A level, whether average pools go before 1x1 convolutions, and how the statistics are sampled ("" for not)."""

    level: str
    pool_first: bool
    sample: str = ""

    @property
    def name(self) -> str:
        """Name the level; where the option is not as the level has it by default, with that: none+pool-first.

        Then the sampling: icf fs:1/32.
        """
        option = "" if self.pool_first == is_pool_first(self.level) else ON if self.pool_first else OFF
        return f"{self.level}{option} {self.sample}".rstrip()


def variants(texts: Iterable[str], samples: Iterable[str] = ()) -> tuple[Variant, ...]:
    """Read ["none,icf", "icf+no-pool-first"] as three variants. What is named twice is measured once.

    Each level also with each of `samples`, which are specs as `bnfuse rewrite --sample` takes them.
    """
    given = [texts] if isinstance(texts, str) else [*texts]
    levels = [variant(text) for text in split(given)]
    if given and not levels:
        raise BnfuseError(f"no level is named: the levels are {', '.join(LEVELS)}")
    sampled = [dataclasses.replace(level, sample=sample) for sample in ("", *samples) for level in levels]
    return tuple(dict.fromkeys(sampled))


def variant(text: str) -> Variant:
    """Read a level with its option. Raises BnfuseError for an unknown one."""
    level, plus, option = text.partition("+")
    if level not in LEVELS or (plus and plus + option not in (ON, OFF)):
        raise BnfuseError(
            f"there is no level '{text}': the levels are {', '.join(LEVELS)}, each also with {ON} or {OFF}"
        )
    return Variant(level, plus + option == ON if plus else is_pool_first(level))


def split(texts: Iterable[str]) -> Iterator[str]:
    """Split comma lists, repeated or not, as one."""
    for text in [texts] if isinstance(texts, str) else texts:
        yield from (part.strip() for part in text.split(",") if part.strip())


def rewrite_variant(graph: TrainingGraph, variant: Variant) -> Rewritten:
    """Rewrite a graph as a variant says."""
    from bnfuse import passes

    return passes.rewrite(
        graph.model, level=variant.level, pool_first=variant.pool_first, sample=variant.sample or None
    )
