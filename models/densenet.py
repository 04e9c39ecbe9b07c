"""DenseNet (Huang et al. 2017): every layer of a block reads the channels of all layers before it.

`concat=flat` (the default, torchvision's form): each layer concatenates the list of all earlier outputs anew.
`concat=nested`: each layer's output is concatenated to what the layer before concatenated.
"""

from __future__ import annotations

import dataclasses

import onnx_graphsurgeon as gs

from bnfuse.core.errors import BnfuseError

from .layers import Network, Size, finish, start


@dataclasses.dataclass(frozen=True)
class Plan:
    """What tells one DenseNet from another."""

    blocks: tuple[int, ...]  # layers in each block
    growth: int
    first: int  # channels after the stem
    bottleneck: bool  # a 1x1 convolution to 4*growth channels before each 3x3
    compression: float  # channels that a transition keeps
    small_stem: bool  # 3x3 stride 1, no pooling


def densenet121(
    batch: int, image: Size, channels: int, classes: int, seed: int | None, *, concat: str = "flat"
) -> Network:
    """Build DenseNet-121."""
    plan = Plan((6, 12, 24, 16), growth=32, first=64, bottleneck=True, compression=0.5, small_stem=False)
    return densenet("densenet121", plan, batch, image, channels, classes, seed, concat)


def densenet40(
    batch: int,
    image: Size,
    channels: int,
    classes: int,
    seed: int | None,
    *,
    concat: str = "flat",
    growth: int = 12,
    depth: int = 12,
) -> Network:
    """`growth` is k, `depth` the layers of each of the three blocks."""
    plan = Plan((depth,) * 3, growth=growth, first=16, bottleneck=False, compression=1.0, small_stem=True)
    return densenet("densenet40", plan, batch, image, channels, classes, seed, concat)


def densenet(
    name: str, plan: Plan, batch: int, image: Size, channels: int, classes: int, seed: int | None, concat: str
) -> Network:
    """Build a DenseNet of these blocks."""
    if concat not in ("flat", "nested"):
        raise BnfuseError(f"concat={concat} is unknown: it is flat or nested")
    graph, x = start(name, batch, channels, image, seed)
    x = stem(graph, x, plan)
    for index, layers in enumerate(plan.blocks, 1):
        x = block(graph, x, plan, layers, f"block{index}", nested=concat == "nested")
        if index < len(plan.blocks):
            x = transition(graph, x, plan, f"transition{index}")
    x = norm_relu(graph, x, "final")
    x = graph.global_pool_layer(x, name="pool")
    return finish(graph, graph.linear_layer(x, classes, name="classifier"))


def stem(graph: Network, x: gs.Variable, plan: Plan) -> gs.Variable:
    """Add what comes before the first block."""
    if plan.small_stem:
        return graph.conv_layer(x, plan.first, 3, name="stem/conv")
    x = graph.conv_layer(x, plan.first, 7, stride=2, name="stem/conv")
    x = norm_relu(graph, x, "stem/")
    return graph.max_pool_layer(x, 3, stride=2, pad=1, name="stem/pool")


def norm_relu(graph: Network, x: gs.Variable, where: str, number: str = "") -> gs.Variable:
    """Add a BatchNorm and a ReLU."""
    where = where if where.endswith("/") else f"{where}/"
    x = graph.batch_norm_layer(x, name=f"{where}norm{number}")
    return graph.relu_layer(x, name=f"{where}relu{number}")


def block(graph: Network, x: gs.Variable, plan: Plan, layers: int, name: str, *, nested: bool) -> gs.Variable:
    """Add a dense block. `nested`: a layer reads a concatenation of the last one and what is new."""
    outputs = [x]
    for index in range(1, layers + 1):
        where = f"{name}/layer{index}"
        if not nested:
            x = graph.concat_layer(outputs, name=f"{where}/concat")
        y = layer(graph, x, plan, where)
        if nested:
            x = graph.concat_layer([x, y], name=f"{where}/concat")
        outputs.append(y)
    return x if nested else graph.concat_layer(outputs, name=f"{name}/concat")


def layer(graph: Network, x: gs.Variable, plan: Plan, where: str) -> gs.Variable:
    """Add a layer, with a bottleneck or without; gives its own `growth` channels."""
    x = norm_relu(graph, x, where, "1")
    if not plan.bottleneck:
        return graph.conv_layer(x, plan.growth, 3, name=f"{where}/conv1")
    x = graph.conv_layer(x, 4 * plan.growth, 1, name=f"{where}/conv1")
    x = norm_relu(graph, x, where, "2")
    return graph.conv_layer(x, plan.growth, 3, name=f"{where}/conv2")


def transition(graph: Network, x: gs.Variable, plan: Plan, name: str) -> gs.Variable:
    """Add a 1x1 convolution to a share (`plan.compression`) of the channels, and a pooling."""
    kept = int(x.shape[1] * plan.compression)
    x = norm_relu(graph, x, name)
    x = graph.conv_layer(x, kept, 1, name=f"{name}/conv")
    return graph.average_pool_layer(x, 2, name=f"{name}/pool")
