"""What onnxruntime-training's own operators take and give: enough for the checker and for shape inference.

These are the operators that onnxruntime 1.19.2 puts into the training graph of a CNN, most of them in com.microsoft,
the gradients of the pools in the standard domain. onnx knows none of them. `parameters` are written `name:kind` with
? for an optional one and * for any number; kinds are T float, I int64, J int32 or int64, B bool, S float or int64. An
attribute with ! is required.
An output has the type and shape of the input whose number is given, or that a function of the context tells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

MICROSOFT = "com.microsoft"
Type = onnx.TypeProto
Rule = int | Callable[[Any], Type | None]

_WINDOW = "pads:INTS strides:INTS auto_pad:STRING"
_CONV = f"kernel_shape:INTS {_WINDOW} dilations:INTS group:INT"
_POOL = f"kernel_shape:INTS! {_WINDOW} dilations:INTS ceil_mode:INT count_include_pad:INT storage_order:INT"
_LOSS = "reduction:STRING ignore_index:INT output_type:INT"


@dataclasses.dataclass(frozen=True)
class TrainingOp:
    """One of onnxruntime's training operators: operands, results, attributes as text; a rule for each result's type."""

    name: str
    inputs: str
    outputs: str
    rules: tuple[Rule, ...]
    attributes: str = ""
    domain: str = MICROSOFT
    version: int = 1


BATCH_NORM_DEFAULTS = {"epsilon": float(np.float32(1e-5)), "momentum": float(np.float32(0.9))}  # as a file has them


def batch_norm_constants(node: ir.Node, elements: float = 0.0) -> dict[str, float]:
    """Epsilon and momentum of a BatchNorm; a file may leave out either.

    With the number of elements a channel that its statistics are of: those of its halves, which have `elements` where
    the running variance is to be the unbiased estimate.
    """
    given = node.attributes
    read = {name: given[name].as_float() if name in given else default for name, default in BATCH_NORM_DEFAULTS.items()}
    corrected = "unbiased" in given and given["unbiased"].as_int() == 1
    return {**read, "elements": float(elements)} if corrected and elements else read


def tensor(kind: int, shape: tuple[int | str | None, ...] | None) -> Type:
    """Make the type of a tensor; the shape is None where the rank is unknown."""
    return onnx.helper.make_tensor_type_proto(kind, shape)


def dims_of(kind: Type | None) -> tuple[int | str | None, ...] | None:
    """Give the shape of a type, None where the rank is unknown."""
    if kind is None or not kind.tensor_type.HasField("shape"):
        return None
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or None) for dim in kind.tensor_type.shape.dim
    )


def attribute_of(context: Any, name: str, default: Any) -> Any:
    """Give an attribute of the node. Lists as tuples, text as str."""
    found = context.get_attribute(name)
    if found is None:
        return default
    value = onnx.helper.get_attribute_value(found)
    return value.decode() if isinstance(value, bytes) else value


def _shape_operand(operand: int, gradient: int) -> Rule:
    """Give the shape is the value of an operand (computed by Shape), the element type that of the gradient."""

    def rule(context: Any) -> Type:
        value = context.get_input_data(operand)
        symbolic = context.get_symbolic_input(operand)
        if value is not None:
            shape: Any = tuple(int(size) for size in onnx.numpy_helper.to_array(value).reshape(-1))
        elif symbolic is not None:
            shape = tuple(
                dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or None) for dim in symbolic.dim
            )
        else:
            shape = None
        return tensor(context.get_input_type(gradient).tensor_type.elem_type, shape)

    return rule


def _conv_bias(context: Any) -> Type:
    weight = context.get_input_type(2)
    dims = dims_of(weight)
    return tensor(weight.tensor_type.elem_type, (dims[0] if dims else None,))


def _concatenated(context: Any) -> Type:
    kinds = [context.get_input_type(place) for place in range(context.get_num_inputs())]
    shapes = [dims_of(kind) for kind in kinds]
    element = kinds[0].tensor_type.elem_type
    if any(shape is None for shape in shapes):
        return tensor(element, None)
    axis = attribute_of(context, "axis", 1)
    sizes = [shape[axis] for shape in shapes]  # type: ignore[index]
    whole = list(shapes[0])  # type: ignore[arg-type]
    whole[axis] = sum(sizes) if all(isinstance(size, int) for size in sizes) else None
    return tensor(element, tuple(whole))


def _lengths(context: Any) -> Type:
    return tensor(onnx.TensorProto.INT64, (context.get_num_inputs(),))


def _unknown_like(operand: int) -> Rule:
    """Give the element type alone: the shape is told by the partner in the forward graph."""
    return lambda context: tensor(context.get_input_type(operand).tensor_type.elem_type, None)


def _loss(context: Any) -> Type:
    scores, labels = context.get_input_type(0), context.get_input_type(1)
    whole = attribute_of(context, "reduction", "mean") == "none"
    return tensor(scores.tensor_type.elem_type, dims_of(labels) if whole else ())


def _flag(context: Any) -> Type:
    return tensor(onnx.TensorProto.BOOL, (1,))


def _matmul(context: Any) -> Type:
    a, b = dims_of(context.get_input_type(0)), dims_of(context.get_input_type(1))
    element = context.get_input_type(0).tensor_type.elem_type
    turned = [attribute_of(context, name, 0) for name in ("transBatchA", "transBatchB")]
    if a is None or b is None or len(a) < 2 or len(b) < 2 or any(turned):
        return tensor(element, None)
    if attribute_of(context, "transA", 0):
        a = (*a[:-2], a[-1], a[-2])
    if attribute_of(context, "transB", 0):
        b = (*b[:-2], b[-1], b[-2])
    batch = _broadcast(a[:-2], b[:-2])
    return tensor(element, None if batch is None else (*batch, a[-2], b[-1]))


def _broadcast(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if a == b:
        return a
    if all(isinstance(size, int) for size in (*a, *b)):
        return tuple(np.broadcast_shapes(a, b))
    return None


def _elementwise_grad(name: str, forward: str, attributes: str = "") -> TrainingOp:
    """Describe dX = dY * f(X or Y)."""
    return TrainingOp(name, f"dY:T {forward}:T", "dX:T", (1,), attributes)


TRAINING_OPS: tuple[TrainingOp, ...] = (
    TrainingOp(
        "BatchNormInternal",
        "X:T scale:T B:T input_mean:T input_var:T",
        "Y:T running_mean:T? running_var:T? saved_mean:T? saved_inv_std:T?",
        (0, 1, 1, 1, 1),
        "epsilon:FLOAT momentum:FLOAT training_mode:INT",
    ),
    TrainingOp(
        "BatchNormalizationGrad",
        "dY:T X:T scale:T mean:T inv_std:T",
        "dX:T dscale:T dbias:T",
        (1, 2, 2),
        "epsilon:FLOAT",
    ),
    TrainingOp("ConvGrad", "dY:T X:T W:T", "dX:T? dW:T? dB:T?", (1, 2, _conv_bias), _CONV),
    TrainingOp("MaxPoolGrad", "dY:T Indices:I", "dX:T", (_unknown_like(0),), _POOL, domain="", version=9),
    TrainingOp("AveragePoolGrad", "dY:T", "dX:T", (_unknown_like(0),), _POOL, domain="", version=9),
    TrainingOp("ConcatTraining", "inputs:T*", "concat:T per_input_length:I?", (_concatenated, _lengths), "axis:INT!"),
    TrainingOp("SplitTraining", "input:T split:I", "outputs:T*", (_unknown_like(0),), "axis:INT"),
    TrainingOp("Scale", "input:T scale:S", "output:T", (0,), "scale_down:INT"),
    TrainingOp("QuickGelu", "X:T", "Y:T", (0,), "alpha:FLOAT"),
    TrainingOp("Gelu", "X:T", "Y:T", (0,)),
    TrainingOp("FastGelu", "X:T bias:T?", "Y:T", (0,)),
    TrainingOp("BiasGelu", "A:T B:T", "C:T", (0,)),
    _elementwise_grad("ReluGrad", "X"),
    _elementwise_grad("SigmoidGrad", "Y"),
    _elementwise_grad("TanhGrad", "Y"),
    _elementwise_grad("LeakyReluGrad", "Y", "alpha:FLOAT"),
    _elementwise_grad("QuickGeluGrad", "X", "alpha:FLOAT"),
    _elementwise_grad("GeluGrad", "X"),
    _elementwise_grad("FastGeluGrad", "X"),
    _elementwise_grad("SoftmaxGrad_13", "Y", "axis:INT"),
    _elementwise_grad("LogSoftmaxGrad_13", "Y", "axis:INT"),
    TrainingOp("DivGrad", "dY:T A:T B:T", "dA:T? dB:T?", (1, 2)),
    TrainingOp("DropoutGrad", "dY:T mask:B ratio:T? training_mode:B?", "dX:T", (0,)),
    TrainingOp("GatherGrad", "shape:I indices:J dY:T", "dX:T", (_shape_operand(0, 2),), "axis:INT"),
    TrainingOp("GatherElementsGrad", "dY:T shape:I indices:J", "dX:T", (_shape_operand(1, 0),), "axis:INT"),
    TrainingOp("SliceGrad", "dY:T shape:I starts:J ends:J axes:J? steps:J?", "dX:T", (_shape_operand(1, 0),)),
    TrainingOp(
        "SoftmaxCrossEntropyLossInternal",
        "scores:T labels:J weights:T? ignore_index:I?",
        "output:T log_prob:T?",
        (_loss, 0),
        _LOSS,
    ),
    TrainingOp(
        "SoftmaxCrossEntropyLossInternalGrad",
        "dY:T log_prob:T label:J weight:T? ignore_index:I? bias:T?",
        "d_logits:T",
        (1,),
        _LOSS,
    ),
    TrainingOp("SoftmaxCrossEntropyLossGrad", "dY:T log_prob:T label:J weight:T? bias:T?", "d_logits:T", (1,), _LOSS),
    TrainingOp("InPlaceAccumulatorV2", "buffer:T value:T overwrite:B?", "updated:B new_buffer:T?", (_flag, 0)),
    TrainingOp(
        "FusedMatMul",
        "A:T B:T",
        "Y:T",
        (_matmul,),
        "alpha:FLOAT transA:INT transB:INT transBatchA:INT transBatchB:INT",
    ),
)
