"""Winograd's transforms against the convolution and its gradients, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from bnfuse.runtime.kernels.cpu import winograd


def same(value):
    return value


def correlate(patch: np.ndarray, window: np.ndarray) -> np.ndarray:
    size = patch.shape[0] - window.shape[0] + 1
    return np.array(
        [[(patch[i : i + len(window), j : j + len(window)] * window).sum() for j in range(size)] for i in range(size)]
    )


@pytest.fixture
def tile():
    rng = np.random.default_rng(0)
    return rng.standard_normal((4, 4)), rng.standard_normal((3, 3)), rng.standard_normal((2, 2))


def test_output_of_a_tile(tile):
    patch, window, _ = tile
    products = np.multiply(winograd.weight_transform(window, same), winograd.input_transform(patch, same))
    np.testing.assert_allclose(winograd.output_transform(products, same), correlate(patch, window), rtol=1e-13)


def test_gradient_of_the_window(tile):
    patch, _, dy = tile
    products = np.multiply(winograd.output_gradient_transform(dy, same), winograd.input_transform(patch, same))
    found = winograd.weight_gradient_transform(products, same)
    np.testing.assert_allclose(found, correlate(patch, dy), rtol=1e-13)


def test_a_whole_transform_of_the_input_takes_32_additions():
    """And no multiplication: what is bound is what is computed."""
    bound = []
    winograd.input_transform(np.eye(4), lambda value: bound.append(value) or value)
    assert len(bound) == 32
