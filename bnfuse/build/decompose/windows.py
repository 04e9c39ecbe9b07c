"""Convolutions and poolings of one and three dimensions by those of two, and poolings of other norms.

    1-d      [N, C, L] as [N, C, 1, L], weights [O, I, k] as [O, I, 1, k]
    3-d          the depth stands in the batch: [N*D, C, H, W]
    Conv 3-d     depth padded, the kD slices that a window reads laid behind each channel: a 2-d Conv of
                 [N*Do, C*kD, H, W] with the weight [O, I*kD, kH, kW]
    ConvTranspose 3-d    a 2-d one of [N*D, C, H, W] with O*kD channels, whose kD parts are laid out by stride and
                 summed
    pools 3-d    in the plane, then along the depth of [N, 1, D, C*H*W]
    LpPool       (kernel size * AveragePool(|x|^p))^(1/p), padding counted: it is 0

An average of averages is the average over the whole window: how many elements count along the depth does not depend on
the place in the plane.
"""

from __future__ import annotations

import math
from typing import Any

from bnfuse.core.windows import axes_of

from .flat_maps import DEPTH_OUT
from .writer import Writer


def conv(write: Writer) -> None:
    """Write Conv of 1 or 3 dimensions by 2-d ones."""
    rank = len(write.shape(write.node.input[0]))
    if rank == 3:
        _flat(write)
    elif rank == 5:
        _deep_conv(write)


def conv_transpose(write: Writer) -> None:
    """Write ConvTranspose with explicit pads, of 1 or 3 dimensions by 2-d ones."""
    explicit_transposed(write)
    rank = len(write.shape(write.node.input[0]))
    if rank == 3:
        _flat(write)
    elif rank == 5:
        _deep_conv_transpose(write)


def pool(write: Writer) -> None:
    """Write MaxPool or AveragePool of 1 or 3 dimensions by 2-d ones."""
    rank = len(write.shape(write.node.input[0]))
    if rank == 3:
        _flat(write)
    elif rank == 5:
        if write.has_result(1) and write.node.output[1] in write.around.read:
            raise write.error("gives the places of its maxima to others, of maps of 3 dimensions: use 2.")
        _deep_pool(write)


def _window(write: Writer) -> dict[str, Any]:
    """All attributes of the window, explicit."""
    x, given = write.node.input[0], write.given
    rank = len(write.shape(x)) - 2
    kernel = list(given.get("kernel_shape") or write.shape(write.node.input[1])[2:])
    return {
        "kernel_shape": kernel,
        "strides": list(given.get("strides") or [1] * rank),
        "dilations": list(given.get("dilations") or [1] * rank),
        "pads": list(given.get("pads") or [0] * (2 * rank)),
    }


def _others(write: Writer, *but: str) -> dict[str, Any]:
    """Give the attributes that have no entry for each axis."""
    of_axes = {"kernel_shape", "strides", "dilations", "pads", "output_padding", "output_shape", "auto_pad"}
    return {key: value for key, value in write.given.items() if key not in of_axes | {*but}}


def _flat(write: Writer) -> None:
    shape, window = write.shape(write.node.input[0]), _window(write)
    before, after = window["pads"]
    attrs = {
        "kernel_shape": [1, *window["kernel_shape"]],
        "strides": [1, *window["strides"]],
        "dilations": [1, *window["dilations"]],
        "pads": [0, before, 0, after],
        **_others(write),
    }
    if write.node.op_type == "AveragePool" and window["dilations"] == [1]:
        del attrs["dilations"]
    if any(write.given.get("output_padding", [0])):
        attrs["output_padding"] = [0, *write.given["output_padding"]]
    inputs = [write.reshape(write.node.input[0], [*shape[:2], 1, shape[2]])]
    if len(write.node.input) > 1:
        weight = write.shape(write.node.input[1])
        inputs.append(write.reshape(write.node.input[1], [*weight[:2], 1, weight[2]]))
        inputs += write.node.input[2:]
    results = 2 if write.has_result(1) else 1  # the places of maxima count all elements, and are the same
    for index, name in enumerate(write.several(write.node.op_type, inputs, results, **attrs)):
        write.give(write.reshape(name, write.shape(write.node.output[index])), index)


def _in_plane(window: dict[str, Any]) -> dict[str, Any]:
    """Give the window without its depth."""
    pads = window["pads"]
    plane = {key: window[key][1:] for key in ("kernel_shape", "strides", "dilations")}
    return {**plane, "pads": [*pads[1:3], *pads[4:6]]}


