"""Gradients against torch's autograd in float64."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from ort_definitions import DEFINITIONS

from bnfuse.build import build
from bnfuse.models import build_forward

pytestmark = pytest.mark.torch
SLOPE = np.array([0.1, 0.2, -0.3, 0.4], np.float32).reshape(4, 1, 1)
V = "c"


def one(op: str, inputs=(V,), **attrs) -> list[onnx.NodeProto]:
    return [helper.make_node(op, list(inputs), ["y"], name="act", **attrs)]


def then(first: list[onnx.NodeProto], op: str, inputs, **attrs) -> list[onnx.NodeProto]:
    first[-1].output[0] = "t"
    return [*first, helper.make_node(op, inputs, ["y"], name="act2", **attrs)]


# name: nodes from c to y, the same with torch (f is torch.nn.functional), opset
CASES = {
    "Elu": (one("Elu"), lambda f, c: f.elu(c), 17),
    "Elu alpha": (one("Elu", alpha=0.3), lambda f, c: f.elu(c, 0.3), 17),
    "Selu": (one("Selu"), lambda f, c: f.selu(c), 17),
    "Celu": (one("Celu", alpha=0.7), lambda f, c: f.celu(c, 0.7), 17),
    "Softplus": (one("Softplus"), lambda f, c: f.softplus(c, threshold=1e9), 17),
    "Softsign": (one("Softsign"), lambda f, c: f.softsign(c), 17),
    "Mish": (one("Mish"), lambda f, c: f.mish(c), 18),
    "HardSwish": (one("HardSwish"), lambda f, c: f.hardswish(c), 17),
    "HardSigmoid": (one("HardSigmoid", alpha=1 / 6), lambda f, c: f.hardsigmoid(c), 17),
    "HardSigmoid default": (one("HardSigmoid"), lambda f, c: (0.2 * c + 0.5).clamp(0, 1), 17),
    "GlobalMaxPool": (one("GlobalMaxPool"), lambda f, c: f.adaptive_max_pool2d(c, 1), 17),
    "ReduceMax": (one("ReduceMax", axes=[1]), lambda f, c: c.amax(1, keepdim=True), 17),
    "ReduceMax 13": (one("ReduceMax", axes=[-1, 2], keepdims=0), lambda f, c: c.amax((2, 3)), 13),
    "ReduceMax all": (one("ReduceMax"), lambda f, c: c.amax((0, 1, 2, 3), keepdim=True), 17),
    "ReduceMax of equal maxima": (
        then(one("Relu"), "ReduceMax", ["t"], axes=[1]),
        lambda f, c: f.relu(c).amax(1, keepdim=True),
        17,
    ),
    "LeakyRelu": (one("LeakyRelu", alpha=0.2), lambda f, c: f.leaky_relu(c, 0.2), 17),
}


@pytest.mark.parametrize("name", CASES)
def test_gradient_of_an_activation(name, after_conv, step):
    import torch

    nodes, function, opset = CASES[name]
    model = after_conv(nodes, opset=opset)
    results, feeds = step(build(model, loss="mse").model)
    w = torch.tensor(numpy_helper.to_array(model.graph.initializer[0]).astype(np.float64), requires_grad=True)
    c = torch.nn.functional.conv2d(torch.tensor(feeds["x"]).double(), w, padding=1)
    loss = ((function(torch.nn.functional, c) - torch.tensor(feeds["labels"]).double()) ** 2).mean()
    loss.backward()
    assert results["loss"] == pytest.approx(loss.item(), rel=2e-6)
    assert relative(results["w_grad"], w.grad.numpy()) < 2e-6


@pytest.mark.parametrize("shape", [(4, 1, 1), (1,), (1, 4, 1, 1), (4, 6, 6)])
def test_gradient_of_prelu_reaches_its_slope(shape, after_conv, step):
    import torch

    slope = np.random.default_rng(3).uniform(-0.5, 0.5, shape).astype(np.float32)
    model = after_conv([helper.make_node("PRelu", ["c", "slope"], ["y"], name="act")], {"slope": slope})
    results, feeds = step(build(model, loss="mse").model)
    w, s = (torch.tensor(numpy_helper.to_array(t), dtype=torch.float64) for t in model.graph.initializer)
    w.requires_grad, s.requires_grad = True, True
    c = torch.nn.functional.conv2d(torch.tensor(feeds["x"]).double(), w, padding=1)
    y = torch.where(c > 0, c, s * c)
    ((y - torch.tensor(feeds["labels"]).double()) ** 2).mean().backward()
    assert relative(results["w_grad"], w.grad.numpy()) < 2e-6
    assert relative(results["slope_grad"], s.grad.numpy()) < 2e-6


def test_every_definition_and_rewrite_has_a_case():
    tried = {name.split()[0] for name in CASES} | {"PRelu"}
    elsewhere = {"Bernoulli", "CastLike"}  # no gradient flows through them: test_drawing.py
    rewritten = {"Bernoulli", "CastLike", "Celu", "Elu", "GlobalMaxPool", "HardSigmoid", "PRelu", "ReduceMax", "Selu"}
    assert set(DEFINITIONS) | rewritten <= tried | elsewhere


def test_gradient_of_layer_normalization(after_conv, step):
    import torch

    values = {"s": np.linspace(0.5, 2, 6).astype(np.float32), "b": np.linspace(-1, 1, 6).astype(np.float32)}
    model = after_conv([helper.make_node("LayerNormalization", ["c", "s", "b"], ["y"], name="ln")], values)
    results, feeds = step(build(model, loss="mse").model)
    tensors = [torch.tensor(numpy_helper.to_array(t), dtype=torch.float64) for t in model.graph.initializer]
    for tensor in tensors:
        tensor.requires_grad = True
    w, s, b = tensors
    c = torch.nn.functional.conv2d(torch.tensor(feeds["x"]).double(), w, padding=1)
    y = torch.nn.functional.layer_norm(c, (6,), s, b)
    ((y - torch.tensor(feeds["labels"]).double()) ** 2).mean().backward()
    for name, tensor in (("w", w), ("s", s), ("b", b)):
        assert relative(results[f"{name}_grad"], tensor.grad.numpy()) < 5e-6


@pytest.mark.parametrize("operands", [["c", "s"], ["c", "s", ""]])
def test_gradient_of_a_layer_normalization_without_bias(operands, after_conv, step):
    """It is built with a bias of zeros, which stays."""
    values = {"s": np.linspace(0.5, 2, 6).astype(np.float32)}
    made = build(after_conv([helper.make_node("LayerNormalization", operands, ["y"], name="ln")], values), loss="mse")
    with_zeros = after_conv(
        [helper.make_node("LayerNormalization", ["c", "s", "b"], ["y"], name="ln")],
        values | {"b": np.zeros(6, np.float32)},
    )
    ours, theirs = step(made.model)[0], step(build(with_zeros, loss="mse").model)[0]
    assert "ln/bias_grad" not in ours
    for name in ("loss", "w_grad", "s_grad"):
        assert (ours[name] == theirs[name]).all()


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("densenet40", {"depth": 2, "image": 16}),
        ("resnet20", {"image": 16}),
        ("mobilenetv2", {"image": 64, "width": 0.25, "dropout": 0}),
        ("squeezenet", {"image": 32, "bypass": "complex", "base": 16, "step": 8, "dropout": 0}),
    ],
)
def test_every_gradient_of_a_network_is_autograds(name, settings, step):
    """Tolerance: float32 torch's own distance from float64, tripled, and no less than 1e-4."""
    source = build_forward(name, batch=4, classes=6, seed=3, **settings)
    results, feeds = step(build(source).model)
    exact, single = (autograd(source, feeds, dtype) for dtype in ("float64", "float32"))
    assert {name for name in results if name.endswith("_grad")} < set(exact)
    scale = max(np.linalg.norm(exact[name]) for name in exact if name.endswith("_grad"))
    for key in exact:
        tolerance = max(1e-4 * np.linalg.norm(exact[key]), 3 * np.linalg.norm(single[key] - exact[key]), 1e-7 * scale)
        assert np.linalg.norm(results[key] - exact[key]) <= tolerance, key


