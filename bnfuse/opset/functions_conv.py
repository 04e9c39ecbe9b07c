"""Bodies of the gradients of a convolution, a part of `functions.py`.

Any rank, strides, dilations, pads on either side, and groups. The weight gradient is a product of matrices for each
sample, as runtimes compute it themselves. As a Conv of x with dy as its weight (strides and dilations exchanged) it is
one operator, for which onnxruntime multiplies a matrix for each input channel: that takes up to seven times as long.
"""

from __future__ import annotations

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
    before, _ = pads(body)
    extent, none = spatial(body("Shape", body["x"]), body), body("Sub", before, before)
    axes = body("Add", every_axis(before, body), body.constant([2]))
    read = body("Slice", spread, before, body("Add", before, extent), axes)
    return pad(read, none, body("Sub", extent, spatial(body("Shape", read), body)), body)


def weight_gradient(dy: ir.Value, x: ir.Value, body: Body) -> ir.Value:
    """Write dweight: the sum over samples of dy [group, M/group, P] times what windows read of the padded x.

    That is [group, P, taps*C/group], for P windows: rows of C/group channels, gathered at the place of each tap.
    """
    group, weight = body.attribute("group"), body("Shape", body["weight"])
    filters, channels = body("Div", dimension(weight, 0, body), group), dimension(weight, 1, body)
    taps = body("ReduceProd", spatial(weight, body))
    padded = pad(x, *pads(body), body)
    places = body("Reshape", places_read(spatial(body("Shape", padded), body), dy, body), body.constant([-1]))
    rows = body("Transpose", grouped(padded, channels, body), perm=ir.AttrInt64s("perm", [0, 1, 3, 2]))
    gradients = grouped(dy, filters, body)
    columns = body("Concat", group, body.constant([-1]), body("Mul", taps, channels), axis=0)

    def product(sample: ir.Value) -> ir.Value:
        read = body("Gather", body("Gather", rows, sample, axis=0), places, axis=1)
        return body("MatMul", body("Gather", gradients, sample, axis=0), body("Reshape", read, columns))

    samples = scalar(dimension(body("Shape", x), 0, body), body)
    zeros = body("ConstantOfShape", body("Concat", group, filters, body("Mul", taps, channels), axis=0))
    total = body(
        "Reshape", body.total(samples, zeros, product), body("Concat", body.constant([0, 0]), taps, channels, axis=0)
    )
    last = body("Transpose", total, perm=ir.AttrInt64s("perm", [0, 1, 3, 2]))
    return body("Reshape", last, weight)


def places_read(extent: ir.Value, dy: ir.Value, body: Body) -> ir.Value:
    """Give the flat places in a map of this extent that each window reads, [windows, taps]: its first and its taps'."""
    size = body("ReduceProd", extent, keepdims=0)
    every = body("Reshape", body("Range", scalar(0, body), size, scalar(1, body)), extent)
    windows = steps(every, spatial(body("Shape", dy), body), "strides", body)
    taps = steps(every, body.attribute("kernel_shape"), "dilations", body)
    return body("Add", body("Reshape", windows, body.constant([-1, 1])), body("Reshape", taps, body.constant([1, -1])))


def steps(every: ir.Value, count: ir.Value, step: str, body: Body) -> ir.Value:
    """Take the first `count` along each axis, a step (the attribute of that name) from one to the next."""
    one = body.constant([1])
    zero, by = body("Sub", count, count), body.attribute(step)
    last = body("Mul", body("Sub", count, one), by)
    return body("Slice", every, zero, body("Add", last, one), every_axis(count, body), by)


def every_axis(vector: ir.Value, body: Body) -> ir.Value:
    """Give 0, 1, ..., as many as a vector has elements."""
    return body("Range", scalar(0, body), body("Size", vector), scalar(1, body))


def grouped(x: ir.Value, channels: ir.Value, body: Body) -> ir.Value:
    """Give [N, C, ...] as [N, group, C/group, the rest]."""
    shape = body("Concat", body.constant([0]), body.attribute("group"), channels, body.constant([-1]), axis=0)
    return body("Reshape", x, shape)


def pads(body: Body) -> tuple[ir.Value, ir.Value]:
    """Give the attribute `pads` as what is in front of each axis and what is behind it."""
    both = body("Reshape", body.attribute("pads"), body.constant([2, -1]))
    first, last = (dimension(both, place, body) for place in (0, 1))
    return body("Reshape", first, body.constant([-1])), body("Reshape", last, body.constant([-1]))


def pad(x: ir.Value, before: ir.Value, after: ir.Value, body: Body) -> ir.Value:
    """Pad the axes behind the first two with zeros; negative pads cut."""
    none = body.constant([0, 0])
    return body("Pad", x, body("Concat", none, before, none, after, axis=0))


def spatial(shape: ir.Value, body: Body) -> ir.Value:
    """Give the part of a shape behind the first two axes."""
    return body.slice(shape, body.constant([2]), body.constant([REST]), axis=0)


def scalar(value: ir.Value | int, body: Body) -> ir.Value:
    """Give a vector of one, or an integer, as a scalar."""
    return body("Squeeze", body.constant([value]) if isinstance(value, int) else value, body.constant([0]))


def dimension(shape: ir.Value, place: int, body: Body) -> ir.Value:
    """Give one dimension of a shape (one row of a matrix), as a vector (a matrix) of one."""
    return body.slice(shape, body.constant([place]), body.constant([place + 1]), axis=0)
