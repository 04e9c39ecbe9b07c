"""Shapes of every tensor of a training graph, as value_info.

onnxruntime writes most of them; what it leaves out (the extra outputs of its training operators) follows from the
operands, and standard operators from onnx's own inference. A missing shape is no cosmetic fault: AveragePoolGrad and
MaxPoolGrad take the size of their result from it, and crash the process where it is not there.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx
from onnx import TensorProto, helper

from bnfuse.core.errors import at_node
from bnfuse.graph.protos import shapes_of, static_shape, typed_values, without_large_values
from bnfuse.opset.spec import DOMAIN

Shape = list[int]


def complete_shapes(model: onnx.ModelProto, file: str | None = None) -> None:
    """Add the shapes that are missing. Raises BnfuseError where one cannot be told."""
    for _ in range(3):  # the rules and onnx's inference feed one another; gradients nest no deeper than this
        if not missing(model):
            return
        apply_rules(model)
        adopt_inferred(model)
    left = missing(model)
    if left:
        node, name = left[0]
        raise at_node(
            node.name,
            node.op_type,
            f"gives '{name}', whose shape neither the file nor the operator tells: it cannot be trained here.",
            file=file,
        )


def missing(model: onnx.ModelProto) -> list[tuple[onnx.NodeProto, str]]:
    """List the results whose shapes are not known, with their nodes."""
    shapes = shapes_of(model.graph)
    return [(node, name) for node in model.graph.node for name in node.output if name and shapes.get(name) is None]


def adopt_inferred(model: onnx.ModelProto) -> None:
    """Take over the shapes that onnx infers where the file has none."""
    inferred = onnx.shape_inference.infer_shapes(without_large_values(model), data_prop=True)
    known = {v.name for v in typed_values(model.graph) if static_shape(v) is not None}
    found = {v.name: v for v in inferred.graph.value_info if v.name not in known and static_shape(v) is not None}
    stale = [v for v in model.graph.value_info if v.name in found]
    for value in stale:
        model.graph.value_info.remove(value)
    model.graph.value_info.extend(found.values())
    for value in model.graph.output:
        if value.name not in known and value.name in {v.name for v in inferred.graph.output}:
            value.CopyFrom(next(v for v in inferred.graph.output if v.name == value.name))


def apply_rules(model: onnx.ModelProto) -> None:
    """Take over the shapes that follow from the operands of onnxruntime's training operators, and of ours."""
    shapes = shapes_of(model.graph)
    listed = {value.name: value for value in (*model.graph.value_info, *model.graph.output)}
    for node in model.graph.node:
        rule = _like(0) if node.domain == DOMAIN else RULES.get(node.op_type)  # of ours: gradients of activations
        if rule is None:
            continue
        inputs = [shapes.get(name) if name else [] for name in node.input]
        if any(shape is None for shape in inputs):
            continue
        for name, result in zip(node.output, rule(inputs, len(node.output)), strict=False):  # type: ignore[arg-type]
            if not name or result is None or shapes.get(name) is not None:
                continue
            kind, shape = result
            shapes[name] = shape
            value = helper.make_tensor_value_info(name, kind, shape)
            if name in listed:
                listed[name].CopyFrom(value)
            else:
                model.graph.value_info.append(value)


Result = tuple[int, Shape] | None
Rule = Callable[[list[Shape], int], list[Result]]


def _like(*operands: int) -> Rule:
    """Output i is float32 and has the shape of operand operands[i]."""
    return lambda inputs, _: [(TensorProto.FLOAT, list(inputs[i])) for i in operands]


def _concat_training(inputs: list[Shape], _: int) -> list[Result]:
    return [None, (TensorProto.INT64, [len(inputs)])]


def _conv_grad(inputs: list[Shape], _: int) -> list[Result]:
    kind = TensorProto.FLOAT
    return [(kind, list(inputs[1])), (kind, list(inputs[2])), (kind, [inputs[2][0]])]


RULES: dict[str, Rule] = {
    "BatchNormInternal": _like(0, 1, 1, 1, 1),
    "BatchNormalizationGrad": _like(1, 2, 2),
    "ConcatTraining": _concat_training,
    "ConvGrad": _conv_grad,
    "DropoutGrad": _like(0),
    "QuickGelu": _like(0),
    "QuickGeluGrad": _like(1),
    "ReluGrad": _like(1),
    "Scale": _like(0),
    "SigmoidGrad": _like(0),
    "SoftmaxCrossEntropyLossGrad": _like(1),
    "SoftmaxGrad_13": _like(0),
    "LogSoftmaxGrad_13": _like(0),
    "TanhGrad": _like(0),
}
