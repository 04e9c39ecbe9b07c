"""How the updates of a run fall into its epochs, where one is of several batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnfuse.core.errors import BnfuseError

if TYPE_CHECKING:
    from bnfuse.runtime.program.optim import Optimizer


def require_updates(optimizer: Optimizer | None, steps: int) -> str | None:
    """Tell what an epoch of so many batches leaves to its last update; None where nothing is left over.

    Raises BnfuseError where an update is of more batches than an epoch has: it would be of fewer each time.
    """
    batches = 1 if optimizer is None else optimizer.accumulate
    if batches > steps:
        there = f"{steps} batch{'' if steps == 1 else 'es'}"
        raise BnfuseError(
            f"accumulate={batches}: an epoch has {there}, and an update does not reach over its end: use {steps} at "
            "most, or larger batches"
        )
    rest = steps % batches
    return None if not rest else f"updates are of {batches} batches; the last one of an epoch is of {rest}"
