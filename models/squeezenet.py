"""SqueezeNet ([Iandola16], chapter 5): Fire modules of a 1x1 squeeze and a concatenated 1x1 and 3x3 expand.

`bypass` is figure 5.2: none; simple adds a Fire module's input to its output where the channels agree; complex also
passes the others' input through a 1x1 convolution. The metaparameters base, step, freq, large and squeeze are those of
section 5.5: expand filters of the first modules, how many more every `freq` modules, the share of 3x3 filters, and the
squeeze filters for each expand filter.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from bnfuse.core.errors import BnfuseError

from .layers import Network, Size, finish, start

FIRES = 8  # fire2 to fire9
POOLED_AFTER = (4, 8)


def squeezenet(
    batch: int,
    image: Size,
    channels: int,
    classes: int,
    seed: int | None,
    *,
    norm: bool = True,
    bypass: str = "none",
    base: int = 128,
    step: int = 128,
    freq: int = 2,
    large: float = 0.5,
    squeeze: float = 0.125,
    dropout: float = 0.5,
) -> Network:
    """Build SqueezeNet."""
    if bypass not in ("none", "simple", "complex"):
        raise BnfuseError(f"bypass={bypass} is unknown: it is none, simple or complex")
    if freq < 1 or base < 8 or step < 0 or not 0 <= large <= 1 or not 0 < squeeze <= 1:
        raise BnfuseError("base must be at least 8, step not negative, freq at least 1, large and squeeze from 0 to 1")
    graph, x = start("squeezenet", batch, channels, image, seed)
    x = graph.conv_relu_layer(x, 96, 7, stride=2, pad=0, norm=norm, bias=not norm, name="conv1")
    x = graph.max_pool_layer(x, 3, ceil=True, name="pool1")
    for index in range(FIRES):
        expand = base + step * (index // freq)
        x = fire_and_bypass(graph, x, expand, large, squeeze, norm, bypass, f"fire{index + 2}")
        if index + 2 in POOLED_AFTER:
            x = graph.max_pool_layer(x, 3, ceil=True, name=f"pool{index + 2}")
    x = graph.dropout_layer(x, dropout, name="dropout")
    x = graph.conv_relu_layer(x, classes, 1, norm=norm, bias=not norm, name="conv10")
    return finish(graph, graph.global_pool_layer(x, name="pool10"))


def fire_and_bypass(
    graph: Network, x: gs.Variable, expand: int, large: float, squeeze: float, norm: bool, bypass: str, name: str
) -> gs.Variable:
    """Add a fire module, and the bypass around it where there is one."""
    y = fire(graph, x, expand, large, squeeze, norm, name)
    if bypass == "none" or (bypass == "simple" and x.shape[1] != y.shape[1]):
        return y
    if x.shape[1] != y.shape[1]:
        x = graph.conv_layer(x, y.shape[1], 1, bias=not norm, name=f"{name}/bypass/conv")
        if norm:
            x = graph.batch_norm_layer(x, name=f"{name}/bypass/norm")
    return graph.add_layer(y, x, name=f"{name}/add")


def fire(
    graph: Network, x: gs.Variable, expand: int, large: float, squeeze: float, norm: bool, name: str
) -> gs.Variable:
    """Squeeze, then both expands, concatenated; an expand without filters is left out."""
    wide = round(expand * large)
    how = {"norm": norm, "bias": not norm}
    x = graph.conv_relu_layer(x, max(1, round(expand * squeeze)), 1, name=f"{name}/squeeze1x1", **how)
    ways = [(expand - wide, 1, "expand1x1"), (wide, 3, "expand3x3")]
    outputs = [graph.conv_relu_layer(x, n, k, name=f"{name}/{part}", **how) for n, k, part in ways if n]
    return graph.concat_layer(outputs, name=f"{name}/concat")
