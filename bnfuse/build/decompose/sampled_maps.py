"""GridSample and DeformConv: maps read between their pixels, each place by its four neighbours.

    rows      [N*H*W, C], a pixel each
    places    y and x in pixels; floor(y), floor(x) and the next ones say which four rows Gather takes for each
    result    their sum, by the distances: (x1 - x)*(y1 - y), ...; a neighbour outside of the map counts 0

Gradients with respect to the map, and to the places by the distances, are those of these operators.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from .writer import Writer

LINEAR, NEAREST = ("bilinear", "linear"), ("nearest",)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Pixels of maps as rows [maps*height*width, channels], and in which row the map of each place begins."""

    name: str
    height: int
    width: int
    begin: np.ndarray  # int64, broadcasts to the shape of the places


def grid_sample(write: Writer) -> None:
    """Write GridSample of maps [N, C, H, W] at [N, h, w, 2]; bilinear and nearest, all paddings."""
    x, grid = write.node.input
    if len(write.shape(x)) != 4:
        raise write.error(f"samples a tensor of {len(write.shape(x))} axes: there are gradients of maps [N, C, H, W].")
    n, c, height, width = write.shape(x)
    mode = write.given.get("mode", b"linear").decode()
    if mode not in LINEAR + NEAREST:
        raise write.error(f"has mode={mode}: there are gradients of bilinear and nearest. Export it with one of these.")
    padding = write.given.get("padding_mode", b"zeros").decode()
    corners = bool(write.given.get("align_corners", 0))
    places = [
        _padded(write, _in_pixels(write, _coordinate(write, grid, index), size, corners), size, padding, corners)
        for index, size in ((1, height), (0, width))
    ]
    rows = Rows(_rows(write, x), height, width, (height * width * np.arange(n)).reshape(n, 1, 1))
    shape = write.shape(grid)[:-1]
    y = nearest(write, rows, places) if mode in NEAREST else bilinear(write, rows, places, shape)
    write.give(write.transpose(write.add("Reshape", [y, write.ints("shape", [*shape, c])]), [0, 3, 1, 2]))


def _rows(write: Writer, x: str) -> str:
    """Give the pixels of maps [N, C, H, W] as rows of their channels."""
    n, c, height, width = write.shape(x)
    return write.add("Reshape", [write.transpose(x, [0, 2, 3, 1]), write.ints("shape", [n * height * width, c])])


def _coordinate(write: Writer, grid: str, index: int) -> str:
    return write.add("Gather", [grid, write.constant("axis", np.array(index, np.int64))], axis=-1)


def _in_pixels(write: Writer, place: str, size: int, corners: bool) -> str:
    """Turn -1 to 1 into pixels: between the centres of the outer ones (`corners`), or between their outer edges."""
    factor = (size - 1) / 2 if corners else size / 2
    scaled = write.add("Mul", [place, write.number("scale", factor)])
    return write.add("Add", [scaled, write.number("centre", (size - 1) / 2)])


def _padded(write: Writer, place: str, size: int, padding: str, corners: bool) -> str:
    """Bring places outside of the map to where they are read; with zeros they stay outside."""
    if padding == "zeros":
        return place
    if padding == "reflection":
        place = _reflected(write, place, size, corners)
    zero, last = write.number("zero", 0.0), write.number("last", size - 1.0)
    above = write.add("Greater", [place, zero])
    inside = write.add("And", [above, write.add("Less", [place, last])])
    return write.add("Where", [inside, place, write.add("Where", [above, last, zero])])  # no slope at the border


def _reflected(write: Writer, place: str, size: int, corners: bool) -> str:
    low, span = (0.0, size - 1.0) if corners else (-0.5, float(size))
    if span == 0:
        return write.add("Mul", [place, write.number("zero", 0.0)])
    length = write.number("span", span)
    beyond = write.add("Abs", [write.add("Sub", [place, write.number("low", low)])])
    turns = write.add("Floor", [write.add("Div", [beyond, length])])
    rest = write.add("Sub", [beyond, write.add("Mul", [turns, length])])
    halves = write.add("Floor", [write.add("Mul", [turns, write.number("half", 0.5)])])
    odd = write.add("Sub", [turns, write.add("Mul", [halves, write.number("two", 2.0)])])
    back = write.add("Sub", [length, rest])
    found = write.add("Where", [write.add("Greater", [odd, write.number("half", 0.5)]), back, rest])
    return write.add("Add", [found, write.number("low", low)])


def _inside(write: Writer, place: str, size: int) -> str:
    above = write.add("GreaterOrEqual", [place, write.number("zero", 0.0)])
    return write.add("And", [above, write.add("LessOrEqual", [place, write.number("last", size - 1.0)])])


