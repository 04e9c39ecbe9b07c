"""Lowering of Transposes between the channels' two places: what a map is in memory, and what the file then says it is.

    [N, C, H, W] -> [N, H, W, C]     a map, which lies in memory as the result does: the same storage
    [N, H, W, C] -> [N, C, H, W]     a dense tensor, which is a map as it lies

Where the type or the place differs it is one copy. Any other Transpose is generic.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from bnfuse.opset.traffic import RESHAPES
from bnfuse.runtime.lowering.generic import lower_generic
from bnfuse.runtime.lowering.layout import MapRef
from bnfuse.runtime.lowering.state import Lowering
from bnfuse.runtime.lowering.values import Form, attributes_of

CHANNELS_LAST, CHANNELS_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


def lower_transpose(low: Lowering, node: ir.Node) -> None:
    """Lower a Transpose: a change of names where memory has the order already."""
    x, order = low.operand(node, 0), tuple(attributes_of(node).get("perm") or ())
    form = low.form(x)
    shape = tuple(form.shape[axis] for axis in order)
    if form.dtype == "float32" and form.map is not None and order == CHANNELS_LAST:
        _rows_of_map(low, node.outputs[0], form.map, shape)
    elif form.dtype == "float32" and form.map is None and form.dense is not None and order == CHANNELS_FIRST:
        _map_of_rows(low, x, node.outputs[0], form.dense, shape)
    else:
        lower_generic(low, node)


def _rows_of_map(low: Lowering, value: ir.Value, ref: MapRef, shape: tuple[int, ...]) -> None:
    if ref.is_dense and low.storages[ref.storage].dtype == "float32":
        low.forms[value] = Form(shape, "float32", dense=ref.storage)
        low.residents[ref.storage].append((value, ref))
    else:
        low.convert(low.new_dense(value, shape), _pixels(ref), "float32", to_map=False)


def _map_of_rows(low: Lowering, x: ir.Value, value: ir.Value, dense: int, shape: tuple[int, ...]) -> None:
    kind = low.map_type(shape)
    if low.stored(shape) == "float32" and value not in low.slots.of and _is_only_reader(x):
        low.forms[value] = Form(shape, "float32")
        low.place(value, MapRef(dense, 0, kind))
    else:
        low.convert(dense, _pixels(low.new_map(value, shape)), "float32", to_map=True)


def _pixels(ref: MapRef) -> MapRef:
    """Give a map as images of one pixel: then both layouts are one."""
    return dataclasses.replace(ref, type=dataclasses.replace(ref.type, n=ref.type.pixels, h=1, w=1))


def _is_only_reader(x: ir.Value) -> bool:
    """Tell whether one node reads a tensor, under whatever shape: what becomes a map may be updated in place."""
    while True:
        if len(x.uses()) != 1 or x.is_graph_output():
            return False
        node = x.producer()
        if node is None or node.op_type not in RESHAPES or node.inputs[0] is None:
            return node is not None
        x = node.inputs[0]
