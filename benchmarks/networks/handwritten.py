"""Forms that people write: U-Nets, GANs, detectors, Siamese nets, several heads, 1-d, 3-d, recurrent, drop path."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

try:
    import torch
    from torch import nn
except ImportError:  # the names are listed without it
    torch = nn = None

Table = dict[str, tuple[Any, tuple[tuple[int, ...], ...], str]]
Module = Any


def conv_norm(i: int, o: int, kernel: int = 3, stride: int = 1, activation: Module = None) -> Module:
    """Conv, BatchNorm, activation (ReLU)."""
    conv = nn.Conv2d(i, o, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(o), activation or nn.ReLU(inplace=True))


def twice(i: int, o: int) -> Module:
    """Two of them."""
    return nn.Sequential(conv_norm(i, o), conv_norm(o, o))


def classifier(channels: int, classes: int = 10) -> list[Module]:
    """The usual end of a network."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


def features(i: int = 3) -> Module:
    """A small trunk of 32 features."""
    return nn.Sequential(conv_norm(i, 16), nn.MaxPool2d(2), conv_norm(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Around(nn.Module if nn else object):  # type: ignore[misc]
    """A module of parts with names, and a function of them and the inputs."""

    def __init__(self, function: Callable[..., Any], **parts: Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


UPSAMPLERS: dict[str, Callable[[int, int], list[Module]]] = {
    "transpose": lambda i, o: [nn.ConvTranspose2d(i, o, 2, 2), nn.BatchNorm2d(o), nn.ReLU()],
    "bilinear": lambda i, o: [nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), conv_norm(i, o, 1)],
    "nearest": lambda i, o: [nn.Upsample(scale_factor=2, mode="nearest"), conv_norm(i, o, 1)],
    "pixelshuffle": lambda i, o: [nn.Conv2d(i, 4 * o, 1), nn.PixelShuffle(2), nn.BatchNorm2d(o), nn.ReLU()],
    "bicubic": lambda i, o: [nn.Upsample(scale_factor=2, mode="bicubic", align_corners=True), conv_norm(i, o, 1)],
}


def unet(up: str, c: int = 16, classes: int = 4) -> Module:
    """A U-Net of three levels."""

    def forward(net, x):
        a = net.down1(x)
        b = net.down2(net.pool(a))
        z = net.down3(net.pool(b))
        y = net.merge2(torch.cat([net.up2(z), b], 1))
        return net.head(net.merge1(torch.cat([net.up1(y), a], 1)))

    return Around(
        forward, down1=twice(3, c), down2=twice(c, 2 * c), down3=twice(2 * c, 4 * c), pool=nn.MaxPool2d(2),
        up2=nn.Sequential(*UPSAMPLERS[up](4 * c, 2 * c)), merge2=twice(4 * c, 2 * c),
        up1=nn.Sequential(*UPSAMPLERS[up](2 * c, c)), merge1=twice(2 * c, c), head=nn.Conv2d(c, classes, 1),
    )  # fmt: skip


def discriminator(*end: Module, image: int = 64) -> Module:
    """DCGAN's, for images of this size."""
    layers = [nn.Conv2d(3, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True)]
    for i, o in ((16, 32), (32, 64)):
        layers += [nn.Conv2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.2, True)]
    return nn.Sequential(*layers, nn.Conv2d(64, 1, image // 8, 1, 0, bias=False), nn.Flatten(), *end)


def generator() -> Module:
    """DCGAN's."""
    layers = []
    for i, o, stride, pad in ((64, 64, 1, 0), (64, 32, 2, 1), (32, 16, 2, 1)):
        layers += [nn.ConvTranspose2d(i, o, 4, stride, pad, bias=False), nn.BatchNorm2d(o), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh())


def preactivation(i: int, o: int, stride: int) -> Module:
    """A block of a wide ResNet."""

    def forward(block, x):
        y = torch.relu(block.norm1(x))
        rest = block.shortcut(y) if block.shortcut is not None else x
        return rest + block.conv2(torch.relu(block.norm2(block.conv1(y))))

    shortcut = nn.Conv2d(i, o, 1, stride, bias=False) if i != o or stride != 1 else None
    return Around(
        forward, norm1=nn.BatchNorm2d(i), conv1=nn.Conv2d(i, o, 3, stride, 1, bias=False), norm2=nn.BatchNorm2d(o),
        conv2=nn.Conv2d(o, o, 3, 1, 1, bias=False), shortcut=shortcut,
    )  # fmt: skip


def wide_resnet() -> Module:
    """Of pre-activation blocks."""
    blocks = [preactivation(*each) for each in ((16, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2))]
    stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
    return nn.Sequential(stem, *blocks, nn.BatchNorm2d(128), nn.ReLU(), *classifier(128))


def one_d() -> Module:
    """Of the kind that reads ECGs."""
    layers = []
    for i, o in ((2, 16), (16, 32), (32, 64)):
        layers += [nn.Conv1d(i, o, 7, 2, 3, bias=False), nn.BatchNorm1d(o), nn.ReLU(), nn.MaxPool1d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 5))


def three_d() -> Module:
    """Of the kind that reads volumes."""
    layers = []
    for i, o in ((1, 8), (8, 16), (16, 32)):
        layers += [nn.Conv3d(i, o, 3, 1, 1, bias=False), nn.BatchNorm3d(o), nn.ReLU(), nn.MaxPool3d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, 5))


def perceptron() -> Module:
    """Linear layers with BatchNorm1d and dropout."""
    layers = []
    for i, o in ((64, 128), (128, 128), (128, 64)):
        layers += [nn.Linear(i, o), nn.BatchNorm1d(o), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def recurrent(kind: str) -> Module:
    """A reader of text lines: convolutions, then a bidirectional LSTM or GRU over the columns."""

    def forward(net, x):
        columns = net.trunk(x).squeeze(2).transpose(1, 2)
        return net.head(net.reader(columns)[0]).transpose(1, 2)

    trunk = [conv_norm(1, 16), nn.MaxPool2d(2), conv_norm(16, 32), nn.MaxPool2d(2), conv_norm(32, 64)]
    reader = getattr(nn, kind)(64, 32, bidirectional=True, batch_first=True)
    return Around(forward, trunk=nn.Sequential(*trunk, nn.MaxPool2d((8, 1))), reader=reader, head=nn.Linear(64, 11))


def siamese(norm: bool = True) -> Module:
    """One trunk, called for each of two images."""
    trunk = features()
    if not norm:
        for place in (0, 2):
            trunk[place] = nn.Sequential(trunk[place][0], nn.ReLU())

    def forward(net, a, b):
        return net.head(torch.cat([net.trunk(a), net.trunk(b)], 1))

    return Around(forward, trunk=trunk, head=nn.Linear(64, 2))


def siamese_in_one_batch() -> Module:
    """Both images as one batch."""

    def forward(net, x):
        z, n = net.trunk(torch.cat([x[:, :3], x[:, 3:]], 0)), x.shape[0]
        return net.head(torch.abs(z[:n] - z[n:]))

    return Around(forward, trunk=features(), head=nn.Linear(32, 2))


def two_heads() -> Module:
    """Two classifiers on one trunk."""

    def forward(net, x):
        z = net.trunk(x)
        return net.a(z), net.b(z)

    return Around(forward, trunk=features(), a=nn.Linear(32, 10), b=nn.Linear(32, 4))


def mixed(norm: Callable[[int], Module]) -> Module:
    """Another norm among BatchNorms."""
    middle = [nn.Conv2d(16, 32, 3, 1, 1), norm(32), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(conv_norm(3, 16), *middle, conv_norm(32, 32), *classifier(32))


class DropPath(nn.Module if nn else object):  # type: ignore[misc]
    """Stochastic depth: written with floor(keep + uniform), or with bernoulli_ as torchvision and timm do."""

    def __init__(self, rate: float, bernoulli: bool) -> None:
        super().__init__()
        self.rate, self.bernoulli = rate, bernoulli

    def forward(self, x):
        if not self.training:
            return x
        keep = 1 - self.rate
        if self.bernoulli:
            return x * x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(keep).div_(keep)
        return x / keep * torch.floor(keep + torch.rand((x.shape[0], 1, 1, 1), device=x.device))


def with_drop_path(*, bernoulli: bool, dropout2d: bool) -> Module:
    """A small ResNet whose branches are dropped."""

    def block() -> Module:
        branch = nn.Sequential(conv_norm(16, 16), nn.Conv2d(16, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16))
        drop = DropPath(0.2, bernoulli)
        return Around(lambda net, x: torch.relu(x + net.drop(net.branch(x))), branch=branch, drop=drop)

    between = [nn.Dropout2d(0.1)] if dropout2d else []
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(16, 10)]
    return nn.Sequential(conv_norm(3, 16), block(), *between, block(), *end)


def dropouts() -> Module:
    """Dropout of maps and of features."""
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(16, 10)]
    return nn.Sequential(conv_norm(3, 16), nn.Dropout2d(0.1), conv_norm(16, 16), *end)


def activations(*made: Module) -> Module:
    """A layer for each activation."""
    return nn.Sequential(conv_norm(3, 16), *(conv_norm(16, 16, activation=each) for each in made), *classifier(16))


def autoencoder() -> Module:
    """Down by strides, up by nearest neighbours."""
    up = [nn.Upsample(scale_factor=2), conv_norm(32, 16), nn.Upsample(scale_factor=2), nn.Conv2d(16, 3, 3, 1, 1)]
    return nn.Sequential(conv_norm(3, 16, stride=2), conv_norm(16, 32, stride=2), *up)


class FrozenBackbone(nn.Module if nn else object):  # type: ignore[misc]
    """The first layer is frozen, its BatchNorm in evaluation mode, as fine-tuning recipes do it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv_norm(3, 16), conv_norm(16, 16), *classifier(16))
        for parameter in self.body[0].parameters():
            parameter.requires_grad = False

    def train(self, mode: bool = True):
        super().train(mode)
        self.body[0][1].eval()
        return self

    def forward(self, x):
        return self.body(x)


def odd_batch_norms() -> Module:
    """One without affine part, one without running statistics."""
    first = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16, affine=False), nn.ReLU()]
    second = [nn.Conv2d(16, 16, 3, 1, 1), nn.BatchNorm2d(16, track_running_stats=False), nn.ReLU()]
    return nn.Sequential(*first, *second, *classifier(16))


def padded(pad: Callable[[int], Module]) -> Module:
    """A convolution behind a padding layer."""
    return nn.Sequential(pad(1), nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), *classifier(16))


def yolo_pooled() -> Module:
    """A pyramid of poolings, concatenated."""

    def forward(net, x):
        maps = [net.down(net.stem(x))]
        for _ in range(3):
            maps.append(net.pool(maps[-1]))
        return net.head(net.out(torch.cat(maps, 1)))

    return Around(
        forward, stem=conv_norm(3, 16, stride=2, activation=nn.SiLU()), pool=nn.MaxPool2d(5, 1, 2),
        down=conv_norm(16, 32, stride=2, activation=nn.SiLU()), out=conv_norm(128, 32, 1, activation=nn.SiLU()),
        head=nn.Conv2d(32, 6, 1),
    )  # fmt: skip


def yolo_upsampled() -> Module:
    """The neck of a feature pyramid."""

    def forward(net, x):
        a = net.stem(x)
        return net.head(net.out(torch.cat([a, net.up(net.down(a))], 1)))

    return Around(
        forward, stem=conv_norm(3, 16, stride=2, activation=nn.SiLU()), up=nn.Upsample(scale_factor=2),
        down=conv_norm(16, 32, stride=2, activation=nn.SiLU()), out=conv_norm(48, 32, 1, activation=nn.SiLU()),
        head=nn.Conv2d(32, 6, 1),
    )  # fmt: skip


def viewed() -> Module:
    """Flattens by view(x.size(0), -1)."""

    def forward(net, x):
        z = net.body(x)
        return net.head(z.view(z.size(0), -1))

    body = nn.Sequential(conv_norm(3, 16), nn.MaxPool2d(2), conv_norm(16, 32))
    return Around(forward, body=body, head=nn.Linear(32 * 16 * 16, 10))


def each_activation() -> Module:
    """Ten activations in a row."""
    made = (nn.SiLU(), nn.GELU(), nn.Hardswish(), nn.LeakyReLU(0.1), nn.PReLU(16))
    return activations(*made, nn.ELU(), nn.ReLU6(), nn.Mish(), nn.Softplus(), nn.Tanh())


def networks() -> Table:
    """List them: a maker, the shapes of the inputs, the loss."""
    small, large, several = ((8, 3, 32, 32),), ((4, 3, 64, 64),), ((8, 3, 64, 64),)
    classified: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
        **{f"own_unet_{up}": (functools.partial(unet, up), large) for up in UPSAMPLERS},
        "own_wide_resnet": (wide_resnet, small),
        "own_ecg_1d": (one_d, ((8, 2, 512),)),
        "own_cnn_3d": (three_d, ((4, 1, 16, 16, 16),)),
        "own_perceptron": (perceptron, ((32, 64),)),
        "own_crnn_lstm": (functools.partial(recurrent, "LSTM"), ((4, 1, 32, 64),)),
        "own_crnn_gru": (functools.partial(recurrent, "GRU"), ((4, 1, 32, 64),)),
        "own_siamese": (siamese, small * 2),
        "own_siamese_without_norm": (functools.partial(siamese, norm=False), small * 2),
        "own_siamese_in_one_batch": (siamese_in_one_batch, ((8, 6, 32, 32),)),
        "own_mixed_group_norm": (lambda: mixed(lambda c: nn.GroupNorm(4, c)), small),
        "own_mixed_instance_norm": (lambda: mixed(lambda c: nn.InstanceNorm2d(c, affine=True)), small),
        "own_mixed_layer_norm": (lambda: mixed(lambda c: nn.GroupNorm(1, c)), small),
        "own_drop_path": (lambda: with_drop_path(bernoulli=False, dropout2d=False), small),
        "own_drop_path_bernoulli": (lambda: with_drop_path(bernoulli=True, dropout2d=False), small),
        "own_drop_path_dropout": (lambda: with_drop_path(bernoulli=False, dropout2d=True), small),
        "own_dropouts": (dropouts, small),
        "own_activations": (each_activation, small),
        "own_leaky_relu": (lambda: activations(nn.LeakyReLU(0.1), nn.LeakyReLU(0.1)), small),
        "own_silu": (lambda: activations(nn.SiLU(), nn.SiLU()), small),
        "own_hard_swish": (lambda: activations(nn.Hardswish(), nn.Hardswish()), small),
        "own_gelu": (lambda: activations(nn.GELU(), nn.GELU()), small),
        "own_frozen_backbone": (FrozenBackbone, small),
        "own_odd_batch_norms": (odd_batch_norms, small),
        "own_reflection_pad": (lambda: padded(nn.ReflectionPad2d), small),
        "own_replication_pad": (lambda: padded(nn.ReplicationPad2d), small),
        "own_yolo_pooled": (yolo_pooled, large),
        "own_yolo_upsampled": (yolo_upsampled, large),
        "own_viewed": (viewed, small),
    }
    regressed = {
        "own_discriminator": (discriminator, several),
        "own_discriminator_sigmoid": (lambda: discriminator(nn.Sigmoid()), several),
        "own_generator": (generator, ((8, 64, 1, 1),)),
        "own_regression": (lambda: nn.Sequential(features(), nn.Linear(32, 4)), small),
        "own_autoencoder": (autoencoder, small),
    }
    return (
        {name: (*each, "cross-entropy") for name, each in classified.items()}
        | {name: (*each, "mse") for name, each in regressed.items()}
        | {"own_two_heads": (two_heads, small, "cross-entropy@0 + 0.5*cross-entropy@1")}
    )
