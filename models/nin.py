"""Network in Network (Lin et al. 2014), as [Iandola16] has it in table 4.2: twelve convolutions, no linear layer.

Images smaller than 67 get its CIFAR form: 5x5 convolutions, narrower, two poolings (`form` chooses otherwise).
The large form can be changed as sections 4.5 and 4.6 of [Iandola16] do: the filters of conv8 (`filters8`), size and
padding of conv7 (`kernel7`, `pad7`), no pooling after conv3 (`pool3=false`). Its poolings round up, as in Caffe: on
12x12 maps (table 4.5) that is 6x6.
"""

from __future__ import annotations

import dataclasses

import onnx_graphsurgeon as gs

from bnfuse.core.errors import BnfuseError

from .layers import Network, Size, finish, pair, start

SMALL = 67  # images below it get the small form


@dataclasses.dataclass(frozen=True)
class Changes:
    """What [Iandola16], tables 4.4, 4.5 and 4.7, vary in the large form."""

    filters8: int = 384
    kernel7: int = 3
    pad7: int = 1
    pool3: bool = True


def nin(
    batch: int,
    image: Size,
    channels: int,
    classes: int,
    seed: int | None,
    *,
    form: str = "auto",
    norm: bool = False,
    dropout: float = 0.5,
    filters8: int = 384,
    kernel7: int = 3,
    pad7: int = 1,
    pool3: bool = True,
) -> Network:
    """Build Network in Network."""
    if form not in ("auto", "large", "small"):
        raise BnfuseError(f"form={form} is unknown: it is auto, large or small")
    graph, x = start("nin", batch, channels, image, seed)
    if form == "large" or (form == "auto" and min(pair(image)) >= SMALL):
        x = large(graph, x, Changes(filters8, kernel7, pad7, pool3), norm)
        x = last(graph, x, 1024, 1024, classes, norm, dropout)
    elif Changes(filters8, kernel7, pad7, pool3) != Changes():
        raise BnfuseError("filters8, kernel7, pad7 and pool3 are of the large form: build with form=large")
    else:
        x = small(graph, x, classes, norm, dropout)
    return finish(graph, graph.global_pool_layer(x, name="pool12"))


def large(graph: Network, x: gs.Variable, changes: Changes, norm: bool) -> gs.Variable:
    """Add the layers for large images."""
    x = unit(graph, x, (96, 96, 96), 11, 1, norm, stride=4, pad=0)
    if changes.pool3:
        x = graph.max_pool_layer(x, 3, ceil=True, name="pool3")
    x = unit(graph, x, (256, 256, 256), 5, 4, norm)
    x = graph.max_pool_layer(x, 3, ceil=True, name="pool6")
    x = unit(graph, x, (384, changes.filters8, 384), changes.kernel7, 7, norm, pad=changes.pad7)
    return graph.max_pool_layer(x, 3, ceil=True, name="pool9")


def small(graph: Network, x: gs.Variable, classes: int, norm: bool, dropout: float) -> gs.Variable:
    """Add the layers for small images."""
    x = unit(graph, x, (192, 160, 96), 5, 1, norm)
    x = graph.max_pool_layer(x, 3, pad=1, name="pool3")
    x = graph.dropout_layer(x, dropout, name="dropout3")
    x = unit(graph, x, (192, 192, 192), 5, 4, norm)
    x = graph.average_pool_layer(x, 3, pad=1, name="pool6")
    return last(graph, x, 192, 192, classes, norm, dropout)


def unit(
    graph: Network, x: gs.Variable, widths: tuple[int, ...], kernel: int, number: int, norm: bool, **how: int
) -> gs.Variable:
    """Give a convolution and two 1x1 convolutions after it."""
    for offset, width in enumerate(widths):
        more = how if offset == 0 else {}
        size = kernel if offset == 0 else 1
        x = graph.conv_relu_layer(x, width, size, norm=norm, bias=not norm, name=f"conv{number + offset}", **more)
    return x


def last(
    graph: Network, x: gs.Variable, wide: int, narrow: int, classes: int, norm: bool, dropout: float
) -> gs.Variable:
    """Add the layers that end in a map for each class."""
    x = unit(graph, x, (wide,), 3, 10, norm)
    x = graph.dropout_layer(x, dropout, name="dropout10")
    return unit(graph, x, (narrow, classes), 1, 11, norm)
