"""ConvNeXts: LayerNorms over channels and Linear layers of maps, with the Transposes that exporters put around them."""

from __future__ import annotations

import collections

import numpy as np
import onnx_ir as ir
import pytest
from convnext import Net, in_float64

import bnfuse
from bnfuse.build import build

NETS = {
    "both": Net(),
    "of one sample, with matrices as they are": Net(batch=1, transposed=False, size=(27, 21)),
    "without a layer scale": Net(layer_scale=False, size=(8, 8)),
    "with drop paths": Net(batch=3, drop_path=True, size=(13, 10), blocks=(2, 1)),
    "without scale and bias": Net(affine=False, window=5),
    "of a single stage": Net(blocks=(2,), channels=5),
}


@pytest.fixture(params=NETS, scope="module")
def net(request):
    return NETS[request.param]


def operators(model):
    return collections.Counter(node.op_type for node in model.graph.node)


def close(found, expected, tolerance):
    assert {*found} >= {*expected}
    for name, value in expected.items():
        assert np.abs(found[name] - value).max() <= tolerance * max(1, np.abs(value).max()), name


@pytest.mark.torch
@pytest.mark.parametrize("level", ["none", "icf"])
def test_gradients_are_those_of_torch(net, level):
    built = build(net.model()).model
    feeds = net.feeds()
    rewritten = ir.to_proto(bnfuse.rewrite(built, level=level).model)
    close(in_float64(rewritten, feeds), net.by_torch(feeds), 1e-6)


def test_no_map_is_turned_and_each_norm_is_one_operator(net):
    found = operators(build(net.model()).model)
    norms = sum(net.blocks) + len(net.blocks)
    assert (found["LayerNorm"], found["LayerNormGrad"]) == (norms, norms)
    assert not {"MatMul", "ReduceMean", "Gemm"} & {*found}
    assert found["Conv"] == 1 + len(net.blocks) - 1 + 3 * sum(net.blocks)
    assert found["Transpose"] <= (0 if net.transposed else 4 * sum(net.blocks))  # of matrices


def test_biases_and_layer_scales_are_in_the_convolutions():
    """A layer scale of a map that is smaller than the weight stays: here that of the second stage."""
    model = build(Net(size=(12, 12)).model()).model
    assert all(len(node.input) == 3 for node in model.graph.node if node.op_type == "Conv")
    maps = {v.name for v in model.graph.value_info if len(v.type.tensor_type.shape.dim) == 4}
    forward = [node for node in model.graph.node if "/grad" not in node.name]
    scales = [n for n in forward if n.op_type == "Mul" and {*n.input} <= maps | {"0.0.gamma", "1.0.gamma"}]
    assert not [n for n in forward if n.op_type == "Add" and not {*n.input} <= maps]
    assert len(scales) <= 2


def test_a_compiled_step_is_that_of_torch():
    pytest.importorskip("torch")
    net = Net(batch=2, channels=8, size=(22, 18), drop_path=True)
    step = bnfuse.compile(bnfuse.rewrite(build(net.model()).model), threads=1)
    feeds = net.feeds()
    expected = net.by_torch(feeds)
    loss = step(*feeds.values())
    assert loss == pytest.approx(float(expected.pop("loss")), rel=1e-5)
    close({f"{name.removesuffix('_grad')}_grad": value for name, value in step.gradients().items()}, expected, 2e-5)
