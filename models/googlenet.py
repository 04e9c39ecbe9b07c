"""GoogLeNet (Szegedy et al. 2015) without local response normalisation and auxiliary heads.

The name alone has a BN after every convolution, `-plain` has none. `kernel5=3` puts a 3x3 in place of the 5x5
convolution, as torchvision has it.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from .layers import Network, Size, finish, start

# 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection (table 1 of the paper); None is a pooling
INCEPTIONS: tuple[tuple[str, tuple[int, ...] | None], ...] = (
    ("3a", (64, 96, 128, 16, 32, 32)),
    ("3b", (128, 128, 192, 32, 96, 64)),
    ("pool3", None),
    ("4a", (192, 96, 208, 16, 48, 64)),
    ("4b", (160, 112, 224, 24, 64, 64)),
    ("4c", (128, 128, 256, 24, 64, 64)),
    ("4d", (112, 144, 288, 32, 64, 64)),
    ("4e", (256, 160, 320, 32, 128, 128)),
    ("pool4", None),
    ("5a", (256, 160, 320, 32, 128, 128)),
    ("5b", (384, 192, 384, 48, 128, 128)),
)


def googlenet(
    batch: int,
    image: Size,
    channels: int,
    classes: int,
    seed: int | None,
    *,
    norm: bool = True,
    kernel5: int = 5,
    dropout: float = 0.4,
) -> Network:
    """Build GoogLeNet without its auxiliary classifiers."""
    how = {"norm": norm, "bias": not norm}
    graph, x = start("googlenet", batch, channels, image, seed)
    x = graph.conv_relu_layer(x, 64, 7, stride=2, name="stem/conv1", **how)
    x = graph.max_pool_layer(x, 3, ceil=True, name="stem/pool1")
    x = graph.conv_relu_layer(x, 64, 1, name="stem/conv2", **how)
    x = graph.conv_relu_layer(x, 192, 3, name="stem/conv3", **how)
    x = graph.max_pool_layer(x, 3, ceil=True, name="stem/pool2")
    for name, widths in INCEPTIONS:
        if widths is None:
            x = graph.max_pool_layer(x, min(3, x.shape[2]), ceil=True, name=name)  # 2x2 is all that images of 32 leave
        else:
            x = inception(graph, x, widths, kernel5, how, f"inception{name}")
    x = graph.global_pool_layer(x, name="pool5")
    x = graph.dropout_layer(x, dropout, name="dropout")
    return finish(graph, graph.linear_layer(x, classes, name="classifier"))


def inception(
    graph: Network, x: gs.Variable, widths: tuple[int, ...], kernel5: int, how: dict[str, bool], name: str
) -> gs.Variable:
    """Four branches over one input, concatenated."""
    one, reduce3, three, reduce5, five, projection = widths
    branch1 = graph.conv_relu_layer(x, one, 1, name=f"{name}/1x1", **how)
    branch3 = graph.conv_relu_layer(x, reduce3, 1, name=f"{name}/3x3_reduce", **how)
    branch3 = graph.conv_relu_layer(branch3, three, 3, name=f"{name}/3x3", **how)
    branch5 = graph.conv_relu_layer(x, reduce5, 1, name=f"{name}/5x5_reduce", **how)
    branch5 = graph.conv_relu_layer(branch5, five, kernel5, name=f"{name}/5x5", **how)
    pooled = graph.max_pool_layer(x, 3, stride=1, pad=1, name=f"{name}/pool")
    pooled = graph.conv_relu_layer(pooled, projection, 1, name=f"{name}/pool_proj", **how)
    return graph.concat_layer([branch1, branch3, branch5, pooled], name=f"{name}/concat")
