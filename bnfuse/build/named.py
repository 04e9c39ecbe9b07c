"""`bnfuse build`: a training file from a zoo name or a forward model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bnfuse.build import Built, build
from bnfuse.core.errors import BnfuseError
from bnfuse.core.ranges import check_whole
from bnfuse.graph.io import save
from bnfuse.models import MODELS, SHAPE_ONLY, build_forward, entry_of


def build_model(source: str, *, zoo: dict[str, Any] | None = None, **options: Any) -> Built:
    """Build the training graph of a network of the zoo, or of the file `source`.

    `zoo` has batch, image, channels, classes, seed and metaparameters; of these a file takes batch and seed.
    """
    given = {key: value for key, value in (zoo or {}).items() if value is not None}
    check_whole("seed", given.get("seed", 0))
    if source in MODELS or source in SHAPE_ONLY:  # the latter are refused
        return build(build_forward(source, **given), file=source, seed=given.get("seed", 0), **options)
    if not looks_like_file(source):
        entry_of(source)  # raises, with the names there are
    foreign = sorted(set(given) - {"batch", "seed"})
    if foreign:
        raise BnfuseError(f"{source}: {', '.join(foreign)} can be chosen for networks of the zoo only, not for a file")
    return build(source, batch=given.get("batch"), seed=given.get("seed", 0), **options)


def looks_like_file(source: str) -> bool:
    """Tell whether a source is meant as a path: it has an ending, a folder, or is there."""
    path = Path(source)
    return path.suffix != "" or len(path.parts) > 1 or path.exists()


def build_file(source: str, output: Path, *, zoo: dict[str, Any], **options: Any) -> Built:
    """Do what `build_model` does, and write the result to `output`."""
    built = build_model(source, zoo=zoo, **options)
    save(built.model, output)
    return built
