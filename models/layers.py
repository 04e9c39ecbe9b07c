"""The layers of the zoo, registered with onnx-graphsurgeon: `graph.conv_layer(x, 64, 3, name="conv1")`.

Every layer takes a `gs.Variable` of static shape and gives one, so that a builder can ask any tensor for its shape.
Names: a node's name is its place in the network (`block1/layer3/conv1`), its output has the same name, and its
parameters hang below it (`block1/layer3/conv1/weight`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from bnfuse.core.errors import BnfuseError, at_node

from .initial import kaiming

OPSET = 18
IR_VERSION = 8
EPSILON = 1e-5
MOMENTUM = 0.9  # of the old value, as ONNX counts it


Size = int | tuple[int, int]  # of an image: the side of a square, or height and width


class Network(gs.Graph):
    """A gs.Graph that also knows the seed of its parameters (None: shapes only)."""

    def __init__(self, name: str, seed: int | None) -> None:
        super().__init__(name=name, opset=OPSET, ir_version=IR_VERSION, producer_name="bnfuse")
        self.seed = seed


def start(name: str, batch: int, channels: int, image: Size, seed: int | None) -> tuple[Network, gs.Variable]:
    """Give an empty network and its input `data`, float32 [batch, channels, *image]."""
    graph = Network(name, seed)
    x = gs.Variable("data", np.float32, [batch, channels, *pair(image)])
    graph.inputs = [x]
    return graph, x


def finish(graph: Network, logits: gs.Variable) -> Network:
    """Names the output `logits`."""
    logits.name = "logits"
    graph.outputs = [logits]
    return graph


def pair(size: Size) -> tuple[int, int]:
    """Give a size as (rows, columns)."""
    return size if isinstance(size, tuple) else (size, size)


def window_size(size: int, kernel: int, stride: int, pad: int, *, ceil: bool = False) -> int:
    """How many windows fit; with `ceil` also a last one that begins inside the map or its left padding."""
    span = size + 2 * pad - kernel
    if span < 0:
        return 0
    count = (-(-span // stride) if ceil else span // stride) + 1
    return count - 1 if ceil and (count - 1) * stride >= size + pad else count


def add(
    graph: gs.Graph,
    op: str,
    inputs: Sequence[gs.Tensor],
    name: str,
    shape: Sequence[int],
    attrs: Mapping[str, object] | None = None,
    more_outputs: Sequence[gs.Variable] = (),
) -> gs.Variable:
    """One node whose first output has the node's name and `shape`."""
    y = gs.Variable(name, np.float32, list(shape))
    # not graph.layer: it looks through all tensors of the graph each time
    graph.nodes.append(gs.Node(op, name, dict(attrs or {}), list(inputs), [y, *more_outputs]))
    return y


def window_shape(x: gs.Variable, channels: int, kernel: int, stride: int, pad: int, name: str, op: str, **how) -> list:
    """Give the shape of what a window makes of x; raises BnfuseError where none fits."""
    n, _, h, w = x.shape
    sizes = [window_size(size, kernel, stride, pad, **how) for size in (h, w)]
    if min(sizes) < 1:
        raise at_node(
            name, op, f"has a {kernel}x{kernel} window, but its input is {h}x{w} here. Build with a larger --image."
        )
    return [n, channels, *sizes]


def window_attrs(kernel: int, stride: int, pad: int) -> dict[str, object]:
    """Give the attributes of a square window."""
    return {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}


