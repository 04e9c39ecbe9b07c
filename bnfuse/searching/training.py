"""The objective of a real search: train the network with the BatchNorms of a placement, and ask for its accuracy."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from bnfuse import api
from bnfuse.core.errors import BnfuseError, DivergedError
from bnfuse.data import Dataset
from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.passes.removal.placements import batch_norm_list
from bnfuse.searching.evaluation import Score
from bnfuse.searching.space import Placement, Space

if TYPE_CHECKING:
    from bnfuse.runtime.program.optim import Optimizer

COSTS = ("count", "bytes")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How each placement is trained."""

    epochs: int = 10
    repeats: int = 1  # trainings a placement, with seeds that follow each other
    seed: int = 0
    level: str = "icf"
    keep_affine: bool = False
    optimizer: Optimizer | None = None
    schedule: str = "cosine"
    warm_up: float = 0.0
    augment: str = "none"
    target: str = "cpu"
    precision: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        for what, value in (("epochs", self.epochs), ("repeats", self.repeats)):
            if value < 1:
                raise BnfuseError(f"{what}={value}: it must be at least 1")

    def to_json(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "optimizer": None if self.optimizer is None else repr(self.optimizer)}


@dataclasses.dataclass(frozen=True)
class Training:
    """Calls train: placement -> accuracies on held-out images. The same placement always gets the same accuracies."""

    graph: TrainingGraph
    data: Dataset
    recipe: Recipe
    space: Space
    bar: Callable[[int, int, str], None] | None = None

    def __call__(self, placement: Placement) -> Score:
        recipe, removed = self.recipe, self.space.removed(placement)
        rewritten = api.rewrite(
            self.graph, level=recipe.level, remove=removed or None, keep_affine=recipe.keep_affine and bool(removed)
        )
        found = [self.train(rewritten, recipe.seed + repeat) for repeat in range(recipe.repeats)]
        chance = 1 / self.data.classes
        return Score(tuple(chance if one is None else one for one in found), sum(one is None for one in found))

    def train(self, rewritten: Any, seed: int) -> float | None:
        """The accuracy after the last epoch; None where the training diverged."""
        recipe = self.recipe
        try:
            history = api.train(
                rewritten,
                self.data,
                epochs=recipe.epochs,
                optimizer=recipe.optimizer,
                schedule=recipe.schedule,
                warm_up=recipe.warm_up,
                augment=recipe.augment,
                eval_every=recipe.epochs,
                target=recipe.target,
                precision=recipe.precision,
                threads=recipe.threads,
                seed=seed,
                progress=Quiet(self.bar),
            )
        except DivergedError:
            return None
        return history.accuracy if np.isfinite(history.accuracy) else None


class Quiet:
    """Progress of which only the bar of kernels is heard."""

    def __init__(self, bar: Callable[[int, int, str], None] | None) -> None:
        if bar is not None:
            self.bar = bar

    def __call__(self, _: str) -> None: ...


def space_of(graph: TrainingGraph, cost: str) -> Space:
    """The graph's BatchNorms. `cost` counts them (count), or the bytes of the maps that they sweep (bytes)."""
    if cost not in COSTS:
        raise BnfuseError(f"cost '{cost}' is unknown: it is {' or '.join(COSTS)}")
    norms = batch_norm_list(graph.model)
    if not norms:
        raise BnfuseError(
            f"{graph.name}: has no BatchNorm to remove: give the graph that `bnfuse build` wrote, not a rewritten one"
        )
    return Space(tuple(n.node for n in norms), tuple(float(n.bytes) if cost == "bytes" else 1.0 for n in norms))


def digest_of_graph(graph: TrainingGraph) -> str:
    """Of structure and values."""
    content = ir.to_proto(graph.model).SerializeToString(deterministic=True)
    return hashlib.sha256(content).hexdigest()
