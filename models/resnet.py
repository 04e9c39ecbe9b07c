"""ResNet (He et al. 2016): y = relu(branch(x) + shortcut(x)), the shortcut a 1x1 convolution where the shape changes.

resnet18 and resnet50 have the stem for large images (7x7 stride 2, max pooling; `stem=small` gives a 3x3 convolution
instead); resnet20 and resnet56 are the CIFAR form of 3 stages of 16, 32 and 64 channels.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_graphsurgeon as gs

from bnfuse.core.errors import BnfuseError

from .layers import Network, Size, finish, start


def resnet18(batch: int, image: Size, channels: int, classes: int, seed: int | None, *, stem: str = "large") -> Network:
    """Build ResNet-18."""
    graph, x = start("resnet18", batch, channels, image, seed)
    x = stages(graph, stem_of(graph, x, stem, 64), basic_branch, (2, 2, 2, 2), 64, 1)
    return head(graph, x, classes)


def resnet50(batch: int, image: Size, channels: int, classes: int, seed: int | None, *, stem: str = "large") -> Network:
    """Build ResNet-50."""
    graph, x = start("resnet50", batch, channels, image, seed)
    x = stages(graph, stem_of(graph, x, stem, 64), bottleneck_branch, (3, 4, 6, 3), 64, 4)
    return head(graph, x, classes)


def resnet20(batch: int, image: Size, channels: int, classes: int, seed: int | None) -> Network:
    """Build ResNet-20 for small images."""
    return cifar_resnet("resnet20", 3, batch, image, channels, classes, seed)


def resnet56(batch: int, image: Size, channels: int, classes: int, seed: int | None) -> Network:
    """Build ResNet-56 for small images."""
    return cifar_resnet("resnet56", 9, batch, image, channels, classes, seed)


def cifar_resnet(
    name: str, depth: int, batch: int, image: Size, channels: int, classes: int, seed: int | None
) -> Network:
    """Build a ResNet of three stages of basic blocks, for small images."""
    graph, x = start(name, batch, channels, image, seed)
    x = stages(graph, stem_of(graph, x, "small", 16), basic_branch, (depth,) * 3, 16, 1)
    return head(graph, x, classes)


def stem_of(graph: Network, x: gs.Variable, stem: str, width: int) -> gs.Variable:
    """Add what comes before the first stage, for large images or small ones."""
    if stem == "small":
        return graph.conv_relu_layer(x, width, 3, norm=True, bias=False, name="stem")
    if stem != "large":
        raise BnfuseError(f"stem={stem} is unknown: it is large or small")
    x = graph.conv_relu_layer(x, width, 7, stride=2, norm=True, bias=False, name="stem")
    return graph.max_pool_layer(x, 3, stride=2, pad=1, name="stem/pool")


def stages(
    graph: Network,
    x: gs.Variable,
    branch: Callable[[Network, gs.Variable, int, int, str], gs.Variable],
    depths: tuple[int, ...],
    width: int,
    expansion: int,
) -> gs.Variable:
    """Every stage but the first halves the map and doubles the width in its first block."""
    for stage, depth in enumerate(depths, 1):
        for index in range(1, depth + 1):
            name = f"stage{stage}/block{index}"
            stride = 2 if stage > 1 and index == 1 else 1
            y = branch(graph, x, width, stride, name)
            if stride > 1 or x.shape[1] != width * expansion:
                x = graph.conv_layer(x, width * expansion, 1, stride=stride, name=f"{name}/shortcut/conv")
                x = graph.batch_norm_layer(x, name=f"{name}/shortcut/norm")
            x = graph.relu_layer(graph.add_layer(y, x, name=f"{name}/add"), name=f"{name}/relu")
        width *= 2
    return x


def basic_branch(graph: Network, x: gs.Variable, width: int, stride: int, name: str) -> gs.Variable:
    """Add two 3x3 convolutions."""
    x = graph.conv_layer(x, width, 3, stride=stride, name=f"{name}/conv1")
    x = graph.relu_layer(graph.batch_norm_layer(x, name=f"{name}/norm1"), name=f"{name}/relu1")
    x = graph.conv_layer(x, width, 3, name=f"{name}/conv2")
    return graph.batch_norm_layer(x, name=f"{name}/norm2")


def bottleneck_branch(graph: Network, x: gs.Variable, width: int, stride: int, name: str) -> gs.Variable:
    """Give the stride is in the 3x3 convolution, as in torchvision."""
    x = graph.conv_layer(x, width, 1, name=f"{name}/conv1")
    x = graph.relu_layer(graph.batch_norm_layer(x, name=f"{name}/norm1"), name=f"{name}/relu1")
    x = graph.conv_layer(x, width, 3, stride=stride, name=f"{name}/conv2")
    x = graph.relu_layer(graph.batch_norm_layer(x, name=f"{name}/norm2"), name=f"{name}/relu2")
    x = graph.conv_layer(x, 4 * width, 1, name=f"{name}/conv3")
    return graph.batch_norm_layer(x, name=f"{name}/norm3")


def head(graph: Network, x: gs.Variable, classes: int) -> Network:
    """Add the pooling and the classifier."""
    x = graph.global_pool_layer(x, name="pool")
    return finish(graph, graph.linear_layer(x, classes, name="classifier"))
