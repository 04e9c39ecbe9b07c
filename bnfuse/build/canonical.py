"""One spelling for what ONNX can say in several ways, so that passes and kernels meet one form.

Explicit windows (no auto_pad, no defaulted kernel, strides, pads), Add instead of a Sum of two, Flatten instead of a
Reshape to [batch, rest], Dropout with its mask and switched on.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from bnfuse.core.windows import resolved_pads
from bnfuse.graph.protos import attributes, fresh, remove_attributes, set_attribute, typed_values

from .graph import Forward

COPIES = ("Cast", "CastLike", "Expand", "Identity", "Reshape")
WINDOWED = ("Conv", "MaxPool", "AveragePool")


def explicit_windows(forward: Forward) -> None:
    """Write out kernel_shape, strides, pads, dilations and group; auto_pad is resolved."""
    shapes = forward.shapes()
    for node in forward.graph.node:
        if node.op_type not in WINDOWED or node.domain not in ("", "ai.onnx"):
            continue
        given = attributes(node)
        kernel = given.get("kernel_shape") or (shapes[node.input[1]] or [])[2:]
        rank = len(kernel)
        strides = given.get("strides") or [1] * rank
        dilations = given.get("dilations") or [1] * rank
        pads = resolved_pads({**given, "kernel_shape": kernel}, (shapes[node.input[0]] or [])[2:])
        for name, value in (("kernel_shape", kernel), ("strides", strides), ("pads", pads)):
            set_attribute(node, name, list(value))
        if node.op_type == "AveragePool":  # its dilations came with opset 19; a window of one element has none
            dilations = [1 if k == 1 else d for k, d in zip(kernel, dilations, strict=True)]
        if node.op_type == "AveragePool" and set(dilations) == {1}:
            remove_attributes(node, {"dilations"})
        else:
            set_attribute(node, "dilations", list(dilations))
        if node.op_type == "Conv":
            set_attribute(node, "group", given.get("group", 1))
        if node.op_type == "MaxPool" and not any(node.output[1:]):  # it orders the indices, which only gradients read
            remove_attributes(node, {"storage_order"})
        remove_attributes(node, {"auto_pad"})


def pads_of_windows(forward: Forward) -> None:
    """Let convolutions pad themselves what a Pad puts around their map with zeros, and poolings where nothing is below
    0: the largest of such a window is the same with zeros as without, and no gradient passes where it is 0."""
    makers, consumers, known = forward.producers(), forward.consumers(), forward.initializers()
    gone: list[onnx.NodeProto] = []
    for pad in forward.graph.node:
        before, after = _zeros_around(pad, known)
        readers = consumers.get(pad.output[0], [])
        maker = makers.get(pad.input[0]) if pad.input else None
        positive = maker is not None and (maker.op_type == "Relu" or _is_clip_at_zero(maker, known))
        takers = ("Conv", "MaxPool") if positive else ("Conv",)
        if not before or not readers or pad.output[0] in forward.output_names():
            continue
        if not all(node.op_type in takers and _reads_as_map_alone(node, pad.output[0]) for node in readers):
            continue
        grown = [[a + b for a, b in zip([*before, *after], attributes(node)["pads"], strict=True)] for node in readers]
        fits = all(_takes_pads(node, pads) for node, pads in zip(readers, grown, strict=True))
        if fits:
            for node, pads in zip(readers, grown, strict=True):
                set_attribute(node, "pads", pads)
                node.input[0] = pad.input[0]
            gone.append(pad)
    forward.remove_nodes(gone)


def _reads_as_map_alone(node: onnx.NodeProto, name: str) -> bool:
    """Tell whether a value is a window's map and nothing else of it; places of maxima are counted in the map."""
    return node.input[0] == name and list(node.input).count(name) == 1 and not any(node.output[1:])


def _zeros_around(node: onnx.NodeProto, known: dict[str, onnx.TensorProto]) -> tuple[list[int], list[int]]:
    """Give how many zeros a Pad puts before and after each axis of the pixels; nothing for any other node."""
    if node.op_type != "Pad" or attributes(node).get("mode", b"constant") != b"constant" or len(node.input) > 3:
        return [], []
    if node.input[1] not in known or any(name and name not in known for name in node.input[2:]):
        return [], []
    pads = numpy_helper.to_array(known[node.input[1]]).tolist()
    rank = len(pads) // 2
    filled = len(node.input) > 2 and node.input[2] and numpy_helper.to_array(known[node.input[2]]).any()
    if filled or rank < 3 or min(pads) < 0 or any((*pads[:2], *pads[rank : rank + 2])):
        return [], []
    return pads[2:rank], pads[rank + 2 :]


def _takes_pads(node: onnx.NodeProto, pads: list[int]) -> bool:
    """Tell whether a window may have these pads: no pooling may lie in them as a whole, nor hang over them."""
    if node.op_type == "Conv":
        return True
    given = attributes(node)
    return not given.get("ceil_mode") and all(p < k for p, k in zip(pads, given["kernel_shape"] * 2, strict=True))


def _is_clip_at_zero(node: onnx.NodeProto, known: dict[str, onnx.TensorProto]) -> bool:
    if node.op_type != "Clip" or len(node.input) < 2 or node.input[1] not in known:
        return False
    return bool(numpy_helper.to_array(known[node.input[1]]) == 0)


