"""Gradients of losses over classes, with all they can be told."""

from __future__ import annotations

import numpy as np
import pytest
from differentiated import check, differentiated, floats, node
from numpy.random import default_rng

from bnfuse.core.errors import BnfuseError

pytestmark = pytest.mark.torch

SHAPES = [(5, 4), (1, 3), (2, 3, 4), (2, 4, 1, 3)]
CASES = [
    (shape, reduction, weighed, ignored)
    for shape in SHAPES
    for reduction in ("mean", "sum", "none")
    for weighed in (False, True)
    for ignored in (None, -100, 1)
]


def operands(shape, weighed, ignored, kind=np.int64):
    labels = default_rng(3).integers(0, shape[1], (shape[0], *shape[2:])).astype(kind)
    if ignored is not None and labels.size > 1:
        labels.flat[0] = ignored
    return {"x": floats(*shape), "labels": labels}, ({"w": floats(shape[1], low=0.2, seed=1)} if weighed else {})


def options(torch, constants, ignored):
    given = {"weight": torch.tensor(constants["w"])} if "w" in constants else {}
    return given | ({} if ignored is None else {"ignore_index": ignored})


@pytest.mark.parametrize(("shape", "reduction", "weighed", "ignored"), CASES)
def test_cross_entropy(shape, reduction, weighed, ignored):
    feeds, constants = operands(shape, weighed, ignored)

    def function(torch, x, labels):
        given = options(torch, constants, ignored)
        return torch.nn.functional.cross_entropy(x, labels, reduction=reduction, **given)

    attributes = {"reduction": reduction, **({} if ignored is None else {"ignore_index": ignored})}
    nodes = [node("SoftmaxCrossEntropyLoss", f"x labels {' '.join(constants)}", "y", **attributes)]
    check(nodes, feeds, function, constants=constants)


@pytest.mark.parametrize(("shape", "reduction", "weighed", "ignored"), CASES)
def test_negative_log_likelihood(shape, reduction, weighed, ignored):
    feeds, constants = operands(shape, weighed, ignored)

    def function(torch, x, labels):
        return torch.nn.functional.nll_loss(x, labels, reduction=reduction, **options(torch, constants, ignored))

    attributes = {"reduction": reduction, **({} if ignored is None else {"ignore_index": ignored})}
    nodes = [node("NegativeLogLikelihoodLoss", f"x labels {' '.join(constants)}", "y", **attributes)]
    check(nodes, feeds, function, constants=constants)


@pytest.mark.parametrize("op", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_labels_of_32_bits(op):
    feeds, _ = operands((3, 4), False, None, np.int32)

    def function(torch, x, labels):
        x = x.log_softmax(1) if op.startswith("Softmax") else x
        return torch.nn.functional.nll_loss(x, labels.long())

    check([node(op, "x labels", "y")], feeds, function)


@pytest.mark.parametrize("outputs", [("y", "p"), ("p",)])
def test_what_arrives_at_the_logarithms(outputs):
    feeds, _ = operands((2, 3, 4), False, None)

    def function(torch, x, labels):
        found = {"y": torch.nn.functional.cross_entropy(x, labels), "p": x.log_softmax(1)}
        return tuple(found[name] for name in outputs)

    check([node("SoftmaxCrossEntropyLoss", "x labels", "y p")], feeds, function, outputs=outputs)


def test_the_forward_loss_gives_the_logarithms():
    feeds, _ = operands((3, 4), False, None)
    found = differentiated([node("SoftmaxCrossEntropyLoss", "x labels", "y")], feeds)
    assert [v.name for v in found.model.graph[0].outputs] == ["y", "softmaxcrossentropyloss/log_prob"]
    assert found.operators() == ["Size", "Cast", "Div", "Expand", "SoftmaxCrossEntropyGrad"]


@pytest.mark.parametrize("op", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_trained_class_weights_are_refused_in_one_line(op):
    feeds, constants = operands((3, 4), True, None)
    with pytest.raises(BnfuseError, match=rf"model.onnx: node 'loss' \({op}\) has class weights that are trained"):
        differentiated([node(op, "x labels w", "y", name="loss")], feeds | constants)
