"""Lowering of source graphs' operators to the kernels of `ai.bnfuse`: what a training graph is made of before any pass.

A plain Conv with bias is `ConvBias`, a Relu `ReluPointwise`, a ReluGrad `PointwiseGradReluGrad`; BatchNormInternal is
the two sweeps of its statistics, the C-sized finalize and `NormalizePointwise`. What has no kernel here goes to
generic.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from bnfuse.analysis.provenance import is_channel_concat
from bnfuse.core.windows import why_not
from bnfuse.opset.activations import ACTIVATIONS, GRADIENTS, Activation
from bnfuse.opset.spec import DOMAIN, OpSpec, parse
from bnfuse.opset.traffic import RESHAPES
from bnfuse.runtime.lowering.dense import lower_gemm, lower_matmul, lower_softmax_loss, lower_softmax_loss_grad
from bnfuse.runtime.lowering.generic import lower_generic, lower_sum
from bnfuse.runtime.lowering.norm import batch_norm_grad_source, batch_norm_source
from bnfuse.runtime.lowering.state import Lowering
from bnfuse.runtime.lowering.steps import composed
from bnfuse.runtime.lowering.values import attributes_of

MICROSOFT = "com.microsoft"
IN_ONNXRUNTIME = "The file runs in onnxruntime."
INSTEAD_OF_1D = (
    "Write it as one of 2, over maps of height 1 (Unsqueeze in front of it), or run the file in onnxruntime."
)
FLOAT_MAX = float(np.finfo(np.float32).max)


def optional(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def result(node: ir.Node, index: int) -> ir.Value | None:
    """An output that somebody wants."""
    value = node.outputs[index] if index < len(node.outputs) else None
    return value if value is not None and value.name else None


def present(**values: ir.Value | None) -> dict[str, ir.Value]:
    return {name: value for name, value in values.items() if value is not None}


def core_of(node: ir.Node) -> str:
    """What a node computes, its steps aside."""
    spec = parse(node.op_type) if node.domain == DOMAIN else None
    return spec.core if spec else node.op_type


# -- convolution ---------------------------------------------------------------------------------------------------


def conv_attributes(low: Lowering, node: ir.Node, weight: tuple[int, ...], size: tuple[int, ...]) -> dict[str, Any]:
    """All attributes with their defaults; pads made explicit where auto_pad asks for them."""
    if len(weight) != 4:
        what = f"has a weight of rank {len(weight)}: only convolutions of 2 dimensions are compiled"
        raise low.error(node, f"{what}. {INSTEAD_OF_1D}" if len(weight) == 3 else f"{what}. {IN_ONNXRUNTIME}")
    given = attributes_of(node)
    found = {
        "dilations": given.get("dilations", (1, 1)),
        "group": given.get("group", 1),
        "kernel_shape": given.get("kernel_shape", weight[2:]),
        "strides": given.get("strides", (1, 1)),
    }
    return {**found, "pads": explicit_pads(low, node, given, found, size)}


def explicit_pads(
    low: Lowering, node: ir.Node, given: Mapping[str, Any], window: Mapping[str, Any], size: tuple[int, ...]
) -> tuple[int, ...]:
    kind = given.get("auto_pad", "NOTSET")
    if kind == "NOTSET":
        return given.get("pads", (0, 0, 0, 0))
    if kind == "VALID":
        return (0, 0, 0, 0)
    before, after = [], []
    for i in range(2):
        stride = window["strides"][i]
        span = window.get("dilations", (1, 1))[i] * (window["kernel_shape"][i] - 1) + 1
        total = max(0, (-(-size[i] // stride) - 1) * stride + span - size[i])
        small, large = total // 2, total - total // 2
        before.append(small if kind == "SAME_UPPER" else large)
        after.append(large if kind == "SAME_UPPER" else small)
    return (*before, *after)


def lower_conv(low: Lowering, node: ir.Node) -> None:
    x, weight, bias = low.operand(node, 0), low.operand(node, 1), optional(node, 2)
    attributes = conv_attributes(low, node, low.shape(weight), low.shape(x)[2:])
    spec = OpSpec((), "Conv", ("Bias",) if bias is not None else ())
    composed(low, node, spec, present(x=x, weight=weight, bias=bias), present(y=result(node, 0)), attributes)


def lower_conv_grad(low: Lowering, node: ir.Node) -> None:
    dy, x, weight = (low.operand(node, i) for i in range(3))
    dx, dweight, dbias = (result(node, i) for i in range(3))
    attributes = conv_attributes(low, node, low.shape(weight), low.shape(x)[2:])
    core = (
        "ConvGrad"
        if dx is not None and dweight is not None
        else "ConvGradInput"
        if dx is not None
        else "ConvGradWeight"
    )
    spec = OpSpec((), core, ("BiasGrad",) if dbias is not None else ())
    results = present(dx=dx, dweight=dweight, dbias=dbias)
    composed(low, node, spec, present(dy=dy, x=x, weight=weight), results, attributes)


# -- pooling -------------------------------------------------------------------------------------------------------


def pool_attributes(low: Lowering, node: ir.Node, size: tuple[int, ...]) -> dict[str, Any]:
    given = attributes_of(node)
    if len(given["kernel_shape"]) != 2:
        what = f"has the window {list(given['kernel_shape'])}: only poolings of 2 dimensions are compiled"
        raise low.error(node, f"{what}. {INSTEAD_OF_1D if len(given['kernel_shape']) == 1 else IN_ONNXRUNTIME}")
    if given.get("storage_order", 0):
        raise low.error(node, "has storage_order=1: only row-major indices are supported")
    window = {
        "kernel_shape": given["kernel_shape"],
        "strides": given.get("strides", (1, 1)),
        "dilations": given.get("dilations", (1, 1)),
        "ceil_mode": given.get("ceil_mode", 0),
    }
    if core_of(node) == "AveragePool":
        if window.pop("dilations") != (1, 1):
            raise low.error(node, "has dilations: an average over a dilated window is not supported")
        window["count_include_pad"] = given.get("count_include_pad", 0)
    window["pads"] = explicit_pads(low, node, given, window, size)
    if reason := why_not(window, size):
        raise low.error(node, reason)
    return window


def lower_max_pool(low: Lowering, node: ir.Node) -> None:
    x = low.operand(node, 0)
    attributes = pool_attributes(low, node, low.shape(x)[2:])
    results = present(y=result(node, 0), indices=result(node, 1))
    composed(low, node, OpSpec((), "MaxPool"), present(x=x), results, attributes)


def lower_average_pool(low: Lowering, node: ir.Node) -> None:
    x = low.operand(node, 0)
    attributes = pool_attributes(low, node, low.shape(x)[2:])
    composed(low, node, OpSpec((), "AveragePool"), present(x=x), present(y=result(node, 0)), attributes)


def lower_global_average_pool(low: Lowering, node: ir.Node) -> None:
    composed(
        low, node, OpSpec((), "GlobalAveragePool"), present(x=low.operand(node, 0)), present(y=result(node, 0)), {}
    )


def lower_max_pool_grad(low: Lowering, node: ir.Node) -> None:
    """The indices name the forward operator, and that its input, whose shape dx has."""
    dy, indices = low.operand(node, 0), low.operand(node, 1)
    forward = indices.producer()
    if forward is None or core_of(forward) != "MaxPool":
        raise low.error(node, "reads indices that no MaxPool of the graph made")
    _pool_grad(low, node, forward, "MaxPoolGrad", present(dy=dy, indices=indices))


def lower_average_pool_grad(low: Lowering, node: ir.Node) -> None:
    """The operator does not name its partner: any AveragePool that has the same window and shapes stands for it."""
    dy = low.operand(node, 0)
    for forward in low.order:
        if _is_partner(low, node, forward, low.shape(dy)):
            _pool_grad(low, node, forward, "AveragePoolGrad", present(dy=dy))
            return
    raise low.error(
        node, "has the window of no AveragePool in the graph whose gradient it could be: build the graph anew"
    )


def _is_partner(low: Lowering, node: ir.Node, forward: ir.Node, shape: tuple[int, ...]) -> bool:
    if core_of(forward) != "AveragePool":
        return False
    ours, theirs = attributes_of(node), attributes_of(forward)
    defaults = {"kernel_shape": (), "strides": (1, 1), "pads": (0, 0, 0, 0)}
    same = all(ours.get(name, default) == theirs.get(name, default) for name, default in defaults.items())
    x = forward.inputs[0]
    given = node.outputs[0].shape
    assert x is not None
    fits = given is None or tuple(given) == low.shape(x)
    return same and fits and low.shape(forward.outputs[0]) == shape


def _pool_grad(low: Lowering, node: ir.Node, forward: ir.Node, core: str, operands: dict[str, ir.Value]) -> None:
    x = low.operand(forward, 0)
    attributes = pool_attributes(low, forward, low.shape(x)[2:])
    composed(low, node, OpSpec((), core), {**operands, "x": x}, present(dx=result(node, 0)), attributes)


# -- elementwise on maps -------------------------------------------------------------------------------------------


def lower_activation(low: Lowering, node: ir.Node) -> None:
    x, activation = low.operand(node, 0), ACTIVATIONS[node.op_type]
    if low.form(x).dtype != "float32":
        lower_generic(low, node)
        return
    spec = OpSpec((activation.name,), "Pointwise")
    composed(low, node, spec, present(x=x), present(y=result(node, 0)), known_attributes(node, activation))


def lower_activation_grad(low: Lowering, node: ir.Node) -> None:
    """The second operand is the activation's; of a Relu it may be the result, which has the same sign."""
    activation = GRADIENTS[node.op_type]
    operands = present(dy=low.operand(node, 0), x=low.operand(node, 1))
    spec = OpSpec((), "PointwiseGrad", (node.op_type,))
    composed(low, node, spec, operands, present(dx=result(node, 0)), known_attributes(node, activation))


