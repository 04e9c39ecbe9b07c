"""What a search found, for people, programs and pictures."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bnfuse.core.text import Section, count, join, number
from bnfuse.searching.evaluation import Evaluation, best_of, is_valid, pareto, reference_of
from bnfuse.searching.loop import percent
from bnfuse.searching.space import Space, to_text


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """All evaluations in their order, the first of them with all BatchNorms."""

    space: Space
    evaluations: tuple[Evaluation, ...]
    tolerance: float
    fingerprint: Mapping[str, Any]
    model: str  # the file, for the command
    keep_affine: bool = False

    @property
    def reference(self) -> Evaluation:
        """The training with all BatchNorms."""
        return self.evaluations[0]

    @property
    def best(self) -> Evaluation:
        """The cheapest placement within the tolerance of the reference."""
        return best_of(self.space, self.evaluations, self.tolerance)

    @property
    def pareto(self) -> tuple[Evaluation, ...]:
        """Accuracy against cost, the cheapest first."""
        return pareto(self.space, self.evaluations)

    @property
    def remove(self) -> str:
        """The best placement as `rewrite` takes it: "1,4,7"; empty where every BatchNorm stays."""
        return ",".join(str(index) for index in self.space.removed(self.best.placement))

    @property
    def command(self) -> str:
        """What rewrites the model to the best placement."""
        remove = f" --remove {self.remove}" if self.remove else ""
        affine = " --keep-affine" if remove and self.keep_affine else ""
        return f"bnfuse rewrite {self.model}{remove}{affine} -o fused.onnx"

    def is_valid(self, evaluation: Evaluation) -> bool:
        """Tell whether an evaluation is within the tolerance."""
        return is_valid(evaluation, reference_of(self.evaluations), self.tolerance)

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON's types; the keys are in docs/search.md."""
        return {
            "model": self.model,
            "batch_norms": [
                {"index": index, "node": name, "cost": cost}
                for index, (name, cost) in enumerate(zip(self.space.names, self.space.costs, strict=True), 1)
            ],
            "tolerance": self.tolerance,
            "reference": self.describe(self.reference),
            "best": self.describe(self.best),
            "pareto": [self.describe(e) for e in self.pareto],
            "evaluations": [self.describe(e) for e in self.evaluations],
            "remove": self.remove,
            "command": self.command,
            "settings": dict(self.fingerprint),
        }

    def describe(self, evaluation: Evaluation) -> dict[str, Any]:
        """Give one evaluation as JSON's types."""
        return {
            **evaluation.to_json(),
            "kept": evaluation.kept,
            "removed": list(self.space.removed(evaluation.placement)),
            "cost": self.space.cost(evaluation.placement),
            "valid": self.is_valid(evaluation),
        }

    def sections(self) -> list[Section]:
        """Show the front, the best placement, and the command that removes what it does without."""
        rows = [
            (
                to_text(e.placement),
                number(e.kept),
                percent(self.space.cost(e.placement)),
                percent(e.accuracy),
                "yes" if self.is_valid(e) else "no",
                number(e.iteration + 1),
            )
            for e in self.pareto
        ]
        columns = ("placement", "BatchNorms", "cost", "accuracy", "valid", "evaluation")
        what = f"{count(len(self.evaluations), 'evaluation')}, accuracy with all: {percent(self.reference.accuracy)}"
        best = self.best
        line = f"{to_text(best.placement)}: {best.kept} of {self.space.size} BatchNorms, {percent(best.accuracy)}"
        return [
            Section.table(f"Accuracy against cost ({what})", columns, rows),
            Section.lines(f"Fewest within {100 * self.tolerance:g} points", [line]),
            Section.lines("To rewrite the graph to it", [self.command]),
        ]

    def __str__(self) -> str:
        return join(self.sections())


def model_name(name: str | Path) -> str:
    """Write a model's name as a shell takes it."""
    return shlex.quote(str(name))
