"""Poolings that round up: what onnx, onnxruntime and torch count differently is written so that all of them agree.

    the last window starts in the padding           ceil_mode=0
    so on one axis, and hangs over on another       ceil_mode=0, and the overhang as padding
    no padding, averages that would count it        count_include_pad=0

onnx's shape inference and onnxruntime 1.19 have a window too many where the last would start in the padding behind the
map, and onnxruntime takes the overhang for padding where averages count that.
"""

from __future__ import annotations

import onnx

from bnfuse.core.windows import POOLS, axes_of, is_miscounted, resolved_pads, why_not
from bnfuse.graph.protos import attributes, remove_attributes, set_attribute, shapes_of, without_large_values

from .graph import Forward


def settle_ceil(forward: Forward) -> None:
    """Settle every pooling with ceil_mode=1, first ones first: the maps of later ones follow from them."""
    while any(_rounds_up(node) for node in forward.graph.node):
        shapes = _inferred(forward)
        for node in forward.graph.node:
            sizes = (shapes.get(node.input[0]) or [])[2:] if _rounds_up(node) else []
            if sizes and min(sizes) > 0 and _settle(forward, node, sizes):
                break
        else:
            return


def _rounds_up(node: onnx.NodeProto) -> bool:
    return node.op_type in POOLS and node.domain in ("", "ai.onnx") and bool(attributes(node).get("ceil_mode"))


def _inferred(forward: Forward) -> dict[str, list[int] | None]:
    """Shapes as far as they can be told, without complaint: a pooling that counts wrongly fits nothing behind it."""
    light = without_large_values(forward.model)
    del light.graph.value_info[:]
    for value in light.graph.output:
        value.type.tensor_type.ClearField("shape")
    return shapes_of(onnx.shape_inference.infer_shapes(light, data_prop=True).graph)


def _settle(forward: Forward, node: onnx.NodeProto, sizes: list[int]) -> bool:
    """Whether the node had to be changed."""
    set_attribute(node, "pads", list(resolved_pads(attributes(node), sizes)))
    remove_attributes(node, {"auto_pad"})
    given = attributes(node)
    axes = axes_of(given, sizes)
    overhangs = [axis.overhang(True) for axis in axes]
    counts_padding = bool(given.get("count_include_pad")) and node.op_type == "AveragePool"
    if not counts_padding and not is_miscounted(given, sizes):
        return False
    if not any(overhangs):
        set_attribute(node, "ceil_mode", 0)
        forward.note(f"'{node.name}': set ceil_mode to 0, which changes nothing there")
    elif counts_padding and any(given.get("pads") or ()):
        raise forward.error_at(
            node,
            "has ceil_mode=1, count_include_pad=1 and padding: onnxruntime computes it wrongly. Set one of them to 0.",
        )
    elif counts_padding:
        set_attribute(node, "count_include_pad", 0)
        forward.note(f"'{node.name}': set count_include_pad to 0, which changes nothing without padding")
    else:
        ends = [axis.after + more for axis, more in zip(axes, overhangs, strict=True)]
        if any(end >= axis.kernel for axis, end in zip(axes, ends, strict=True)):
            raise forward.error_at(node, why_not(given, sizes) or "")
        pads = [axis.before for axis in axes] + ends
        set_attribute(node, "pads", pads)
        set_attribute(node, "ceil_mode", 0)
        forward.note(f"'{node.name}': set ceil_mode to 0 and pads to {pads}, which changes nothing there")
    return True


def fault_of(node: onnx.NodeProto, sizes: list[int]) -> str | None:
    """Tell why a pooling of maps of these sizes cannot be trained: onnxruntime would give NaN, or not load the file."""
    given = {**attributes(node), "pads": list(resolved_pads(attributes(node), sizes))}
    axes = axes_of(given, sizes)
    if given.get("storage_order"):
        return "has storage_order=1: its gradient takes indices by rows. Set it to 0."
    if reason := why_not(given, sizes):
        return reason
    if any(max(axis.before, axis.after) >= axis.kernel for axis in axes):
        return (
            f"has pads={given['pads']} and kernel_shape={given['kernel_shape']}: onnxruntime takes no padding as "
            "large as the kernel. Pad less."
        )
    if node.op_type == "AveragePool" and any(axis.dilation != 1 and axis.kernel > 1 for axis in axes):
        return "averages a window with dilations: there is no gradient of it here. Write it as a Conv."
    return None
