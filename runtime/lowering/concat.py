"""Lowering of Concat and Split: of maps along their channels nothing is left to do (layout.py)."""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.analysis.provenance import is_channel_concat
from bnfuse.runtime.lowering.generic import lower_generic
from bnfuse.runtime.lowering.operands import optional
from bnfuse.runtime.lowering.state import Lowering
from bnfuse.runtime.lowering.values import attributes_of


def lower_concat(low: Lowering, node: ir.Node) -> None:
    """Lower a concatenation: of channels it lies together already (layout.py), of vectors or images it is put
    together."""
    value = node.outputs[0]
    if value in low.vector_slots.of and low.form(low.operand(node, 0)).dtype == "float32":
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
    """Put maps one behind the other: each is brought where it belongs, from the file's layout if it has no other."""
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
    start, sizes = 0, split_sizes(low, node, shape[1])
    if len(sizes) != len(node.outputs) or sum(sizes) != shape[1]:
        raise low.error(node, f"splits {shape[1]} channels into {len(node.outputs)} parts of {sizes}: build it anew")
    if min(sizes) <= 0:
        lower_generic(low, node)  # a map has channels
        return
    for value, size in zip(node.outputs, sizes, strict=True):
        low.define(value, (shape[0], size, *shape[2:]))
        low.place(value, low.map(x).channels(start, start + size))
        start += size


def split_sizes(low: Lowering, node: ir.Node, channels: int) -> list[int]:
    """Find the channels of each part of a split. Raises BnfuseError where they are not known now."""
    lengths = optional(node, 1)
    if lengths is not None:
        known = low.constant(lengths)
        if known is None:
            raise low.error(node, f"splits by '{lengths.name}', which is not constant")
        return [int(size) for size in known]
    given = attributes_of(node).get("split")
    size = -(-channels // len(node.outputs))
    return list(given) if given else [min(size, channels - i * size) for i in range(len(node.outputs))]
