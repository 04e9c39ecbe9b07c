"""LayerNorms over the channels of pixels against the numpy reference in float64."""

import numpy as np
import pytest

from bnfuse.opset import plain, reference
from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.cpu.layer_norm import layer_norm, layer_norm_grad
from bnfuse.runtime.kernels.kernel import MapType

pytestmark = pytest.mark.usefixtures("optimized_by_turns")

SHAPES = [(2, 37, 5, 3), (1, 96, 7, 7), (3, 1, 2, 2), (40, 16, 1, 1), (1, 5, 1, 1)]


def in_slot(x, stride, offset):
    n, c, h, w = x.shape
    buffer = np.full((n, h, w, stride), 9.0, np.float32)
    buffer[..., offset : offset + c] = x.transpose(0, 2, 3, 1)
    return buffer, MapType(n, h, w, c, stride)


def drawn(rng, shape):
    maps = {name: rng.normal(size=shape).astype(np.float32) for name in ("dy", "x")}
    vectors = {name: rng.uniform(0.5, 2, size=shape[1]).astype(np.float32) for name in ("scale", "bias")}
    return {**maps, **vectors}


def expected(name, operands, **attributes):
    wide = {key: value.astype(np.float64) for key, value in operands.items()}
    return reference.run(plain.PLAIN_OPS[name], wide, attributes)


def as_map(found, kind, offset=0):
    return found.reshape(kind.n, kind.h, kind.w, kind.stride)[..., offset : offset + kind.c].transpose(0, 3, 1, 2)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("ratio", [0.0, 1e2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward(shape, ratio, threads):
    operands = drawn(np.random.default_rng(0), shape)
    operands["x"] += np.float32(ratio)
    (buffer, kind), (_, result) = in_slot(operands["x"], shape[1] + 13, 6), in_slot(operands["x"], shape[1] + 2, 1)
    kernel = layer_norm(kind, result, resolve("cpu", threads), 1e-3)
    vectors = {name: operands[name] for name in ("scale", "bias")}
    found = execute.call(kernel, {"x": buffer, **vectors}, {"x": 6, "y": 1})
    wanted = expected("LayerNorm", {"x": operands["x"], **vectors}, epsilon=1e-3)
    tolerance = 1e-6 * (1 + ratio)
    np.testing.assert_allclose(as_map(found["y"], result, 1), wanted["y"], rtol=1e-5, atol=10 * tolerance)
    np.testing.assert_allclose(found["mean"], wanted["mean"].ravel(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found["inv_std"], wanted["inv_std"].ravel(), rtol=1e-5 * (1 + ratio))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradient(shape, threads):
    operands = drawn(np.random.default_rng(1), shape)
    del operands["bias"]
    rows = (shape[0], *shape[2:])
    operands["mean"] = operands["x"].mean(axis=1)
    operands["inv_std"] = np.random.default_rng(2).uniform(0.5, 2, size=rows).astype(np.float32)
    (dy, dy_kind), (x, x_kind) = in_slot(operands["dy"], shape[1], 0), in_slot(operands["x"], shape[1] + 9, 5)
    kernel = layer_norm_grad(dy_kind, x_kind, dy_kind, resolve("cpu", threads))
    found = execute.call(kernel, {**operands, "dy": dy, "x": x}, {"x": 5})
    wanted = expected("LayerNormGrad", operands)
    np.testing.assert_allclose(as_map(found["dx"], dy_kind), wanted["dx"], rtol=1e-5, atol=1e-5)
    for name in ("dscale", "dbias"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, atol=1e-5, err_msg=name)
