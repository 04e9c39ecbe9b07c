"""Softmax cross-entropy and its gradient against float64 numpy."""

import numpy as np
import pytest
from loss_case import gradient, gradient_case, losses

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.common.loss import LossGradProblem, LossProblem
from bnfuse.runtime.kernels.cpu.loss import softmax_loss, softmax_loss_grad

pytestmark = pytest.mark.usefixtures("optimized_by_turns")

TARGET = resolve("cpu", 2)


CASES = [
    LossProblem(16, 10),
    LossProblem(3, 1000, reduction="sum", label_dtype="int32"),
    LossProblem(5, 37, reduction="none"),
    LossProblem(4, 21, 6, weighted=True, ignore_index=-1),
    LossProblem(2, 5, 9, "none", ignore_index=2),
    LossProblem(1, 1),
]
GRADIENTS = [
    LossGradProblem(16, 10),
    LossGradProblem(3, 1000, label_dtype="int32"),
    LossGradProblem(4, 21, 6),
    LossGradProblem(300, 3),
    LossGradProblem(1, 1),
]


@pytest.mark.parametrize("problem", CASES, ids=str)
def test_loss(problem):
    rng = np.random.default_rng(0)
    scores = (5 * rng.normal(size=(problem.n, problem.classes, problem.inner))).astype(np.float32)
    labels = rng.integers(0, problem.classes, size=(problem.n, problem.inner))
    if problem.ignore_index is not None:
        labels[0, 0] = problem.ignore_index
    weights = rng.uniform(0.5, 2, size=problem.classes).astype(np.float32) if problem.weighted else None
    loss, log_prob = losses(scores.astype(np.float64), labels, problem.reduction, weights, problem.ignore_index)
    operands = {"scores": scores, "labels": labels}
    if weights is not None:
        operands["weights"] = weights
    found = execute.call(softmax_loss(problem, TARGET), operands)
    np.testing.assert_allclose(found["loss"], np.ravel(loss), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found["log_prob"], log_prob.ravel(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("problem", GRADIENTS, ids=str)
def test_gradient(problem):
    case = gradient_case(problem)
    found = execute.call(softmax_loss_grad(problem, TARGET), case)
    np.testing.assert_allclose(found["dscores"], gradient(case), rtol=1e-5, atol=2e-7)


def test_large_scores_neither_overflow_nor_underflow():
    problem = LossProblem(2, 3)
    scores = np.array([[1e4, -1e4, 0], [0, 200, 100]], np.float32)
    found = execute.call(softmax_loss(problem, TARGET), {"scores": scores, "labels": np.array([1, 2])})
    np.testing.assert_allclose(found["loss"], [(2e4 + 100) / 2], rtol=1e-6)


def test_a_label_that_is_no_class_shows_as_nan():
    problem = LossProblem(2, 3)
    scores = np.zeros((2, 3), np.float32)
    for label in (3, -1, 2**40):
        found = execute.call(softmax_loss(problem, TARGET), {"scores": scores, "labels": np.array([0, label])})
        assert np.isnan(found["loss"]).all()


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_gradient_of_a_label_that_is_no_class_has_no_one_in_its_row(kind):
    problem = LossGradProblem(5, 3, label_dtype=np.dtype(kind).name)
    case = gradient_case(problem, labels=[2, -1, 3, np.iinfo(kind).min, -100])
    found = execute.call(softmax_loss_grad(problem, TARGET), case)["dscores"]
    np.testing.assert_allclose(found, gradient(case), rtol=1e-5, atol=2e-7)
    assert not found[-3:].any()


def test_labels_of_another_dtype_are_refused():
    with pytest.raises(BnfuseError, match="labels are float32"):
        LossProblem(2, 3, label_dtype="float32")
    with pytest.raises(BnfuseError, match="labels are float32"):
        LossGradProblem(2, 3, label_dtype="float32")
