"""How far rounding noise moves what a graph computes: the yardstick of a comparison, and the errors beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from bnfuse.graph.signature import GraphSignature
from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.ort.oracle import Arrays
from bnfuse.verifying.cancelled import yardsticks
from bnfuse.verifying.runners import FileRunner, RoundedRunner, Where
from bnfuse.verifying.verdict import ROUNDING, Curves, TensorError

MINIMUM, MINIMUM_IN_FLOAT64 = 1e-5, 1e-9
FACTOR, FACTOR_IN_FEWER_BITS = 8.0, 1.5  # of the spread; in fewer bits the spread is that of the precision itself
LEAST_ROUNDINGS = 2.0  # that are tolerated however small the spread is: results were computed from rounded values
FLOOR = 1e-6  # of the largest norm of the same kind


class Reference:
    """What `before` computes, and how far rounding noise moves it: the more draws, the better its tail is known.

    For a step in fewer bits than float32 a draw is `before` computed in that precision, from disturbed operands.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        kind: type[FileRunner],
        where: Where,
        feeds: Arrays,
        state: Arrays,
        lr: float,
        steps: int,
        rng: np.random.Generator,
    ) -> None:
        self.graph, self.where, self.rounding, self.rng = graph, where, where.rounding, rng
        self.noisy: type[FileRunner] = RoundedRunner if where.has_fewer_bits else kind
        self.feeds, self.state, self.lr, self.steps = feeds, state, lr, steps
        runner = kind(graph, where)
        self.values = runner.evaluate(feeds, state)
        self.losses = runner.train(feeds, state, lr, steps, self.values)
        self.runner: FileRunner | None = runner if self.noisy is kind else None
        self.spreads: list[Arrays] = []
        self.noisy_losses: list[list[float]] = []

    def draw(self, count: int) -> None:
        """Run with `count` more draws of noise."""
        self.runner = self.runner or self.noisy(self.graph, self.where)
        # there half of one is about what rounding moves a value in the mean
        disturbance = self.rounding / 2 if self.where.has_fewer_bits else self.rounding
        for _ in range(count):
            feeds, state = disturbed(self.feeds, self.state, self.graph.signature, self.rng, disturbance)
            self.spreads.append(self.runner.evaluate(feeds, state))
            losses = self.runner.train(feeds, state, self.lr, self.steps, self.spreads[-1])
            self.noisy_losses.append(losses)

    def close(self) -> None:
        """Give its memory back before the other graph runs."""
        self.runner = None

    def judge(self, result: Arrays, losses: list[float]) -> tuple[tuple[TensorError, ...], Curves | None]:
        """Compare the other graph's results and losses. Gives an error for each tensor, and the curves where it was
        trained."""
        signature, measured_by = self.graph.signature, yardsticks(self.graph)
        tensors = tuple(compare(self.values, result, self.spreads, signature, self.rounding, measured_by))
        if not self.steps:
            return tensors, None
        tolerances = curve_tolerances(self.losses, self.noisy_losses, self.rounding)
        return tensors, Curves(tuple(self.losses), tuple(losses), tolerances)


def disturbed(
    feeds: Arrays, state: Arrays, signature: GraphSignature, rng: np.random.Generator, rounding: float = ROUNDING
) -> tuple[Arrays, Arrays]:
    """Disturb feeds and state by one rounding of noise on the data and the parameters."""
    touched = {*signature.data, *signature.virtual, *signature.trainable, *signature.frozen}

    def noise(name: str, value: np.ndarray) -> np.ndarray:
        if name not in touched or not np.issubdtype(value.dtype, np.floating):
            return value
        signs = rng.integers(0, 2, value.shape) * 2 - 1
        return (value.astype(np.float64) * (1 + rounding * signs)).astype(value.dtype)

    return (
        {name: noise(name, value) for name, value in feeds.items()},
        {name: noise(name, value) for name, value in state.items()},
    )


def tolerance(spread: float, rounding: float = ROUNDING) -> float:
    """Give a multiple of the spread, but never less than a few roundings."""
    least = MINIMUM if rounding >= ROUNDING else MINIMUM_IN_FLOAT64
    factor = FACTOR if rounding <= ROUNDING else FACTOR_IN_FEWER_BITS
    return max(least, LEAST_ROUNDINGS * rounding, factor * spread)


def compare(
    reference: Arrays,
    result: Arrays,
    spreads: list[Arrays],
    signature: GraphSignature,
    rounding: float = ROUNDING,
    measured_by: Mapping[str, str] | None = None,
) -> Iterator[TensorError]:
    """Compare the loss first, then gradients, then running statistics. An output of `measured_by` is measured by the
    size of another one, where that is larger."""
    measured_by = measured_by or {}
    for kind, outputs in (
        ("loss" if signature.loss else "output", list(signature.results)),
        ("gradient", list(signature.gradients.values())),
        ("running", list(signature.running.values())),
    ):
        least = FLOOR * max((norm(reference[name]) for name in outputs), default=0.0)
        for name in outputs:
            floor = max(least, norm(reference[measured_by[name]])) if name in measured_by else least
            spread = max((distance(noisy[name], reference[name], floor) for noisy in spreads), default=0.0)
            error = distance(result[name], reference[name], floor)
            yield TensorError(name, kind, error, tolerance(spread, rounding))


def norm(x: np.ndarray) -> float:
    """Give the Euclidean norm, summed in float64."""
    return float(np.linalg.norm(x.astype(np.float64).ravel()))


def distance(a: np.ndarray, b: np.ndarray, floor: float) -> float:
    """Compute ||a - b|| / max(||b||, floor), in float64; infinite where the shapes differ, NaN where a value is."""
    if a.shape != b.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):  # infinities of one sign: NaN, as it should be
        difference = norm(a.astype(np.float64) - b.astype(np.float64))
    return difference / max(norm(b), floor) if difference else 0.0 * difference


def curve_tolerances(curve: list[float], noisy: list[list[float]], rounding: float = ROUNDING) -> tuple[float, ...]:
    """Give the tolerance of the largest spread so far: curves that have parted do not come together again."""
    found, spread = [], 0.0
    for step, loss in enumerate(curve):
        spread = max([spread, *(abs(other[step] - loss) / max(abs(loss), 1e-30) for other in noisy)])
        found.append(tolerance(spread, rounding))
    return tuple(found)
