"""The stand-alone halves of a BatchNorm against the numpy reference in float64."""

import numpy as np
import pytest
import tvm_ffi

from bnfuse.opset import plain, reference
from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.cpu import coefficients, norm
from bnfuse.runtime.kernels.kernel import MapType

pytestmark = pytest.mark.usefixtures("optimized")

TARGET = resolve("cpu", 2)


def one(name, *arguments):
    """The kernel of one per-channel operator."""
    return coefficients.coefficients(((name, arguments),), TARGET)


def nhwc(x):
    return x.transpose(0, 2, 3, 1)


def in_slot(x, stride, offset):
    n, c, h, w = x.shape
    buffer = np.full((n, h, w, stride), 9.0, np.float32)
    buffer[..., offset : offset + c] = nhwc(x)
    return buffer, MapType(n, h, w, c, stride)


def expected(name, operands, **attributes):
    wide = {k: v.astype(np.float64) for k, v in operands.items()}
    return reference.run(plain.PLAIN_OPS[name], wide, attributes)


def vectors(rng, count, *names):
    return {name: rng.uniform(0.5, 2, size=count).astype(np.float32) for name in names}


@pytest.mark.parametrize("sweeps", [1, 2])
@pytest.mark.parametrize("ratio", [0.0, 1e3])
def test_statistics(sweeps, ratio):
    x = (np.random.default_rng(0).normal(size=(3, 37, 9, 7)) + ratio).astype(np.float32)
    buffer, kind = in_slot(x, 50, 6)
    found = execute.call(norm.batch_norm_statistics(kind, TARGET, sweeps), {"x": buffer}, {"x": 6})
    wanted = expected("BatchNormStatistics", {"x": x})
    np.testing.assert_allclose(found["mean"], wanted["mean"], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found["variance"], wanted["variance"], rtol=1e-5)


def test_finalize_serves_any_number_of_channels():
    kernel = one("finalize", 24, 1e-5, 0.9)
    assert kernel.key == one("finalize", 7, 1e-5, 0.9).key
    function = execute.compile_kernel(kernel)
    for count in (24, 7):
        kernel = one("finalize", count, 1e-5, 0.9)
        operands = vectors(np.random.default_rng(1), count, *plain.PLAIN_OPS["BatchNormFinalize"].operands)
        found = execute.call(kernel, operands, function=function)
        for name, value in expected("BatchNormFinalize", operands, epsilon=1e-5, momentum=0.9).items():
            np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("elements", [1.0, 2.0, 98.0])
def test_finalize_moves_the_running_variance_by_the_unbiased_one(elements):
    kernel = one("finalize", 7, 1e-5, 0.9, elements)
    operands = vectors(np.random.default_rng(1), 7, *plain.PLAIN_OPS["BatchNormFinalize"].operands)
    wanted = expected("BatchNormFinalize", operands, epsilon=1e-5, momentum=0.9, elements=elements)
    for name, value in wanted.items():
        np.testing.assert_allclose(execute.call(kernel, operands)[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


def test_grad_reduce():
    rng = np.random.default_rng(2)
    dz, x = (rng.normal(size=(2, 21, 8, 5)).astype(np.float32) for _ in range(2))
    operands = {"dz": dz, "x": x, **vectors(rng, 21, "mean", "inv_std")}
    (dz_buffer, dz_kind), (x_buffer, x_kind) = in_slot(dz, 21, 0), in_slot(x, 40, 11)
    kernel = norm.batch_norm_grad_reduce(dz_kind, x_kind, TARGET)
    found = execute.call(kernel, {**operands, "dz": dz_buffer, "x": x_buffer}, {"x": 11})
    for name, value in expected("BatchNormGradReduce", operands).items():
        assert np.abs(found[name] - value).max() <= 1e-6 * np.abs(value).max(), name


def test_grad_terms_and_their_accumulation():
    rng = np.random.default_rng(3)
    operands = vectors(rng, 19, "dbeta", "dgamma", "a", "inv_std")
    found = execute.call(one("grad_terms", 19), operands)
    for name, value in expected("BatchNormGradTerms", operands).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)
    operands |= vectors(rng, 44, "beta_acc", "gamma_acc")
    kernel = one("grad_terms_accumulate", 19, 44)
    found = execute.call(kernel, operands, {"beta_acc": 12, "gamma_acc": 12})
    for name, value in expected("BatchNormGradTermsAccumulate", operands, acc_start=12, acc_stop=31).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


def test_grad_finalize_of_a_range_of_channels():
    rng = np.random.default_rng(4)
    operands = {**vectors(rng, 40, "beta_term", "gamma_term"), **vectors(rng, 17, "mean")}
    kernel = one("grad_finalize", 17, 40, 98)
    found = execute.call(kernel, operands, {"beta_term": 20, "gamma_term": 20})
    for name, value in expected("BatchNormGradFinalize", operands, count=98, start=20, stop=37).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


def test_a_group_reads_what_its_members_wrote():
    rng = np.random.default_rng(5)
    terms = vectors(rng, 19, "dbeta", "dgamma", "a", "inv_std")
    kernel = coefficients.coefficients((("grad_terms", (19,)), ("grad_finalize", (19, 19, 98))), TARGET)
    shared = {name: execute.aligned(19) for name in ("beta_term", "gamma_term")}
    mean = execute.aligned_copy(rng.normal(size=19).astype(np.float32))
    first = {name: execute.aligned_copy(value) for name, value in terms.items()} | shared
    second = {**shared, "mean": mean, "q": execute.aligned(19), "w": execute.aligned(19)}
    arrays = {f"{name}_{i}": value for i, member in enumerate((first, second)) for name, value in member.items()}
    function = execute.compile_kernel(kernel)
    function(*(tvm_ffi.from_dlpack(arrays[param.name]) for param in kernel.params), 0, 0)
    results = expected("BatchNormGradTerms", terms)
    wanted = expected("BatchNormGradFinalize", {**results, "mean": mean}, count=98, start=0, stop=19)
    for name, value in wanted.items():
        np.testing.assert_allclose(arrays[f"{name}_1"], value, rtol=1e-5, atol=1e-8, err_msg=name)
