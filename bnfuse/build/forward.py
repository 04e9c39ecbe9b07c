"""Reads a forward model and brings it to the form that the repairs and the gradients expect.

Afterwards: opset 13 to 21, no local functions, every node named, constants as initializers, initializers not listed as
inputs, every shape known and static.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnx.version_converter
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.io import check_sizes, read_proto
from bnfuse.graph.protos import (
    LARGE,
    adopt_graph,
    attributes,
    element_count,
    fresh,
    shapes_of,
    static_shape,
    typed_values,
    without_large_values,
)
from bnfuse.graph.signature import METADATA_KEY
from bnfuse.graph.wellformed import check_functions
from bnfuse.opset.result_size import result_elements

from .canonical import fit_reshapes_to_batch
from .exporters import lost_parameters, parameter_numbers, signature_of
from .graph import Forward
from .old_batch_norms import TRAINING_MODE
from .pools import POOLS, fault_of, settle_ceil
from .sequences import resolve_sequences

OLDEST, NEWEST, TARGET = 18, 21, 18  # opsets that gradients are made in, and what others are converted to
SAME = 13  # from here on converted operators are what they were, but for where their axes stand
IR_VERSIONS = (8, 10)
REARRANGING = (
    "Cast",
    "CastLike",
    "Concat",
    "ConstantOfShape",
    "Expand",
    "Gather",
    "Identity",
    "Reshape",
    "Shape",
    "Slice",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
)
COMPUTING = (  # of shapes and other constants; of parameters it is the network's own
    *(
        "Abs",
        "Add",
        "And",
        "Ceil",
        "Clip",
        "Cos",
        "CumSum",
        "Div",
        "Equal",
        "Floor",
        "Greater",
        "GreaterOrEqual",
        "Less",
        "LessOrEqual",
        "Max",
    ),
    *("Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "Range", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum"),
    *("Reciprocal", "Round", "ScatterElements", "ScatterND", "Sign", "Size", "Sqrt", "Sub", "Tile", "Where", "Xor"),
    *("Erf", "Exp", "GatherElements", "GatherND", "IsInf", "IsNaN", "Log", "MatMul", "Mean", "OneHot", "ReduceMean"),
    *("Relu", "Sigmoid", "Sin", "Tanh", "Trilu"),
)
LIKE_OPERAND = ("GroupNormalization", "MeanVarianceNormalization")  # not inferred, or deprecated in 18
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
FOLD_LIMIT = 1 << 28  # elements

log = logging.getLogger(__name__)


def read_forward(source: onnx.ModelProto | str | Path, *, file: str | None = None, batch: int | None = None) -> Forward:
    """Give the model with constants folded, its opset as in the file."""
    if isinstance(source, onnx.ModelProto):
        model = onnx.ModelProto()
        model.CopyFrom(source)
        check_sizes(model, file)
        check_functions(model, file)
    else:
        file = file or str(source)
        model = read_proto(source)
    forward = Forward(model, file)
    refuse_what_is_no_forward_graph(forward)
    if model.functions:
        forward.model = onnx.inliner.inline_local_functions(model)
    separate_initializers_from_inputs(forward)
    forward.numbers = frozenset(parameter_numbers(forward.model))
    forward.signed = frozenset(tensor.target for tensor in signature_of(forward.model).values())
    forward.lost = frozenset(lost_parameters(forward.model))
    name_nodes(forward)
    drop_unread_inputs(forward)
    if batch is not None:
        set_batch(forward, batch)
    return forward


def refuse_what_is_no_forward_graph(forward: Forward) -> None:
    """Raise where the file is a training graph already, has a subgraph, or has no output."""
    graph = forward.graph
    trained = {entry.key for entry in forward.model.metadata_props} & {METADATA_KEY}
    if trained or any(node.op_type in ("ConvGrad", "BatchNormInternal") for node in graph.node):
        raise forward.error("is a training graph already: `bnfuse rewrite` and the others take it as it is")
    for node in graph.node:
        if any(attr.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for attr in node.attribute):
            raise forward.error_at(node, "has a subgraph: control flow cannot be trained. Export the model without it.")
    if not graph.output:
        raise forward.error("has no output: nothing to compute a loss from")


def separate_initializers_from_inputs(forward: Forward) -> None:
    """Take initializers out of the inputs, where old files list every one of them."""
    known = forward.initializers()
    if len(known) < len(forward.graph.initializer):
        raise forward.error("has two initializers of the same name")
    made = [name for node in forward.graph.node for name in node.output if name]
    if double := next((name for name in made if name in known), None):
        raise forward.error(f"has an initializer and the result of a node of one name ('{double}'): rename one")
    if len({*made}) < len(made):
        raise forward.error("has two results of the same name")
    kept = [value for value in forward.graph.input if value.name not in known]
    del forward.graph.input[:]
    forward.graph.input.extend(kept)


def drop_unread_inputs(forward: Forward) -> None:
    """Take out inputs of tf2onnx that nothing reads: constants that a function captured and that it folded."""
    read = forward.consumers().keys() | forward.output_names()
    unread = [value for value in forward.graph.input if value.name not in read]
    if forward.model.producer_name != "tf2onnx" or not unread or len(unread) == len(forward.graph.input):
        return
    for value in unread:
        forward.graph.input.remove(value)
    forward.note(f"left out inputs that nothing reads: {', '.join(value.name for value in unread)}")


def name_nodes(forward: Forward) -> None:
    """Give every node a name of its own: reports, errors and the diff speak of nodes by name."""
    taken: set[str] = set()
    for index, node in enumerate(forward.graph.node):
        node.name = fresh(node.name or f"{node.op_type}_{index}", taken)
        taken.add(node.name)


def set_batch(forward: Forward, batch: int) -> None:
    """Write `batch` into the first dimension of every data input."""
    if batch < 1:
        raise BnfuseError(f"--batch {batch} is out of range: it must be at least 1")
    shapes = shapes_as_exported(forward)
    for value in forward.graph.input:
        dims = value.type.tensor_type.shape.dim
        if not dims:
            raise forward.error(f"input '{value.name}' has no dimensions: --batch has nothing to fix")
        old = dims[0].dim_value or None
        dims[0].ClearField("dim_param")
        dims[0].dim_value = batch
        fit_reshapes_to_batch(forward, old, batch, shapes)


def shapes_as_exported(forward: Forward) -> dict[str, list[int] | None]:
    """Map names to the shapes that they have with the batch of the file, as far as onnx can tell."""
    if not any(node.op_type == "Reshape" for node in forward.graph.node):
        return {}
    try:
        return shapes_of(onnx.shape_inference.infer_shapes(without_large_values(forward.model)).graph)
    except Exception:  # what is wrong with the file is told where its shapes are needed
        return {}


@dataclasses.dataclass
class Constants:
    """Initializers that were no initializers in the file: Constant nodes, and what follows from them and from shapes.

    Among them are the placeholders, made by ConstantOfShape or Expand, of values that the file may not have.
    """

    names: set[str] = dataclasses.field(default_factory=set)
    placeholders: set[str] = dataclasses.field(default_factory=set)
    variables: frozenset[str] = frozenset()  # initializers that are not folded: what they are is not settled here

    def __or__(self, other: Constants) -> Constants:
        variables = self.variables | other.variables
        return Constants(self.names | other.names, self.placeholders | other.placeholders, variables)

    def adopt(self, copies: dict[str, str]) -> None:
        """Count copies among what their sources are; `copies` maps each copy to its source."""
        for known in (self.names, self.placeholders):
            known.update([copy for copy, source in copies.items() if source in known])


def fold_constants(forward: Forward, constants: Constants | None = None, *, shapes: bool = False) -> Constants:
    """Turn nodes that rearrange or compute with constants into initializers; with `shapes` a Shape too.

    `constants` are those that are known already. An Identity of an initializer is how torch's exporter writes a second
    tensor of equal values (two new BNs, say), so each reader gets a copy of its own.
    """
    found = Constants()
    known = set(constants.names) if constants else set()
    standing_in = set(constants.placeholders) if constants else set()
    kept = constants.variables if constants else frozenset()
    values = {name: tensor for name, tensor in forward.initializers().items() if name not in kept}
    types = element_types(forward.graph)
    sizes = forward.shapes() if shapes else {}
    gone = []
    for node in forward.graph.node:
        tensor = _folded(forward, node, values, types, sizes, known)
        if tensor is None:
            continue
        name = node.output[0]
        tensor.name = name
        values[name], types[name] = tensor, tensor.data_type
        forward.graph.initializer.append(tensor)
        gone.append(node)
        made_here = node.op_type in ("Constant", "ConstantOfShape", "Shape", "Size")
        if made_here or any(source in known for source in node.input):
            known.add(name)
            found.names.add(name)
        if node.op_type in ("ConstantOfShape", "Expand") or any(source in standing_in for source in node.input):
            standing_in.add(name)
            found.placeholders.add(name)
    forward.remove_nodes(gone)
    return found


def _folded(
    forward: Forward,
    node: onnx.NodeProto,
    values: dict[str, onnx.TensorProto],
    types: dict[str, int],
    shapes: dict[str, list[int] | None],
    constants: set[str],
) -> onnx.TensorProto | None:
    if node.op_type == "Constant":
        return _constant(forward, node)
    if node.domain not in ("", "ai.onnx") or node.op_type not in (*REARRANGING, *COMPUTING):
        return None
    shape = shapes.get(node.input[0]) if node.op_type in ("Shape", "Size") else None
    if shape is not None:
        given = attributes(node)
        part = shape[given.get("start", 0) : given.get("end", len(shape))]
        return numpy_helper.from_array(np.array(part if node.op_type == "Shape" else element_count(shape), np.int64))
    if node.op_type != "Identity" and any(
        name in forward.numbers or _is_weight(name, values, constants) for name in node.input
    ):
        return None
    if node.op_type == "CastLike" and node.input[0] in values and node.input[1] in types:
        array = numpy_helper.to_array(values[node.input[0]])
        return numpy_helper.from_array(array.astype(helper.tensor_dtype_to_np_dtype(types[node.input[1]])))
    if not node.input or any(name and name not in values for name in node.input):
        return None
    if node.op_type in COMPUTING and not all(_counts(name, values, constants) for name in node.input if name):
        return None
    return _evaluated(forward, node, values)


def _is_weight(name: str, values: dict[str, onnx.TensorProto], constants: set[str]) -> bool:
    """Tell whether an initializer of the file may be a parameter: it stays whole then, under its name, and what is made
    of it is made in the graph."""
    return name in values and name not in constants and bool(values[name].dims) and values[name].data_type in FLOATS


def _counts(name: str, values: dict[str, onnx.TensorProto], constants: set[str]) -> bool:
    """Tell whether a constant is no weight: of integers, or from the graph itself and small."""
    kind = values[name].data_type
    return kind in (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL) or (
        name in constants and element_count(values[name].dims) < LARGE
    )


def _constant(forward: Forward, node: onnx.NodeProto) -> onnx.TensorProto:
    given = attributes(node)
    if "value" in given:
        tensor = onnx.TensorProto()
        tensor.CopyFrom(given["value"])
        return tensor
    for key, kind in (("value_float", np.float32), ("value_floats", np.float32), ("value_int", np.int64)):
        if key in given:
            return numpy_helper.from_array(np.asarray(given[key], kind))
    if "value_ints" in given:
        return numpy_helper.from_array(np.asarray(given["value_ints"], np.int64))
    raise forward.error_at(node, "holds a value of a kind that cannot be trained: export it as a tensor.")


def _evaluated(forward: Forward, node: onnx.NodeProto, values: dict[str, onnx.TensorProto]) -> onnx.TensorProto:
    feeds = {name: numpy_helper.to_array(values[name]) for name in node.input if name}
    size = result_elements(node, feeds, forward.opset)
    if size > FOLD_LIMIT:
        raise forward.error_at(node, f"makes a tensor of {size:.0f} elements: no network has that many in one tensor.")
    inputs = [helper.make_tensor_value_info(n, values[n].data_type, list(values[n].dims)) for n in feeds]
    outputs = [helper.make_tensor_value_info(node.output[0], TensorProto.UNDEFINED, None)]
    graph = helper.make_graph([node], "constant", inputs, outputs)
    model = helper.make_model(graph, opset_imports=forward.model.opset_import, ir_version=8)
    try:
        (result,) = ReferenceEvaluator(model).run(None, feeds)
    except Exception as error:
        raise forward.error_at(node, f"cannot be computed from its constants: {' '.join(str(error).split())}") from None
    return numpy_helper.from_array(np.asarray(result, order="C"))


def element_types(graph: onnx.GraphProto) -> dict[str, int]:
    """Map the names of all values with a declared type to onnx's number of their element type."""
    types = {value.name: value.type.tensor_type.elem_type for value in typed_values(graph)}
    return types | {tensor.name: tensor.data_type for tensor in graph.initializer}