def autograd(model: onnx.ModelProto, feeds: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """Loss, gradients and new running statistics of a forward graph, by torch."""
    import torch
    from torch.nn import functional

    kind = getattr(torch, dtype)
    values = {t.name: torch.tensor(numpy_helper.to_array(t)).to(kind) for t in model.graph.initializer}
    env = {**values, "data": torch.tensor(feeds["data"]).to(kind)}
    results = {}
    for node in model.graph.node:
        for name in node.input:
            if name in values and values[name].dim() and "running" not in name:
                values[name].requires_grad = True
        inputs = [env[name] for name in node.input]
        attrs = {attr.name: helper.get_attribute_value(attr) for attr in node.attribute}
        env[node.output[0]] = evaluate(functional, torch, node.op_type, inputs, attrs)
        if node.op_type == "BatchNormalization":
            x = inputs[0].detach()
            for old, new, now in zip(
                node.input[3:], node.output[1:], (x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)), strict=True
            ):
                results[new] = (env[old] * attrs["momentum"] + now * (1 - attrs["momentum"])).numpy()
    loss = functional.cross_entropy(env["logits"], torch.tensor(feeds["labels"]))
    loss.backward()
    results |= {f"{name}_grad": v.grad.numpy() for name, v in values.items() if v.grad is not None}
    return {**results, "loss": loss.detach().numpy(), "logits": env["logits"].detach().numpy()}


def evaluate(functional, torch, op: str, x: list, attrs: dict):
    if op == "Conv":
        pads = attrs["pads"]
        assert pads[:2] == pads[2:]
        bias = x[2] if len(x) > 2 else None
        return functional.conv2d(x[0], x[1], bias, attrs["strides"], pads[:2], attrs["dilations"], attrs["group"])
    if op == "BatchNormalization":
        return functional.batch_norm(x[0], None, None, x[1], x[2], training=True, eps=attrs["epsilon"])
    if op == "MaxPool":
        how = attrs["kernel_shape"], attrs["strides"], attrs["pads"][:2]
        return functional.max_pool2d(x[0], *how, ceil_mode=bool(attrs["ceil_mode"]))
    if op == "AveragePool":
        return functional.avg_pool2d(x[0], attrs["kernel_shape"], attrs["strides"], attrs["pads"][:2])
    return {
        "Relu": lambda: functional.relu(x[0]),
        "Clip": lambda: x[0].clamp(0, 6),
        "Add": lambda: x[0] + x[1],
        "Concat": lambda: torch.cat(x, 1),
        "GlobalAveragePool": lambda: x[0].mean((2, 3), keepdim=True),
        "Flatten": lambda: x[0].flatten(1),
        "Gemm": lambda: functional.linear(*x),
    }[op]()
