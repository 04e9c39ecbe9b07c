"""Lowering of the operators that have no kernel of their own (kernels/common/generic_ops.py).

Generic kernels know dense tensors and nothing of maps. Elementwise operators and reductions of maps are given the
shapes as they lie in memory, NHWC. What depends on the order of axes gets its operands in the layout of the file, and
so does everything that has to do with maps stored in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.common import generic_elementwise
from bnfuse.runtime.kernels.common.generic import GenericProblem, row_major
from bnfuse.runtime.kernels.common.generic_ops import SCALARS, SUPPORTED
from bnfuse.runtime.kernels.common.generic_reduce import FOLDINGS
from bnfuse.runtime.lowering.layout import MapRef, to_nhwc
from bnfuse.runtime.lowering.state import Lowering, Ref
from bnfuse.runtime.lowering.values import attributes_of
from bnfuse.runtime.program import program as p

ELEMENTWISE = frozenset({*generic_elementwise.OPS, *SCALARS} - set(generic_elementwise.RENAMED))
NHWC_AXIS = {0: 0, 1: 3, 2: 1, 3: 2}  # axis of the file -> axis in memory

# inputs that have to be constants, by position: the attribute that the kernel takes instead
STATIC: dict[str, dict[int, str]] = {
    "Slice": {1: "starts", 2: "ends", 3: "axes", 4: "steps"},
    "Pad": {1: "pads", 2: "value", 3: "axes"},
    "Split": {1: "split"},
    "Expand": {1: "shape"},
    "ConstantOfShape": {0: "shape"},
    "Dropout": {1: "ratio", 2: "training_mode"},
    "Tile": {1: "repeats"},
    "Range": {0: "start", 1: "limit", 2: "delta"},
    "OneHot": {1: "depth"},
    "Trilu": {1: "k"},
    "TopK": {1: "k"},
    "CumSum": {1: "axis"},
    "CumProd": {1: "axis"},
    **{reduction: {1: "axes"} for reduction in FOLDINGS},
}
SHAPE_ALONE = frozenset({"EyeLike"})  # of their operand nothing but the shape matters
SCATTERED_ROWS = 1 << 22  # rows whose updates are listed beforehand, at most: the list is kept in memory


def lower_generic(low: Lowering, node: ir.Node) -> None:
    """Launch the generic kernel of a node, in the layout that costs least."""
    if node.op_type not in SUPPORTED:
        raise low.error(node, f"has no kernel: write it by operators that have one: {', '.join(supported())}")
    operands, attributes = split_operands(low, node)
    outputs = written(node)
    types = low.output_types(node)
    if in_memory_order(low, node, operands, types, attributes):
        lower_as_maps(low, node, operands, outputs, types, attributes)
        return
    ins = [(low.shape(v), low.form(v).dtype) for v in operands]
    refs: dict[str, Ref] = {f"in{i}": low.dense(v) for i, v in enumerate(operands)}
    for i, (value, (shape, dtype)) in enumerate(zip(outputs, types, strict=True)):
        refs[f"out{i}"] = low.new_dense(value, shape, dtype)
    launch(low, node, ins, types, attributes, refs)


def written(node: ir.Node) -> list[ir.Value]:
    """List the outputs up to the last that has a name. One before it that the file leaves out gets a name here."""
    last = max((index for index, value in enumerate(node.outputs) if value.name), default=-1)
    outputs = list(node.outputs[: last + 1])
    for index, value in enumerate(outputs):
        value.name = value.name or f"{node.name or node.op_type}/unused/{index}"
    return outputs


def supported() -> list[str]:
    """Names of the standard operators that can be lowered, without those of gradients."""
    from bnfuse.runtime.lowering.source import SOURCE_OPS

    return sorted(
        name
        for name in {*SUPPORTED, *(name for _, name in SOURCE_OPS)}
        if onnx.defs.has(name) and not name.endswith("Grad")
    )


def split_operands(low: Lowering, node: ir.Node) -> tuple[list[ir.Value], dict[str, Any]]:
    """Divide a node's inputs into what a kernel reads and what it must know when it is made, by name."""
    attributes = {name: scalar_or_tuple(value) for name, value in attributes_of(node).items()}
    static = STATIC.get(node.op_type, {})
    operands = []
    for index, value in enumerate(node.inputs):
        if value is None or not value.name or node.op_type in SHAPE_ALONE:
            continue
        if index not in static:
            operands.append(value)
            continue
        constant = low.constant(value)
        if constant is None:
            raise low.error(node, f"reads '{static[index]}' from '{value.name}', which is not constant")
        attributes[static[index]] = scalar_or_tuple(constant)
    if node.op_type == "Dropout":
        attributes["node"] = low.order[node]
        attributes.setdefault("training_mode", 0)  # as ONNX has it where the input is left out
    return operands, attributes


