"""Operators that move elements about, by Reshape and Transpose; and the grid along which they are moved."""

from __future__ import annotations

import numpy as np

from .writer import Writer

MOST_FACTORS = 512


def depth_to_space(write: Writer) -> None:
    """Write DepthToSpace (PixelShuffle): channels become the pixels of blocks."""
    x, size = write.node.input[0], int(write.given["blocksize"])
    n, c, h, w = write.shape(x)
    inner = c // size**2
    if write.given.get("mode", b"DCR") == b"CRD":
        x = write.reshape(x, [n, inner, size, size, h, w])
        x = write.transpose(x, [0, 1, 4, 2, 5, 3])
    else:
        x = write.reshape(x, [n, size, size, inner, h, w])
        x = write.transpose(x, [0, 3, 4, 1, 5, 2])
    write.give(write.reshape(x, [n, inner, h * size, w * size]))


def space_to_depth(write: Writer) -> None:
    """Write SpaceToDepth: the pixels of blocks become channels."""
    x, size = write.node.input[0], int(write.given["blocksize"])
    n, c, h, w = write.shape(x)
    x = write.reshape(x, [n, c, h // size, size, w // size, size])
    columns_first = write.given.get("mode", b"DCR") == b"CRD"
    x = write.transpose(x, [0, 1, 3, 5, 2, 4] if columns_first else [0, 3, 5, 1, 2, 4])
    write.give(write.reshape(x, [n, c * size**2, h // size, w // size]))


def affine_grid(write: Writer) -> None:
    """Write AffineGrid as the product of its points, which are constant, [pixels, axes + 1], and the matrices."""
    theta, sizes = write.node.input[0], (write.integers(1, "sizes") or [])[2:]
    corners = bool(write.given.get("align_corners"))
    along = []
    for size in sizes:
        steps = np.arange(size, dtype=np.float64)
        along.append(2 * steps / max(size - 1, 1) - (size > 1) if corners else (2 * steps + 1) / size - 1)
    points = np.meshgrid(*along, indexing="ij")[::-1]  # x first
    matrix = np.stack([axis.reshape(-1) for axis in (*points, np.ones_like(points[0]))], axis=1)
    turned = write.transpose(theta, [0, 2, 1])
    grid = write.add("MatMul", [write.constant("points", matrix.astype(np.float32)), turned])
    write.give(write.add("Reshape", [grid, write.ints("shape", [write.shape(theta)[0], *sizes, len(sizes)])]))


def col2im(write: Writer) -> None:
    """Write Col2Im (torch's fold) as a ConvTranspose of each channel, whose weight puts every tap in its place."""
    x, image, block = write.node.input[0], write.integers(1, "image"), write.integers(2, "block")
    assert image is not None
    assert block is not None
    rank, taps = len(block), int(np.prod(block))
    dilations, strides = (write.given.get(name, [1] * rank) for name in ("dilations", "strides"))
    pads = write.given.get("pads", [0] * (2 * rank))
    n, rows, _ = write.shape(x)
    reach = [(k - 1) * d + 1 for k, d in zip(block, dilations, strict=True)]
    whole = [size + pads[i] + pads[rank + i] for i, size in enumerate(image)]
    counts = [(size - r) // s + 1 for size, r, s in zip(whole, reach, strides, strict=True)]
    more = [size - (count - 1) * s - r for size, count, s, r in zip(whole, counts, strides, reach, strict=True)]
    weight = np.tile(np.eye(taps, dtype=np.float32).reshape(taps, 1, *block), (rows // taps, *[1] * (rank + 1)))
    y = write.add(
        "ConvTranspose",
        [write.add("Reshape", [x, write.ints("shape", [n, rows, *counts])]), write.constant("taps", weight)],
        group=rows // taps,
        kernel_shape=block,
        strides=list(strides),
        dilations=list(dilations),
        pads=list(pads),
        output_padding=more,
    )
    write.give(y)


def cumulative_product(write: Writer) -> None:
    """Write CumProd as a product after the other."""
    x = write.node.input[0]
    shape, given = write.shape(x), write.integers(1, "axis")
    assert given is not None
    axis = given[0] % len(shape)
    length, reverse, exclusive = shape[axis], write.given.get("reverse", 0), write.given.get("exclusive", 0)
    if length > MOST_FACTORS:
        raise write.error(f"multiplies {length} elements one after the other: there are gradients of {MOST_FACTORS}.")
    parts = [x] if length == 1 else write.several("Split", [x, write.ints("ones", [1] * length)], length, axis=axis)
    ordered = parts[::-1] if reverse else parts
    one = write.constant("one", np.ones([1 if i == axis else size for i, size in enumerate(shape)], np.float32))
    products = [one if exclusive else ordered[0]]
    for part in ordered[:-1] if exclusive else ordered[1:]:
        products.append(part if products[-1] == one else write.add("Mul", [products[-1], part]))
    found = products[::-1] if reverse else products
    write.give(found[0] if length == 1 else write.add("Concat", found, axis=axis))


def cast_like(write: Writer) -> None:
    """Write CastLike as a Cast to the type of its second operand."""
    x, like = write.node.input
    write.add("Cast", [x], last=True, to=write.around.types[like])