def _read(write: Writer, rows: Rows, y: str, x: str) -> str:
    """Read the rows at whole places, [*places, C]; those outside give some pixel."""
    zero = write.constant("first", np.array(0, np.int64))
    whole = []
    for place, size in ((y, rows.height), (x, rows.width)):
        index = write.add("Cast", [place], to=TensorProto.INT64)
        index = write.add("Min", [index, write.constant("last_index", np.array(size - 1, np.int64))])
        whole.append(write.add("Max", [index, zero]))
    above = write.add("Mul", [whole[0], write.constant("width", np.array(rows.width, np.int64))])
    row = write.add("Add", [write.add("Add", [above, whole[1]]), write.constant("begin", rows.begin.astype(np.int64))])
    return write.add("Gather", [rows.name, row], axis=0)


def _weighed(write: Writer, pixels: str, inside: str, weight: str) -> str:
    weight = write.add("Where", [inside, weight, write.number("zero", 0.0)])
    return write.add("Mul", [pixels, write.add("Unsqueeze", [weight, write.ints("last_axis", [-1])])])


def nearest(write: Writer, rows: Rows, places: Sequence[str]) -> str:
    """Read maps at the pixels nearest to the places y and x, of one shape: [*shape, C]."""
    y, x = (write.add("Round", [place]) for place in places)
    inside = write.add("And", [_inside(write, y, rows.height), _inside(write, x, rows.width)])
    return _weighed(write, _read(write, rows, y, x), inside, write.number("one", 1.0))


def bilinear(write: Writer, rows: Rows, places: Sequence[str], shape: Sequence[int]) -> str:
    """Read maps at the places y and x, of one `shape`: [*shape, C]."""
    one = write.number("one", 1.0)
    sides = []
    for place, size in zip(places, (rows.height, rows.width), strict=True):
        before = write.add("Floor", [place])
        behind = write.add("Add", [before, one])
        share = write.add("Sub", [place, before])
        rest = write.add("Sub", [behind, place])
        sides.append([(at, _inside(write, at, size), weight) for at, weight in ((before, rest), (behind, share))])
    parts = []
    for (y, y_inside, y_weight), (x, x_inside, x_weight) in itertools.product(*sides):
        inside = write.add("And", [y_inside, x_inside])
        parts.append(_weighed(write, _read(write, rows, y, x), inside, write.add("Mul", [y_weight, x_weight])))
    total = parts[0]
    for part in parts[1:]:
        total = write.add("Add", [total, part])
    return total


def deform_conv(write: Writer) -> None:
    """Write DeformConv in two dimensions: maps sampled at the places of all windows, and a product of matrices."""
    x, w, offset = write.node.input[:3]
    if len(write.shape(x)) != 4:
        raise write.error(f"reads a tensor of {len(write.shape(x))} axes: there are gradients of maps [N, C, H, W].")
    (n, c, height, width), (out, _, *kernel) = write.shape(x), write.shape(w)
    oh, ow = write.shape(offset)[2:]
    given = write.given
    groups, parts, count = int(given.get("group", 1)), int(given.get("offset_group", 1)), int(np.prod(kernel))
    strides, dilations = given.get("strides", [1, 1]), given.get("dilations", [1, 1])
    before = given.get("pads", [0] * 4)[:2]
    shape = [n, parts, count, oh, ow]
    moved = write.add("Reshape", [offset, write.ints("shape", [n, parts, count, 2, oh, ow])])
    taps = np.indices(kernel).reshape(2, count)
    places = []
    for axis, size in enumerate((oh, ow)):
        start = np.arange(size) * strides[axis] - before[axis]
        along = start.reshape([-1, 1] if axis == 0 else [1, -1])
        whole = taps[axis].reshape(count, 1, 1) * dilations[axis] + along
        index = write.constant("axis", np.array(axis, np.int64))
        own = write.add("Gather", [moved, index], axis=3)
        places.append(write.add("Add", [own, write.constant("places", whole.astype(np.float32))]))
    by_part = write.add("Reshape", [x, write.ints("shape", [n * parts, c // parts, height, width])])
    pixels = write.transpose(by_part, [0, 2, 3, 1])
    flat = write.add("Reshape", [pixels, write.ints("shape", [n * parts * height * width, c // parts])])
    begin = (height * width * np.arange(n * parts)).reshape(n, parts, 1, 1, 1)
    read = bilinear(write, Rows(flat, height, width, begin), places, shape)
    if write.operand(4):
        mask = write.add("Reshape", [write.operand(4), write.ints("shape", [*shape, 1])])
        read = write.add("Mul", [read, mask])
    columns = write.transpose(read, [0, 3, 4, 1, 5, 2])  # N, oh, ow, and the channels with all taps of each
    per = c // groups * count
    stack = write.add("Reshape", [columns, write.ints("shape", [n * oh * ow, groups, per])])
    weight = write.reshape(w, [groups, out // groups, per])
    product = write.add("MatMul", [write.transpose(stack, [1, 0, 2]), write.transpose(weight, [0, 2, 1])])
    joined = write.add("Reshape", [write.transpose(product, [1, 0, 2]), write.ints("shape", [n, oh, ow, out])])
    if write.operand(3):
        joined = write.add("Add", [joined, write.operand(3)])
    write.give(write.transpose(joined, [0, 3, 1, 2]))