def scalar_or_tuple(value: Any) -> Any:
    """Bring an attribute into a form that can be hashed and printed."""
    if hasattr(value, "numpy"):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        return value.item() if value.size == 1 and value.ndim == 0 else tuple(value.reshape(-1).tolist())
    return value


def in_memory_order(
    low: Lowering, node: ir.Node, operands: Sequence[ir.Value], types: Sequence[Any], attributes: Mapping[str, Any]
) -> bool:
    """Whether a map among the operands can stay as it lies: generic kernels know the types of the file only."""
    if not any(is_map(low, value) for value in operands):
        return False
    of_file = [(low.shape(value), low.form(value).dtype) for value in operands] + list(types)
    if any(low.stored(shape, dtype) != dtype for shape, dtype in of_file):
        return False
    if node.op_type in ELEMENTWISE:
        return all(len(shape) == 4 for shape, _ in types) and all(fits_nhwc(low, v) for v in operands)
    if node.op_type.startswith("Reduce"):
        kept = {0, 1, 2, 3} - {axis % 4 for axis in attributes.get("axes") or range(4)}
        return bool(attributes.get("keepdims", 1)) or not (1 in kept and kept & {2, 3})
    return False


def is_map(low: Lowering, value: ir.Value) -> bool:
    """Whether the value lies in memory as a map; one of a single pixel is both dense and a map."""
    form = low.form(value)
    if len(form.shape) != 4 or form.constant is not None:
        return False
    return form.map is not None or MapRef(0, 0, low.map_type(form.shape, form.dtype)).is_file_layout


def fits_nhwc(low: Lowering, value: ir.Value) -> bool:
    """Tell whether a value can lie as a map: maps do; of a lower rank, what has but one axis that is not 1."""
    shape = low.shape(value)
    return len(shape) == 4 or sum(size != 1 for size in shape) <= 1


def memory_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Give the NHWC shape of a tensor of rank 4 at most, filled up with axes of 1 in front."""
    return to_nhwc((1,) * (4 - len(shape)) + shape)


def lower_as_maps(
    low: Lowering,
    node: ir.Node,
    operands: Sequence[ir.Value],
    outputs: Sequence[ir.Value],
    types: Sequence[tuple[tuple[int, ...], str]],
    attributes: dict[str, Any],
) -> None:
    """Launch the same kernel over shapes as they lie in memory. A slot of a wider buffer is copied out, or into."""
    if attributes.get("axes"):
        attributes["axes"] = tuple(NHWC_AXIS[axis % 4] for axis in attributes["axes"])
    attributes.pop("shape", None)
    ins = [(memory_shape(low.shape(v)), low.form(v).dtype) for v in operands]
    refs: dict[str, Ref] = {f"in{i}": dense_map(low, v) for i, v in enumerate(operands)}
    outs, late = [], []
    for i, (value, (shape, dtype)) in enumerate(zip(outputs, types, strict=True)):
        outs.append((memory_shape(shape) if len(shape) == 4 else shape, dtype))
        place = low.new_map(value, shape, dtype)
        refs[f"out{i}"] = place.storage
        if not place.is_dense:
            aside = MapRef(low.storage(place.type.pixels * place.type.c, dtype), 0, low.map_type(shape, dtype))
            refs[f"out{i}"] = aside.storage
            late.append((aside, place))
    launch(low, node, ins, outs, attributes, refs)
    for aside, place in late:
        low.copy_map(aside, place)


def dense_map(low: Lowering, value: ir.Value) -> int:
    """Give the storage of an operand in memory's order of axes."""
    if len(low.shape(value)) != 4:
        return low.dense(value)
    ref = low.map(value)
    if ref.is_dense:
        return ref.storage
    dtype = low.form(value).dtype
    kind = low.map_type(low.shape(value), dtype)
    copy = MapRef(low.storage(kind.elements, dtype), 0, kind)
    low.copy_map(ref, copy)
    return copy.storage