def explicit_dropout(forward: Forward) -> None:
    """Give Dropout its ratio and its mask, and switch it on: exporters write the inference form."""
    known = forward.initializers()
    switched = 0
    for node in forward.graph.node:
        if node.op_type != "Dropout":
            continue
        taken = forward.names()
        ratio = node.input[1] if len(node.input) > 1 and node.input[1] else fresh(f"{node.name}/ratio", taken)
        if ratio not in taken:
            forward.set_initializer(ratio, np.array(0.5, np.float32))
        training = node.input[2] if len(node.input) > 2 else ""
        if not (training in known and numpy_helper.to_array(known[training])):
            training = fresh(f"{node.name}/training", taken)
            forward.set_initializer(training, np.array(True))
            switched += 1
        mask = node.output[1] if len(node.output) > 1 and node.output[1] else fresh(f"{node.name}/mask", taken)
        inputs, outputs = [node.input[0], ratio, training], [node.output[0], mask]
        del node.input[:], node.output[:]
        node.input.extend(inputs)
        node.output.extend(outputs)
    if switched:
        forward.note(f"switched on {switched} Dropout nodes")


def drop_copies(forward: Forward) -> None:
    """Take out what changes neither values, shape nor type: Identity, a Cast to the same type, a Reshape or Expand to
    the same shape. Shapes must be known."""
    shapes, types = (
        forward.shapes(),
        {value.name: value.type.tensor_type.elem_type for value in typed_values(forward.graph)},
    )
    outputs, makers = forward.output_names(), forward.producers()
    renamed: dict[str, str] = {}
    gone: list[onnx.NodeProto] = []
    for node in forward.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = renamed.get(name, name)
        if node.op_type not in COPIES or node.domain not in ("", "ai.onnx"):
            continue
        x, y = node.input[0], node.output[0]
        same = shapes.get(x) == shapes.get(y) is not None and types.get(x) == types.get(y)
        if not same:
            continue
        if y not in outputs:
            renamed[y] = x
        elif x in makers and x not in outputs:  # what made x makes the output
            maker = makers[x]
            maker.output[list(maker.output).index(x)] = y
            makers[y] = maker
            for other in forward.graph.node:
                for index, name in enumerate(other.input):
                    if name == x:
                        other.input[index] = y
        else:
            continue
        gone.append(node)
    forward.remove_nodes(gone)


def add_of_sum(forward: Forward) -> None:
    """Sum of several tensors is one Add after another, as residual networks have them."""
    nodes: list[onnx.NodeProto] = []
    for node in forward.graph.node:
        if node.op_type != "Sum" or len(node.input) < 2:
            nodes.append(node)
            continue
        total, *others = node.input
        for index, other in enumerate(others):
            is_last = index == len(others) - 1
            name = node.name if is_last else forward.fresh(f"{node.name}/{index}")
            result = node.output[0] if is_last else name
            nodes.append(onnx.helper.make_node("Add", [total, other], [result], name=name))
            total = result
    del forward.graph.node[:]
    forward.graph.node.extend(nodes)


def explicit_transpose(forward: Forward) -> None:
    """Write out perm, without which all axes turn round."""
    shapes = forward.shapes()
    for node in forward.graph.node:
        if node.op_type == "Transpose" and "perm" not in attributes(node):
            rank = len(shapes[node.input[0]] or [])
            set_attribute(node, "perm", list(reversed(range(rank))))


def flatten_of_reshape(forward: Forward) -> None:
    """Turn Reshape of a map to [batch, rest] into Flatten."""
    shapes = forward.shapes()
    for node in forward.graph.node:
        if node.op_type != "Reshape":
            continue
        before, after = shapes[node.input[0]] or [], shapes[node.output[0]] or []
        if len(before) > 2 and len(after) == 2 and before[0] == after[0]:
            node.op_type = "Flatten"
            del node.input[1:]
            remove_attributes(node, {"allowzero"})
            set_attribute(node, "axis", 1)


def fit_reshapes_to_batch(forward: Forward, old: int | None, new: int, shapes: Mapping[str, list[int] | None]) -> None:
    """Keep the batch, whatever it is now, in a Reshape to a constant shape that begins with the file's batch.

    One of a tensor that does not begin with it (`shapes` are those of the file) makes a vector a row, and stays.
    """
    known = forward.initializers()
    for node in forward.graph.node:
        if node.op_type != "Reshape" or node.input[1] not in known:
            continue
        target, before = numpy_helper.to_array(known[node.input[1]]).tolist(), shapes.get(node.input[0])
        if before is not None and (not before or before[0] != old):
            continue
        if len(target) > 1 and target[0] == old and old not in (0, -1, new):
            name = fresh(f"{node.name}/shape", forward.names())
            forward.set_initializer(name, np.array([0, *target[1:]], np.int64))
            node.input[1] = name


def flatten_logits(forward: Forward, logits: str) -> str:
    """Turn logits [batch, classes, 1, 1], as a last convolution or pooling leaves them, into [batch, classes]."""
    shape = forward.shapes()[logits] or []
    if len(shape) <= 2 or any(size != 1 for size in shape[2:]):
        return logits
    taken = forward.names()
    flat = fresh(f"{logits}_flat", taken)
    node = onnx.helper.make_node("Flatten", [logits], [flat], name=fresh("flatten_logits", taken), axis=1)
    forward.graph.node.append(node)
    for value in forward.graph.output:
        if value.name == logits:
            value.CopyFrom(onnx.helper.make_tensor_value_info(flat, value.type.tensor_type.elem_type, None))
    forward.note(f"flattened the output '{logits}' to [batch, classes]")
    return flat
