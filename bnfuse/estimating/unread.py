"""Options that a question of `bnfuse estimate` does not read: they are refused, for an answer without them misleads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from bnfuse.build.zoo import is_network
from bnfuse.core.errors import BnfuseError
from bnfuse.core.options import flag_of
from bnfuse.estimating.assumptions import Assumptions
from bnfuse.estimating.hardware import HOST
from bnfuse.estimating.layerwise import Passes
from bnfuse.estimating.options import Request
from bnfuse.estimating.parallel.scaling import MESSAGES
from bnfuse.estimating.reram.assumptions import is_stack

SIMULATED = ("bucket", "jitter", "sharded")  # of the simulation, not of the paper's formulas
BETWEEN_WORKERS = ("network", "reduce", "scaling", "overlap", "latency", *SIMULATED)
OF_GRAPHS = ("order", "optimizer", "views")
FLAGS = {field.name: flag_of(field) for field in dataclasses.fields(Request)}
OF_CACHES = ("cache", "bandwidth", "flops", "precision", "measure", "levels", "sweep", "reuse", "roofline", "workers")


def refuse_unread(request: Request) -> None:
    """Raise BnfuseError for the first option that the question does not read."""
    for complaint in complaints(request):
        raise BnfuseError(complaint)


def complaints(request: Request) -> Iterator[str]:
    """Go through the options that the question does not read, each with why."""
    options = given(request)
    by_name, graph = is_network(request.source), not is_network(request.source) or bool(request.levels)
    if by_name and (found := chosen(options, request.signature)):
        yield f"{found}: about training graphs that others wrote, not about a network of the zoo"
    if request.hardware is not None and is_stack(request.hardware):
        if found := chosen(options, (*OF_CACHES, *BETWEEN_WORKERS, *OF_GRAPHS)):
            yield f"{found}: not for a ReRAM/GPU stack, whose choices are given by --assume"
        return
    if request.measure and request.hardware != HOST:
        yield "--measure: about this machine, so it takes --hardware host"
    if not request.workers and (found := chosen(options, BETWEEN_WORKERS)):
        yield f"{found}: about several workers: say how many with --workers 1,2,4"
    by_formula = request.reduce in MESSAGES
    if by_formula and (found := chosen(options, SIMULATED)):
        yield f"{found}: for --reduce ring or halving, which are simulated: {request.reduce} is the paper's formula"
    if not by_formula and (found := chosen(options, ("overlap",))):
        yield f"{found}: for --reduce tree or server: with {request.reduce} the buckets say what overlaps"
    if not graph and (found := chosen(options, ("optimizer", "views"))):
        yield f"{found}: about a training graph, which a network of the zoo has with --level none"
    passes = [key for key in request.assume if key in names(Passes)]
    if graph and passes:
        yield f"--assume {passes[0]}: about networks of the zoo by name: a training graph says it itself"
    timing = [key for key in request.assume if key in names(Assumptions)]
    if request.reuse and timing:
        yield f"--assume {timing[0]}: about when things happen, on which --reuse does not depend"
    axis = (request.sweep or "").partition("=")[0].strip()
    if found := chosen(options, (axis,) if axis in ("cache", "bandwidth", "flops", "batch") else ()):
        yield f"{found}: is what --sweep varies: leave one of them out"


def given(request: Request) -> set[str]:
    """List the options that are not as they are by default."""
    fields = [field for field in dataclasses.fields(request) if field.default is not dataclasses.MISSING]
    values = {field.name: getattr(request, field.name) for field in fields}
    found = {field.name for field in fields if values[field.name] != field.default}
    if not request.levels:  # an empty list is not the default's empty tuple
        found.discard("levels")
    return found | {key for options in (request.zoo, request.signature) for key, value in options.items() if value}


def chosen(options: set[str], wanted: Iterable[str]) -> str:
    """List those of `wanted` that were given, as they are written."""
    return ", ".join(FLAGS.get(name, f"--{name.replace('_', '-')}") for name in wanted if name in options)


def names(kind: Any) -> set[str]:
    """List the names of a dataclass's fields."""
    return {field.name for field in dataclasses.fields(kind)}
