"""SoftmaxCrossEntropyLoss and SoftmaxCrossEntropyGrad of ai.bnfuse: the problems, and one row.

Scores are [n, classes, inner...]: a row is one image and one inner position. Sums are float64. A label that is no class
makes the loss NaN rather than read beyond the scores; the gradient, which is given a dloss for each row, has no one in
that row.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.common.rows import At, Rows
from bnfuse.runtime.kernels.common.steps import Expr, f32, f64, to_f32
from bnfuse.runtime.kernels.kernel import Param
from bnfuse.runtime.targets.target import Target

Reduction = Literal["mean", "sum", "none"]


@dataclasses.dataclass(frozen=True)
class Labelled:
    """Scores with a label a row. `inner` is the product of the dimensions behind the classes, 1 for classification."""

    n: int
    classes: int
    inner: int = 1

    @property
    def rows(self) -> int:
        """Count the rows, each of which has one label."""
        return self.n * self.inner

    @property
    def along_classes(self) -> Rows:
        """Give the rows along the classes."""
        return Rows(self.n, self.classes, self.inner)


@dataclasses.dataclass(frozen=True)
class LossProblem(Labelled):
    """A loss."""

    reduction: Reduction = "mean"
    label_dtype: str = "int64"
    weighted: bool = False
    ignore_index: int | None = None

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum", "none"):
            raise BnfuseError(f"SoftmaxCrossEntropyLoss: reduction '{self.reduction}' is not mean, sum or none")
        check_labels(self.label_dtype)

    @property
    def losses(self) -> int:
        """Count the elements of the loss."""
        return self.rows if self.reduction == "none" else 1


@dataclasses.dataclass(frozen=True)
class LossGradProblem(Labelled):
    """The gradient of the losses of all rows."""

    label_dtype: str = "int64"

    def __post_init__(self) -> None:
        check_labels(self.label_dtype)


def check_labels(dtype: str) -> None:
    """Raise BnfuseError unless labels are integers that kernels take."""
    if dtype not in ("int32", "int64"):
        raise BnfuseError(f"SoftmaxCrossEntropyLoss: labels are {dtype}: give int64 or int32")


def loss_params(problem: LossProblem) -> tuple[Param, ...]:
    """List scores, labels, [weights] -> loss, log_prob; all float32 but the labels."""
    elements = problem.rows * problem.classes
    return (
        Param("scores", "in", elements),
        *_label_params(problem),
        Param("loss", "out", problem.losses),
        Param("log_prob", "out", elements),
    )


def grad_params(problem: LossGradProblem) -> tuple[Param, ...]:
    """List dlosses, log_prob, labels -> dscores; all float32 but the labels."""
    elements = problem.rows * problem.classes
    return (
        Param("dlosses", "in", problem.rows),
        Param("log_prob", "in", elements),
        Param("labels", "in", problem.rows, problem.label_dtype),
        Param("dscores", "out", elements),
    )


def _label_params(problem: LossProblem) -> tuple[Param, ...]:
    weights = (Param("weights", "in", problem.classes),) if problem.weighted else ()
    return (Param("labels", "in", problem.rows, problem.label_dtype), *weights)


def row_loss(problem: LossProblem, target: Target, args: Any, rows: Any, row: Expr, at: At) -> tuple[Expr, Expr]:
    """Write a row's log_prob; give its loss and its weight, as float64. `rows` walks along it (rows.py)."""
    scores = args["scores"]
    top = rows.fold(target, "float32", float("-inf"), lambda top, c: steps.maximum(scores[at(c)], top), tirx.Max)
    total = rows.fold(target, "float64", 0.0, lambda total, c: total + f64(steps.exp(scores[at(c)] - top)), tirx.Add)
    log_total = T.bind(tirx.log(total))

    def log_prob(c: Expr) -> Expr:
        return to_f32(f64(scores[at(c)] - top) - log_total)

    rows.along(target, lambda c: T.buffer_store(args["log_prob"], log_prob(c), [at(c)]))
    label = Label(problem, args, row)
    return label.when_used(label.weight * (f64(0.0) - f64(log_prob(label.index)))), label.weight


def row_gradient(problem: LossGradProblem, target: Target, args: Any, rows: Any, row: Expr, at: At) -> None:
    """Write a row's dscores."""
    valid, index = label_class(problem, args["labels"][row])
    scale = T.bind(args["dlosses"][row])

    def gradient(c: Expr) -> None:
        own = tirx.Select(tirx.And(valid, c == index), f32(1.0), f32(0.0))
        T.buffer_store(args["dscores"], (steps.exp(args["log_prob"][at(c)]) - own) * scale, [at(c)])

    rows.along(target, gradient)


def label_class(problem: LossProblem | LossGradProblem, label: Expr) -> tuple[Expr, Expr]:
    """Tell whether a label is a class, and which; 0 where it is none."""
    dtype = problem.label_dtype
    valid = tirx.And(label >= tirx.const(0, dtype), label < tirx.const(problem.classes, dtype))
    valid = T.bind(valid)
    return valid, T.bind(tirx.Cast("int32", tirx.Select(valid, label, tirx.const(0, dtype))))


class Label:
    """The label of a row: its class (0 where it is none), its weight as float64, and whether it counts."""

    def __init__(self, problem: LossProblem, args: Any, row: Expr) -> None:
        label = args["labels"][row]
        self.valid, self.index = label_class(problem, label)
        ignored = problem.ignore_index
        self.ignored = None if ignored is None else label == tirx.const(ignored, problem.label_dtype)
        weight = f64(args["weights"][self.index]) if problem.weighted else f64(1.0)
        self.weight = weight if self.ignored is None else T.bind(tirx.Select(self.ignored, f64(0.0), weight))

    def when_used(self, value: Expr) -> Expr:
        """Write the value, 0 where the label is ignored, NaN where it is no class."""
        value = tirx.Select(self.valid, value, f64(float("nan")))
        return value if self.ignored is None else tirx.Select(self.ignored, f64(0.0), value)
