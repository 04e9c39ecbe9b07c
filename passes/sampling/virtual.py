"""Virtual samples: rows of noise run through the network beside the batch (VDN, [Chen18], section 4.2).

    loss, log_prob =                       rows  = Concat(virtual, x)                [n + N, C, H, W]
      SoftmaxCrossEntropyLoss(      ->     marks = Concat(ignored, labels)           [n + N]
        network(x), labels)                all   = network(rows)
    logits = network(x)                    loss, log_prob = SoftmaxCrossEntropyLoss(all, marks)   ignore_index
                                           logits = Slice(all, n, n + N)

Every map behind the entry has n more rows, in front; outputs of the graph have the real rows only. The virtual rows'
labels are the loss's ignore_index, so the loss is the mean over the real rows and its gradient is 0 in the others. In
the network their gradient is not 0: it comes through the statistics. `virtual` is an input, drawn each step.

In groups (--local-bn) each group of samples has its own virtual rows in front: Split and Concat interleave them.

What cannot have more rows raises an error that names it: a loss without ignore_index, an operator that works across
the batch (a mean over it, say), a size of the batch that is hidden in a constant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError, at_node
from bnfuse.graph.drawing import FED
from bnfuse.graph.sampling import METADATA_KEY as SAMPLING_KEY
from bnfuse.graph.sampling import sampling_of
from bnfuse.graph.signature import INTEGERS, METADATA_KEY, GraphSignature
from bnfuse.passes.dialect.source_ops import constant_of, is_map, sizes
from bnfuse.passes.rewriter import Editor, FusionResult
from bnfuse.passes.sampling.batch_axis import batch_axes, refusal

IGNORED = -100  # onnx's and torch's usual mark of a label that does not count
LABELS_OF = {"SoftmaxCrossEntropyLoss": 1, "SoftmaxCrossEntropyGrad": 2}  # op -> input that holds the labels
SHAPE_OF = {"Reshape": 1, "Expand": 1}  # op -> input that holds the shape of the result


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of the batch in order: `groups` times `virtual` and then `real` ones."""

    virtual: int
    real: int
    groups: int = 1

    @property
    def total(self) -> int:
        """Count all rows of the batch."""
        return self.groups * (self.virtual + self.real)


class AddVirtual(ir.passes.InPlacePass):
    """Put virtual samples in front of the batch. `signature` has their input afterwards."""

    def __init__(self, count: int, signature: GraphSignature, *, groups: int = 1) -> None:
        super().__init__()
        self.count, self.signature, self.groups = count, signature, groups

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model and its signature in place. Raises BnfuseError where something cannot have more rows."""
        editor = Editor(model, "virtual")
        data, labels = entry(model.graph, self.signature)
        batch = sizes(data)[0]
        if self.count < 1 or batch % self.groups:
            raise BnfuseError(f"{self.count} virtual samples in {self.groups} groups of a batch of {batch}: give vdn:1")
        rows = Rows(self.count, batch // self.groups, self.groups)
        axes = batch_axes(model.graph, [data, labels], counted=labels)
        widen(editor, axes, batch, rows.total)
        first = next(iter(model.graph))
        virtual = add_input(editor, data, rows)
        interleave(editor, data, virtual, rows, before=first)
        mask(editor, labels, rows, before=first)
        for index, output in enumerate(list(model.graph.outputs)):
            if output in axes:
                keep_real(editor, index, axes[output], rows)
        self.signature = dataclasses.replace(self.signature, virtual=(*self.signature.virtual, str(virtual.name)))
        record(model, self.signature)
        return editor.result()


def entry(graph: ir.Graph, signature: GraphSignature) -> tuple[ir.Value, ir.Value]:
    """Find the inputs that take the images and their labels. Raises BnfuseError where they cannot have more rows."""
    inputs = {value.name: value for value in graph.inputs}
    if signature.virtual:
        raise BnfuseError(
            f"input '{signature.virtual[0]}' takes virtual samples already: rewrite the source graph anew"
        )
    if len(signature.data) != 1 or len(signature.labels) != 1:
        named = ", ".join((*signature.data, *signature.labels)) or "none"
        raise BnfuseError(f"virtual samples go beside one data input with its labels; this graph has {named}: no vdn")
    data, labels = inputs[signature.data[0]], inputs[signature.labels[0]]
    if not is_map(data):
        raise BnfuseError(f"input '{data.name}' is no float32 batch of images with a fixed shape: no vdn")
    if labels.dtype not in INTEGERS or labels.shape is None or len(labels.shape) != 1:
        raise BnfuseError(
            f"labels input '{labels.name}' holds no class numbers, so virtual ones cannot be masked: no vdn"
        )
    return data, labels


def widen(editor: Editor, axes: dict[ir.Value, int], batch: int, total: int) -> None:
    """Give every value behind the inputs its new size, and the constants that name the old one."""
    for value, axis in axes.items():
        node = value.producer()
        if constant_of(value) is not None:
            widen_constant(editor, axes, value, axis, total)
        if node is None or value.shape is None or node.op_type == "Constant":
            continue
        shape = list(value.shape)
        if shape[axis] != batch:
            raise refusal(node, f"gives '{value.name}' of {shape[axis]} rows where the batch has {batch}")
        if node.op_type in SHAPE_OF:
            widen_target(editor, node, axis, total)
        shape[axis] = total
        if node.op_type in FED and "shape" in node.attributes:
            node.attributes["shape"] = ir.AttrInt64s("shape", [int(size) for size in shape if isinstance(size, int)])
        value.shape = ir.Shape(shape)


def widen_constant(editor: Editor, axes: dict[ir.Value, int], value: ir.Value, axis: int, total: int) -> None:
    """Make a constant of alike rows longer where values with more rows are made of it."""
    array = constant_of(value)
    assert array is not None
    new = editor.constant(f"{value.name}/rows", np.repeat(array.take([0], axis), total, axis))
    for node, index in list(value.uses()):
        if node.outputs[0] in axes:
            node.replace_input_with(index, new)
            editor.fused.append(node.name or node.op_type)


def widen_target(editor: Editor, node: ir.Node, axis: int, total: int) -> None:
    """Make the constant that names the shape of a node's result name the new batch, where it named the old one."""
    at = SHAPE_OF[node.op_type]
    target = constant_of(node.inputs[at])
    if target is not None and target[axis] != -1:
        new = target.copy()
        new[axis] = total
        node.replace_input_with(at, editor.constant(f"{node.name}/shape", new))
        editor.fused.append(node.name or node.op_type)


