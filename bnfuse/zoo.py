"""What `bnfuse models` lists."""

from __future__ import annotations

import dataclasses
from typing import Any

from bnfuse.models import MODELS, count_forward


@dataclasses.dataclass(frozen=True)
class ZooEntry:
    """A network at its default sizes. `flops` are of one image, forward."""

    name: str
    about: str
    image: int
    classes: int
    batch: int
    parameters: int
    flops: int
    metaparameters: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def zoo_entries() -> list[ZooEntry]:
    """All networks, counted without making their weights."""
    return [zoo_entry(name) for name in sorted(MODELS)]


def zoo_entry(name: str) -> ZooEntry:
    entry = MODELS[name]
    counts = count_forward(name, batch=1)
    return ZooEntry(
        name,
        entry.about,
        entry.image,
        entry.classes,
        entry.batch,
        counts.parameters,
        counts.flops_per_image,
        entry.metaparameters,
    )
