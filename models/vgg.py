"""VGG (Simonyan and Zisserman 2015): 3x3 convolutions, the width doubling at every pooling, three linear layers.

The name alone has a BN after every convolution, `-plain` has none. Convolutions keep their bias in both, as published.
"""

from __future__ import annotations

from .layers import Network, Size, finish, start

WIDTHS = (1, 2, 4, 8, 8)  # channels of each stage, in those of the first
DEPTHS = {11: (1, 1, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}  # convolutions of each stage


def vgg(
    batch: int,
    image: Size,
    channels: int,
    classes: int,
    seed: int | None,
    *,
    depth: int = 16,
    norm: bool = True,
    dropout: float = 0.5,
    hidden: int = 4096,
    width: int = 64,
) -> Network:
    """`hidden` is the width of the two inner linear layers, `width` the channels of the first stage."""
    graph, x = start(f"vgg{depth}", batch, channels, image, seed)
    for stage, (count, factor) in enumerate(zip(DEPTHS[depth], WIDTHS, strict=True), 1):
        for index in range(1, count + 1):
            x = graph.conv_relu_layer(x, factor * width, 3, norm=norm, name=f"stage{stage}/layer{index}")
        x = graph.max_pool_layer(x, 2, name=f"stage{stage}/pool")
    x = graph.flatten_layer(x, name="flatten")
    for index in (1, 2):
        x = graph.linear_layer(x, hidden, gain=2**0.5, name=f"hidden{index}/linear")
        x = graph.relu_layer(x, name=f"hidden{index}/relu")
        x = graph.dropout_layer(x, dropout, name=f"hidden{index}/dropout")
    return finish(graph, graph.linear_layer(x, classes, name="classifier"))
