"""Small torch modules, and what torch makes of a step of theirs in float64."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn

BATCH, CLASSES = 4, 3


class Small(nn.Module):
    """Two convolutions with BatchNorms, a residual sum, a classifier; a buffer, and a parameter that nothing reads."""

    def __init__(self, width: int = 4, classes: int = CLASSES, tied: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=True)
        self.norm2 = nn.BatchNorm2d(width, momentum=0.3)
        self.again = nn.Conv2d(width, width, 3, padding=1, bias=False)
        if tied:
            self.again.weight = self.conv.weight
        self.head = nn.Linear(width, classes)
        self.register_buffer("gain", torch.tensor(1.5))
        self.spare = nn.Parameter(torch.ones(2))

    def forward(self, images):
        x = torch.relu(self.norm1(self.stem(images)))
        x = torch.relu(self.norm2(self.conv(x)) + x)
        x = self.again(x) * self.gain
        return self.head(x.mean((2, 3)))


def small(seed: int = 0, **how: Any) -> Small:
    """In training mode, after some batches' worth of statistics."""
    torch.manual_seed(seed)
    module = Small(**how)
    for norm in (module.norm1, module.norm2):
        norm.running_mean.uniform_(-0.5, 0.5)
        norm.running_var.uniform_(0.5, 2)
        norm.num_batches_tracked.fill_(7)
    return module.train()


def images(seed: int = 0, batch: int = BATCH) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((batch, 2, 6, 6)).astype(np.float32))


def labels(batch: int = BATCH, classes: int = CLASSES) -> torch.Tensor:
    return torch.arange(batch) % classes


def in_float64(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """Loss, gradients and buffers of a step in float64, by torch."""
    wide = copy.deepcopy(module).double()
    loss = nn.functional.cross_entropy(wide(x.double()), y)
    loss.backward()
    gradients = {name: one.grad.numpy() for name, one in wide.named_parameters() if one.grad is not None}
    return float(loss.detach()), gradients, {name: one.numpy() for name, one in wide.named_buffers()}
