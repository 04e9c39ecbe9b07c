"""A forward network differentiated by torch, in float64, with BatchNorms of the test's own definition.

    expected = differentiate(oracle, network, {"x": images}, labels, norm)

`norm(name, x, p)` gives y and both new running statistics from a map and `Parameters`. Rows of the batch whose label is
`IGNORED` do not count in the loss. The result has the names of the training graph's outputs.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

IGNORED = -100


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Of one BatchNorm: tensors [C], and two numbers."""

    scale: Any
    bias: Any
    mean: Any
    variance: Any
    epsilon: float
    momentum: float


Norm = Callable[[str, Any, Parameters], tuple[Any, Any, Any]]


def differentiate(
    oracle: types.ModuleType,
    model: onnx.ModelProto,
    data: dict[str, np.ndarray],
    labels: np.ndarray,
    norm: Norm,
) -> dict[str, np.ndarray]:
    import torch

    evaluator = oracle.Evaluator(model, "float64")
    parameters = {t.name: evaluator.tensor(onnx.numpy_helper.to_array(t)) for t in model.graph.initializer}
    for value in parameters.values():
        value.requires_grad_(value.is_floating_point() and value.dim() > 0)
    env = {**parameters, **{name: evaluator.tensor(value) for name, value in data.items()}}
    for node in model.graph.node:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        inputs = [env[name] for name in node.input]
        if node.op_type == "BatchNormalization":
            numbers = (attributes["epsilon"], attributes["momentum"])
            results = norm(node.name, inputs[0], Parameters(*inputs[1:], *numbers))
        else:
            results = evaluator.call(node, inputs, attributes)
        env |= dict(zip(node.output, results, strict=False))
    loss = torch.nn.functional.cross_entropy(env["logits"], torch.from_numpy(labels), ignore_index=IGNORED)
    loss.backward()
    found = {"loss": loss, "logits": env["logits"]}
    found |= {f"{name}_grad": p.grad for name, p in parameters.items() if p.grad is not None}
    found |= {n: env[n] for node in model.graph.node if node.op_type == "BatchNormalization" for n in node.output[1:3]}
    return {name: value.detach().numpy() for name, value in found.items()}


def full(name: str, x: Any, p: Parameters) -> tuple[Any, Any, Any]:
    """The BatchNorm that the source graph has: statistics of the whole batch."""
    return normalised(x, x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0), p)


def normalised(x: Any, mean: Any, variance: Any, p: Parameters) -> tuple[Any, Any, Any]:
    """y and the new running statistics from statistics of any kind, [C]."""
    a = p.scale * (variance + p.epsilon).rsqrt()
    m = p.momentum
    return wide(a) * x + wide(p.bias - a * mean), m * p.mean + (1 - m) * mean, m * p.variance + (1 - m) * variance


def wide(c: Any) -> Any:
    """[C] as [1, C, 1, 1]"""
    return c.reshape(1, -1, 1, 1)


def worst(expected: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> float:
    """The largest relative error of what both have. A gradient that vanishes is judged by the size of the others."""
    floor = 1e-3 * max(float(np.linalg.norm(value)) for name, value in expected.items() if name.endswith("_grad"))
    return max(
        float(np.linalg.norm(found[name] - value)) / (float(np.linalg.norm(value)) + floor)
        for name, value in expected.items()
        if name in found
    )
