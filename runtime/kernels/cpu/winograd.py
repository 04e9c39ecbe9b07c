"""The transforms of Winograd's minimal filtering F(2x2, 3x3) (Lavin and Gray, arXiv 1509.09308, section 4.1).

A convolution of a 3x3 window and stride 1 gives two by two outputs y for a patch d of four by four inputs:

    y = A^T ((G g G^T) * (B^T d B)) A      * elementwise: 16 multiplications for each pair of channels, not 36

What sums over input channels does so between the elementwise product and A^T..A, so 16 matrix products remain, one for
each of the 16 places of a transformed patch. The gradients are the transposes of the same maps, with M = A dy A^T:

    dg = G^T (M * (B^T d B)) G        dd = B (M * (G g G^T)) B^T, added up where patches overlap

The transforms take and return rows of values: scalars or vectors, one lane a channel, of TIR or numpy. `bind` names
what is used more than once. `load_block` and `store_places` are for TIR.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cpu.tir import Buffer, Expr, span, store

Matrix = tuple[tuple[Fraction, ...], ...]
Block = Sequence[Sequence[Any]]
Bind = Callable[[Any], Any]

OUT = 2  # outputs of a tile, along each axis
PATCH = 4  # inputs of a tile, and places of its transform
PLACES = PATCH * PATCH


def _matrix(*rows: str) -> Matrix:
    return tuple(tuple(Fraction(entry) for entry in row.split()) for row in rows)


def transposed(matrix: Matrix) -> Matrix:
    """Give the transpose of a matrix."""
    return tuple(zip(*matrix, strict=True))


B_T = _matrix("1 0 -1 0", "0 1 1 0", "0 -1 1 0", "0 1 0 -1")
G = _matrix("1 0 0", "1/2 1/2 1/2", "1/2 -1/2 1/2", "0 0 1")
A_T = _matrix("1 1 1 0", "0 1 -1 -1")


def input_transform(patch: Block, bind: Bind) -> Block:
    """Write B^T d B: 4x4 to 4x4."""
    return sandwich(B_T, patch, bind)


def weight_transform(window: Block, bind: Bind) -> Block:
    """Write G g G^T: 3x3 to 4x4."""
    return sandwich(G, window, bind)


def output_transform(products: Block, bind: Bind) -> Block:
    """Write A^T m A: 4x4 to 2x2."""
    return sandwich(A_T, products, bind)


def output_gradient_transform(dy: Block, bind: Bind) -> Block:
    """Write A dy A^T: 2x2 to 4x4."""
    return sandwich(transposed(A_T), dy, bind)


def weight_gradient_transform(products: Block, bind: Bind) -> Block:
    """Write G^T m G: 4x4 to 3x3."""
    return sandwich(transposed(G), products, bind)


def sandwich(matrix: Matrix, block: Block, bind: Bind) -> list[list[Any]]:
    """Write matrix * block * matrix^T."""
    columns = [apply(matrix, column, bind) for column in zip(*block, strict=True)]
    return [apply(matrix, row, bind) for row in zip(*columns, strict=True)]


def apply(matrix: Matrix, values: Sequence[Any], bind: Bind) -> list[Any]:
    """Write matrix * values."""
    return [_combine(row, values, bind) for row in matrix]


def _combine(row: Sequence[Fraction], values: Sequence[Any], bind: Bind) -> Any:
    """Write the sum of row[i]*values[i]: terms of one size are added up before they are scaled."""
    total = None
    for size in sorted({abs(factor) for factor in row if factor}, reverse=True):
        terms = [(factor > 0, value) for factor, value in zip(row, values, strict=True) if abs(factor) == size]
        same = _signed_sum(terms)
        part = same if size == 1 else same * float(size)
        total = part if total is None else total + part
    return total if sum(map(bool, row)) == 1 and 1 in row else bind(total)


def _signed_sum(terms: list[tuple[bool, Any]]) -> Any:
    """Write the terms added up or, where not `True`, taken away; one to be added comes first, if there is one."""
    (positive, total), *rest = sorted(terms, key=lambda term: not term[0])
    if not positive:
        total = total * -1.0
    for positive, value in rest:
        total = total + value if positive else total - value
    return total


def load_block(buffer: Buffer, size: int, index: Callable[[int, int], Expr], width: int, stride: int = 1) -> Block:
    """Read size x size vectors of `width` elements, each from `index(row, column)` on, `stride` apart."""
    return [[T.bind(buffer[span(index(i, j), width, stride)]) for j in range(size)] for i in range(size)]


def store_places(buffer: Buffer, values: Block, start: Expr, apart: int, width: int) -> None:
    """Store the 4 x 4 vectors of a transformed patch, `apart` elements from one place to the next."""
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            store(buffer, span(start + (i * PATCH + j) * apart, width), value)
