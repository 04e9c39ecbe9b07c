"""MobileNetV2 (Sandler et al. 2018): inverted residuals around a depthwise convolution, ReLU6."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from bnfuse.core.errors import BnfuseError

from .layers import Network, Size, finish, start

# expansion, channels, blocks, stride of the first block (table 2 of the paper)
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def mobilenetv2(
    batch: int, image: Size, channels: int, classes: int, seed: int | None, *, width: float = 1.0, dropout: float = 0.2
) -> Network:
    """`width` multiplies the channels of every layer, rounded to a multiple of 8."""
    if not 0.1 <= width <= 8:
        raise BnfuseError(f"width={width:g} is out of range: it must be from 0.1 to 8")
    graph, x = start("mobilenetv2", batch, channels, image, seed)
    x = conv_norm_relu6(graph, x, rounded(32 * width), 3, "stem", stride=2)
    for stage, (expansion, wide, blocks, stride) in enumerate(STAGES, 1):
        for index in range(1, blocks + 1):
            name = f"stage{stage}/block{index}"
            x = inverted_residual(graph, x, expansion, rounded(wide * width), stride if index == 1 else 1, name)
    x = conv_norm_relu6(graph, x, rounded(1280 * max(width, 1.0)), 1, "last")
    x = graph.global_pool_layer(x, name="pool")
    x = graph.dropout_layer(x, dropout, name="dropout")
    return finish(graph, graph.linear_layer(x, classes, name="classifier"))


def rounded(channels: float) -> int:
    """Give the nearest multiple of 8 that loses at most a tenth."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * channels else nearest


def conv_norm_relu6(graph: Network, x: gs.Variable, channels: int, kernel: int, name: str, **how: int) -> gs.Variable:
    """Add a convolution, a BatchNorm and a ReLU6."""
    x = graph.conv_layer(x, channels, kernel, name=f"{name}/conv", **how)
    x = graph.batch_norm_layer(x, name=f"{name}/norm")
    return graph.relu6_layer(x, name=f"{name}/relu")


def inverted_residual(
    graph: Network, x: gs.Variable, expansion: int, channels: int, stride: int, name: str
) -> gs.Variable:
    """Add an inverted residual: expand, depthwise, project."""
    shortcut, wide = x, x.shape[1] * expansion
    if expansion > 1:
        x = conv_norm_relu6(graph, x, wide, 1, f"{name}/expand")
    x = conv_norm_relu6(graph, x, wide, 3, f"{name}/depthwise", stride=stride, group=wide)
    x = graph.conv_layer(x, channels, 1, name=f"{name}/project/conv")
    x = graph.batch_norm_layer(x, name=f"{name}/project/norm")
    if stride == 1 and shortcut.shape[1] == channels:
        x = graph.add_layer(x, shortcut, name=f"{name}/add")
    return x