def add_input(editor: Editor, data: ir.Value, rows: Rows) -> ir.Value:
    """Add the graph's input of virtual samples, [rows, C, H, W], of the data's type."""
    shape = ir.Shape([rows.virtual * rows.groups, *sizes(data)[1:]])
    value = ir.Value(name=editor.fresh("virtual"), shape=shape, type=data.type)
    editor.graph.inputs.append(value)
    return value


def interleave(editor: Editor, data: ir.Value, virtual: ir.Value, rows: Rows, *, before: ir.Node) -> None:
    """Let what read the data read the virtual samples and the data, group by group."""
    readers = list(data.uses())
    parts = [
        part
        for pair in zip(
            split(editor, virtual, [rows.virtual] * rows.groups, before=before),
            split(editor, data, [rows.real] * rows.groups, before=before),
            strict=True,
        )
        for part in pair
    ]
    joined = join(editor, parts, f"{data.name}/with_virtual", before=before)
    for node, index in readers:
        node.replace_input_with(index, joined)


def mask(editor: Editor, labels: ir.Value, rows: Rows, *, before: ir.Node) -> None:
    """Let what read the labels read marks that it ignores for the virtual rows."""
    readers = [(node, index) for node, index in labels.uses() if node.op_type != "Size"]  # which counts the real ones
    losses = [node for node, _ in readers if node.op_type == "SoftmaxCrossEntropyLoss"]
    stated = any("ignore_index" in node.attributes for node in losses)
    ignored = ignored_label(losses)
    for node, index in readers:
        if LABELS_OF.get(node.op_type) != index and not (stated and node.op_type == "Equal"):
            raise at_node(
                node.name or "", node.op_type, "reads the labels, and cannot ignore virtual ones. Leave vdn out."
            )
        if node in losses:
            node.attributes["ignore_index"] = ir.AttrInt64("ignore_index", ignored)
        elif node.op_type in LABELS_OF:
            without_virtual(editor, node, rows)
    assert labels.dtype is not None
    marks = editor.constant(f"{labels.name}/ignored", np.full(rows.virtual, ignored, labels.dtype.numpy()))
    parts = split(editor, labels, [rows.real] * rows.groups, before=before)
    joined = join(editor, [v for part in parts for v in (marks, part)], f"{labels.name}/with_virtual", before=before)
    for node, index in readers:
        node.replace_input_with(index, joined)


