"""Bodies of the gradients of a convolution, a part of `functions.py`.

A ConvTranspose is here too, as the gradient that it is. Any rank, strides, dilations, pads on either side, and groups.
The weight gradient is a product of matrices for each sample, as runtimes compute it themselves. As a Conv of x with dy
as its weight (strides and dilations exchanged) it is one operator, for which onnxruntime multiplies a matrix for each
input channel: that takes up to seven times as long.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnfuse.opset.body import Body, reference

REST = 1 << 62  # as the end of a range: to the last


def input_gradient(dy: ir.Value, body: Body) -> ir.Value:
    """Write dx: a ConvTranspose spreads dy over the padded rows that windows read; of these are those of x taken.

    The last rows of x, which no window may read, are padded. Pad could cut too, but where nothing is left (no window
    reads x at all) onnxruntime's gives what is not there.
    """
    attributes = {name: reference(name) for name in ("dilations", "group", "strides")}
    spread = body("ConvTranspose", dy, body["weight"], **attributes)
    shape = body("Shape", body["x"])
    before = body("Reshape", dimension(pads(body), 0, body), body.constant([-1]))
    read = body("Slice", spread, before, body("Add", before, shape))
    missing = body("Sub", shape, body("Shape", read))
    return body("Pad", read, body("Concat", body("Sub", missing, missing), missing, axis=0))


def transposed(x: ir.Value, body: Body) -> ir.Value:
    """Write y = ConvTranspose(x, weight), without a bias."""
    names = ("dilations", "group", "kernel_shape", "output_padding", "pads", "strides")
    return body("ConvTranspose", x, body["weight"], **{name: reference(name) for name in names})


def transposed_input_gradient(dy: ir.Value, body: Body) -> ir.Value:
    """Write dx of a ConvTranspose: the convolution of dy that it is the gradient of.

    Where output_padding is a stride or more, that has windows behind those of x.
    """
    names = ("dilations", "group", "kernel_shape", "pads", "strides")
    dx = body("Conv", dy, body["weight"], **{name: reference(name) for name in names})
    shape = body("Shape", body["x"])
    return body("Slice", dx, body("Sub", shape, shape), shape)


def weight_gradient(dy: ir.Value, x: ir.Value, body: Body) -> ir.Value:
    """Write dweight: the sum over samples of dy [group, M/group, P] times what windows read of the padded x.

    That is [group, P, taps*C/group], for P windows: rows of C/group channels, gathered at the place of each tap.
    """
    group, shape = body.attribute("group"), body("Shape", body["weight"])
    filters, channels = body("Div", dimension(shape, 0, body), group), dimension(shape, 1, body)
    padded = body("Pad", x, body("Reshape", pads(body), body.constant([-1])))
    places = places_read(behind(body("Shape", padded), 2, body), dy, body)
    rows = body("Transpose", grouped(padded, channels, body), perm=ir.AttrInt64s("perm", [0, 1, 3, 2]))
    gradients, flat = grouped(dy, filters, body), body.constant([0, 0, -1])

    def product(sample: ir.Value) -> ir.Value:
        read = body("Gather", body("Gather", rows, sample, axis=0), places, axis=1)
        return body("MatMul", body("Gather", gradients, sample, axis=0), body("Reshape", read, flat))

    samples = body("Gather", body("Shape", x), body.constant(0), axis=0)
    zeros = body("Concat", group, filters, body("ReduceProd", behind(shape, 1, body)), axis=0)
    total = body.total(samples, body("ConstantOfShape", zeros), product)
    by_tap = body("Reshape", total, body("Concat", body.constant([0, 0, -1]), channels, axis=0))
    last = body("Transpose", by_tap, perm=ir.AttrInt64s("perm", [0, 1, 3, 2]))
    return body("Reshape", last, shape)


def places_read(extent: ir.Value, dy: ir.Value, body: Body) -> ir.Value:
    """Give the flat places in a map of this extent that each window reads, [windows, taps]: its first and its taps'."""
    size = body("ReduceProd", extent, keepdims=0)
    every = body("Reshape", body("Range", body.constant(0), size, body.constant(1)), extent)
    windows = steps(every, behind(body("Shape", dy), 2, body), "strides", body)
    taps = steps(every, body.attribute("kernel_shape"), "dilations", body)
    return body("Add", body("Reshape", windows, body.constant([-1, 1])), body("Reshape", taps, body.constant([1, -1])))


def steps(every: ir.Value, count: ir.Value, step: str, body: Body) -> ir.Value:
    """Take the first `count` along each axis, a step (the attribute of that name) from one to the next."""
    by = body.attribute(step)
    return body("Slice", every, body("Sub", count, count), body("Mul", count, by), None, by)


def grouped(x: ir.Value, channels: ir.Value, body: Body) -> ir.Value:
    """Give [N, C, ...] as [N, group, C/group, the rest]."""
    shape = body("Concat", body.constant([0]), body.attribute("group"), channels, body.constant([-1]), axis=0)
    return body("Reshape", x, shape)


def pads(body: Body) -> ir.Value:
    """Give the attribute `pads` for all axes of a map: [2, rank], what is in front of each axis and what is behind."""
    none = ir.AttrTensor("value", ir.tensor(np.zeros((2, 2), np.int64)))
    return body(
        "Concat", body("Constant", value=none), body("Reshape", body.attribute("pads"), body.constant([2, -1])), axis=1
    )


def behind(shape: ir.Value, start: int, body: Body) -> ir.Value:
    """Give a shape without its first dimensions."""
    return body.slice(shape, body.constant([start]), body.constant([REST]), axis=0)


def dimension(shape: ir.Value, place: int, body: Body) -> ir.Value:
    """Give one dimension of a shape (one row of a matrix), as a vector (a matrix) of one."""
    return body("Gather", shape, body.constant([place]), axis=0)
