"""Nodes with a torch layer of their own: op -> how it is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from bnfuse.baselines.writer import Convert, Writer, attribute, present, torch_pads
from bnfuse.opset.spec import DOMAIN


def window(w: Writer, node: ir.Node, kernel: list[int]) -> dict[str, Any]:
    """Give kernel, stride, dilation, and the pads before and after, one number for each spatial dimension."""
    rank = len(kernel)
    if attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise w.error(node, f"has auto_pad={attribute(node, 'auto_pad')}: only explicit pads are taken")
    pads = attribute(node, "pads", [0] * 2 * rank) if attribute(node, "auto_pad") != "VALID" else [0] * 2 * rank
    return {
        "kernel": tuple(kernel),
        "stride": tuple(attribute(node, "strides", [1] * rank)),
        "dilation": tuple(attribute(node, "dilations", [1] * rank)),
        "before": tuple(pads[:rank]),
        "after": tuple(pads[rank:]),
    }


def even_padding(w: Writer, node: ir.Node, how: dict[str, Any], fill: float, limit: bool = False) -> tuple[Any, Any]:
    """Give the operand and the padding left to the layer: what the layer cannot pad itself is padded before it.

    torch's layers pad both sides alike, its poolings (`limit`) by half a window at most.
    """
    x, before, after = w.value(node, 0), how["before"], how["after"]
    fits = all(2 * p <= k for p, k in zip(before, how["kernel"], strict=True)) or not limit
    if before == after and fits:
        return x, before
    padded = w.call(w.nn.functional.pad, x, torch_pads(before, after), value=fill)
    return padded, (0,) * len(before)


def same(numbers: tuple[int, ...]) -> Any:
    """Give one number where all are equal, as people write it."""
    return numbers[0] if len(set(numbers)) == 1 else numbers


def conv(w: Writer, node: ir.Node) -> Any:
    """Write a Conv1d, Conv2d or Conv3d; the function where the weight or the bias is computed (scaled, say)."""
    weight, bias = node.inputs[1], node.inputs[2] if present(node, 2) else None
    out, into, *kernel = w.shape(node, weight)
    if not 1 <= len(kernel) <= 3:
        raise w.error(node, f"has {len(kernel)} spatial dimensions: torch has 1 to 3")
    how = window(w, node, kernel)
    x, padding = even_padding(w, node, how, 0.0)
    groups = attribute(node, "group", 1)
    if any(value is not None and w.constant(value) is None for value in (weight, bias)):
        more = [w.value(node, index) for index in (1, 2) if present(node, index)]
        how = {"stride": how["stride"], "padding": padding, "dilation": how["dilation"], "groups": groups}
        return w.call(getattr(w.nn.functional, f"conv{len(kernel)}d"), x, *more, **how)
    layer = getattr(w.nn, f"Conv{len(kernel)}d")(
        into * groups,
        out,
        same(how["kernel"]),
        stride=same(how["stride"]),
        padding=same(padding),
        dilation=same(how["dilation"]),
        groups=groups,
        bias=bias is not None,
        device="meta",
    )
    return w.layer(node, layer, x, weight=weight, bias=bias)


def batch_norm(w: Writer, node: ir.Node) -> Any:
    """Write a BatchNorm: ONNX's momentum is the share of the old value, torch's that of the new one."""
    _, scale, bias, mean, variance = node.inputs[:5]
    shape = w.shape(node, node.inputs[0])
    training = node.domain == DOMAIN or bool(attribute(node, "training_mode", 0))
    rank = max(1, len(shape) - 2)
    if rank > 3:
        raise w.error(node, f"has {rank} spatial dimensions: torch has 1 to 3")
    layer = getattr(w.nn, f"BatchNorm{rank}d")(
        shape[1],
        eps=plain(attribute(node, "epsilon", 1e-5)),
        momentum=round(1 - attribute(node, "momentum", 0.9), 6),
        device="meta",
    )
    layer.num_batches_tracked = w.torch.tensor(0)
    layer.train(training)
    return w.layer(node, layer, w.value(node, 0), weight=scale, bias=bias, running_mean=mean, running_var=variance)


def plain(number: float) -> float:
    """Give the shortest decimal that is the same float32: files keep 1e-5 as 9.999999747378752e-06."""
    return float(f"{number:.7g}")


def relu(w: Writer, node: ir.Node) -> Any:
    """Write a ReLU."""
    return w.layer(node, w.nn.ReLU(), w.value(node, 0))


def clip(w: Writer, node: ir.Node) -> Any:
    """Write Clip: a ReLU or ReLU6 where the bounds are theirs, else a Hardtanh or torch.clamp."""
    low = w.scalar(node, 1, attribute(node, "min"))
    high = w.scalar(node, 2, attribute(node, "max"))
    x = w.value(node, 0)
    if low is None and high is None:
        return x
    if (low, high) == (0, 6):
        return w.layer(node, w.nn.ReLU6(), x)
    if low is None or high is None:
        return w.layer(node, w.nn.ReLU(), x) if low == 0 else w.call(w.torch.clamp, x, min=low, max=high)
    return w.layer(node, w.nn.Hardtanh(low, high), x)


def gelu(w: Writer, node: ir.Node) -> Any:
    """Write a GELU."""
    return w.layer(node, w.nn.GELU(approximate=attribute(node, "approximate", "none")), w.value(node, 0))


def gelu_tanh(w: Writer, node: ir.Node) -> Any:
    """Write a GELU by its approximation."""
    return w.layer(node, w.nn.GELU(approximate="tanh"), w.value(node, 0))


def thresholded_relu(w: Writer, node: ir.Node) -> Any:
    """Write x where it is above a number, else 0."""
    return w.layer(node, w.nn.Threshold(plain(attribute(node, "alpha", 1.0)), 0.0), w.value(node, 0))


def quick_gelu(w: Writer, node: ir.Node) -> Any:
    """Write x*sigmoid(alpha*x), which for alpha 1 is SiLU."""
    alpha, x = attribute(node, "alpha", 1.702), w.value(node, 0)
    if alpha == 1:
        return w.layer(node, w.nn.SiLU(), x)
    return w.call(w.torch.mul, x, w.call(w.torch.sigmoid, w.call(w.torch.mul, x, plain(alpha))))


def activation(name: str, **defaults: float) -> Convert:
    """Give a layer that is the same function, its numbers under the names (torch's) of ONNX's attributes."""

    def write(w: Writer, node: ir.Node) -> Any:
        numbers = [plain(attribute(node, key, default)) for key, default in defaults.items()]
        return w.layer(node, getattr(w.nn, name)(*numbers), w.value(node, 0))

    return write


def axis_activation(name: str) -> Convert:
    """Write a layer of this name over the axis that the node names, the last by default."""
    return lambda w, node: w.layer(node, getattr(w.nn, name)(dim=attribute(node, "axis", -1)), w.value(node, 0))


def max_pool(w: Writer, node: ir.Node) -> Any:
    """Write a MaxPool of one to three dimensions."""
    how = window(w, node, attribute(node, "kernel_shape"))
    x, padding = even_padding(w, node, how, -math.inf, limit=True)
    layer = getattr(w.nn, f"MaxPool{len(padding)}d")(
        same(how["kernel"]),
        stride=same(how["stride"]),
        padding=same(padding),
        dilation=same(how["dilation"]),
        ceil_mode=bool(attribute(node, "ceil_mode", 0)),
    )
    return w.layer(node, layer, x)


def average_pool(w: Writer, node: ir.Node) -> Any:
    """Write an AvgPool of one to three dimensions."""
    how = window(w, node, attribute(node, "kernel_shape"))
    counted = bool(attribute(node, "count_include_pad", 0))
    x, padding = even_padding(w, node, how, 0.0, limit=True)
    if set(how["dilation"]) != {1}:
        raise w.error(node, f"has dilations={list(how['dilation'])}: torch's average pooling has none")
    if padding != how["before"] and not counted:
        raise w.error(node, f"has uneven pads {[*how['before'], *how['after']]} that it does not count: torch has not")
    layer = getattr(w.nn, f"AvgPool{len(padding)}d")(
        same(how["kernel"]),
        stride=same(how["stride"]),
        padding=same(padding),
        ceil_mode=bool(attribute(node, "ceil_mode", 0)),
        count_include_pad=counted,
    )
    return w.layer(node, layer, x)


def global_pool(kind: str) -> Convert:
    """Write an adaptive pooling to one value a channel."""

    def write(w: Writer, node: ir.Node) -> Any:
        rank = len(w.shape(node, node.inputs[0])) - 2
        return w.layer(node, getattr(w.nn, f"{kind}{rank}d")(1), w.value(node, 0))

    return write


def gemm(w: Writer, node: ir.Node) -> Any:
    """Give a Linear where the weight is a parameter as Linear has it, else the product written out."""
    weight, bias = node.inputs[1], node.inputs[2] if present(node, 2) else None
    x, alpha, beta = w.value(node, 0), attribute(node, "alpha", 1.0), attribute(node, "beta", 1.0)
    columns = w.shape(node, node.outputs[0])[1]
    usual = alpha == 1 and (beta == 1 or bias is None) and attribute(node, "transB", 0)
    biased = bias is None or (w.constant(bias) is not None and w.shape(node, bias) == (columns,))
    if usual and biased and not attribute(node, "transA", 0) and w.constant(weight) is not None:
        out, into = w.shape(node, weight)
        layer = w.nn.Linear(into, out, bias=bias is not None, device="meta")
        return w.layer(node, layer, x, weight=weight, bias=bias)
    left = w.call(w.torch.t, x) if attribute(node, "transA", 0) else x
    right = w.value(node, 1)
    right = w.call(w.torch.t, right) if attribute(node, "transB", 0) else right
    if bias is None:
        product = w.call(w.torch.matmul, left, right)
        return product if alpha == 1 else w.call(w.torch.mul, product, alpha)
    if alpha == 1 and beta == 1:
        return w.call(w.torch.addmm, w.value(node, 2), left, right)
    return w.call(w.torch.addmm, w.value(node, 2), left, right, beta=beta, alpha=alpha)


def dropout(w: Writer, node: ir.Node) -> Any:
    """Write a Dropout; where its ratio is 0, or it does not train, the operand itself."""
    ratio, training = w.scalar(node, 1, 0.5), w.scalar(node, 2, False)
    x = w.value(node, 0)
    return w.layer(node, w.nn.Dropout(plain(ratio)), x) if ratio and training else x


LAYERS: dict[str, Callable[[Writer, ir.Node], Any]] = {
    "AveragePool": average_pool,
    "BatchNorm": batch_norm,
    "BatchNormalization": batch_norm,
    "Celu": activation("CELU", alpha=1.0),
    "Clip": clip,
    "Conv": conv,
    "Dropout": dropout,
    "Elu": activation("ELU", alpha=1.0),
    "Gelu": gelu,
    "Gemm": gemm,
    "GlobalAveragePool": global_pool("AdaptiveAvgPool"),
    "GlobalMaxPool": global_pool("AdaptiveMaxPool"),
    "GeluPointwise": gelu,  # of ai.bnfuse, where the opset has no such operator
    "GeluTanhPointwise": gelu_tanh,
    "HardSwish": activation("Hardswish"),
    "LeakyRelu": activation("LeakyReLU", alpha=0.01),
    "LogSoftmax": axis_activation("LogSoftmax"),
    "MaxPool": max_pool,
    "Mish": activation("Mish"),
    "QuickGeluPointwise": quick_gelu,
    "Relu": relu,
    "Selu": activation("SELU"),
    "Sigmoid": activation("Sigmoid"),
    "Softmax": axis_activation("Softmax"),
    "Softplus": activation("Softplus"),
    "Softsign": activation("Softsign"),
    "Tanh": activation("Tanh"),
    "ThresholdedRelu": thresholded_relu,
}