def convert_opset(forward: Forward) -> None:
    """Convert opsets below those that gradients are made in, and the IR version.

    Newer opsets are brought down when their operators are decomposed.
    """
    versions = {opset.domain or "": opset.version for opset in forward.model.opset_import}
    if "" not in versions:
        versions[""] = versions.get("ai.onnx", 1)
    version = versions[""]
    forward.model.ir_version = min(max(forward.model.ir_version, IR_VERSIONS[0]), IR_VERSIONS[1])
    if version < OLDEST:
        convert_to(forward, version, TARGET)


def raise_opset(forward: Forward, version: int) -> None:
    """Convert to `version` what is below it."""
    current = forward.opset
    if current < version:
        convert_to(forward, current, version)


def convert_to(forward: Forward, version: int, target: int) -> None:
    """Convert the model to opset `target` by onnx's converter. Raises BnfuseError where it cannot."""
    try:
        light = onnx.version_converter.convert_version(without_large_values(forward.model), target)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise forward.error(
            f"opset {version} does not convert to {target} ({reason[:200]}). "
            f"Export it with opset {TRAINING_MODE} to {NEWEST}."
        ) from None
    adopt_graph(forward.model, light)
    name_nodes(forward)
    if version < SAME:
        forward.note(f"converted from opset {version} to {target}")


