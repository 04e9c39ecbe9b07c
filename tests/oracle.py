"""A training graph evaluated with torch operators, in float32 or float64: the yardstick of the tests.

    evaluate(model, feeds, "float64") -> {output name: array}

Forward operators are torch's own; gradients are written out from their definitions (not taken from autograd), so that
a graph is judged by what its nodes mean. Functions are evaluated through their bodies. Float tensors take the asked
dtype everywhere, constants and casts included.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

Attributes = dict[str, Any]


def evaluate(model: onnx.ModelProto, feeds: dict[str, np.ndarray], dtype: str = "float64") -> dict[str, np.ndarray]:
    """The graph outputs. Inputs that are not fed take their initial values."""
    evaluator = Evaluator(model, dtype)
    env = {tensor.name: evaluator.tensor(onnx.numpy_helper.to_array(tensor)) for tensor in model.graph.initializer}
    env |= {name: evaluator.tensor(value) for name, value in feeds.items()}
    wanted = {value.name for value in model.graph.output}
    evaluator.nodes(model.graph.node, env, {}, wanted)
    return {value.name: env[value.name].numpy() for value in model.graph.output}


class Evaluator:
    def __init__(self, model: onnx.ModelProto, dtype: str) -> None:
        import torch

        self.torch = torch
        self.float = getattr(torch, dtype)
        self.functions = {(f.domain, f.name): f for f in model.functions}
        self.shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.value_info}

    def tensor(self, value: np.ndarray) -> Any:
        made = self.torch.from_numpy(np.array(value))
        return made.to(self.float) if made.is_floating_point() else made

    def nodes(self, nodes: Any, env: dict[str, Any], outer: Attributes, wanted: set[str]) -> None:
        """Runs nodes in order and forgets each tensor after its last reader."""
        nodes = [(node, reads(node)) for node in nodes]
        last = {name: i for i, (_, read) in enumerate(nodes) for name in read}
        for i, (node, read) in enumerate(nodes):
            inputs = [env[name] if name else None for name in node.input]
            attributes = {a.name: self.attribute(a, outer) for a in node.attribute}
            if node.op_type == "Loop":
                results = self.loop(attributes["body"], inputs, env, outer)
            else:
                results = self.call(node, inputs, {k: v for k, v in attributes.items() if v is not None})
            env |= {name: value for name, value in zip(node.output, results, strict=False) if name}
            for name in read:
                if name in env and last[name] == i and name not in wanted:
                    del env[name]

    def loop(self, body: onnx.GraphProto, inputs: list[Any], env: dict[str, Any], outer: Attributes) -> tuple[Any, ...]:
        """A loop of a known number of turns; what it gives is what it carries from one to the next."""
        count, going, *carried = inputs
        turn, again, *names = (value.name for value in body.input)
        results = [value.name for value in body.output]
        for i in range(int(count)):
            inner = {**env, turn: self.torch.tensor(i), again: going, **dict(zip(names, carried, strict=True))}
            self.nodes(body.node, inner, outer, {*results})
            carried = [inner[name] for name in results[1:]]
        return tuple(carried)

    def attribute(self, attribute: onnx.AttributeProto, outer: Attributes) -> Any:
        if attribute.ref_attr_name:
            return outer.get(attribute.ref_attr_name)
        value = onnx.helper.get_attribute_value(attribute)
        return value.decode() if isinstance(value, bytes) else value

    def call(self, node: onnx.NodeProto, inputs: list[Any], attributes: Attributes) -> tuple[Any, ...]:
        function = self.functions.get((node.domain, node.op_type))
        if function is not None:
            env = dict(zip(function.input, inputs, strict=False))
            defaults = {a.name: self.attribute(a, {}) for a in function.attribute_proto}
            self.nodes(function.node, env, {**defaults, **attributes}, {*function.output})
            return tuple(env[name] for name in function.output)
        operator = OPERATORS.get(node.op_type)
        if operator is None:
            raise NotImplementedError(f"{node.domain}::{node.op_type}")
        if node.op_type in ("MaxPoolGrad", "AveragePoolGrad"):  # what the result's shape is, only the file says
            attributes["shape"] = self.shapes[node.output[0]]
        outputs = [bool(name) for name in node.output]
        results = operator(self, inputs, attributes, outputs)
        return results if isinstance(results, tuple) else (results,)


def reads(node: onnx.NodeProto) -> set[str]:
    """What a node reads, with what graphs inside of it read."""
    graphs = [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    inner = {name for graph in graphs for each in graph.node for name in reads(each)}
    return {*node.input, *inner} - {""}


Operator = Callable[[Evaluator, list[Any], Attributes, list[bool]], Any]


def simple(function: Callable[..., Any]) -> Operator:
    """An operator of its inputs alone."""
    return lambda e, x, a, o: function(*x)


# Windows: pads as ONNX has them, (top, left, bottom, right)


def window(a: Attributes, x: Any, kernel: list[int]) -> tuple[list[int], list[int], list[int]]:
    """strides, pads, dilations"""
    rank = len(kernel)
    return a.get("strides", [1] * rank), a.get("pads", [0] * 2 * rank), a.get("dilations", [1] * rank)


def torch_pads(pads: list[int]) -> list[int]:
    """(top, left, bottom, right) -> (left, right, top, bottom)"""
    half = len(pads) // 2
    return [side for i in reversed(range(half)) for side in (pads[i], pads[half + i])]


def unpadded(x: Any, pads: list[int]) -> Any:
    half = len(pads) // 2
    for i in range(half):
        x = x.narrow(2 + i, pads[i], x.shape[2 + i] - pads[i] - pads[half + i])
    return x


def conv(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    data, weight, *bias = x
    strides, pads, dilations = window(a, data, list(weight.shape[2:]))
    functions = {1: e.torch.conv1d, 2: e.torch.conv2d, 3: e.torch.conv3d}
    padded = e.torch.nn.functional.pad(data, torch_pads(pads))
    extra = {"stride": strides, "dilation": dilations, "groups": a.get("group", 1)}
    return functions[weight.dim() - 2](padded, weight, bias[0] if bias else None, **extra)


def conv_grad(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    """The adjoint of the convolution in its input and in its weight."""
    dy, data, weight = x
    strides, pads, dilations = window(a, data, list(weight.shape[2:]))
    padded = e.torch.nn.functional.pad(data, torch_pads(pads))
    mask = [o[0], len(o) > 1 and o[1], len(o) > 2 and o[2]]
    groups, rank = a.get("group", 1), weight.dim() - 2
    dx, dw, db = e.torch.ops.aten.convolution_backward(
        dy, padded, weight, [weight.shape[0]], strides, [0] * rank, dilations, False, [0] * rank, groups, mask
    )
    return (unpadded(dx, pads) if dx is not None else None), dw, db


def conv_transpose(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    data, weight, *bias = x
    strides, pads, dilations = window(a, data, list(weight.shape[2:]))
    y = e.torch.nn.functional.conv_transpose2d(
        data, weight, None, strides, 0, a.get("output_padding", 0), a.get("group", 1), dilations
    )
    y = unpadded(y, pads)
    return y + bias[0].reshape(1, -1, 1, 1) if bias else y


def output_sizes(
    sizes: list[int], kernel: list[int], strides: list[int], pads: list[int], dilations: list[int], ceil: int
) -> list[int]:
    """Sizes of a pooling's result; with `ceil` no window begins in the padding behind."""
    found = []
    half = len(kernel)
    for i in range(half):
        room = sizes[i] + pads[i] + pads[half + i] - dilations[i] * (kernel[i] - 1) - 1
        size = (math.ceil if ceil else math.floor)(room / strides[i]) + 1
        if ceil and (size - 1) * strides[i] >= sizes[i] + pads[i]:
            size -= 1
        found.append(size)
    return found