@gs.Graph.register()
def conv_layer(
    self: Network,
    x: gs.Variable,
    channels: int,
    kernel: int,
    *,
    name: str,
    stride: int = 1,
    pad: int | None = None,
    group: int = 1,
    bias: bool = False,
) -> gs.Variable:
    """Convolution [N, in, H, W] -> [N, channels, H', W']; `pad` keeps H, W at stride 1 by default."""
    pad = kernel // 2 if pad is None else pad
    if channels < 1:
        raise at_node(name, "Conv", f"has {channels} output channels: it needs at least one.")
    if group < 1 or x.shape[1] % group or channels % group:
        what = f"has {x.shape[1]} input and {channels} output channels, which {group} groups do not divide."
        raise at_node(name, "Conv", what)
    shape = window_shape(x, channels, kernel, stride, pad, name, "Conv")
    weight = f"{name}/weight"
    inputs = [x, gs.Constant(weight, kaiming(weight, (channels, x.shape[1] // group, kernel, kernel), self.seed))]
    if bias:
        inputs.append(gs.Constant(f"{name}/bias", np.zeros(channels, np.float32)))
    attrs = {**window_attrs(kernel, stride, pad), "dilations": [1, 1], "group": group}
    return add(self, "Conv", inputs, name, shape, attrs)


@gs.Graph.register()
def batch_norm_layer(self: Network, x: gs.Variable, *, name: str) -> gs.Variable:
    """Training BatchNormalization with its new running statistics as second and third output."""
    channels = x.shape[1]
    inputs = [
        x,
        gs.Constant(f"{name}/scale", np.ones(channels, np.float32)),
        gs.Constant(f"{name}/bias", np.zeros(channels, np.float32)),
        gs.Constant(f"{name}/running_mean", np.zeros(channels, np.float32)),
        gs.Constant(f"{name}/running_var", np.ones(channels, np.float32)),
    ]
    running = [gs.Variable(f"{name}/new_running_{what}", np.float32, [channels]) for what in ("mean", "var")]
    attrs = {"epsilon": EPSILON, "momentum": MOMENTUM, "training_mode": 1}
    return add(self, "BatchNormalization", inputs, name, x.shape, attrs, running)


@gs.Graph.register()
def relu_layer(self: Network, x: gs.Variable, *, name: str) -> gs.Variable:
    """Add a ReLU."""
    return add(self, "Relu", [x], name, x.shape)


@gs.Graph.register()
def relu6_layer(self: Network, x: gs.Variable, *, name: str) -> gs.Variable:
    """Add a Clip to [0, 6]."""
    limits = [gs.Constant(f"{name}/{side}", np.array(value, np.float32)) for side, value in (("min", 0), ("max", 6))]
    return add(self, "Clip", [x, *limits], name, x.shape)


@gs.Graph.register()
def add_layer(self: Network, x: gs.Variable, y: gs.Variable, *, name: str) -> gs.Variable:
    """Add two maps."""
    return add(self, "Add", [x, y], name, x.shape)


@gs.Graph.register()
def concat_layer(self: Network, xs: Sequence[gs.Variable], *, name: str) -> gs.Variable:
    """Concatenation along the channels."""
    n, _, h, w = xs[0].shape
    return add(self, "Concat", xs, name, [n, sum(x.shape[1] for x in xs), h, w], {"axis": 1})


@gs.Graph.register()
def max_pool_layer(
    self: Network, x: gs.Variable, kernel: int, *, name: str, stride: int = 2, pad: int = 0, ceil: bool = False
) -> gs.Variable:
    """Add a max pooling."""
    shape = window_shape(x, x.shape[1], kernel, stride, pad, name, "MaxPool", ceil=ceil)
    return add(self, "MaxPool", [x], name, shape, {**window_attrs(kernel, stride, pad), "ceil_mode": int(ceil)})


@gs.Graph.register()
def average_pool_layer(
    self: Network, x: gs.Variable, kernel: int, *, name: str, stride: int = 2, pad: int = 0
) -> gs.Variable:
    """Add an average pooling."""
    shape = window_shape(x, x.shape[1], kernel, stride, pad, name, "AveragePool")
    return add(self, "AveragePool", [x], name, shape, window_attrs(kernel, stride, pad))


@gs.Graph.register()
def global_pool_layer(self: Network, x: gs.Variable, *, name: str) -> gs.Variable:
    """Mean over H, W: [N, C, H, W] -> [N, C]."""
    pooled = add(self, "GlobalAveragePool", [x], name, [*x.shape[:2], 1, 1])
    return self.flatten_layer(pooled, name=f"{name}/flatten")


@gs.Graph.register()
def flatten_layer(self: Network, x: gs.Variable, *, name: str) -> gs.Variable:
    """Add what makes [N, C*H*W] of a map."""
    return add(self, "Flatten", [x], name, [x.shape[0], int(np.prod(x.shape[1:]))], {"axis": 1})


@gs.Graph.register()
def linear_layer(self: Network, x: gs.Variable, features: int, *, name: str, gain: float = 1.0) -> gs.Variable:
    """[N, in] -> [N, features], weight (features, in); `gain` is sqrt(2) where a ReLU follows."""
    weight = f"{name}/weight"
    inputs = [
        x,
        gs.Constant(weight, kaiming(weight, (features, x.shape[1]), self.seed, gain=gain)),
        gs.Constant(f"{name}/bias", np.zeros(features, np.float32)),
    ]
    return add(self, "Gemm", inputs, name, [x.shape[0], features], {"transB": 1})


@gs.Graph.register()
def dropout_layer(self: Network, x: gs.Variable, ratio: float, *, name: str) -> gs.Variable:
    """Training Dropout; nothing at all where the ratio is 0."""
    if not 0 <= ratio < 1:
        raise BnfuseError(f"dropout={ratio:g} is not a ratio: it must be at least 0 and below 1")
    if ratio == 0:
        return x
    inputs = [
        x,
        gs.Constant(f"{name}/ratio", np.array(ratio, np.float32)),
        gs.Constant(f"{name}/training", np.array(True)),
    ]
    mask = gs.Variable(f"{name}/mask", np.bool_, list(x.shape))
    return add(self, "Dropout", inputs, name, x.shape, None, [mask])


@gs.Graph.register()
def conv_relu_layer(
    self: Network, x: gs.Variable, channels: int, kernel: int, *, name: str, norm: bool, bias: bool = True, **how
) -> gs.Variable:
    """Conv, BN where `norm`, ReLU: `name/conv`, `name/norm`, `name/relu`."""
    x = self.conv_layer(x, channels, kernel, name=f"{name}/conv", bias=bias, **how)
    if norm:
        x = self.batch_norm_layer(x, name=f"{name}/norm")
    return self.relu_layer(x, name=f"{name}/relu")
