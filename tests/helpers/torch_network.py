"""The networks that tests write as text, in torch and float64, for autograd: the definition that graphs are held to.

    outputs = run(model, body, feeds, statistics)     # loss, gradients and running statistics, by the graph's names

`statistics(name, x)` gives mean and variance of the BN of this name. Written from the text alone: no node of the
training graph is looked at, only its inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
from torch.nn import functional
from torch_statistics import normalise

from bnfuse.graph.signature import GraphSignature

Statistics = Callable[[str, Any], tuple[Any, Any]]


def run(
    model: onnx.ModelProto, body: str, feeds: dict[str, np.ndarray], statistics: Statistics
) -> dict[str, np.ndarray]:
    signature = GraphSignature.from_json(next(p.value for p in model.metadata_props if p.key == "bnfuse.roles"))
    values = {t.name: torch.tensor(onnx.numpy_helper.to_array(t).astype(np.float64)) for t in model.graph.initializer}
    for name in signature.trainable:
        values[name].requires_grad_()
    network = Network(values, statistics)
    maps = {"x": torch.tensor(feeds["x"])}
    for line in filter(None, (line.strip() for line in body.splitlines())):
        result, call = (part.strip() for part in line.split("=", 1))
        name, arguments = re.fullmatch(r"(\w+)\((.*)\)", call).groups()  # type: ignore[union-attr]
        plain = [part.strip() for part in arguments.split(",") if "=" not in part]
        options = {key: int(value) for key, value in (p.strip().split("=") for p in arguments.split(",") if "=" in p)}
        operands = [maps[part] for part in plain if part in maps]
        maps[result] = getattr(network, name)(result, *operands, **options)
    logits = functional.linear(maps["out"].mean((2, 3)), values["fc/weight"], values["fc/bias"])
    loss = functional.cross_entropy(logits, torch.tensor(feeds["labels"]))
    loss.backward()
    found = {signature.loss: loss} | {output: values[name].grad for name, output in signature.gradients.items()}
    found |= {output: network.running[name] for name, output in signature.running.items()}
    return {name: value.detach().numpy() for name, value in found.items()}


class Network:
    def __init__(self, values: dict[str, Any], statistics: Statistics) -> None:
        self.values, self.statistics = values, statistics
        self.running: dict[str, Any] = {}

    def conv(self, y: str, x: Any, w: int = 0, k: int = 1, s: int = 1, g: int = 1, bias: int = 0) -> Any:
        weight = self.values[f"{f'shared{w}' if w else y}/weight"]
        return functional.conv2d(x, weight, self.values[f"{y}/bias"] if bias else None, s, k // 2, 1, g)

    def bn(self, y: str, x: Any, zero: int = 0, eps: int = 5) -> Any:
        found = self.statistics(y, x)
        for name, batch in zip(("mean", "var"), found, strict=True):
            old = self.values[f"{y}/{name}"]
            momentum = float(np.float32(0.9))
            self.running[f"{y}/{name}"] = old * momentum + batch.detach() * (1 - momentum)
        epsilon = float(np.float32(10.0**-eps))
        return normalise(x, found, self.values[f"{y}/scale"], self.values[f"{y}/bias"], epsilon)

    def relu(self, y: str, x: Any) -> Any:
        return torch.relu(x)

    def relu6(self, y: str, x: Any) -> Any:
        return torch.clamp(x, 0, 6)

    def silu(self, y: str, x: Any) -> Any:
        return functional.silu(x)

    def add(self, y: str, a: Any, b: Any) -> Any:
        return a + b

    def cat(self, y: str, *xs: Any) -> Any:
        return torch.cat(xs, 1)

    def maxpool(self, y: str, x: Any, k: int = 2, s: int = 2) -> Any:
        return functional.max_pool2d(x, k, s, (k - 1) // 2)

    def avgpool(self, y: str, x: Any, k: int = 2, s: int = 2, p: int = 0, count: int = 0) -> Any:
        return functional.avg_pool2d(x, k, s, p, False, bool(count))
