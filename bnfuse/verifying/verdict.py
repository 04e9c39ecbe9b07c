"""What a comparison found: each tensor's error and tolerance, the verdict, and how it is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from bnfuse.core.text import Section, join

ROUNDING = 2.0**-24
ROUNDINGS = {"fp64": 2.0**-53, "fp32": ROUNDING, "tf32": 2.0**-11, "bf16": 2.0**-8, "fp16": 2.0**-11}  # by precision
BLIND, BLIND_IN_FEWER_BITS = 0.1, 1.0  # tolerances from which on nothing is judged: much of what is wrong would pass


@dataclasses.dataclass(frozen=True)
class TensorError:
    """One compared tensor. `kind` is loss, output, gradient or running."""

    tensor: str
    kind: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.error <= self.tolerance  # also False for a NaN


@dataclasses.dataclass(frozen=True)
class Curves:
    """The loss of each training step in both graphs, and how far they may part by the same rule."""

    before: tuple[float, ...]
    after: tuple[float, ...]
    tolerances: tuple[float, ...]

    @property
    def errors(self) -> tuple[float, ...]:
        """The relative difference of the losses, step by step."""
        return tuple(abs(a - b) / max(abs(b), 1e-30) for b, a in zip(self.before, self.after, strict=True))

    @property
    def ok(self) -> bool:
        """Whether every step is within its tolerance."""
        return all(error <= tolerance for error, tolerance in zip(self.errors, self.tolerances, strict=True))


@dataclasses.dataclass(frozen=True)
class Verification:
    """What a comparison found."""

    runtime: str
    seed: int
    loss_before: float
    loss_after: float
    tensors: tuple[TensorError, ...]
    curves: Curves | None = None
    notes: tuple[str, ...] = ()
    precision: str = "fp32"

    @property
    def equal(self) -> bool:
        """Whether everything can be judged, and is within its tolerance."""
        return self.judged and not is_wrong(self)

    @property
    def judged(self) -> bool:
        """Whether rounding noise leaves room for a verdict on everything."""
        return not self.unjudged

    @property
    def unjudged(self) -> tuple[str, ...]:
        """Tensors, and steps of the training, that rounding noise moves too far for a verdict."""
        limit = BLIND if ROUNDINGS[self.precision] <= ROUNDING else BLIND_IN_FEWER_BITS
        steps = enumerate(self.curves.tolerances if self.curves else (), 1)
        return (
            *(tensor.tensor for tensor in self.tensors if tensor.tolerance >= limit),
            *(f"the loss of step {step}" for step, tolerance in steps if tolerance >= limit),
        )

    @property
    def verdict(self) -> str:
        """The answer in words."""
        if is_wrong(self):
            return "NOT equal"
        if self.judged:
            return "Equal"
        return f"cannot be judged: {unjudged_text(self.unjudged, len(self.tensors))}"

    @property
    def worst(self) -> TensorError:
        """The tensor that comes closest to its tolerance or exceeds it by most."""
        return max(self.tensors, key=lambda t: t.error / t.tolerance if np.isfinite(t.error) else np.inf)

    @property
    def loss_error(self) -> float:
        """The relative difference of the losses."""
        return self.tensors[0].error

    def __bool__(self) -> bool:
        return self.equal

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON's types; the keys are in docs/cli.md."""
        worst = self.worst
        found: dict[str, Any] = {
            "equal": self.equal,
            "judged": self.judged,
            "unjudged": list(self.unjudged),
            "runtime": self.runtime,
            "precision": self.precision,
            "seed": self.seed,
            "loss_before": self.loss_before,
            "loss_after": self.loss_after,
            "loss_error": self.loss_error,
            "worst": {"tensor": worst.tensor, "error": worst.error, "tolerance": worst.tolerance},
            "tensors": [dataclasses.asdict(tensor) for tensor in self.tensors],
            "notes": list(self.notes),
        }
        if self.curves:
            found["curves"] = dataclasses.asdict(self.curves)
        return found

    def sections(self) -> list[Section]:
        """Show the verdict, the worst tensor of each kind, the losses of the training, and notes."""
        kinds = [
            (kind, [t for t in self.tensors if t.kind == kind]) for kind in ("loss", "output", "gradient", "running")
        ]
        rows = []
        for kind, tensors in kinds:
            if tensors:
                worst = max(tensors, key=lambda t: t.error / t.tolerance)
                bad = sum(not t.ok for t in tensors)
                rows.append((kind, len(tensors), bad, f"{worst.error:.1e}", f"{worst.tolerance:.1e}", worst.tensor))
        how = self.runtime if self.precision in ("fp32", "fp64") else f"{self.runtime}, {self.precision}"
        title = f"{self.verdict}: loss {self.loss_before:.7g} and {self.loss_after:.7g} ({how})"
        columns = ("compared", "tensors", "wrong", "worst error", "tolerance", "tensor")
        parts = [Section.table(title, columns, rows)]
        if self.curves:
            parts.append(self.curve_section(self.curves))
        if self.notes:
            parts.append(Section.lines("Notes", self.notes))
        return parts

    def curve_section(self, curves: Curves) -> Section:
        """Show the losses step by step."""
        rows = [
            (i + 1, f"{b:.6f}", f"{a:.6f}", f"{error:.1e}", f"{tolerance:.1e}")
            for i, (b, a, error, tolerance) in enumerate(
                zip(curves.before, curves.after, curves.errors, curves.tolerances, strict=True)
            )
        ]
        return Section.table("Training on one batch", ("step", "loss before", "loss after", "error", "tolerance"), rows)

    def __str__(self) -> str:
        return join(self.sections())


def is_right(tensors: Sequence[TensorError], curves: Curves | None) -> bool:
    """Tell whether every tensor, and every step of a training, is within its tolerance."""
    return all(tensor.ok for tensor in tensors) and (curves is None or curves.ok)


def is_wrong(found: Verification) -> bool:
    """Tell whether something is beyond its tolerance, and not only beyond judgement."""
    return not is_right(found.tensors, found.curves)


def refusal_note(no: Verification) -> str:
    """Write what a seed said that was not the answer in the end."""
    if not is_wrong(no):
        return f"seed {no.seed} could not be judged ({unjudged_text(no.unjudged, len(no.tensors))})"
    worst = no.worst
    return (
        f"seed {no.seed} said no ({worst.tensor}: {worst.error:.1e} of {worst.tolerance:.1e}), as a ReLU at zero can: "
        "a mistake shows on every seed"
    )


def unjudged_text(names: Sequence[str], tensors: int) -> str:
    """Write which tensors cannot be judged, and what to do about it."""
    which = names[0] + (", ..." if len(names) > 1 else "")
    return (
        f"{len(names)} of {tensors} tensors ({which}) are moved too far by rounding noise alone: verify with a larger "
        "--batch or --image, fewer layers, fewer --steps, or in more bits (--runtime float64)"
    )