def _planes(write: Writer, x: str, *, flat: bool = True) -> str:
    """Give [N, C, D, H, W] as [N, D, C, H, W], or [N*D, C, H, W]."""
    n, c, d, h, w = write.shape(x)
    x = write.transpose(x, DEPTH_OUT)
    return write.add("Reshape", [x, write.ints("planes", [n * d, c, h, w])]) if flat else x


def _give_planes(write: Writer, y: str) -> None:
    """Make [N*D, C, H, W] the result."""
    n, c, d, h, w = write.shape(write.node.output[0])
    y = write.add("Reshape", [y, write.ints("depth", [n, d, c, h, w])])
    write.give(write.transpose(y, DEPTH_OUT))


def _deep_conv(write: Writer) -> None:
    (n, c, d, h, w), window = write.shape(write.node.input[0]), _window(write)
    weight, depth = write.shape(write.node.input[1]), write.shape(write.node.output[0])[2]
    deep, stride, dilation = (window[key][0] for key in ("kernel_shape", "strides", "dilations"))
    before, after = window["pads"][0], window["pads"][3]
    x = write.pad(_planes(write, write.node.input[0], flat=False), [0, before, 0, 0, 0], [0, after, 0, 0, 0])
    whole, reach = d + before + after, (depth - 1) * stride + 1
    slices = []
    for k in range(deep):
        start = k * dilation
        part = x if (whole, stride) == (depth, 1) else write.slice(x, 1, start, start + reach, stride)
        slices.append(write.add("Reshape", [part, write.ints("slice", [n, depth, c, 1, h * w])]) if deep > 1 else part)
    x = write.add("Concat", slices, axis=3) if deep > 1 else slices[0]
    x = write.add("Reshape", [x, write.ints("planes", [n * depth, c * deep, h, w])])
    flat = write.reshape(write.node.input[1], [weight[0], weight[1] * deep, *weight[3:]])
    group = {"group": write.given.get("group", 1)}
    _give_planes(write, write.add("Conv", [x, flat, *write.node.input[2:]], **_in_plane(window), **group))


def _deep_conv_transpose(write: Writer) -> None:
    (n, _, d, _, _), window = write.shape(write.node.input[0]), _window(write)
    weight, (_, out, depth, height, width) = write.shape(write.node.input[1]), write.shape(write.node.output[0])
    deep, stride, dilation = (window[key][0] for key in ("kernel_shape", "strides", "dilations"))
    before, more = window["pads"][0], write.given.get("output_padding") or [0, 0, 0]
    flat = write.reshape(write.node.input[1], [weight[0], weight[1] * deep, *weight[3:]])
    attrs = {**_in_plane(window), "group": write.given.get("group", 1)}
    if any(more[1:]):
        attrs["output_padding"] = list(more[1:])
    y = write.add("ConvTranspose", [_planes(write, write.node.input[0]), flat], **attrs)
    y = write.add("Reshape", [y, write.ints("parts", [n, d, out, deep, height * width])])
    whole = max((d - 1) * stride + dilation * (deep - 1) + stride, before + depth)
    plane, laid = out * height * width, []
    for k in range(deep):
        part = write.slice(y, 3, k, k + 1) if deep > 1 else y
        part = write.add("Reshape", [part, write.ints("part", [n, d, 1, plane])])
        part = write.pad(part, [0] * 4, [0, 0, stride - 1, 0])
        part = write.add("Reshape", [part, write.ints("spread", [n, d * stride, plane])])
        laid.append(write.pad(part, [0, k * dilation, 0], [0, whole - d * stride - k * dilation, 0]))
    total = laid[0]
    for part in laid[1:]:
        total = write.add("Add", [total, part])
    if (before, whole) != (0, depth):
        total = write.slice(total, 1, before, before + depth)
    total = write.add("Reshape", [total, write.ints("planes", [n * depth, out, height, width])])
    bias = write.operand(2)
    _give_planes(write, write.add("Add", [total, write.reshape(bias, [out, 1, 1])]) if bias else total)


