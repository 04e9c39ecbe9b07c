"""A wide ResNet for small images, WRN-16-4: pre-activation residual blocks of two 3x3 convolutions.

bnfuse build benchmarks/networks/wide_resnet.py:make --example 128,3,32,32 -o wrn.onnx
"""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        changed = inputs != outputs or stride > 1
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changed else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.relu(self.bn1(x))
        left = x if self.shortcut is None else self.shortcut(out)
        return left + self.conv2(torch.relu(self.bn2(self.conv1(out))))


def make(depth: int = 16, width: int = 4, classes: int = 10) -> nn.Module:
    """Make the network, of `depth` convolutions and linear layers."""
    blocks, channels = (depth - 4) // 6, 16
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, 1, 1, bias=False)]
    for stage, outputs in enumerate((16 * width, 32 * width, 64 * width)):
        for block in range(blocks):
            layers.append(Block(channels, outputs, 2 if stage and not block else 1))
            channels = outputs
    head = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    return nn.Sequential(*layers, nn.BatchNorm2d(channels), *head)
