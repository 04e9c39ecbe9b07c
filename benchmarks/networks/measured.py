"""Networks whose steps are measured beside torch's, at the sizes that people train them with."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from . import Network
from .handwritten import Around, conv_norm, nn, torch, twice
from .libraries import timm_network, torchvision_network

IMAGES = ((16, 3, 224, 224),)


def unet(c: int = 64, classes: int = 4, depth: int = 4) -> Any:
    """The U-Net of five levels, with BatchNorm and transposed convolutions."""

    def forward(net, x):
        maps = [net.stem(x)]
        for down in net.downs:
            maps.append(down(maps[-1]))
        y = maps.pop()
        for up, merge in zip(net.ups, net.merges, strict=True):
            y = merge(torch.cat([maps.pop(), up(y)], 1))
        return net.head(y)

    widths = [c * 2**level for level in range(depth + 1)]
    pairs = list(itertools.pairwise(widths))
    return Around(
        forward,
        stem=twice(3, c),
        downs=nn.ModuleList(nn.Sequential(nn.MaxPool2d(2), twice(i, o)) for i, o in pairs),
        ups=nn.ModuleList(nn.ConvTranspose2d(o, i, 2, 2) for i, o in reversed(pairs)),
        merges=nn.ModuleList(twice(o, i) for i, o in reversed(pairs)),
        head=nn.Conv2d(c, classes, 1),
    )


def silu(i: int, o: int, kernel: int = 1, stride: int = 1) -> Any:
    """Conv, BatchNorm, SiLU."""
    return conv_norm(i, o, kernel, stride, nn.SiLU(inplace=True))


def bottleneck(c: int, shortcut: bool) -> Any:
    """1x1 and 3x3, added to what they read where there is a shortcut."""
    body = nn.Sequential(silu(c, c), silu(c, c, 3))
    return Around(lambda net, x: x + net.body(x) if shortcut else net.body(x), body=body)


def partial_stage(i: int, o: int, blocks: int, shortcut: bool = True) -> Any:
    """A cross-stage partial block: blocks on one half, both halves concatenated."""

    def forward(net, x):
        return net.last(torch.cat([net.blocks(net.first(x)), net.beside(x)], 1))

    body = nn.Sequential(*(bottleneck(o // 2, shortcut) for _ in range(blocks)))
    return Around(forward, first=silu(i, o // 2), beside=silu(i, o // 2), blocks=body, last=silu(o, o))


def pooled_pyramid(c: int) -> Any:
    """Poolings of 5x5, one behind the other, concatenated (SPPF)."""

    def forward(net, x):
        maps = [net.first(x)]
        for _ in range(3):
            maps.append(net.pool(maps[-1]))
        return net.last(torch.cat(maps, 1))

    return Around(forward, first=silu(c, c // 2), pool=nn.MaxPool2d(5, 1, 2), last=silu(2 * c, c))


def yolo(c: int = 32, outputs: int = 18) -> Any:
    """A detector of YOLO's kind: CSP stages, SPPF, a path aggregation network, three heads, flattened and joined."""

    def forward(net, x):
        small = net.stage3(net.stem(x))
        middle = net.stage4(small)
        large = net.lateral5(net.stage5(middle))
        y = net.lateral4(net.merge4(torch.cat([net.up(large), middle], 1)))
        p3 = net.merge3(torch.cat([net.up(y), small], 1))
        p4 = net.out4(torch.cat([net.down3(p3), y], 1))
        p5 = net.out5(torch.cat([net.down4(p4), large], 1))
        return torch.cat([head(p).flatten(2) for head, p in zip(net.heads, (p3, p4, p5), strict=True)], 2)

    def stage(i: int, blocks: int) -> Any:
        return nn.Sequential(silu(i, 2 * i, 3, 2), partial_stage(2 * i, 2 * i, blocks))

    return Around(
        forward,
        stem=nn.Sequential(silu(3, c, 3, 2), stage(c, 1)),
        stage3=stage(2 * c, 2),
        stage4=stage(4 * c, 3),
        stage5=nn.Sequential(stage(8 * c, 1), pooled_pyramid(16 * c)),
        lateral5=silu(16 * c, 8 * c),
        merge4=partial_stage(16 * c, 8 * c, 1, False),
        lateral4=silu(8 * c, 4 * c),
        merge3=partial_stage(8 * c, 4 * c, 1, False),
        down3=silu(4 * c, 4 * c, 3, 2),
        out4=partial_stage(8 * c, 8 * c, 1, False),
        down4=silu(8 * c, 8 * c, 3, 2),
        out5=partial_stage(16 * c, 16 * c, 1, False),
        up=nn.Upsample(scale_factor=2),
        heads=nn.ModuleList(nn.Conv2d(k * c, outputs, 1) for k in (4, 8, 16)),
    )


def networks() -> dict[str, Network]:
    """List them by the names that papers use."""
    torchvision = (
        *("mobilenet_v3_large", "efficientnet_b0", "regnet_y_1_6gf", "shufflenet_v2_x1_0", "inception_v3"),
        *("convnext_tiny", "resnext50_32x4d"),
    )
    timm = ("cspdarknet53", "res2net50_26w_4s", "ghostnet_100", "vovnet39a", "repvgg_a0", "hrnet_w18_small")
    return {
        **{name: Network("torchvision", functools.partial(torchvision_network, name), IMAGES) for name in torchvision},
        **{name: Network("timm", functools.partial(timm_network, name), IMAGES) for name in timm},
        "convmixer_768_32": Network("timm", functools.partial(timm_network, "convmixer_768_32"), ((4, 3, 224, 224),)),
        "unet": Network("handwritten", unet, ((4, 3, 256, 256),)),
        "yolo": Network("handwritten", yolo, IMAGES),
    }