def check_valid(forward: Forward) -> None:
    """Run onnx's own checker: attributes of the right kind, operands in number, order of nodes."""
    try:
        onnx.checker.check_model(_readable(forward))
    except Exception as error:
        raise forward.error(f"is no valid ONNX model: {' '.join(str(error).split())[:300]}") from None


def settle_shapes(forward: Forward, constants: Constants) -> Constants:
    """Infer shapes and fold what is computed from them, in turns until neither tells more. Returns `constants` and
    more."""
    require_static_inputs(forward)
    while True:
        adopt_shapes(forward)
        before = len(forward.graph.node)
        constants |= fold_constants(forward, constants, shapes=True)
        resolve_sequences(forward)
        if len(forward.graph.node) == before:
            break
    require_static_results(forward)
    return constants


def infer_shapes(forward: Forward) -> None:
    """Infer all shapes anew from the inputs; raises where one is unknown or depends on the data."""
    require_static_inputs(forward)
    adopt_shapes(forward)
    require_static_results(forward)


def _readable(forward: Forward) -> onnx.ModelProto:
    """Copy the model for onnx's inference and checker, which stumble over some operators whose result is like their
    operand."""
    light = without_large_values(forward.model)
    for node in light.graph.node:
        if node.op_type in LIKE_OPERAND:
            node.op_type = "Identity"
            del node.input[1:], node.attribute[:]
    return light