def known_attributes(node: ir.Node, activation: Activation) -> dict[str, float]:
    """The attributes of an activation, with those that the node leaves out."""
    given = attributes_of(node)
    return {name: given.get(name, default) for name, default in activation.defaults}


def lower_clip(low: Lowering, node: ir.Node) -> None:
    bounds = clip_bounds(low, node)
    x = low.operand(node, 0)
    if bounds is None or low.form(x).dtype != "float32":
        lower_generic(low, node)
        return
    attributes = dict(zip(("min", "max"), bounds, strict=True))
    composed(low, node, OpSpec(("Clip",), "Pointwise"), present(x=x), present(y=result(node, 0)), attributes)


def clip_bounds(low: Lowering, node: ir.Node) -> tuple[float, float] | None:
    """Lower and upper bound, where they are known now."""
    found = []
    for index, default in ((1, -FLOAT_MAX), (2, FLOAT_MAX)):
        value = optional(node, index)
        known = low.constant(value)
        if value is not None and value.name and known is None:
            return None
        found.append(default if known is None else float(known))
    return found[0], found[1]


def lower_add(low: Lowering, node: ir.Node) -> None:
    """Of two equal shapes a map with a skip; broadcasting is generic."""
    x, skip = low.operand(node, 0), low.operand(node, 1)
    forms = low.form(x), low.form(skip)
    if forms[0].shape != forms[1].shape or any(f.dtype != "float32" or not f.shape for f in forms):
        lower_generic(low, node)
        return
    composed(low, node, OpSpec(("Add",), "Pointwise"), present(x=x, skip=skip), present(y=result(node, 0)), {})


