"""Operators that move elements about, by Reshape and Transpose; and the grid along which they are moved."""

from __future__ import annotations

import numpy as np

from .writer import Writer


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


def cast_like(write: Writer) -> None:
    """Write CastLike as a Cast to the type of its second operand."""
    x, like = write.node.input
    write.add("Cast", [x], last=True, to=write.around.types[like])
