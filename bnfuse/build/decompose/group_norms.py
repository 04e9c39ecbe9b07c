"""GroupNormalization as torch's exporter writes it, read as one operator again.

Reshape(x; [N, groups, -1]) -> InstanceNormalization(ones, zeros) -> Reshape(to the shape of x) [-> Mul -> Add]
"""

from __future__ import annotations

import numpy as np
import onnx

from bnfuse.graph.protos import attributes, set_attribute

from .writer import Surroundings


def join_group_norms(around: Surroundings) -> int:
    """Turn the second Reshape into a GroupNormalization of x; gives how many. What it read before may be dead."""
    makers = around.forward.producers()
    found = 0
    gone: list[onnx.NodeProto] = []
    for node in around.forward.graph.node:
        norm = makers.get(node.input[0]) if node.op_type == "Reshape" else None
        first = makers.get(norm.input[0]) if norm is not None and norm.op_type == "InstanceNormalization" else None
        if norm is None or first is None or first.op_type != "Reshape" or not _is_plain(around, norm):
            continue
        shape, grouped = around.shapes.get(first.input[0]), around.shapes.get(norm.input[0])
        if shape is None or not grouped or len(grouped) != 3 or around.shapes.get(node.output[0]) != shape:
            continue
        if shape[0] != grouped[0] or len(shape) < 2 or shape[1] % grouped[1]:
            continue
        operands = [_constant(around, node, what, value, shape[1]) for what, value in (("ones", 1.0), ("zeros", 0.0))]
        x = first.input[0]
        node.op_type = "GroupNormalization"
        del node.input[:], node.attribute[:]
        node.input.extend([x, *operands])
        set_attribute(node, "num_groups", grouped[1])
        set_attribute(node, "epsilon", attributes(norm).get("epsilon", 1e-5))
        gone += _take_affine(around, node)
        found += 1
    around.forward.remove_nodes(gone)
    return found


def _take_affine(around: Surroundings, norm: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Take the Mul and Add behind it, by one parameter a channel, into the operator. Gives those that are dead."""
    gone: list[onnx.NodeProto] = []
    consumers, makers = around.forward.consumers(), around.forward.producers()
    channels = (around.shapes.get(norm.output[0]) or [0, 0])[1]
    for op, index in (("Mul", 1), ("Add", 2)):
        readers = consumers.get(norm.output[0], [])
        if len(readers) != 1 or readers[0].op_type != op or norm.output[0] in around.forward.output_names():
            break
        (aligned,) = [name for name in readers[0].input if name != norm.output[0]] or [""]
        maker = makers.get(aligned)
        rank = len(around.shapes.get(norm.output[0]) or [])
        if maker is None or around.shapes.get(aligned) not in (
            [channels, *[1] * (rank - 2)],
            [1, channels, *[1] * (rank - 2)],
        ):
            break
        whole = around.values.get(maker.input[0]) if maker.op_type in ("Reshape", "Unsqueeze") else None
        if whole is None or list(whole.dims) != [channels]:
            break
        norm.input[index] = maker.input[0]
        reader, norm_output = readers[0], norm.output[0]
        norm.output[0], reader.output[0] = reader.output[0], norm_output
        gone.append(reader)
    return gone


def _is_plain(around: Surroundings, norm: onnx.NodeProto) -> bool:
    for name, value in zip(norm.input[1:3], (1.0, 0.0), strict=True):
        tensor = around.values.get(name)
        if tensor is None or name in around.variables or (onnx.numpy_helper.to_array(tensor) != value).any():
            return False
    return True


def _constant(around: Surroundings, node: onnx.NodeProto, what: str, value: float, channels: int) -> str:
    name = around.fresh(f"{node.name}/{what}")
    around.added.append(onnx.numpy_helper.from_array(np.full(channels, value, np.float32), name))
    return name