@dataclasses.dataclass(frozen=True)
class ClipGradient:
    """dy * Cast(x >= min And x <= max), as onnxruntime-training spells it: one kernel in place of five."""

    dy: ir.Value
    x: ir.Value
    bounds: tuple[float, float]
    nodes: tuple[ir.Node, ...]  # all but the Mul


def find_clip_gradient(low: Lowering, node: ir.Node) -> ClipGradient | None:
    """The gradient of a Clip that ends in this Mul, if nothing else reads its parts."""
    if node.op_type != "Mul" or node.domain:
        return None
    for dy, mask in (node.inputs, reversed(node.inputs)):
        cast = _only_read(mask, "Cast")
        both = _only_read(cast.inputs[0], "And") if cast is not None else None
        if cast is None or both is None or dy is None:
            continue
        sides = {side.op_type: side for v in both.inputs if (side := _only_read(v, "GreaterOrEqual", "LessOrEqual"))}
        if len(sides) != 2:
            continue
        lower, upper = sides["GreaterOrEqual"], sides["LessOrEqual"]
        bounds = low.constant(lower.inputs[1]), low.constant(upper.inputs[1])
        x = lower.inputs[0]
        if x is not None and x is upper.inputs[0] and bounds[0] is not None and bounds[1] is not None:
            return ClipGradient(dy, x, (float(bounds[0]), float(bounds[1])), (lower, upper, both, cast))
    return None


