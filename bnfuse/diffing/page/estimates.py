"""The estimated time of a step before and after, on hardware by name (bnfuse/estimating)."""

from __future__ import annotations

import dataclasses

from bnfuse.core.errors import BnfuseError
from bnfuse.estimating.estimate import Estimate, estimate
from bnfuse.estimating.hardware import Hardware, profile
from bnfuse.estimating.training import training_workload
from bnfuse.graph.training_graph import TrainingGraph


@dataclasses.dataclass(frozen=True)
class Estimated:
    """Both graphs on one hardware."""

    hardware: Hardware
    before: Estimate
    after: Estimate


@dataclasses.dataclass(frozen=True)
class Estimates:
    """Step times by the memory model, or why there are none."""

    found: tuple[Estimated, ...] = ()
    why_not: str = ""


def estimates_of(first: TrainingGraph, second: TrainingGraph, names: tuple[str, ...]) -> Estimates:
    """Estimate both graphs on named hardware. `why_not` says which graph cannot be estimated, and why. A hardware that
    does not exist is an error."""
    chosen = [profile(name) for name in names]
    try:
        before, after = training_workload(first), training_workload(second)
        return Estimates(tuple(Estimated(on, estimate(before, on), estimate(after, on)) for on in chosen))
    except BnfuseError as error:
        return Estimates(why_not=str(error))