def without_virtual(editor: Editor, node: ir.Node, rows: Rows) -> None:
    """Let the gradients of the rows' losses, [N], be 0 in the virtual rows."""
    dlosses = node.inputs[0]
    assert dlosses is not None
    real = np.tile(np.repeat(np.array([0, 1], np.float32), [rows.virtual, rows.real]), rows.groups)
    counted = editor.constant(f"{node.name}/real", real)
    (masked,) = editor.standard("Mul", [dlosses, counted], 1, before=node, of=[node])
    masked.shape, masked.type = ir.Shape([rows.total]), dlosses.type
    node.replace_input_with(0, masked)


def ignored_label(nodes: Sequence[ir.Node]) -> int:
    """Give the label that the losses ignore already, or the usual one. Raises BnfuseError where they differ."""
    stated = {node.attributes["ignore_index"].as_int() for node in nodes if "ignore_index" in node.attributes}
    if len(stated) > 1:
        raise BnfuseError(f"the losses ignore different labels ({sorted(stated)}), so virtual ones have none: no vdn")
    return stated.pop() if stated else IGNORED


def keep_real(editor: Editor, index: int, axis: int, rows: Rows) -> None:
    """Cut a graph output down to the real rows, under its old name."""
    output = editor.graph.outputs[index]
    name, shape = str(output.name), list(output.shape or ())
    shape[axis] = rows.real * rows.groups
    last = output.producer()
    assert last is not None
    following = list(editor.graph)
    place = following[following.index(last) + 1] if following[-1] is not last else None
    output.name = editor.fresh(f"{name}/with_virtual")
    real = real_rows(editor, output, axis, rows, after=last, before=place)
    real.name, real.shape, real.type = name, ir.Shape(shape), output.type
    editor.graph.outputs[index] = real


def real_rows(
    editor: Editor, value: ir.Value, axis: int, rows: Rows, *, after: ir.Node, before: ir.Node | None
) -> ir.Value:
    """Cut the real rows out of a value that holds virtual ones too, group by group."""
    if rows.groups > 1:
        parts = split(editor, value, [rows.virtual, rows.real] * rows.groups, axis, before=before, of=after)
        return join(editor, parts[1::2], f"{value.name}/real", axis, before=before, of=after)
    bounds = [
        editor.constant(f"{value.name}/{name}", np.array([number], np.int64))
        for name, number in (("start", rows.virtual), ("stop", rows.total), ("axis", axis))
    ]
    return insert(editor, "Slice", [value, *bounds], 1, before=before, of=after)[0]


def split(
    editor: Editor,
    value: ir.Value,
    lengths: list[int],
    axis: int = 0,
    *,
    before: ir.Node | None,
    of: ir.Node | None = None,
) -> list[ir.Value]:
    """Cut a value into consecutive parts, typed; the value itself where there is one part."""
    if len(lengths) == 1:
        return [value]
    given = editor.constant(f"{value.name}/rows", np.array(lengths, np.int64))
    parts = insert(editor, "Split", [value, given], len(lengths), before=before, of=of or before, axis=axis)
    for part, length in zip(parts, lengths, strict=True):
        shape = list(value.shape or ())
        shape[axis] = length
        part.shape, part.type = ir.Shape(shape), value.type
    return parts


def join(
    editor: Editor,
    parts: list[ir.Value],
    name: str,
    axis: int = 0,
    *,
    before: ir.Node | None,
    of: ir.Node | None = None,
) -> ir.Value:
    """Concatenate values along an axis, under a new name, typed."""
    (joined,) = insert(editor, "Concat", parts, 1, before=before, of=of or before, axis=axis)
    shape = list(parts[0].shape or ())
    shape[axis] = sum(part.shape[axis] for part in parts if part.shape is not None)
    joined.name, joined.shape, joined.type = editor.fresh(name), ir.Shape(shape), parts[0].type
    return joined


def insert(
    editor: Editor,
    op: str,
    inputs: list[ir.Value],
    outputs: int,
    *,
    before: ir.Node | None,
    of: ir.Node | None,
    **more: int,
) -> list[ir.Value]:
    """Insert a standard node before another one, or at the end of the graph."""
    assert of is not None
    anchor = before or of
    values = editor.standard(op, inputs, outputs, before=anchor, of=[of], **more)  # type: ignore[arg-type]
    node = values[0].producer()
    assert node is not None
    if before is None:
        editor.graph.remove(node)
        editor.graph.append(node)
    editor.fused.append(node.name or op)
    return values


def record(model: ir.Model, signature: GraphSignature) -> None:
    """Write the new input into the metadata: its role, and that it is drawn."""
    model.metadata_props[METADATA_KEY] = signature.to_json()
    model.metadata_props[SAMPLING_KEY] = dataclasses.replace(sampling_of(model), virtual=signature.virtual).to_json()