def launch(
    low: Lowering, node: ir.Node, ins: Sequence[Any], outs: Sequence[Any], attributes: Mapping[str, Any], refs: Any
) -> None:
    """Launch the generic kernel of a node; attributes that are None are left out, drawn ones get their scalars."""
    launch_as(node.op_type, low, ins, outs, attributes, refs)


def launch_as(
    op_type: str, low: Lowering, ins: Sequence[Any], outs: Sequence[Any], attributes: Mapping[str, Any], refs: Any
) -> None:
    """Launch the generic kernel of an operator by its name."""
    known = tuple(sorted((name, value) for name, value in attributes.items() if value is not None))
    problem = GenericProblem(op_type, tuple(ins), tuple(outs), known)
    scalars = [p.Scalar(name) for name in SCALARS.get(op_type, ())]
    low.launch(registry.GENERIC, (problem, low.target), refs, scalars)


def lower_sum(low: Lowering, node: ir.Node) -> None:
    """Of maps one sweep, wherever they lie; else generic."""
    values = [value for value in node.inputs if value is not None]
    shapes = {low.shape(value) for value in values}
    if len(shapes) != 1 or len(next(iter(shapes))) != 4 or any(low.form(v).dtype != "float32" for v in values):
        lower_generic(low, node)
        return
    (shape,) = shapes
    if all(low.lies_dense(value) for value in values):
        kind = low.rows_type(shape)
        refs: dict[str, Ref] = {f"x{i}": MapRef(low.dense(value), 0, kind) for i, value in enumerate(values)}
        y = MapRef(low.new_dense(node.outputs[0], shape), 0, kind)
    else:
        refs = {f"x{i}": low.map(value) for i, value in enumerate(values)}
        y = low.new_map(node.outputs[0], shape)
    refs["y"] = y
    kinds = tuple(refs[f"x{i}"].type for i in range(len(values)))  # type: ignore[union-attr]
    low.launch(registry.SUM_MAPS, (kinds, y.type, low.target), refs)


def lower_scatter(low: Lowering, node: ir.Node) -> None:
    """Lower ScatterND and ScatterElements. Rows of constant indices get a kernel that knows the updates of each."""
    data, indices, updates = (low.operand(node, index) for index in range(3))
    shape, dtype = low.shape(data), low.form(data).dtype
    attributes = {name: attributes_of(node)[name] for name in ("axis", "reduction") if name in node.attributes}
    start, known = low.constant(data), low.constant(indices)
    operands: list[tuple[tuple[Any, str], int]] = []
    if start is not None and start.size and (start == start.flat[0]).all():
        attributes["fill"] = start.flat[0].item()
    else:
        operands.append(((shape, dtype), low.dense(data)))
    op_type, changes = node.op_type, ((low.shape(updates), dtype), low.dense(updates))
    if known is None or not is_listed(node, shape, known):
        operands += [((low.shape(indices), low.form(indices).dtype), low.dense(indices)), changes]
    else:
        op_type = "ScatterRows"
        lists = updates_by_row(known, shape[: known.shape[-1]])
        operands += [changes, *(((a.shape, a.dtype.name), low.constant_storage(a)) for a in lists)]
    refs: dict[str, Ref] = {f"in{i}": storage for i, (_, storage) in enumerate(operands)}
    refs["out0"] = low.new_dense(node.outputs[0], shape, dtype)
    launch_as(op_type, low, [kind for kind, _ in operands], [(shape, dtype)], attributes, refs)


def is_listed(node: ir.Node, shape: tuple[int, ...], indices: np.ndarray) -> bool:
    """Whether the updates of a scatter into data of this shape are listed row by row beforehand."""
    rows = math.prod(shape[: indices.shape[-1]]) if node.op_type == "ScatterND" else 0
    return indices.size > 0 and math.prod(shape) > 0 and 0 < rows <= SCATTERED_ROWS


def updates_by_row(indices: np.ndarray, named: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """List the updates of a ScatterND row by row of the data: where each row's begin in the list, and the list.

    `named` has the sizes of the axes that an index names. Both are int32; the updates of a row keep their order.
    """
    sizes = np.array(named, np.int64)
    vectors = indices.reshape(-1, len(named)).astype(np.int64)
    vectors = np.clip(np.where(vectors < 0, vectors + sizes, vectors), 0, sizes - 1)
    row = vectors @ np.array(row_major(named), np.int64)
    order = np.argsort(row, kind="stable")
    starts = np.searchsorted(row[order], np.arange(math.prod(named) + 1))
    return starts.astype(np.int32), order.astype(np.int32)
