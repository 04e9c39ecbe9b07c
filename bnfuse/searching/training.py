"""The objective of a real search: train the network with the BatchNorms of a placement, and ask for its accuracy."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError, DivergedError
from bnfuse.core.progress import Bar
from bnfuse.core.ranges import check_whole
from bnfuse.data import Dataset
from bnfuse.graph.training_graph import TrainingGraph, open_graph
from bnfuse.passes import Rewritten, rewrite
from bnfuse.passes.removal.placements import batch_norm_list
from bnfuse.searching.evaluation import Score
from bnfuse.searching.space import Placement, Space
from bnfuse.training import Options
from bnfuse.training.run import Compiling, train_graph

if TYPE_CHECKING:
    from bnfuse.runtime.program.optim import Optimizer

COSTS = ("count", "bytes")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How each placement is trained."""

    epochs: int = 10
    repeats: int = 1  # trainings a placement, with seeds that follow each other
    seed: int = 0
    level: str = dataclasses.field(default="icf", init=False)
    keep_affine: bool = False
    optimizer: Optimizer | None = None
    schedule: str = "cosine"
    warm_up: float = 0.0
    augment: str = "none"
    target: str = "cpu"
    precision: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        check_whole("epochs", self.epochs, 1)
        check_whole("repeats", self.repeats, 1)

    @property
    def compiling(self) -> Compiling:
        """How a graph becomes a step."""
        return Compiling(self.target, self.precision, self.optimizer, self.threads)

    def options(self, seed: int) -> Options:
        """Tell what each training does: one evaluation, after the last epoch."""
        return Options(self.epochs, seed, self.schedule, self.warm_up, self.augment, eval_every=self.epochs)

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON's types, for the fingerprint of a search."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "optimizer": None if self.optimizer is None else repr(self.optimizer)}


@dataclasses.dataclass(frozen=True)
class Training:
    """Calls train: placement -> accuracies on held-out images. The same placement always gets the same accuracies."""

    graph: TrainingGraph
    data: Dataset
    recipe: Recipe
    space: Space
    bar: Bar | None = None

    def __call__(self, placement: Placement) -> Score:
        """Train with the BatchNorms of a placement, once for each seed."""
        recipe, removed = self.recipe, self.space.removed(placement)
        rewritten = rewrite(
            self.graph.model,
            level=recipe.level,
            remove=removed or None,
            keep_affine=recipe.keep_affine and bool(removed),
            signature=self.graph.signature,
        )
        found = [self.train(rewritten, recipe.seed + repeat) for repeat in range(recipe.repeats)]
        chance = 1 / self.data.classes
        return Score(tuple(chance if one is None else one for one in found), sum(one is None for one in found))

    def train(self, rewritten: Rewritten, seed: int) -> float | None:
        """Give the accuracy after the last epoch; None where the training diverged."""
        recipe, graph = self.recipe, open_graph(rewritten)
        try:
            history = train_graph(graph, self.data, recipe.options(seed), recipe.compiling, progress=Quiet(self.bar))
        except DivergedError:
            return None
        return history.accuracy if np.isfinite(history.accuracy) else None


class Quiet:
    """Progress of which only the bar of kernels is heard."""

    def __init__(self, bar: Bar | None) -> None:
        if bar is not None:
            self.bar = bar

    def __call__(self, _: str) -> None:
        """Hear nothing."""


def space_of(graph: TrainingGraph, cost: str) -> Space:
    """Make the space of the graph's BatchNorms. `cost` counts them (count), or the bytes of the maps that they sweep
    (bytes)."""
    if cost not in COSTS:
        raise BnfuseError(f"cost '{cost}' is unknown: it is {' or '.join(COSTS)}")
    norms = batch_norm_list(graph.model)
    if not norms:
        raise BnfuseError(
            f"{graph.name}: has no BatchNorm to remove: give the graph that `bnfuse build` wrote, not a rewritten one"
        )
    return Space(tuple(n.node for n in norms), tuple(float(n.bytes) if cost == "bytes" else 1.0 for n in norms))


def digest_of_graph(graph: TrainingGraph) -> str:
    """Digest structure and values of a graph."""
    content = ir.to_proto(graph.model).SerializeToString(deterministic=True)
    return hashlib.sha256(content).hexdigest()
