"""Gradients of convolutions and poolings: windows that move over a map."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from bnfuse.graph.microsoft.source import Source, attribute_of
from bnfuse.graph.values import static_shape
from bnfuse.opset.spec import DOMAIN, FORWARD_CORES, OpSpec, find

Window = dict[str, Any]


def conv_grad(source: Source) -> None:
    """ConvGrad(dy, x, weight): the operator of ours that has the results that are wanted. 1-d ones are made 2-d."""
    dy, x, weight = (source.operand(place) for place in range(3))
    source.require_float32(dy, x, weight)
    rank = source.rank(weight)
    if rank not in (3, 4):
        raise source.error(f"is of a convolution of {rank - 2} dimensions: those of 1 and 2 are read. Build it anew.")
    window = window_of(source, source.node, x, tuple(source.sizes(weight)[2:]))
    dx, dweight, dbias = (source.result(place) for place in range(3))
    if dx is None and dweight is None:
        source.give(2, source.sum(dy, [axis for axis in range(rank) if axis != 1]))
        return
    if rank == 3:
        dy, x, weight = (_wider(source, value) for value in (dy, x, weight))
        window = _one_dimensional(window)
    core = "ConvGradWeight" if dx is None else "ConvGradInput" if dweight is None else "ConvGrad"
    spec = OpSpec((), core, ("BiasGrad",) if dbias is not None else ())
    shapes = {"dx": source.dims(x), "dweight": source.dims(weight), "dbias": [source.dims(weight)[0]]}
    made = source.own(spec, {"dy": dy, "x": x, "weight": weight}, shapes, window)
    for place, name in enumerate(("dx", "dweight", "dbias")):
        if name in made:
            value = made[name]
            source.give(place, _narrower(source, value) if rank == 3 and name != "dbias" else value)


def _wider(source: Source, value: ir.Value) -> ir.Value:
    """Write [N, C, L] as a map of height 1."""
    n, c, length = source.dims(value)
    return source.op("Unsqueeze", value, source.ints([2], "height"), shape=[n, c, 1, length])


def _narrower(source: Source, value: ir.Value) -> ir.Value:
    n, c, _, length = source.dims(value)
    return source.op("Squeeze", value, source.ints([2], "height"), shape=[n, c, length])


def _one_dimensional(window: Window) -> Window:
    """Give the window of a map of height 1."""
    wide = {name: (1, *window[name]) for name in ("kernel_shape", "strides", "dilations")}
    before, after = window["pads"]
    return {**window, **wide, "pads": (0, before, 0, after)}


def window_of(source: Source, node: ir.Node, x: ir.Value, kernel: tuple[int, ...] | None = None) -> Window:
    """Give the attributes of a convolution or pooling, with every default written out and auto_pad resolved."""
    kernel = tuple(attribute_of(node, "kernel_shape", None) or kernel or ())
    ones = (1,) * len(kernel)
    strides, dilations = (tuple(attribute_of(node, name, None) or ones) for name in ("strides", "dilations"))
    pads = tuple(attribute_of(node, "pads", None) or (0,) * (2 * len(kernel)))
    auto = attribute_of(node, "auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        totals = [
            max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
            for size, s, k, d in zip(source.sizes(x)[2:], strides, kernel, dilations, strict=True)
        ]
        small, large = tuple(total // 2 for total in totals), tuple(total - total // 2 for total in totals)
        pads = (*small, *large) if auto == "SAME_UPPER" else (*large, *small)
    elif auto == "VALID":
        pads = (0,) * (2 * len(kernel))
    counts = {name: int(attribute_of(node, name, default)) for name, default in COUNTS.items()}
    return {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": pads, **counts}


COUNTS = {"group": 1, "ceil_mode": 0, "count_include_pad": 0}


# Poolings


def max_pool_grad(source: Source) -> None:
    """MaxPoolGrad(dy, indices): ours, with the x and the window of the pooling that gave the indices.

    For maps of another rank each dy is added where its index, into all of x, says.
    """
    dy, indices = source.operand(0), source.operand(1)
    forward = indices.producer()
    if forward is None or core_of(forward) != "MaxPool" or indices is not _indices_of(forward):
        raise source.error("reads indices that no MaxPool of the graph made: the graph is damaged. Build it anew.")
    x = forward.inputs[0]
    assert x is not None
    if not source.is_float32(dy, x) or source.rank(x) != 4 or attribute_of(forward, "storage_order", 0):
        source.give(0, _scattered(source, dy, indices, x))
        return
    spec = OpSpec((), "MaxPoolGrad")
    operands = {"dy": dy, "indices": indices, "x": x}
    source.give(0, source.own(spec, operands, {"dx": source.dims(x)}, window_of(source, forward, x))["dx"])


def core_of(node: ir.Node) -> str:
    """Name the standard operator that does a node's work, its steps aside."""
    spec = find(node.op_type) if node.domain == DOMAIN else None
    return spec.core if isinstance(spec, OpSpec) else node.op_type


