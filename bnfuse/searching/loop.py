"""The search itself: propose, evaluate, store, until there are enough evaluations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from bnfuse.core.errors import BnfuseError
from bnfuse.core.progress import Progress, quiet
from bnfuse.searching.evaluation import Evaluation, Score, Settings, best_of, reference_of
from bnfuse.searching.proposals import propose
from bnfuse.searching.space import MAX_ENUMERATED, Placement, Space, to_text

Objective = Callable[[Placement], Score]


def evaluations_of(space: Space, settings: Settings) -> int:
    """Tell how many evaluations there will be in all: never more than there are placements."""
    if settings.method == "exhaustive":
        space.all_placements()  # complains of a space that is too large
    count = 2**space.size if space.size <= MAX_ENUMERATED else None
    wanted = settings.iterations if settings.iterations is not None else count
    assert wanted is not None
    return wanted if count is None else min(wanted, count)


def search(
    space: Space,
    objective: Objective,
    settings: Settings,
    *,
    history: Sequence[Evaluation] = (),
    store: Callable[[Evaluation], None] = lambda _: None,
    progress: Progress = quiet,
) -> tuple[Evaluation, ...]:
    """Search. Gives all evaluations, those of `history` first; each new one is stored before the next is proposed."""
    done, total = list(history), evaluations_of(space, settings)
    while len(done) < total:
        placement = propose(space, settings, done)
        start = time.monotonic()
        done.append(Evaluation(len(done), placement, objective(placement), time.monotonic() - start))
        require_reference(done[0])
        store(done[-1])
        progress(describe(space, settings, done, total))
    return tuple(done)


def require_reference(evaluation: Evaluation) -> None:
    """Refuse a reference that diverged: beside one at chance accuracy any placement would pass for good."""
    if evaluation.score.diverged:
        raise BnfuseError(
            "the training with all BatchNorms diverged, and the others are measured by it:"
            " use a smaller --lr or a --warm-up, and another --output"
        )


def describe(space: Space, settings: Settings, history: Sequence[Evaluation], total: int) -> str:
    """Write one line about the last evaluation and the best so far."""
    last, best = history[-1], best_of(space, history, settings.tolerance)
    broken = f", {last.score.diverged} diverged" if last.score.diverged else ""
    return (
        f"evaluation {len(history)} of {total}: {to_text(last.placement)}, {last.kept} of {space.size} BatchNorms, "
        f"{percent(last.accuracy)}{broken} (all: {percent(reference_of(history))}); "
        f"best: {to_text(best.placement)}, {best.kept}, {percent(best.accuracy)}"
    )


def percent(share: float) -> str:
    """Write a share as per cent with two digits."""
    return f"{100 * share:.2f} %"
