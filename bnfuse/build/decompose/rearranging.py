"""Operators that move elements about, by Reshape and Transpose."""

from __future__ import annotations

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


def cast_like(write: Writer) -> None:
    """Write CastLike as a Cast to the type of its second operand."""
    x, like = write.node.input
    write.add("Cast", [x], last=True, to=write.around.types[like])
