"""DenseNet-121 in idiomatic torch layers, the baseline of the zoo's densenet121."""

from __future__ import annotations

import torch
from torch import nn


class Layer(nn.Module):
    """BN, ReLU, 1x1 convolution to 4k channels, BN, ReLU, 3x3 convolution to k channels."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        x = self.conv1(self.relu(self.norm1(torch.cat(features, 1))))
        return self.conv2(self.relu(self.norm2(x)))


class Block(nn.Module):
    def __init__(self, layers: int, channels: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(channels + i * growth, growth) for i in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet121(nn.Module):
    def __init__(self, classes: int = 1000, growth: int = 32) -> None:
        super().__init__()
        channels = 2 * growth
        stages: list[nn.Module] = [
            nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        for index, layers in enumerate((6, 12, 24, 16)):
            stages.append(Block(layers, channels, growth))
            channels += layers * growth
            stages += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            if index < 3:
                stages += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
                channels //= 2
        self.features = nn.Sequential(*stages)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).mean((2, 3)))
