"""Softmax cross-entropy and its gradient on a GPU, interpreted, against float64 numpy."""

import dataclasses

import numpy as np
import pytest
from cuda_kernels import ARCHITECTURES, assert_no_spills, gpu, run_kernel
from loss_case import gradient, gradient_case, losses

from bnfuse.runtime.kernels.common.loss import LossGradProblem, LossProblem
from bnfuse.runtime.kernels.cuda import loss as cuda_loss
from bnfuse.runtime.kernels.cuda.loss import softmax_loss, softmax_loss_grad

CASES = [
    LossProblem(16, 10),
    LossProblem(3, 1000, reduction="sum", label_dtype="int32"),
    LossProblem(5, 37, reduction="none"),
    LossProblem(4, 21, 6, weighted=True, ignore_index=-1),
    LossProblem(2, 5, 9, "none", ignore_index=2),
    LossProblem(300, 3, ignore_index=1),
    LossProblem(1, 1),
]
GRADIENTS = [
    LossGradProblem(16, 10),
    LossGradProblem(3, 1000, label_dtype="int32"),
    LossGradProblem(4, 21, 6),
    LossGradProblem(300, 3),
    LossGradProblem(1, 1),
]


@pytest.mark.parametrize("many_blocks", [False, True])
@pytest.mark.parametrize("problem", CASES, ids=str)
def test_loss(problem, many_blocks, monkeypatch):
    if many_blocks:
        monkeypatch.setattr(cuda_loss, "SUM_ROWS", 7)
    rng = np.random.default_rng(0)
    scores = (5 * rng.normal(size=(problem.n, problem.classes, problem.inner))).astype(np.float32)
    labels = rng.integers(0, problem.classes, size=(problem.n, problem.inner))
    if problem.ignore_index is not None:
        labels[0, 0] = problem.ignore_index
    weights = rng.uniform(0.5, 2, size=problem.classes).astype(np.float32) if problem.weighted else None
    loss, log_prob = losses(scores.astype(np.float64), labels, problem.reduction, weights, problem.ignore_index)
    operands = {"scores": scores, "labels": labels, "weights": weights}
    found = run_kernel(softmax_loss(problem, gpu()), operands)
    np.testing.assert_allclose(found["loss"], np.ravel(loss), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found["log_prob"], log_prob.ravel(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("problem", GRADIENTS, ids=str)
def test_gradient(problem):
    case = gradient_case(problem)
    found = run_kernel(softmax_loss_grad(problem, gpu()), case)
    np.testing.assert_allclose(found["dscores"], gradient(case), rtol=1e-5, atol=2e-7)
    scaled = run_kernel(softmax_loss_grad(problem, gpu("fp16")), {**case, "dlosses": 1024 * case["dlosses"]})
    np.testing.assert_array_equal(scaled["dscores"], 1024 * found["dscores"])


def test_large_scores_neither_overflow_nor_underflow():
    scores = np.array([[1e4, -1e4, 0], [0, 200, 100]], np.float32)
    found = run_kernel(softmax_loss(LossProblem(2, 3), gpu()), {"scores": scores, "labels": np.array([1, 2])})
    np.testing.assert_allclose(found["loss"], [(2e4 + 100) / 2], rtol=1e-6)


def test_a_score_that_is_nan_shows():
    scores = np.zeros((2, 300), np.float32)
    scores[1, 77] = np.nan
    found = run_kernel(softmax_loss(LossProblem(2, 300), gpu()), {"scores": scores, "labels": np.array([1, 2])})
    assert np.isnan(found["loss"]).all()


@pytest.mark.parametrize("label", [3, -1, 2**40, -(2**63)])
def test_a_label_that_is_no_class_reads_nothing_and_shows_as_nan(label):
    problem = dataclasses.replace(LossProblem(2, 3), weighted=True)
    operands = {"scores": np.zeros((2, 3), np.float32), "labels": np.array([0, label]), "weights": np.ones(3)}
    found = run_kernel(softmax_loss(problem, gpu()), operands)
    assert np.isnan(found["loss"]).all()


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_gradient_of_a_label_that_is_no_class_has_no_one_in_its_row(kind):
    problem = LossGradProblem(5, 3, label_dtype=np.dtype(kind).name)
    case = gradient_case(problem, labels=[2, -1, 3, np.iinfo(kind).min, -100])
    found = run_kernel(softmax_loss_grad(problem, gpu()), case)["dscores"]
    np.testing.assert_allclose(found, gradient(case), rtol=1e-5, atol=2e-7)
    assert not found[-3:].any()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_without_spills(arch):
    for problem in (LossProblem(64, 1000), LossProblem(8, 21, 5000, weighted=True, ignore_index=-1)):
        assert_no_spills(softmax_loss(problem, gpu(arch=arch)))
    for problem in (LossGradProblem(64, 1000), LossGradProblem(8, 21, 5000)):
        assert_no_spills(softmax_loss_grad(problem, gpu("fp16", arch)))