def _indices_of(forward: ir.Node) -> ir.Value | None:
    spec = find(forward.op_type) if forward.domain == DOMAIN else None
    place = spec.results.index("indices") if isinstance(spec, OpSpec) else 1
    return forward.outputs[place] if place < len(forward.outputs) else None


def _scattered(source: Source, dy: ir.Value, indices: ir.Value, x: ir.Value) -> ir.Value:
    total = int(np.prod(source.sizes(x)))
    zeros = source.constant(np.zeros(total, source.dtype(dy).numpy()), "zeros")
    everything = source.ints([-1], "everything")
    count = [int(np.prod(source.sizes(dy)))]
    places = source.op("Reshape", indices, everything, shape=count, dtype=ir.DataType.INT64)
    values = source.op("Reshape", dy, everything, shape=count)
    added = source.op("ScatterElements", zeros, places, values, shape=[total], axis=0, reduction="add")
    return source.op("Reshape", added, source.ints(source.sizes(x), "shape"), shape=source.sizes(x))


def average_pool_grad(source: Source) -> None:
    """AveragePoolGrad(dy): ours, with the x of the pooling that it belongs to."""
    dy, dx = source.operand(0), source.result(0)
    forward = _average_pool_of(source, dy)
    if forward is None:
        what = "has the window of no AveragePool in the graph whose gradient it could be"
        raise source.error(f"{what}: the graph is damaged. Build it anew.")
    x = forward.inputs[0]
    assert x is not None and dx is not None
    source.require_float32(dy, x)
    window, rank = window_of(source, forward, x), source.rank(x)
    if rank not in (3, 4) or any(size != 1 for size in window["dilations"]):
        raise source.error("is of an average pooling that is not read: of 1 or 2 dimensions, without dilations, it is.")
    if rank == 3:
        dy, x, window = _wider(source, dy), _wider(source, x), _one_dimensional(window)
    made = source.own(OpSpec((), "AveragePoolGrad"), {"dy": dy, "x": x}, {"dx": source.dims(x)}, window)["dx"]
    source.give(0, _narrower(source, made) if rank == 3 else made)


def _average_pool_of(source: Source, dy: ir.Value) -> ir.Node | None:
    """Find the pooling of a gradient: the one that it is named after, else any with the same window and sizes.

    The operator does not name it, and x gives no more than its sizes.
    """
    pools = [node for node in source.graph if core_of(node) == "AveragePool" and _fits(source, node, dy)]
    base = (source.node.name or "").split("_Grad/")[0]
    return next((node for node in pools if node.name == base), pools[0] if pools else None)


def _fits(source: Source, forward: ir.Node, dy: ir.Value) -> bool:
    x, y, dx = forward.inputs[0], forward.outputs[0], source.node.outputs[0]
    if x is None or x.shape is None or len(x.shape) < 3:
        return False
    wanted = [(static_shape(dx), static_shape(x)), (static_shape(dy), static_shape(y))]
    if any(ours is not None and theirs is not None and ours != theirs for ours, theirs in wanted):
        return False
    ours, theirs = (window_of(source, node, x) for node in (source.node, forward))
    return all(ours[name] == theirs[name] for name in FORWARD_CORES["AveragePool"])


def global_average_pool_grad(source: Source) -> bool:
    """Scale(dy, H*W) that one Expand to the shape of x reads: GlobalAveragePoolGrad. Gives whether it was one."""
    scaled = source.node.outputs[0]
    readers = [use.node for use in scaled.uses()]
    if len(readers) != 1 or scaled.is_graph_output() or readers[0].op_type != "Expand":
        return False
    expand = readers[0]
    shape = expand.inputs[1].producer() if expand.inputs[1] is not None else None
    x = shape.inputs[0] if shape is not None and is_whole_shape(shape) else None
    dy, factor = source.operand(0), source.known(source.operand(1))
    if x is None or factor is None or not source.attribute("scale_down", 0) or expand.inputs[0] is not scaled:
        return False
    sizes, small = static_shape(x), static_shape(dy)
    if sizes is None or small is None or len(sizes) != 4 or small != (*sizes[:2], 1, 1):
        return False
    if not source.is_float32(dy, x) or factor.size != 1 or not np.isclose(float(factor.item()), sizes[2] * sizes[3]):
        return False
    last = Source(source.model, expand, source.names, source.file)
    made = last.own(OpSpec((), "GlobalAveragePoolGrad"), {"dy": dy, "x": x}, {"dx": sizes})
    last.give(0, made["dx"])
    last.finish()
    source.finish()
    if shape is not None and not any(value.uses() or value.is_graph_output() for value in shape.outputs):
        source.graph.remove(shape, safe=True)
    return True


def is_whole_shape(node: ir.Node) -> bool:
    """Tell whether a node gives all dimensions of its operand."""
    return node.op_type == "Shape" and not attribute_of(node, "start", 0) and "end" not in node.attributes


CONVERSIONS = {
    "ConvGrad": conv_grad,
    "MaxPoolGrad": max_pool_grad,
    "AveragePoolGrad": average_pool_grad,
}
