"""onnx schemas of `ai.bnfuse` and of the training operators, for the checker and for shape inference.

onnx prefers a registered schema to a model-local function of the same name: the function stays the body that
runtimes execute, while shapes come from the schema, which needs no detour through the body's nodes.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx

from bnfuse.core.errors import BnfuseError
from bnfuse.opset.plain import PlainOp
from bnfuse.opset.shapes import result_shapes
from bnfuse.opset.spec import DOMAIN, INTEGERS, LABELS, VERSION, OpSpec, attribute_type, find
from bnfuse.opset.training_ops import TRAINING_OPS, Rule, TrainingOp, attribute_of, dims_of, tensor

Schema = onnx.defs.OpSchema
Parameter = Schema.FormalParameter
Option = Schema.FormalParameterOption

KINDS = {
    "T": ["tensor(float)", "tensor(double)", "tensor(float16)"],
    "I": ["tensor(int64)"],
    "J": ["tensor(int32)", "tensor(int64)"],
    "B": ["tensor(bool)"],
    "S": ["tensor(float)", "tensor(double)", "tensor(float16)", "tensor(int64)"],
}
_registering = threading.Lock()
OPTIONS = {"": Option.Single, "?": Option.Optional, "*": Option.Variadic}


def register(names: Iterable[str]) -> None:
    """Make onnx know these `ai.bnfuse` operators; the ones it knows already stay."""
    for name in names:
        op = find(name)
        if op is None:
            raise BnfuseError(f"{DOMAIN}::{name} is no operator of this op set. See docs/ops.md.")
        add(own_schema, op, name, DOMAIN)


@functools.cache
def register_training_ops() -> None:
    """Make onnx know the operators that onnxruntime-training adds to a graph."""
    importlib.import_module("onnx.reference")  # it refuses to load once two domains have a Gelu
    for op in TRAINING_OPS:
        add(training_schema, op, op.name, op.domain)


def add(make: Callable[[Any], Schema], op: Any, name: str, domain: str) -> None:
    """Register a schema that onnx has not yet: a thread at a time, for it takes none twice."""
    with _registering:
        if not onnx.defs.has(name, domain):
            onnx.defs.register_schema(make(op))


def register_for(model: onnx.ModelProto) -> None:
    """Make onnx know every operator of a training graph, source or rewritten."""
    register_training_ops()
    register({node.op_type for node in model.graph.node if node.domain == DOMAIN})


def check_model(model: onnx.ModelProto) -> None:
    """Run onnx's full check, strict shape inference included. Raises BnfuseError with what it says, in one line."""
    register_for(model)
    try:
        onnx.checker.check_model(without_state(model), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise BnfuseError(f"not valid ONNX: {' '.join(str(error).split())}") from None


def infer_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give a copy of the model with the shape of every tensor that can be told."""
    register_for(model)
    light = without_state(model)
    try:
        light = onnx.shape_inference.infer_shapes(light, check_type=True, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        raise BnfuseError(f"shapes do not fit together: {' '.join(str(error).split())}") from None
    inferred = onnx.ModelProto()
    inferred.CopyFrom(model)
    for field in ("value_info", "output"):
        del getattr(inferred.graph, field)[:]
        getattr(inferred.graph, field).extend(getattr(light.graph, field))
    return inferred


def without_state(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give a copy without the initial values of graph inputs: large, and no matter to shapes."""
    inputs = {value.name for value in model.graph.input}
    copy = onnx.ModelProto()
    for field, value in model.ListFields():
        if field.name != "graph":
            _assign(copy, field.name, value)
    for field, value in model.graph.ListFields():
        if field.name != "initializer":
            _assign(copy.graph, field.name, value)
    copy.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name not in inputs)
    return copy


def _assign(message: Any, name: str, value: Any) -> None:
    if isinstance(value, (int, float, str, bytes)):
        setattr(message, name, value)
    else:
        getattr(message, name).MergeFrom(value)


# Schemas


def own_schema(op: OpSpec | PlainOp) -> Schema:
    """Give the schema of an `ai.bnfuse` operator: every operand, result and attribute is required."""

    def infer(context: Any) -> None:
        attributes = {name: attribute_of(context, name, None) for name in op.attributes}  # no shape follows from others
        shapes = {name: dims_of(context.get_input_type(place)) for place, name in enumerate(op.operands)}
        for place, (name, shape) in enumerate(result_shapes(op, shapes, attributes).items()):
            context.set_output_type(place, tensor(_element(name), shape))

    schema = Schema(
        op.name,
        DOMAIN,
        VERSION,
        inputs=[Parameter(name, _own_kind(name)) for name in op.operands],
        outputs=[Parameter(name, _own_kind(name)) for name in op.results],
        type_constraints=[("J", KINDS["J"], "")] if {*LABELS} & {*op.operands} else [],
        attributes=[
            *(_attribute(name, attribute_type(name), required=True) for name in op.attributes),
            *(_attribute(name, attribute_type(name), required=False) for name, _ in getattr(op, "optional", ())),
        ],
    )
    schema.set_type_and_shape_inference_function(infer)
    return schema


def _element(name: str) -> int:
    return onnx.TensorProto.INT64 if name in INTEGERS else onnx.TensorProto.FLOAT


def _own_kind(name: str) -> str:
    return "J" if name in LABELS else "tensor(int64)" if name in INTEGERS else "tensor(float)"


def training_schema(op: TrainingOp) -> Schema:
    """Make the schema of one of onnxruntime's training operators."""
    inputs = [_parameter(text) for text in op.inputs.split()]
    outputs = [_parameter(text) for text in op.outputs.split()]
    used = sorted({parameter.type_str for parameter in (*inputs, *outputs)})
    schema = Schema(
        op.name,
        op.domain,
        op.version,
        inputs=inputs,
        outputs=outputs,
        type_constraints=[(kind, KINDS[kind], "") for kind in used],
        attributes=[_given_attribute(text) for text in op.attributes.split()],
    )
    schema.set_type_and_shape_inference_function(functools.partial(_infer_outputs, op.rules))
    return schema


def _parameter(text: str) -> Any:
    name, kind = text.split(":")
    option = kind[1:]
    return Parameter(name, kind[0], param_option=OPTIONS[option])


def _given_attribute(text: str) -> Any:
    name, kind = text.split(":")
    return _attribute(name, kind.rstrip("!"), required=kind.endswith("!"))


def _attribute(name: str, kind: str, *, required: bool) -> Any:
    return Schema.Attribute(name, getattr(Schema.AttrType, kind), "", required=required)


def _infer_outputs(rules: Sequence[Rule], context: Any) -> None:
    for place in range(context.get_num_outputs()):
        rule = rules[min(place, len(rules) - 1)]  # the last rule serves a variadic output
        kind = context.get_input_type(rule) if isinstance(rule, int) else rule(context)
        if kind is not None:
            context.set_output_type(place, kind)
