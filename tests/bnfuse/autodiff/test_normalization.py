"""Gradients of BatchNorms that train and of frozen ones, and of LayerNorms over channels."""

from __future__ import annotations

import numpy as np
import pytest
from differentiated import check, differentiated, few, floats, node, seeds, shapes
from hypothesis import given

from bnfuse.core.errors import BnfuseError
from bnfuse.opset.spec import DOMAIN

pytestmark = pytest.mark.torch

OPERANDS = "x scale bias mean variance"


def operands(shape, seed=0):
    c = shape[1]
    feeds = {"x": floats(*shape, seed=seed), "scale": floats(c, seed=seed + 1), "bias": floats(c, seed=seed + 2)}
    return feeds, {"mean": floats(c, seed=seed + 3), "variance": floats(c, seed=seed + 4, low=0.5)}


def trained(y="y"):
    outputs = f"{y} new_mean new_variance batch_mean inv_std"
    return node("BatchNorm", OPERANDS, outputs, domain=DOMAIN, epsilon=0.125, momentum=0.5)


@few
@given(shapes(2), seeds)
def test_batch_norms_that_train(shape, seed):
    shape = (shape[0] + 1, *shape[1:])
    feeds, constants = operands(shape, seed)

    def function(torch, x, scale, bias):
        return torch.nn.functional.batch_norm(x, None, None, scale, bias, True, 0.5, 0.125)

    found = check([trained()], feeds, function, constants=constants)
    assert found.operators() == ["BatchNormGrad"]


@few
@given(shapes(2), seeds)
def test_layer_norms_over_channels(shape, seed):
    feeds, _ = operands((shape[0], shape[1] + 1, *shape[2:]), seed)

    def function(torch, x, scale, bias):
        y = torch.nn.functional.layer_norm(x.movedim(1, -1), x.shape[1:2], scale, bias, 0.125)
        return y.movedim(-1, 1)

    nodes = [node("LayerNorm", "x scale bias", "y own_mean inverse", domain=DOMAIN, epsilon=0.125)]
    found = check(nodes, feeds, function)
    assert found.operators() == ["LayerNormGrad"]


def test_statistics_of_a_layer_norm_that_the_loss_reads_are_refused_in_one_line():
    feeds, _ = operands((2, 3, 4))
    nodes = [node("LayerNorm", "x scale bias", "y own_mean inverse", domain=DOMAIN, epsilon=0.125)]
    with pytest.raises(BnfuseError, match=r"model.onnx: node 'layernorm' .* has statistics that the loss depends on"):
        differentiated(nodes, feeds, outputs=("y", "own_mean"))


def test_statistics_that_the_loss_reads_are_refused_in_one_line():
    feeds, constants = operands((2, 3, 4))
    with pytest.raises(BnfuseError, match=r"model.onnx: node 'batchnorm' .* has statistics that the loss depends on"):
        differentiated([trained()], feeds, constants=constants, outputs=("y", "batch_mean"))


@few
@given(shapes(2), seeds)
def test_frozen_batch_norms(shape, seed):
    feeds, statistics = operands(shape, seed)

    def function(torch, x, scale, bias, mean, variance):
        aligned = (-1, *[1] * (len(shape) - 2))
        mean, variance, scale, bias = (v.reshape(aligned) for v in (mean, variance, scale, bias))
        return (x - mean) / (variance + 0.125).sqrt() * scale + bias

    nodes = [node("BatchNormalization", OPERANDS, "y", epsilon=0.125)]
    check(nodes, feeds | statistics, function)


def test_a_frozen_batch_norm_with_frozen_parameters_is_one_product_of_the_map():
    feeds, constants = operands((2, 3, 4, 4))
    found = differentiated([node("BatchNormalization", OPERANDS, "y")], feeds, constants=constants, wanted=["x"])
    maps = [n.op_type for n in found.model.graph if "/grad" in str(n.name) or str(n.name) == "x_grad"]
    assert maps == ["Add", "Sqrt", "Div", "Reshape", "Mul"]


@few
@given(shapes(2), seeds)
def test_the_affine_map_of_each_channel(shape, seed):
    shape = (*shape, 1, 1)[:4]
    feeds = {"x": floats(*shape, seed=seed), "a": floats(shape[1], seed=seed + 1), "b": floats(shape[1], seed=seed + 2)}
    nodes = [node("NormalizePointwise", "x a b", "y", domain=DOMAIN)]
    check(nodes, feeds, lambda torch, x, a, b: x * a.reshape(-1, 1, 1) + b.reshape(-1, 1, 1))


def test_a_mean_far_from_zero_cancels_nothing():
    feeds, constants = operands((4, 2, 3, 3))
    feeds["x"] += 1e6
    constants["mean"] = np.full(2, 1e6)

    def function(torch, x, scale, bias):
        mean, variance = (torch.tensor(constants[name]) for name in ("mean", "variance"))
        return torch.nn.functional.batch_norm(x, mean, variance, scale, bias, False, 0.0, 0.125)

    nodes = [node("BatchNormalization", OPERANDS, "y", epsilon=0.125)]
    check(nodes, feeds, function, constants=constants)
