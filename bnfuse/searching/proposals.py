"""What to train next: by the Bayesian model, at random, by annealing, or everything in turn.

Each proposal is a function of the evaluations so far and of a generator that (seed, iteration) makes anew. Nothing
else is remembered between iterations, so a search that is taken up again proposes what it would have proposed without
the break.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.searching.evaluation import Evaluation, Settings, reference_of
from bnfuse.searching.quadratic import solve
from bnfuse.searching.space import Placement, Space, random_placement
from bnfuse.searching.surrogate import Array, draw_surrogate

DEEPEST = 10  # tolerances: how far below the reference the model tells accuracies apart
STARTS = 5  # evaluated placements from which the program is improved as well
HEAT, COOLING = 2.0, 0.85  # annealing: the first temperature in tolerances, and its factor an evaluation


def generator(seed: int, iteration: int) -> np.random.Generator:
    """Make the random numbers of an iteration."""
    return np.random.default_rng([seed, iteration])


def propose(space: Space, settings: Settings, history: Sequence[Evaluation]) -> Placement:
    """Propose the placement of iteration len(history); never one that was evaluated."""
    iteration = len(history)
    if iteration == 0:
        return space.everything
    taken = {e.placement for e in history}
    if settings.method == "exhaustive":
        return next_of_all(space, taken)
    rng = generator(settings.seed, iteration)
    if iteration <= settings.initial or settings.method == "random":
        return random_placement(space.size, taken, rng)
    if settings.method == "annealing":
        return anneal(space, settings, history, taken, rng)
    return thompson(space, settings, history, taken, rng)


def next_of_all(space: Space, taken: set[Placement]) -> Placement:
    """Give the first placement that was not evaluated. Raises BnfuseError where all were."""
    found = next((p for p in space.all_placements() if p not in taken), None)
    if found is None:
        raise BnfuseError(f"all {len(taken)} placements are evaluated: nothing is left to search")
    return found


def thompson(
    space: Space, settings: Settings, history: Sequence[Evaluation], taken: set[Placement], rng: np.random.Generator
) -> Placement:
    """Give the maximum of one draw of the model less lambda times the cost ([Joardar22], V-B)."""
    slopes = settings.lambda_at(len(history), space.size) * space.weights()
    placements = np.array([e.placement for e in history], np.int8)
    scores = bounded_accuracies(history, settings.tolerance, float(slopes.sum()))
    starts = placements[np.argsort(placements @ slopes - scores, kind="stable")[:STARTS]]
    return solve(draw_surrogate(placements, scores, rng).minus(slopes), rng, taken=taken, starts=starts)


def bounded_accuracies(history: Sequence[Evaluation], tolerance: float, most: float) -> Array:
    """Give accuracies as far as they matter: none above the reference, none far below it.

    A placement need only be as good as all BatchNorms; paid for being better, the model would look for accuracy
    instead of sparsity. That a placement is useless is all that its accuracy tells below a point; chance accuracy of a
    diverged training, entered as it is, would be most of the variance that the model explains. That bound is at least
    twice what all BatchNorms together are worth (`most`), so that a useless placement never gains by being cheap.
    """
    reference = reference_of(history)
    lowest = reference - max(DEEPEST * tolerance, 2 * most, 0.05)
    return np.clip([e.accuracy for e in history], lowest, reference)


def anneal(
    space: Space, settings: Settings, history: Sequence[Evaluation], taken: set[Placement], rng: np.random.Generator
) -> Placement:
    """Propose by simulated annealing of the same penalised accuracy: a step from where the walk through the history is
    now."""
    here = walk(space, settings, history).placement
    for flips in range(1, space.size + 1):
        around = [flipped(here, which) for which in itertools.combinations(range(space.size), flips)]
        free = [p for p in around if p not in taken]
        if free:
            return free[int(rng.integers(len(free)))]
    raise BnfuseError(f"all {len(taken)} placements are evaluated: nothing is left to search")


def walk(space: Space, settings: Settings, history: Sequence[Evaluation]) -> Evaluation:
    """Give the state after the history: the best of the initial evaluations, then each that was accepted."""

    def value(e: Evaluation) -> float:
        return e.accuracy - settings.lambda_at(0, space.size) * float(np.dot(space.weights(), e.placement))

    state = max(history[: settings.initial + 1], key=value)
    for e in history[settings.initial + 1 :]:
        heat = HEAT * max(settings.tolerance, 0.005) * COOLING ** (e.iteration - settings.initial - 1)
        luck = np.random.default_rng([settings.seed, e.iteration, 1]).random()
        if luck < np.exp(min(0.0, (value(e) - value(state)) / heat)):
            state = e
    return state


def flipped(placement: Placement, which: Sequence[int]) -> Placement:
    """Flip the bits at these places."""
    return tuple(1 - bit if index in which else bit for index, bit in enumerate(placement))