def _only_read(value: ir.Value | None, *kinds: str) -> ir.Node | None:
    """The node of one of these kinds that makes the value, if the value has a single reader."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type not in kinds or value is None or value.is_graph_output():
        return None
    return node if len(tuple(value.uses())) == 1 else None


def lower_mul(low: Lowering, node: ir.Node) -> None:
    """Generic, unless it is the end of the gradient of a Clip."""
    found: ClipGradient | None = low.notes.get(("clip", node))
    if found is None:
        lower_generic(low, node)
        return
    attributes = dict(zip(("min", "max"), found.bounds, strict=True))
    operands = present(dy=found.dy, x=found.x)
    composed(low, node, OpSpec((), "PointwiseGrad", ("ClipGrad",)), operands, present(dx=result(node, 0)), attributes)


# -- channels ------------------------------------------------------------------------------------------------------


def lower_concat(low: Lowering, node: ir.Node) -> None:
    """Of maps along their channels nothing is left to do: the operands lie in their slots (layout.py)."""
    place_concat(low, node)
    if node.op_type == "ConcatTraining" and (lengths := result(node, 1)) is not None:
        axis = node.attributes["axis"].as_int()
        sizes = [low.shape(v)[axis] for v in node.inputs if v is not None]
        low.set_constant(lengths, np.array(sizes, np.int64))


def place_concat(low: Lowering, node: ir.Node) -> None:
    value = node.outputs[0]
    if value in low.vector_slots.of:
        low.new_dense(value, low.type_of(value)[0])  # the parts lie in it already
        return
    if is_batch_concat(low, node):
        concat_images(low, node)
        return
    if not is_channel_concat(node):
        lower_generic(low, node)
        return
    slot, shapes = low.slots.of[value], [low.shape(v) for v in node.inputs if v is not None]
    channels = sum(shape[1] for shape in shapes)
    low.define(value, (shapes[0][0], channels, *shapes[0][2:]))
    low.place(value, low.root(slot.root).channels(slot.start, slot.start + channels))


def is_batch_concat(low: Lowering, node: ir.Node) -> bool:
    """Whether it puts maps behind one another that no kernel reads in the layout of the file."""
    forms = [low.form(v) for v in node.inputs if v is not None]
    is_of_maps = all(len(form.shape) == 4 and form.dtype == "float32" for form in forms)
    return is_of_maps and node.attributes["axis"].as_int() % 4 == 0 and not node.outputs[0].is_graph_output()


def concat_images(low: Lowering, node: ir.Node) -> None:
    """Maps one behind the other: each is brought where it belongs, from the layout of the file if it has no other."""
    values = [v for v in node.inputs if v is not None]
    images = [low.shape(v)[0] for v in values]
    y = low.new_map(node.outputs[0], (sum(images), *low.shape(values[0])[1:]))
    for index, value in enumerate(values):
        part = y.images(sum(images[:index]), sum(images[: index + 1]))
        form = low.form(value)
        if form.map is None and form.dense is not None:
            low.convert(form.dense, part, form.dtype, to_map=True)
        else:
            low.copy_map(low.map(value), part)


def lower_split(low: Lowering, node: ir.Node) -> None:
    """Of a map along its channels: views."""
    x = low.operand(node, 0)
    shape = low.shape(x)
    axis = attributes_of(node).get("axis", 0) % len(shape)
    if len(shape) != 4 or axis != 1:
        lower_generic(low, node)
        return
    start = 0
    for value, size in zip(node.outputs, split_sizes(low, node, shape[1]), strict=True):
        low.define(value, (shape[0], size, *shape[2:]))
        low.place(value, low.map(x).channels(start, start + size))
        start += size


def split_sizes(low: Lowering, node: ir.Node, channels: int) -> list[int]:
    lengths = optional(node, 1)
    if lengths is not None:
        known = low.constant(lengths)
        if known is None:
            raise low.error(node, f"splits by '{lengths.name}', which is not constant")
        return [int(size) for size in known]
    given = attributes_of(node).get("split")
    size = -(-channels // len(node.outputs))
    return list(given) if given else [min(size, channels - i * size) for i in range(len(node.outputs))]


# -- shapes --------------------------------------------------------------------------------------------------------


def lower_reshape(low: Lowering, node: ir.Node) -> None:
    """The same elements in another shape: the same storage."""
    ((shape, _),) = low.output_types(node)
    source = low.operand(node, 0)
    if math.prod(shape) != math.prod(low.shape(source)):
        raise low.error(
            node, f"makes {list(shape)} of {list(low.shape(source))}, which has other elements: build it anew"
        )
    low.alias(node.outputs[0], source, shape)


def lower_identity(low: Lowering, node: ir.Node) -> None:
    low.alias(node.outputs[0], low.operand(node, 0))


Lower = Callable[[Lowering, ir.Node], None]

SOURCE_OPS: dict[tuple[str, str], Lower] = {
    ("", "Conv"): lower_conv,
    (MICROSOFT, "ConvGrad"): lower_conv_grad,
    ("", "MaxPool"): lower_max_pool,
    ("", "MaxPoolGrad"): lower_max_pool_grad,
    ("", "AveragePool"): lower_average_pool,
    ("", "AveragePoolGrad"): lower_average_pool_grad,
    ("", "GlobalAveragePool"): lower_global_average_pool,
    **{(activation.domain, name): lower_activation for name, activation in ACTIVATIONS.items()},
    **{(MICROSOFT, step): lower_activation_grad for step in GRADIENTS},
    ("", "Clip"): lower_clip,
    ("", "Add"): lower_add,
    ("", "Mul"): lower_mul,
    ("", "Sum"): lower_sum,
    ("", "Concat"): lower_concat,
    (MICROSOFT, "ConcatTraining"): lower_concat,
    ("", "Split"): lower_split,
    (MICROSOFT, "SplitTraining"): lower_split,
    **{("", name): lower_reshape for name in RESHAPES},
    ("", "Identity"): lower_identity,
    (MICROSOFT, "BatchNormInternal"): batch_norm_source,
    (MICROSOFT, "BatchNormalizationGrad"): batch_norm_grad_source,
    ("", "Gemm"): lower_gemm,
    ("", "MatMul"): lower_matmul,
    ("", "SoftmaxCrossEntropyLoss"): lower_softmax_loss,
    (MICROSOFT, "SoftmaxCrossEntropyLossGrad"): lower_softmax_loss_grad,
}
