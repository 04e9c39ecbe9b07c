"""Networks of the zoo in idiomatic torch layers, written by hand: what `bnfuse.baselines` is checked against.

Parameters are in the order of the zoo's, so that values can be copied from one to the other in order.
"""

from __future__ import annotations

import torch
from torch import nn


def conv_norm(into: int, out: int, kernel: int, *more: nn.Module, **how: int) -> list[nn.Module]:
    conv = nn.Conv2d(into, out, kernel, padding=kernel // 2, bias=False, **how)
    return [conv, nn.BatchNorm2d(out), *more]


class Residual(nn.Module):
    """relu(branch(x) + shortcut(x)); `kernels` of the branch's convolutions, the stride in its first 3x3."""

    def __init__(self, into: int, width: int, out: int, kernels: tuple[int, ...], stride: int) -> None:
        super().__init__()
        fits = stride == 1 and into == out
        channels = [into, *[width] * (len(kernels) - 1), out]
        layers: list[nn.Module] = []
        for index, kernel in enumerate(kernels):
            step = stride if index == kernels.index(3) else 1
            more = [nn.ReLU(inplace=True)] if index < len(kernels) - 1 else []
            layers += conv_norm(channels[index], channels[index + 1], kernel, *more, stride=step)
        self.branch = nn.Sequential(*layers)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity() if fits else nn.Sequential(*conv_norm(into, out, 1, stride=stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.branch(x)
        y += self.shortcut(x)
        return self.relu(y)


def resnet(kernels: tuple[int, ...], depths: tuple[int, ...], expansion: int, classes: int) -> nn.Sequential:
    stem = conv_norm(3, 64, 7, nn.ReLU(inplace=True), stride=2)
    layers: list[nn.Module] = [*stem, nn.MaxPool2d(3, stride=2, padding=1)]
    into = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for index in range(depth):
            stride = 2 if stage and index == 0 else 1
            layers.append(Residual(into, width, width * expansion, kernels, stride))
            into = width * expansion
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, classes))


def resnet18(classes: int = 1000) -> nn.Sequential:
    return resnet((3, 3), (2, 2, 2, 2), 1, classes)


def resnet50(classes: int = 1000) -> nn.Sequential:
    return resnet((1, 3, 1), (3, 4, 6, 3), 4, classes)


class InvertedResidual(nn.Module):
    def __init__(self, into: int, out: int, expansion: int, stride: int) -> None:
        super().__init__()
        wide = into * expansion
        layers = conv_norm(into, wide, 1, nn.ReLU6(inplace=True)) if expansion > 1 else []
        layers += conv_norm(wide, wide, 3, nn.ReLU6(inplace=True), stride=stride, groups=wide)
        self.branch = nn.Sequential(*layers, *conv_norm(wide, out, 1))
        self.residual = stride == 1 and into == out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.branch(x) if self.residual else self.branch(x)


def mobilenetv2(classes: int = 1000, dropout: float = 0.2) -> nn.Sequential:
    """Sandler et al. 2018, table 2: expansion, channels, blocks, stride."""
    table = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    layers = conv_norm(3, 32, 3, nn.ReLU6(inplace=True), stride=2)
    into = 32
    for expansion, out, blocks, stride in table:
        for index in range(blocks):
            layers.append(InvertedResidual(into, out, expansion, stride if index == 0 else 1))
            into = out
    layers += conv_norm(into, 1280, 1, nn.ReLU6(inplace=True))
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(1280, classes)]
    return nn.Sequential(*layers, *head)


def vgg16(classes: int = 1000, image: int = 224, dropout: float = 0.5) -> nn.Sequential:
    """With BN after every convolution, and the convolutions' biases."""
    layers: list[nn.Module] = []
    into = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(into, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            into = width
        layers.append(nn.MaxPool2d(2))
    layers.append(nn.Flatten())
    into = 512 * (image // 32) ** 2
    for _ in range(2):
        layers += [nn.Linear(into, 4096), nn.ReLU(inplace=True), nn.Dropout(dropout)]
        into = 4096
    return nn.Sequential(*layers, nn.Linear(into, classes))


class Fire(nn.Module):
    def __init__(self, into: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Sequential(*conv_norm(into, squeeze, 1, nn.ReLU(inplace=True)))
        self.expand1x1 = nn.Sequential(*conv_norm(squeeze, expand, 1, nn.ReLU(inplace=True)))
        self.expand3x3 = nn.Sequential(*conv_norm(squeeze, expand, 3, nn.ReLU(inplace=True)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.squeeze(x)
        return torch.cat([self.expand1x1(x), self.expand3x3(x)], 1)


def squeezenet(classes: int = 1000, dropout: float = 0.5) -> nn.Sequential:
    """SqueezeNet 1.0 with BN after every convolution."""
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 7, stride=2, bias=False), nn.BatchNorm2d(96), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, stride=2, ceil_mode=True))
    into = 96
    for index in range(8):
        squeeze = 16 * (1 + index // 2)
        layers.append(Fire(into, squeeze, 4 * squeeze))
        into = 8 * squeeze
        if index in (2, 6):
            layers.append(nn.MaxPool2d(3, stride=2, ceil_mode=True))
    layers += [nn.Dropout(dropout), *conv_norm(into, classes, 1, nn.ReLU(inplace=True))]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