def _deep_pool(write: Writer) -> None:
    (n, c, d, _, _), window = write.shape(write.node.input[0]), _window(write)
    (_, _, depth, height, width), others = write.shape(write.node.output[0]), _others(write, "storage_order")
    pads = window["pads"]
    along: dict[str, Any] = {
        "kernel_shape": [window["kernel_shape"][0], 1],
        "strides": [window["strides"][0], 1],
        "dilations": [window["dilations"][0], 1],
        "pads": [pads[0], 0, pads[3], 0],
    }
    plane = _in_plane(window)
    if write.node.op_type == "AveragePool":
        for part in (plane, along):
            if set(part["dilations"]) == {1}:
                del part["dilations"]
    x = write.add(write.node.op_type, [_planes(write, write.node.input[0])], **plane, **others)
    if window["kernel_shape"][0] > 1 or depth != d:
        x = write.add("Reshape", [x, write.ints("along", [n, 1, d, c * height * width])])
        x = write.add(write.node.op_type, [x], **along, **others)
        x = write.add("Reshape", [x, write.ints("planes", [n * depth, c, height, width])])
    _give_planes(write, x)


def global_pool(write: Writer) -> None:
    """Write GlobalAveragePool of another rank by that of 2-d maps, GlobalMaxPool as a MaxPool over the whole map."""
    x = write.node.input[0]
    shape = write.shape(x)
    if len(shape) == 2:
        write.add("Identity", [x], last=True)
        return
    rows, columns = shape[2] if len(shape) > 3 else 1, math.prod(shape[3:] if len(shape) > 3 else shape[2:])
    average = write.node.op_type == "GlobalAveragePool"
    if average and len(shape) == 4:
        return
    x = write.reshape(x, [*shape[:2], rows, columns])
    if average:
        x = write.add("GlobalAveragePool", [x])
    else:
        window: dict[str, Any] = {"strides": [1, 1], "pads": [0] * 4, "dilations": [1, 1]}
        x = write.add("MaxPool", [x], kernel_shape=[rows, columns], **window)
    write.give(x if len(shape) == 4 else write.reshape(x, [*shape[:2], *[1] * (len(shape) - 2)]))


def _power(write: Writer, x: str, p: int) -> str:
    if p == 2:
        return write.add("Mul", [x, x])
    x = write.add("Abs", [x])
    return x if p == 1 else write.add("Pow", [x, write.number("p", p)])


def _root(write: Writer, x: str, p: int) -> str:
    if p == 1:
        return x
    return write.add("Sqrt", [x]) if p == 2 else write.add("Pow", [x, write.number("root", 1 / p)])


def lp_pool(write: Writer) -> None:
    """Write LpPool by AveragePool."""
    x, p = write.node.input[0], int(write.given.get("p", 2))
    window: dict[str, Any] = _window(write)
    rank = len(window["kernel_shape"])
    ceil = bool(write.given.get("ceil_mode"))
    for axis, of in enumerate(axes_of(window, write.shape(x)[2:])):
        window["pads"][rank + axis] += of.overhang(ceil)
    if set(window["dilations"]) == {1}:
        del window["dilations"]
    mean = write.add("AveragePool", [_power(write, x, p)], count_include_pad=1, **window)
    size = write.number("size", math.prod(window["kernel_shape"]))
    write.give(_root(write, write.add("Mul", [mean, size]), p))


def global_lp_pool(write: Writer) -> None:
    """Write GlobalLpPool by ReduceSum."""
    x, p = write.node.input[0], int(write.given.get("p", 2))
    total = write.reduce("ReduceSum", _power(write, x, p), range(2, len(write.shape(x))))
    write.give(_root(write, total, p))


def explicit_transposed(write: Writer) -> None:
    """Write out pads, strides, dilations and output_padding of a ConvTranspose, in place, as onnx derives them of
    auto_pad or output_shape."""
    window, given = _window(write), write.given
    sizes = write.shape(write.node.input[0])[2:]
    rank = len(sizes)
    more = list(given.get("output_padding") or [0] * rank)
    auto = given.get("auto_pad", b"NOTSET").decode()
    wanted = given.get("output_shape")
    if wanted is None and auto.startswith("SAME"):
        wanted = [size * stride for size, stride in zip(sizes, window["strides"], strict=True)]
    pads = [0] * (2 * rank) if auto == "VALID" else window["pads"]
    for axis, size in enumerate((wanted or [])[-rank:]):
        reach = (window["kernel_shape"][axis] - 1) * window["dilations"][axis] + 1
        total = window["strides"][axis] * (sizes[axis] - 1) + more[axis] + reach - size
        if total < 0:
            total, more[axis] = 0, more[axis] - total
        small, large = total // 2, total - total // 2
        pads[axis], pads[rank + axis] = (small, large) if auto == "SAME_UPPER" else (large, small)
    write.given = {**window, "pads": pads, "group": given.get("group", 1)}
    if any(more):
        write.given["output_padding"] = more
    if {**given} != write.given:
        write.set_attributes(write.given)
