"""Accuracies of logits: of images and of pixels, class by class."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.training.confusion import require_confusion, write_confusion
from bnfuse.training.scoring import CONFUSED, evaluate_batches

RNG = np.random.default_rng(0)


def scored(logits, labels, **options):
    parts = [(logits[i : i + 7], labels[i : i + 7]) for i in range(0, len(labels), 7)]
    return evaluate_batches(lambda x: x, iter(parts), **options)


def test_numbers_are_scikit_learns():
    from sklearn import metrics

    logits, labels = RNG.standard_normal((200, 8)).astype(np.float32), RNG.integers(0, 8, 200)
    logits[np.arange(200), labels] += 1
    found, answers = scored(logits, labels), logits.argmax(1)
    assert found.accuracy == pytest.approx(metrics.accuracy_score(labels, answers))
    assert found.top5 == pytest.approx(metrics.top_k_accuracy_score(labels, logits, k=5))
    assert found.balanced_accuracy == pytest.approx(metrics.balanced_accuracy_score(labels, answers))
    assert np.array_equal(found.confusion, metrics.confusion_matrix(labels, answers))
    p = np.exp(logits.astype(np.float64))
    assert found.loss == pytest.approx(metrics.log_loss(labels, p / p.sum(1, keepdims=True)))
    np.testing.assert_allclose(found.class_accuracies, metrics.recall_score(labels, answers, average=None))


def test_of_equal_logits_the_first_is_the_largest():
    found = scored(np.zeros((6, 6), np.float32), np.arange(6))
    assert (found.right, found.five) == (1, 5)
    assert scored(np.zeros((3, 5), np.float32), np.arange(3)).top5 is None


def test_a_class_without_images_counts_for_nothing():
    found = scored(np.eye(4, dtype=np.float32)[[0, 1, 1]], np.array([0, 1, 2]), names=("a", "b", "c", "d"))
    assert found.balanced_accuracy == pytest.approx(2 / 3)
    classes = found.to_json()["classes"]
    assert [c["accuracy"] for c in classes] == [1.0, 1.0, 0.0, None]
    assert [c["name"] for c in classes] == ["a", "b", "c", "d"]
    json.dumps(found.to_json(), allow_nan=False)
    assert "66.67 % by class" in str(found) and "By class" in str(found)


def test_pixels_are_counted_but_for_those_ignored():
    labels = RNG.integers(0, 3, (9, 4, 5))
    labels[:, 0] = 255
    logits = RNG.standard_normal((9, 3, 4, 5)).astype(np.float32)
    found = scored(logits, labels, ignored=255)
    known, answers = labels != 255, logits.argmax(1)
    assert (found.images, found.pixels, found.top5) == (9, 9 * 15, None)
    assert found.accuracy == pytest.approx((answers == labels)[known].mean())
    overlaps = [
        ((answers == c) & (labels == c) & known).sum() / (((answers == c) | (labels == c)) & known).sum()
        for c in range(3)
    ]
    assert found.mean_iou == pytest.approx(np.mean(overlaps))
    assert "mean IoU" in str(found)


def test_a_confusion_matrix_is_a_table_or_a_picture(tmp_path):
    logits, labels = RNG.standard_normal((60, 3)).astype(np.float32), RNG.integers(0, 3, 60)
    found = scored(logits, labels, names=("cat", "a, dog", "$x$"))
    for name in ("c.csv", "c.png", "c.svg"):
        require_confusion(tmp_path / name)
        write_confusion(found, tmp_path / name)
    with (tmp_path / "c.csv").open(newline="") as stream:
        head, *rows = csv.reader(stream)
    assert head == ["class", "cat", "a, dog", "$x$"] == ["class", *(row[0] for row in rows)]
    assert np.array_equal(np.array([row[1:] for row in rows], int), found.confusion)
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "c.svg").read_text().startswith("<?xml")


def test_a_confusion_matrix_that_cannot_be_is_refused(tmp_path):
    with pytest.raises(BnfuseError, match=r"ends in \.csv, \.png"):
        require_confusion(tmp_path / "c.txt")
    many = scored(np.zeros((2, CONFUSED + 1), np.float32), np.zeros(2, np.int64))
    assert (many.right, many.confusion, many.balanced_accuracy, many.to_json()["classes"]) == (2, None, None, None)
    with pytest.raises(BnfuseError, match="more than 2048 classes"):
        write_confusion(many, tmp_path / "c.csv")


def test_logits_of_another_shape_are_refused():
    with pytest.raises(BnfuseError, match="logits are"):
        scored(np.zeros((2, 3, 1, 1), np.float32), np.zeros(2, np.int64))
