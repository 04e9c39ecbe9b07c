"""Sparse linear maps along rows and columns against the product with the dense matrix."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.common.taps import TapsProblem, most_taps, taps_of
from bnfuse.runtime.kernels.cpu.taps import taps
from bnfuse.runtime.kernels.kernel import MapType

TARGET = resolve("cpu", 2)


def sparse(out: int, size: int, most: int, rng: np.random.Generator, *, picks: bool = False) -> np.ndarray:
    """A matrix with up to `most` entries a row; rows of fewer, and of none, among them."""
    matrix = np.zeros((out, size), np.float32)
    for row in range(out):
        count = most if picks else rng.integers(0, most + 1)
        matrix[row, rng.choice(size, min(count, size), replace=False)] = (
            1 if picks else rng.normal(size=min(count, size))
        )
    return matrix


def run(x, matrix, axis, slots=((0, 0), (0, 0))):
    """x [n, h, w, c] with columns or rows mixed; maps in the given (further channels, offset) of wider buffers."""
    index, weight = taps_of(matrix)
    c = x.shape[3]
    shape = made(x.shape, matrix, axis)
    kinds = [MapType(*full, full[3] + more) for full, (more, _) in zip((x.shape, shape), slots, strict=True)]
    problem = TapsProblem(*kinds, axis, index.shape[1], weight is not None)
    wide, out = (
        np.full((*kind_shape, kind.stride), 7, np.float32)
        for kind_shape, kind in ((x.shape[:3], kinds[0]), (shape[:3], kinds[1]))
    )
    wide[..., slots[0][1] : slots[0][1] + c] = x
    arrays = {"x": wide, "index": index, "y": out} | ({} if weight is None else {"weight": weight})
    found = execute.call(taps(problem, TARGET), arrays, {"x": slots[0][1], "y": slots[1][1]})["y"].reshape(out.shape)
    outside = found.copy()
    outside[..., slots[1][1] : slots[1][1] + shape[3]] = 7
    assert (outside == 7).all()
    return found[..., slots[1][1] : slots[1][1] + shape[3]]


def made(shape, matrix, axis):
    """The shape [n, h, w, c] of what a matrix makes along an axis of a map."""
    return tuple(len(matrix) if name == axis else size for name, size in zip("nhwc", shape, strict=True))


def wanted(x, matrix, axis):
    along = {"h": "oi,niwc->nowc", "w": "oi,nhic->nhoc", "c": "oi,nhwi->nhwo"}[axis]
    return np.einsum(along, matrix.astype(np.float64), x.astype(np.float64))


def check(shape, out, most, axis, slots=((0, 0), (0, 0)), picks=False):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape).astype(np.float32)
    matrix = sparse(out, shape["nhwc".index(axis)], most, rng, picks=picks)
    np.testing.assert_allclose(run(x, matrix, axis, slots), wanted(x, matrix, axis), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", ["h", "w"])
def test_equals_the_dense_product(axis):
    check((2, 6, 5, 16), 9, 4, axis)
    check((2, 6, 5, 37), 3, 1, axis, picks=True)
    check((1, 21, 23, 3), 4, 18, axis, slots=((5, 3), (2, 1)))


@pytest.mark.parametrize(("c", "out", "slots"), [(16, 16, ((0, 0), (0, 0))), (37, 50, ((5, 3), (2, 1)))])
def test_channels_are_picked(c, out, slots):
    check((2, 3, 5, c), out, 1, "c", slots, picks=True)


@settings(max_examples=8, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.integers(1, 70)),
    out=st.integers(1, 12),
    most=st.integers(1, 11),
    axis=st.sampled_from(["h", "w"]),
)
def test_any_sizes(shape, out, most, axis):
    check(shape, out, most, axis)


def test_the_table_has_what_the_matrix_has():
    matrix = np.array([[0, 2, 0, 3], [0, 0, 0, 0], [1, 0, 0, 0]], np.float32)
    index, weight = taps_of(matrix)
    assert weight is not None and most_taps(matrix) == 2 == index.shape[1]
    rebuilt = np.zeros_like(matrix)
    np.add.at(rebuilt, (np.arange(3)[:, None], index), weight)
    np.testing.assert_array_equal(rebuilt, matrix)
    assert taps_of(np.eye(3, 5, 1))[1] is None
