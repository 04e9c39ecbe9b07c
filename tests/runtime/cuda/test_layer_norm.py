"""LayerNorms over the channels of pixels on a GPU, against float64."""

import cuda_kernels
import numpy as np
import pytest
from cuda_operator import alignment, nhwc, raw, rounded, values_of

from bnfuse.opset import plain, reference
from bnfuse.runtime.kernels.cuda.layer_norm import layer_norm, layer_norm_grad
from bnfuse.runtime.kernels.kernel import MapType

DTYPES = ["float32", "bfloat16", "float16"]
SHAPES = [(2, 37, 3, 3), (1, 96, 3, 2), (9, 5, 1, 1)]


def in_slot(x, stride, offset, dtype):
    n, c, h, w = x.shape
    buffer = np.full((n, h, w, stride), 9.0, np.float32)
    buffer[..., offset : offset + c] = nhwc(x)
    return raw(buffer, dtype), MapType(n, h, w, c, stride, dtype, alignment(c, stride, offset))


def drawn(shape, dtype):
    rng = np.random.default_rng(0)
    maps = {name: rounded(rng.normal(size=shape), dtype) for name in ("dy", "x")}
    return {**maps, **{name: rounded(rng.uniform(0.5, 2, size=shape[1]), "float32") for name in ("scale", "bias")}}


def assert_map(found, kind, dtype, exact, offset=0):
    tolerance = {"float32": 1e-5, "bfloat16": 2**-8, "float16": 2**-10}[dtype]
    made = values_of(found, dtype).reshape(kind.n, kind.h, kind.w, kind.stride)[..., offset : offset + kind.c]
    np.testing.assert_allclose(made, nhwc(exact), rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward(shape, dtype):
    operands, c = drawn(shape, dtype), shape[1]
    (x, kind), (_, result) = in_slot(operands["x"], c + 11, 6, dtype), in_slot(operands["x"], c + 3, 0, dtype)
    kernel = layer_norm(kind, result, cuda_kernels.gpu(), 1e-3)
    vectors = {name: operands[name] for name in ("scale", "bias")}
    found = cuda_kernels.run_kernel(kernel, {"x": x, **vectors}, {"x": 6})
    wanted = reference.run(plain.PLAIN_OPS["LayerNorm"], {"x": operands["x"], **vectors}, {"epsilon": 1e-3})
    assert_map(found["y"], result, dtype, wanted["y"])
    np.testing.assert_allclose(found["mean"], wanted["mean"].ravel(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found["inv_std"], wanted["inv_std"].ravel(), rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradient(shape, dtype):
    operands, c = drawn(shape, dtype), shape[1]
    del operands["bias"]
    operands["mean"] = rounded(operands["x"].mean(axis=1), "float32")
    operands["inv_std"] = rounded(np.random.default_rng(2).uniform(0.5, 2, operands["mean"].shape), "float32")
    (dy, dy_kind), (x, x_kind) = in_slot(operands["dy"], c, 0, dtype), in_slot(operands["x"], c + 9, 5, dtype)
    kernel = layer_norm_grad(dy_kind, x_kind, dy_kind, cuda_kernels.gpu())
    found = cuda_kernels.run_kernel(kernel, {**operands, "dy": dy, "x": x}, {"x": 5})
    wanted = reference.run(plain.PLAIN_OPS["LayerNormGrad"], operands, {})
    assert_map(found["dx"], dy_kind, dtype, wanted["dx"])
    for name in ("dscale", "dbias"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("arch", "dtype"), [("sm_80", "float32"), ("sm_90", "bfloat16")])
def test_no_spills(arch, dtype):
    target = cuda_kernels.gpu("bf16", arch, 132)
    kind = MapType(64, 28, 28, 192, 192, dtype, 8)
    cuda_kernels.assert_no_spills(layer_norm(kind, kind, target, 1e-6))
    cuda_kernels.assert_no_spills(layer_norm_grad(kind, kind, kind, target))
