"""Small torch modules, and what a training loop of them gives, for bnfuse.torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

CLASSES = 4
IMAGE = (3, 8, 8)


def conv_norm(i: int, o: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(i, o, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(o), nn.ReLU())


class Small(nn.Module):
    """A residual sum, a concatenation, a squeeze-excitation: one of each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_norm(3, 8)
        self.side = conv_norm(8, 8)
        self.grown = conv_norm(16, 8)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.Sigmoid())
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        y = self.side(x)
        z = self.grown(torch.cat([x, y], 1))
        return self.head((z * self.gate(z) + y).mean((2, 3)))


def made(kind: Callable[[], nn.Module] = Small, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module = kind().train()
    with torch.no_grad():
        for one in module.modules():
            if isinstance(one, nn.BatchNorm2d):
                one.weight.uniform_(0.5, 1.5)
                one.bias.normal_(0, 0.2)
    return module


def images(count: int = 4, seed: int = 1, shape: tuple[int, ...] = IMAGE) -> torch.Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def labels(count: int = 4) -> torch.Tensor:
    return torch.arange(count) % CLASSES


def doubled(module: nn.Module) -> nn.Module:
    """The module in float64, computed by torch."""
    return copy.deepcopy(module).double()


def loss_of(module: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(module(x).to(next(module.parameters()).dtype), labels(len(x)))


def gradients(module: nn.Module) -> dict[str, Any]:
    return {name: None if one.grad is None else one.grad.double() for name, one in module.named_parameters()}


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().double() for name, one in module.state_dict().items()}


def distance(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest error of a tensor, relative to that tensor, or to the largest of all where it is close to nothing."""
    assert found.keys() == expected.keys()
    present = {name for name, one in expected.items() if one is not None}
    assert present == {name for name, one in found.items() if one is not None}
    floor = 1e-3 * max(float(expected[name].norm()) for name in present)
    return max(
        float((found[name] - expected[name]).norm() / max(float(expected[name].norm()), floor)) for name in present
    )
