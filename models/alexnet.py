"""AlexNet (Krizhevsky et al. 2012) as one tower, without local response normalisation.

`groups=2` splits the second, fourth and fifth convolution as the two towers did. Images smaller than 67 get a 5x5 stem
of stride 1 in place of the 11x11 of stride 4.
"""

from __future__ import annotations

from .layers import Network, Size, finish, pair, start

SMALL = 67  # below it the large form runs out of map


def alexnet(
    batch: int,
    image: Size,
    channels: int,
    classes: int,
    seed: int | None,
    *,
    groups: int = 1,
    dropout: float = 0.5,
    hidden: int = 4096,
) -> Network:
    """Build AlexNet as one tower, without local response normalisation."""
    how = {"norm": False, "bias": True}
    graph, x = start("alexnet", batch, channels, image, seed)
    if min(pair(image)) < SMALL:
        x = graph.conv_relu_layer(x, 96, 5, name="conv1", **how)
    else:
        x = graph.conv_relu_layer(x, 96, 11, stride=4, pad=0, name="conv1", **how)
    x = graph.max_pool_layer(x, 3, name="pool1")
    x = graph.conv_relu_layer(x, 256, 5, group=groups, name="conv2", **how)
    x = graph.max_pool_layer(x, 3, name="pool2")
    x = graph.conv_relu_layer(x, 384, 3, name="conv3", **how)
    x = graph.conv_relu_layer(x, 384, 3, group=groups, name="conv4", **how)
    x = graph.conv_relu_layer(x, 256, 3, group=groups, name="conv5", **how)
    x = graph.max_pool_layer(x, 3, name="pool5")
    x = graph.flatten_layer(x, name="flatten")
    for index in (6, 7):
        x = graph.linear_layer(x, hidden, gain=2**0.5, name=f"linear{index}")
        x = graph.relu_layer(x, name=f"relu{index}")
        x = graph.dropout_layer(x, dropout, name=f"dropout{index}")
    return finish(graph, graph.linear_layer(x, classes, name="classifier"))
