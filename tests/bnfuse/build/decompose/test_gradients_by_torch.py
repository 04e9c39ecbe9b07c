"""Gradients through decompositions against torch's autograd in float64."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from decomposed import by_onnxruntime, floats, model_of
from onnx import helper, numpy_helper

from bnfuse.build import build

pytestmark = pytest.mark.torch
AFFINE = {"s": floats(6, seed=1, low=0.5), "b": floats(6, seed=2)}


def one(op: str, inputs: str, **attrs) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), ["y"], "it", **attrs)


CASES = {
    "Conv 1-d": (
        one("Conv", "x w b", strides=[2], pads=[1, 1]),
        (2, 3, 9),
        {"w": floats(6, 3, 3, seed=1), "b": floats(6, seed=2)},
        lambda f, x, w, b: f.conv1d(x, w, b, 2, 1),
    ),
    "Conv 3-d": (
        one("Conv", "x w", strides=[2, 1, 2], pads=[1] * 6, dilations=[1, 2, 1], group=2),
        (2, 4, 5, 6, 7),
        {"w": floats(6, 2, 3, 2, 3, seed=1)},
        lambda f, x, w: f.conv3d(x, w, None, (2, 1, 2), 1, (1, 2, 1), 2),
    ),
    "ConvTranspose 3-d": (
        one("ConvTranspose", "x w b", strides=[2, 2, 1], pads=[1, 0, 1, 1, 0, 1], output_padding=[1, 0, 0]),
        (2, 4, 3, 3, 4),
        {"w": floats(4, 3, 3, 2, 3, seed=1), "b": floats(3, seed=2)},
        lambda f, x, w, b: f.conv_transpose3d(x, w, b, (2, 2, 1), (1, 0, 1), (1, 0, 0)),
    ),
    "MaxPool 3-d": (
        one("MaxPool", "x", kernel_shape=[2, 2, 2], strides=[2, 1, 2]),
        (2, 3, 4, 5, 6),
        {},
        lambda f, x: f.max_pool3d(x, 2, (2, 1, 2)),
    ),
    "AveragePool 3-d": (
        one("AveragePool", "x", kernel_shape=[3, 3, 3], strides=[2, 2, 2], pads=[1] * 6, count_include_pad=1),
        (2, 3, 4, 5, 6),
        {},
        lambda f, x: f.avg_pool3d(x, 3, 2, 1),
    ),
    "InstanceNormalization": (
        one("InstanceNormalization", "x s b", epsilon=1e-3),
        (2, 6, 4, 5),
        AFFINE,
        lambda f, x, s, b: f.instance_norm(x, None, None, s, b, True, 0.1, 1e-3),
    ),
    "GroupNormalization": (
        one("GroupNormalization", "x s b", epsilon=1e-3, num_groups=3),
        (2, 6, 4, 5),
        AFFINE,
        lambda f, x, s, b: f.group_norm(x, 3, s, b, 1e-3),
    ),
    "LayerNormalization": (
        one("LayerNormalization", "x s b", epsilon=1e-3),
        (2, 5, 6),
        AFFINE,
        lambda f, x, s, b: f.layer_norm(x, (6,), s, b, 1e-3),
    ),
    "LRN": (
        one("LRN", "x", size=3, alpha=0.3, beta=0.75, bias=1.5),
        (2, 6, 4, 5),
        {},
        lambda f, x: f.local_response_norm(x, 3, 0.3, 0.75, 1.5),
    ),
    "LpPool": (
        one("LpPool", "x", kernel_shape=[2, 2], strides=[2, 2], p=2),
        (2, 3, 4, 6),
        {},
        lambda f, x: f.lp_pool2d(x, 2, 2),
    ),
    "DepthToSpace": (
        one("DepthToSpace", "x", blocksize=2, mode="CRD"),
        (2, 12, 3, 4),
        {},
        lambda f, x: f.pixel_shuffle(x, 2),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_autograds(name):
    import torch

    node, shape, values, function = CASES[name]
    scale = floats(*shape[:2], *[1] * (len(shape) - 2), seed=9, low=0.5, high=1.5)
    weight = floats(1, shape[1], *[1] * (len(shape) - 2), seed=8, low=0.5, high=1.5)
    node = onnx.NodeProto.FromString(node.SerializeToString())
    node.input[0] = "scaled"  # by a parameter: its gradient is that of x, summed
    feeds = {"x": floats(*shape) * scale}
    nodes = [helper.make_node("Mul", ["x", "k"], ["scaled"], "mul"), node]
    model = build(model_of(nodes, feeds, {**values, "k": weight}), loss="mse").model
    tensors = {
        key: torch.tensor(value, dtype=torch.float64, requires_grad=True)
        for key, value in {"k": weight, **values}.items()
    }
    y = function(
        torch.nn.functional, torch.tensor(feeds["x"]).double() * tensors["k"], *(tensors[key] for key in values)
    )
    labels = floats(*y.shape, seed=7)
    ((y - torch.tensor(labels).double()) ** 2).mean().backward()
    found = dict(
        zip([v.name for v in model.graph.output], by_onnxruntime(model, {**feeds, "labels": labels}), strict=True)
    )
    np.testing.assert_allclose(found["y"], y.detach().numpy(), rtol=1e-4, atol=1e-5)
    for key, tensor in tensors.items():
        expected = tensor.grad.numpy()
        assert np.linalg.norm(found[f"{key}_grad"] - expected) < 1e-5 * np.linalg.norm(expected) + 2e-7
    kept = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    assert all((kept[key] == value).all() for key, value in values.items())