def adopt_shapes(forward: Forward) -> None:
    """Put what onnx infers of all shapes in place of what the file says."""
    graph = forward.graph
    settle_ceil(forward)
    del graph.value_info[:]
    for value in graph.output:
        kind = value.type.tensor_type.elem_type
        value.CopyFrom(helper.make_tensor_value_info(value.name, kind, None))
    light = _readable(forward)
    try:
        light = onnx.shape_inference.infer_shapes(light, check_type=True, strict_mode=True, data_prop=True)
    except Exception as error:
        raise forward.error(f"its shapes do not fit together: {' '.join(str(error).split())[:300]}") from None
    del graph.value_info[:], graph.output[:]
    graph.value_info.extend(light.graph.value_info)
    graph.output.extend(light.graph.output)


def require_static_results(forward: Forward) -> None:
    """Raise where a result has a dimension that is no number, with the node."""
    shapes, computed = forward.shapes(), forward.producers()
    for node in forward.graph.node:
        for name in node.output:
            if name and shapes.get(name) is None:
                extent = (shapes.get(node.input[0]) or [])[2:] if node.op_type in POOLS else []
                if extent and (reason := fault_of(node, extent)):
                    raise forward.error_at(node, reason)
                sizes = [operand for operand in node.input[1:] if operand in computed]
                what = f"from '{sizes[0]}', which depends on the data" if sizes else "from the values of the data"
                raise forward.error_at(
                    node,
                    f"gives '{name}', whose shape follows {what}: it must be the same in every step.",
                )


def require_static_inputs(forward: Forward) -> None:
    """Raise where an input has no shape, or a dimension that is no number."""
    for value in forward.graph.input:
        kind = value.type.tensor_type
        if not kind.HasField("shape"):
            raise forward.error(f"input '{value.name}' has no shape: export the model with static shapes")
        if static_shape(value) is not None:
            if min(static_shape(value) or [1]) < 1:
                raise forward.error(f"input '{value.name}' has an empty dimension: pass --batch N")
            continue
        dims = [dim.dim_value or dim.dim_param or "?" for dim in kind.shape.dim]
        only_batch = all(dim.dim_value > 0 for dim in kind.shape.dim[1:])
        remedy = "pass --batch N" if only_batch else "export the model with a static image size"
        raise forward.error(f"input '{value.name}' has the dynamic shape {dims}: {remedy}")
