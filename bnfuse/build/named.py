"""`bnfuse build`: a training file from a zoo name, a forward model, or code and programs of torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bnfuse.build import Built, build
from bnfuse.core.errors import BnfuseError
from bnfuse.core.ranges import check_whole
from bnfuse.fromtorch.initial_state import Loading, put_state
from bnfuse.fromtorch.programs import is_program, program_of
from bnfuse.fromtorch.sources import examples, is_code, make_arguments, module_of
from bnfuse.fromtorch.weights import read_weights
from bnfuse.graph.io import save
from bnfuse.models import MODELS, SHAPE_ONLY, build_forward, entry_of


def build_model(
    source: str,
    *,
    zoo: dict[str, Any] | None = None,
    example: Sequence[str] = (),
    make_arg: Sequence[str] = (),
    **options: Any,
) -> Built:
    """Build the training graph of a network of the zoo, of the file `source`, or of what code makes: model.py:make.

    `zoo` has batch, image, channels, classes, seed and metaparameters; of these a file takes batch and seed, and code
    the sizes of its images, unless `example` says them: "16,3,224,224". `make_arg` has arguments of the code as
    "name=value".
    """
    given = {key: value for key, value in (zoo or {}).items() if value is not None}
    check_whole("seed", given.get("seed", 0))
    if is_code(source):
        return build_code(source, given, example, make_arg, options)
    for option, values in (("--example", example), ("--make-arg", make_arg)):
        if values:
            raise BnfuseError(f"{source}: {option} is for code that makes a torch module (model.py:make)")
    if is_program(source):
        refuse_foreign(source, given, {"seed"}, "a program, which has the sizes that it was exported with")
        return build(program_of(source), file=source, seed=given.get("seed", 0), **options)
    if source in MODELS or source in SHAPE_ONLY:  # the latter are refused
        return build(build_forward(source, **given), file=source, seed=given.get("seed", 0), **options)
    if not looks_like_file(source):
        entry_of(source)  # raises, with the names there are
    refuse_foreign(source, given, {"batch", "seed"}, "a file")
    return build(source, batch=given.get("batch"), seed=given.get("seed", 0), **options)


def build_code(
    source: str, given: dict[str, Any], example: Sequence[str], make_arg: Sequence[str], options: dict[str, Any]
) -> Built:
    """Run the code that a source names, and build the training graph of the torch module that it makes."""
    refuse_foreign(source, given, {"batch", "image", "channels", "seed"}, "code (--make-arg NAME=VALUE hands it on)")
    arguments = make_arguments(make_arg)
    inputs = examples(example, given.get("batch"), given.get("image"), given.get("channels"))
    seed = given.get("seed", 0)
    return build(module_of(source, arguments, seed=seed), example=inputs, file=source, seed=seed, **options)


def refuse_foreign(source: str, given: dict[str, Any], known: set[str], what: str) -> None:
    """Raise where a size was given that a source does not take."""
    foreign = sorted(set(given) - known)
    if foreign:
        raise BnfuseError(f"{source}: {', '.join(foreign)} can be chosen for networks of the zoo only, not for {what}")


def looks_like_file(source: str) -> bool:
    """Tell whether a source is meant as a path: it has an ending, a folder, or is there."""
    path = Path(source)
    return path.suffix != "" or len(path.parts) > 1 or path.exists()


def build_file(
    source: str,
    output: Path,
    *,
    zoo: dict[str, Any],
    weights: str | None = None,
    loading: Loading | None = None,
    **options: Any,
) -> Built:
    """Do what `build_model` does, with the values that `weights` names in the place of initial ones
    (bnfuse.fromtorch.weights), and write the result to `output`. What `init` matches is drawn all the same."""
    state = read_weights(weights) if weights is not None else None
    built = build_model(source, zoo=zoo, **options)
    if state is not None:
        how = dataclasses.replace(loading or Loading(), leave=tuple(options.get("init", ())))
        about = put_state(built.model, state, how, name=str(weights))
        built = dataclasses.replace(built, notes=(*built.notes, about))
    save(built.model, output)
    return built
