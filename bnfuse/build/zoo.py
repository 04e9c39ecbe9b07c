"""The zoo as commands see it: what `bnfuse models` lists, and networks by name where a file may be meant as well."""

from __future__ import annotations

import dataclasses
from typing import Any

from bnfuse.build.named import looks_like_file
from bnfuse.core.errors import BnfuseError
from bnfuse.models import MODELS, SHAPE_ONLY, build_graph, count_forward, entry_of
from bnfuse.models.layers import Network


@dataclasses.dataclass(frozen=True)
class ZooEntry:
    """A network at its default sizes. `flops` are of one sample, forward.

    A `shape_only` network serves estimates: it has no image and no classes, and no training graph is built of it.
    """

    name: str
    about: str
    image: int | None
    classes: int | None
    batch: int
    parameters: int
    flops: int
    metaparameters: dict[str, Any]
    shape_only: bool

    def to_json(self) -> dict[str, Any]:
        """Give the entry as JSON's types; the keys are in docs/cli.md."""
        return dataclasses.asdict(self)


def zoo_entries() -> list[ZooEntry]:
    """Describe all networks, counted without making their weights."""
    return [zoo_entry(name) for name in sorted(MODELS | SHAPE_ONLY)]


def zoo_entry(name: str) -> ZooEntry:
    """Describe a network of the zoo: its sizes by default, parameters and FLOPs of a sample."""
    entry = entry_of(name)
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
        entry.shape_only,
    )


def is_network(source: Any) -> bool:
    """Tell whether it is the name of a network of the zoo."""
    return isinstance(source, str) and (source in MODELS or source in SHAPE_ONLY)


def network_named(source: Any, zoo: dict[str, Any] | None = None) -> Network | None:
    """Give the network of the zoo that `source` names, without its weights, or None where `source` is a model.

    `zoo` has its batch, image, channels, classes and metaparameters; None where not given. A model takes none of them.
    """
    given = {key: value for key, value in (zoo or {}).items() if value is not None}
    if is_network(source):
        return build_graph(source, **given)
    if isinstance(source, str) and not looks_like_file(source):
        entry_of(source)  # raises, with the names there are
    if given:
        what = ", ".join(sorted(given))
        raise BnfuseError(f"{source}: {what} can be chosen for networks of the zoo only, not for a training graph")
    return None