def windows(e: Evaluator, x: Any, a: Attributes, fill: float, dilated: bool) -> tuple[Any, list[int]]:
    """[N, C, OH, OW, KH*KW], and the sizes (OH, OW)."""
    kernel = a["kernel_shape"]
    strides, pads, dilations = window(a, x, kernel)
    dilations = dilations if dilated else [1, 1]
    sizes = output_sizes(list(x.shape[2:]), kernel, strides, pads, dilations, a.get("ceil_mode", 0))
    reach = [(size - 1) * s + d * (k - 1) + 1 for size, s, d, k in zip(sizes, strides, dilations, kernel, strict=True)]
    behind = [max(0, r - n - p) for r, n, p in zip(reach, x.shape[2:], pads[:2], strict=True)]
    padded = e.torch.nn.functional.pad(x, (pads[1], behind[1], pads[0], behind[0]), value=fill)
    parts = [
        padded[
            :,
            :,
            i * dilations[0] : i * dilations[0] + (sizes[0] - 1) * strides[0] + 1 : strides[0],
            j * dilations[1] : j * dilations[1] + (sizes[1] - 1) * strides[1] + 1 : strides[1],
        ]
        for i in range(kernel[0])
        for j in range(kernel[1])
    ]
    return e.torch.stack(parts, -1), sizes


