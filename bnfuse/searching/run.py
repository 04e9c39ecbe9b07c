"""A search from the model to its result: opens, checks, resumes, evaluates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bnfuse.core.files import require_writable
from bnfuse.core.progress import Progress, bar_of, quiet
from bnfuse.core.ranges import check_real, check_whole
from bnfuse.data import Dataset
from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.runtime.program.optim import Optimizer, require_optimizer
from bnfuse.searching.evaluation import Settings
from bnfuse.searching.loop import evaluations_of, search
from bnfuse.searching.plot import plot as draw
from bnfuse.searching.plot import require_plotting
from bnfuse.searching.quadratic import import_cvxpy
from bnfuse.searching.result import SearchResult, model_name
from bnfuse.searching.storage import open_log
from bnfuse.searching.training import Recipe, Training, digest_of_graph, space_of
from bnfuse.training import Loader, data_for, parse_augment
from bnfuse.training.checkpoints import digest_of_data
from bnfuse.training.run import default_optimizer


def asked(
    *,
    iterations: int | None = None,
    method: str = "bo",
    initial: int = 4,
    lambdas: Sequence[float] | None = None,
    tolerance: float = 0.01,
    seed: int = 0,
    optimizer: Optimizer | None = None,
    **training: Any,
) -> tuple[Settings, Recipe]:
    """Read the options of a search; `training` has the other fields of `Recipe`. Raises BnfuseError for what cannot
    be, before any work. By default there are 20 trainings, with method exhaustive one of each placement."""
    require_optimizer(optimizer)
    check_whole("seed", seed)
    check_real("tolerance", tolerance)
    recipe = Recipe(seed=seed, optimizer=optimizer or default_optimizer(), **training)
    wanted = iterations if iterations is not None or method == "exhaustive" else 20
    chosen = None if lambdas is None else tuple(lambdas)
    return Settings(method, wanted, initial, chosen, tolerance, seed), recipe


def run_search(
    graph: TrainingGraph,
    data: Any,
    settings: Settings,
    recipe: Recipe,
    *,
    cost: str = "count",
    output: str | Path,
    resume: bool,
    plot: str | Path | None = None,
    skip_unreadable: bool = False,
    progress: Progress = quiet,
) -> SearchResult:
    """Search. Everything that can be wrong is found out before the first training."""
    if plot is not None:
        require_writable(plot)
        require_plotting(plot)
    if settings.method == "bo":
        import_cvxpy()
    space = space_of(graph, cost)
    total = evaluations_of(space, settings)
    graph.state()  # complains of values that are missing
    images = data_for(graph, data, **reading_for(data, recipe, skip_unreadable))
    loader = require_trainable(graph, images, recipe)
    for line in (*images.about, loader.about):
        progress(line)
    fingerprint = fingerprint_of(graph, images, settings, recipe, cost)
    training = Training(graph, images, recipe, space, bar_of(progress))
    with open_log(output, space, fingerprint, resume=resume) as log:
        if log.dropped:
            progress(f"{log.path}: its last line was cut short and is dropped")
        if log.history:
            progress(f"{log.path}: {len(log.history)} of {total} evaluations are there")
        history = search(space, training, settings, history=log.history, store=log.append, progress=progress)
    result = SearchResult(space, history, settings.tolerance, fingerprint, model_name(graph.name), recipe.keep_affine)
    if plot is not None:
        draw(result, plot)
    return result


def reading_for(data: Any, recipe: Recipe, skip_unreadable: bool) -> dict[str, Any]:
    """Tell how images are read, which a Dataset has been."""
    crops = not isinstance(data, Dataset) and parse_augment(recipe.augment).scale is not None
    return {"skip_unreadable": skip_unreadable, "random_crops": crops}


def require_trainable(graph: TrainingGraph, images: Dataset, recipe: Recipe) -> Loader:
    """Raise for what each training would complain of, before a file is begun. Gives what makes its batches."""
    recipe.options(recipe.seed).check()
    return Loader(images, graph.batch, augment=parse_augment(recipe.augment))


def fingerprint_of(
    graph: TrainingGraph, images: Dataset, settings: Settings, recipe: Recipe, cost: str
) -> dict[str, Any]:
    """Gather all that decides what a search proposes and what its trainings give; the number of evaluations may
    grow."""
    chosen = {key: value for key, value in dataclasses.asdict(settings).items() if key != "iterations"}
    lambdas = None if settings.lambdas is None else list(settings.lambdas)
    return {
        "model": digest_of_graph(graph),
        "data": digest_of_data(images),
        **recipe.to_json(),
        **chosen,
        "lambdas": lambdas,
        "cost": cost,
    }