def max_pool(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    """The result, and the flat index of each maximum over the whole input."""
    torch, data = e.torch, x[0]
    values, _ = windows(e, data, a, -math.inf, dilated=True)
    index = torch.arange(data.numel(), dtype=torch.float64).reshape(data.shape)
    places, _ = windows(e, index, a, -1.0, dilated=True)
    best = values.argmax(-1, keepdim=True)
    return values.gather(-1, best).squeeze(-1), places.gather(-1, best).squeeze(-1).to(torch.int64)


def average_divisor(e: Evaluator, like: Any, a: Attributes) -> Any:
    """How many elements each window averages over: padding counts if asked, what ceil_mode adds behind it never."""
    kernel = a["kernel_shape"]
    _, pads, _ = window(a, like, kernel)
    ones = e.torch.ones_like(like[:1, :1])
    if a.get("count_include_pad", 0):
        ones = e.torch.nn.functional.pad(ones, torch_pads(pads), value=1.0)
        a = {**a, "pads": [0] * len(pads)}
    return windows(e, ones, a, 0.0, dilated=False)[0].sum(-1)


def average_pool(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    return windows(e, x[0], a, 0.0, dilated=False)[0].sum(-1) / average_divisor(e, x[0], a)


def average_pool_grad(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    """Each window's dy over its divisor goes to all elements of the window."""
    like = e.torch.zeros(a["shape"], dtype=e.float)
    places, _ = windows(
        e, e.torch.arange(like[0, 0].numel(), dtype=e.float).reshape(like[:1, :1].shape), a, -1.0, False
    )
    places = places[0, 0].reshape(-1).to(e.torch.int64)
    share = (x[0] / average_divisor(e, like, a)).unsqueeze(-1).expand(*x[0].shape, math.prod(a["kernel_shape"]))
    inside = places >= 0
    flat = like.reshape(*like.shape[:2], -1)
    return flat.index_add(2, places[inside], share.reshape(*like.shape[:2], -1)[:, :, inside]).reshape(like.shape)


# BatchNorm


def per_channel(v: Any, like: Any) -> Any:
    return v.reshape(1, -1, *[1] * (like.dim() - 2))


def others(x: Any) -> list[int]:
    """All dimensions but the channels'."""
    return [i for i in range(x.dim()) if i != 1]


def batch_norm(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    """y, running mean and variance (biased), mean, 1/sqrt(variance + epsilon)."""
    data, scale, bias, running_mean, running_variance = x
    mean, variance = data.mean(others(data)), data.var(others(data), correction=0)
    inv_std = (variance + a.get("epsilon", 1e-5)).rsqrt()
    m = a.get("momentum", 0.9)
    y = per_channel(scale * inv_std, data) * (data - per_channel(mean, data)) + per_channel(bias, data)
    return y, running_mean * m + mean * (1 - m), running_variance * m + variance * (1 - m), mean, inv_std


def batch_norm_grad(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    dy, data, scale, mean, inv_std = x
    normal = (data - per_channel(mean, data)) * per_channel(inv_std, data)
    dbias, dscale = dy.sum(others(dy)), (dy * normal).sum(others(dy))
    count = data.numel() // data.shape[1]
    inner = dy - per_channel(dbias / count, dy) - normal * per_channel(dscale / count, dy)
    return per_channel(scale * inv_std, dy) * inner, dscale, dbias


# Loss


def cross_entropy(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    log_prob = e.torch.log_softmax(x[0], 1)
    counts = x[1] != a["ignore_index"] if "ignore_index" in a else e.torch.ones_like(x[1], dtype=e.torch.bool)
    labels = x[1].to(e.torch.int64) * counts
    picked = -log_prob.gather(1, labels.unsqueeze(1)).squeeze(1) * counts
    losses = {"mean": lambda: picked.sum() / counts.sum(), "sum": picked.sum, "none": lambda: picked}
    return losses[a.get("reduction", "mean")](), log_prob


def cross_entropy_grad(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    dloss, log_prob, labels = x[:3]
    counts = labels != a["ignore_index"] if "ignore_index" in a else e.torch.ones_like(labels, dtype=e.torch.bool)
    labels = labels.to(e.torch.int64) * counts
    one_hot = e.torch.zeros_like(log_prob).scatter_(1, labels.unsqueeze(1), 1.0)
    count = counts.sum() if a.get("reduction", "mean") == "mean" else 1
    dloss = dloss.unsqueeze(1) if a.get("reduction") == "none" else dloss
    return (log_prob.exp() - one_hot) * counts.unsqueeze(1) * dloss / count


# Shapes and reductions


def axes_of(x: list[Any], a: Attributes, at: int = 1) -> list[int] | None:
    if len(x) > at and x[at] is not None:
        return [int(v) for v in x[at]]
    return a.get("axes")


def reduce(kind: str) -> Operator:
    def run(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
        axes = axes_of(x, a)
        if axes is None:
            if a.get("noop_with_empty_axes"):
                return x[0]
            axes = list(range(x[0].dim()))
        keep = bool(a.get("keepdims", 1))
        return getattr(e.torch, kind)(x[0], axes, keepdim=keep) if axes else x[0]

    return run


def reshape(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    dims = [int(d) for d in x[1]]
    if not a.get("allowzero", 0):
        dims = [x[0].shape[i] if d == 0 else d for i, d in enumerate(dims)]
    return x[0].reshape(dims)


def flatten(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    axis = a.get("axis", 1) % (x[0].dim() + 1)
    return x[0].reshape(math.prod(x[0].shape[:axis]), -1)


def expand(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    shape = e.torch.broadcast_shapes(tuple(x[0].shape), tuple(int(d) for d in x[1]))
    return x[0].expand(shape)


def shape(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    return e.torch.tensor(list(x[0].shape[a.get("start", 0) : a.get("end")]), dtype=e.torch.int64)


def constant(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    for name, value in a.items():
        if name == "value":
            return e.tensor(onnx.numpy_helper.to_array(value))
        kind = e.float if "float" in name else e.torch.int64
        return e.torch.tensor(value, dtype=kind)
    raise ValueError("Constant without a value")


def constant_of_shape(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    value = e.tensor(onnx.numpy_helper.to_array(a["value"])) if "value" in a else e.tensor(np.zeros(1, np.float32))
    return value.reshape(()).expand([int(d) for d in x[0]]).clone()


def cast(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(a["to"]))
    return x[0].to(e.float if kind.kind == "f" else getattr(e.torch, str(kind)))


def slice_(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    data, starts, ends, *rest = x
    axes = [int(v) for v in rest[0]] if rest and rest[0] is not None else range(len(starts))
    steps = [int(v) for v in rest[1]] if len(rest) > 1 else [1] * len(starts)
    index = [slice(None)] * data.dim()
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        index[axis] = slice(int(start), min(int(end), 2**62), step)
    return data[tuple(index)]


def split(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    axis = a.get("axis", 0)
    if len(x) > 1 and x[1] is not None:
        return tuple(e.torch.split(x[0], [int(v) for v in x[1]], axis))
    return tuple(e.torch.tensor_split(x[0], len(o), axis))


def concat(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    lengths = e.torch.tensor([v.shape[a["axis"]] for v in x], dtype=e.torch.int64)
    return e.torch.cat(x, a["axis"]), lengths


def gemm(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    left = x[0].T if a.get("transA") else x[0]
    right = x[1].T if a.get("transB") else x[1]
    y = a.get("alpha", 1.0) * (left @ right)
    return y + a.get("beta", 1.0) * x[2] if len(x) > 2 and x[2] is not None and a.get("beta", 1.0) else y


def scatter(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    data, indices, updates = x
    axis = a.get("axis", 0)
    if a.get("reduction", "none") == "add":
        return data.scatter_add(axis, indices, updates)
    return data.scatter(axis, indices, updates)


def pad(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    value = float(x[2]) if len(x) > 2 and x[2] is not None else 0.0
    return e.torch.nn.functional.pad(x[0], torch_pads([int(v) for v in x[1]]), value=value)


def clip(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    low = x[1] if len(x) > 1 else None
    high = x[2] if len(x) > 2 else None
    return x[0].clamp(low, high) if low is not None or high is not None else x[0]


def scale(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    by = x[1].to(e.float)
    return x[0] / by if a.get("scale_down", 0) else x[0] * by


def dropout(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    ratio = float(x[1]) if len(x) > 1 and x[1] is not None else 0.5
    training = bool(x[2]) if len(x) > 2 and x[2] is not None else False
    if ratio and training:
        raise NotImplementedError("random dropout has no one result: set its ratio to 0")
    return x[0], e.torch.ones_like(x[0], dtype=e.torch.bool)


def dropout_grad(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    ratio = float(x[2]) if len(x) > 2 and x[2] is not None else 0.5
    return x[0] * x[1] / (1 - ratio)


def quick_gelu_grad(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    alpha = a.get("alpha", 1.702)
    s = e.torch.sigmoid(alpha * x[1])
    return x[0] * s * (1 + alpha * x[1] * (1 - s))


def max_pool_grad(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    """Each dy goes to the element that was the maximum, by its flat index."""
    dx = e.torch.zeros(math.prod(a["shape"]), dtype=e.float)
    return dx.scatter_add(0, x[1].reshape(-1), x[0].reshape(-1)).reshape(a["shape"])


def comparison(name: str) -> Operator:
    return lambda e, x, a, o: getattr(e.torch, name)(x[0], x[1])


def permute(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    return x[0].permute(a.get("perm", list(reversed(range(x[0].dim())))))


def squeeze(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    axes = axes_of(x, a)
    return x[0].squeeze(axes) if axes is not None else x[0].squeeze()


def unsqueeze(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    y, axes = x[0], axes_of(x, a) or ()
    for axis in sorted(axis % (y.dim() + len(axes)) for axis in axes):
        y = y.unsqueeze(axis)
    return y


def gather(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    data, indices = x
    axis = a.get("axis", 0) % data.dim()
    shape = (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    return data.index_select(axis, indices.reshape(-1)).reshape(shape)


def total(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    y = x[0]
    for other in x[1:]:
        y = y + other
    return y


def divide(e: Evaluator, x: list[Any], a: Attributes, o: list[bool]) -> Any:
    return x[0] / x[1] if x[0].is_floating_point() else x[0] // x[1]


OPERATORS: dict[str, Operator] = {
    "Abs": simple(lambda x: x.abs()),
    "Add": simple(lambda x, y: x + y),
    "And": simple(lambda x, y: x & y),
    "AveragePool": average_pool,
    "AveragePoolGrad": average_pool_grad,
    "BatchNormInternal": batch_norm,
    "BatchNormalization": batch_norm,
    "BatchNormalizationGrad": batch_norm_grad,
    "Cast": cast,
    "Clip": clip,
    "Concat": lambda e, x, a, o: concat(e, x, a, o)[0],
    "ConcatTraining": concat,
    "Constant": constant,
    "ConstantOfShape": constant_of_shape,
    "Conv": conv,
    "ConvGrad": conv_grad,
    "ConvTranspose": conv_transpose,
    "Div": divide,
    "Dropout": dropout,
    "DropoutGrad": dropout_grad,
    "Elu": lambda e, x, a, o: e.torch.nn.functional.elu(x[0], a.get("alpha", 1.0)),
    "Equal": comparison("eq"),
    "Erf": simple(lambda x: x.erf()),
    "Exp": simple(lambda x: x.exp()),
    "Expand": expand,
    "Flatten": flatten,
    "Gather": gather,
    "Gemm": gemm,
    "GlobalAveragePool": simple(lambda x: x.mean(list(range(2, x.dim())), keepdim=True)),
    "GlobalMaxPool": simple(lambda x: x.amax(list(range(2, x.dim())), keepdim=True)),
    "Greater": comparison("gt"),
    "GreaterOrEqual": comparison("ge"),
    "HardSigmoid": lambda e, x, a, o: (a.get("alpha", 0.2) * x[0] + a.get("beta", 0.5)).clamp(0, 1),
    "HardSwish": simple(lambda x: x * (x / 6 + 0.5).clamp(0, 1)),
    "Identity": simple(lambda x: x),
    "LeakyRelu": lambda e, x, a, o: e.torch.nn.functional.leaky_relu(x[0], a.get("alpha", 0.01)),
    "Less": comparison("lt"),
    "LessOrEqual": comparison("le"),
    "Log": simple(lambda x: x.log()),
    "LogSoftmax": lambda e, x, a, o: x[0].log_softmax(a.get("axis", -1)),
    "MatMul": simple(lambda x, y: x @ y),
    "MaxPool": max_pool,
    "MaxPoolGrad": max_pool_grad,
    "Mul": simple(lambda x, y: x * y),
    "Neg": simple(lambda x: -x),
    "Max": lambda e, x, a, o: functools.reduce(e.torch.maximum, x),
    "Min": lambda e, x, a, o: functools.reduce(e.torch.minimum, x),
    "NonZero": simple(lambda x: x.nonzero().T),
    "Not": simple(lambda x: ~x),
    "Pad": pad,
    "Pow": simple(lambda x, y: x**y),
    "PRelu": simple(lambda x, slope: x.where(x > 0, slope * x)),
    "QuickGelu": lambda e, x, a, o: x[0] * e.torch.sigmoid(a.get("alpha", 1.702) * x[0]),
    "QuickGeluGrad": quick_gelu_grad,
    "Range": lambda e, x, a, o: e.torch.arange(x[0].item(), x[1].item(), x[2].item(), dtype=x[0].dtype),
    "Reciprocal": simple(lambda x: 1 / x),
    "ReduceMax": reduce("amax"),
    "ReduceMean": reduce("mean"),
    "ReduceProd": lambda e, x, a, o: x[0].prod().reshape([1] * x[0].dim() if a.get("keepdims", 1) else []),
    "ReduceSum": reduce("sum"),
    "Relu": simple(lambda x: x.clamp_min(0)),
    "ReluGrad": simple(lambda dy, x: dy * (x > 0)),
    "Reshape": reshape,
    "Scale": scale,
    "ScatterElements": scatter,
    "ScatterND": simple(lambda data, indices, updates: data.index_copy(0, indices[:, 0], updates)),
    "Shape": shape,
    "Sigmoid": simple(lambda x: x.sigmoid()),
    "Sign": simple(lambda x: x.sign()),
    "SigmoidGrad": simple(lambda dy, y: dy * y * (1 - y)),
    "Size": lambda e, x, a, o: e.torch.tensor(x[0].numel(), dtype=e.torch.int64),
    "Slice": slice_,
    "SoftmaxCrossEntropyLoss": cross_entropy,
    "SoftmaxCrossEntropyLossGrad": cross_entropy_grad,
    "Softmax": lambda e, x, a, o: x[0].softmax(a.get("axis", -1)),
    "Softplus": simple(lambda x: x.clamp_min(0) + (-x.abs()).exp().log1p()),
    "Split": split,
    "SplitTraining": split,
    "Sqrt": simple(lambda x: x.sqrt()),
    "Squeeze": squeeze,
    "Sub": simple(lambda x, y: x - y),
    "Sum": total,
    "Tanh": simple(lambda x: x.tanh()),
    "TanhGrad": simple(lambda dy, y: dy * (1 - y * y)),
    "Transpose": permute,
    "Unsqueeze": unsqueeze,
    "Where": simple(lambda condition, x, y: x.where(condition, y)),
}
