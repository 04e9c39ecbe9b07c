"""Per-channel operators of a BatchNorm on a GPU, interpreted, against the numpy reference in float64."""

import numpy as np
import pytest
from cuda_kernels import ARCHITECTURES, assert_no_spills, gpu, run_kernel

from bnfuse.opset import plain, reference, reference_ranks
from bnfuse.runtime.kernels.cuda.coefficients import ONE_BLOCK, coefficients

FINALIZE = ("scale", "bias", "mean", "variance", "running_mean", "running_variance")


def expected(name, operands, **attributes):
    wide = {k: v.astype(np.float64) for k, v in operands.items()}
    return reference.run(plain.PLAIN_OPS[name], wide, attributes)


def vectors(rng, count, *names):
    return {name: rng.uniform(0.5, 2, size=count).astype(np.float32) for name in names}


def agree(found, wanted, suffix=""):
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name + suffix], value, rtol=1e-6, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("channels", [3, 300])
def test_finalize(channels):
    operands = vectors(np.random.default_rng(0), channels, *FINALIZE)
    kernel = coefficients((("finalize", (channels, 1.2345e-12, 0.9)),), gpu())
    agree(run_kernel(kernel, operands), expected("BatchNormFinalize", operands, epsilon=1.2345e-12, momentum=0.9))


def test_finalize_moves_the_running_variance_by_the_unbiased_one():
    operands = vectors(np.random.default_rng(0), 3, *FINALIZE)
    found = run_kernel(coefficients((("finalize", (3, 1e-5, 0.9, 4.0)),), gpu()), operands)
    agree(found, expected("BatchNormFinalize", operands, epsilon=1e-5, momentum=0.9, elements=4.0))


def test_a_small_epsilon_keeps_its_digits():
    channels, epsilon = 4, 1.2345e-13
    operands = vectors(np.random.default_rng(0), channels, *FINALIZE) | {"variance": np.zeros(channels, np.float32)}
    found = run_kernel(coefficients((("finalize", (channels, epsilon, 0.9)),), gpu()), operands)
    np.testing.assert_allclose(found["inv_std"], epsilon**-0.5, rtol=1e-6)


def test_terms_and_their_accumulation_into_a_range():
    operands = vectors(np.random.default_rng(1), 19, "dbeta", "dgamma", "a", "inv_std")
    agree(run_kernel(coefficients((("grad_terms", (19,)),), gpu()), operands), expected("BatchNormGradTerms", operands))
    operands |= vectors(np.random.default_rng(2), 44, "beta_acc", "gamma_acc")
    kernel = coefficients((("grad_terms_accumulate", (19, 44)),), gpu())
    found = run_kernel(kernel, operands, {"beta_acc": 12, "gamma_acc": 12})
    agree(found, expected("BatchNormGradTermsAccumulate", operands, acc_start=12, acc_stop=31))


@pytest.mark.parametrize("channels", [19, 5 * ONE_BLOCK])
def test_a_group_reads_what_its_members_wrote(channels):
    rng = np.random.default_rng(3)
    first = vectors(rng, channels, "dbeta", "dgamma", "a", "inv_std")
    shared = {name: np.zeros(channels, np.float32) for name in ("beta_term", "gamma_term")}
    second = vectors(rng, channels, "dbeta", "dgamma", "a", "inv_std")
    last = {**shared, "mean": rng.normal(size=channels - 4).astype(np.float32)}
    members = (
        ("grad_terms", (channels,)),
        ("grad_terms", (channels,)),
        ("grad_finalize", (channels - 4, channels, 98)),
    )
    kernel = coefficients(members, gpu())
    assert len(kernel.build()) == (1 if channels < ONE_BLOCK else 2)
    arrays = {f"{n}_{i}": v for i, group in enumerate((first | shared, second, last)) for n, v in group.items()}
    found = run_kernel(kernel, arrays, {"beta_term_2": 4, "gamma_term_2": 4})
    results = expected("BatchNormGradTerms", first)
    agree(found, expected("BatchNormGradTerms", second), "_1")
    wanted = expected("BatchNormGradFinalize", {**results, "mean": last["mean"]}, count=98, start=4, stop=channels)
    agree(found, wanted, "_2")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_without_spills(arch):
    members = (("finalize", (200, 1e-5, 0.1)), ("grad_terms", (70,)), ("grad_finalize", (70, 70, 98)))
    assert_no_spills(coefficients(members, gpu(arch=arch)))


@pytest.mark.parametrize("channels", [5, 300])
def test_moments_of_all_ranks_and_what_reads_them(channels):
    rng = np.random.default_rng(4)
    gathered = {
        "mean_0": (100 + rng.standard_normal((3, channels))).astype(np.float32),
        "variance_0": rng.uniform(0.5, 2, (3, channels)).astype(np.float32),
    }
    operands = {f"{name}_1": value for name, value in vectors(rng, channels, *FINALIZE).items()}
    shared = {"all_mean_0": np.zeros(channels, np.float32), "all_variance_0": np.zeros(channels, np.float32)}
    operands |= {"mean_1": shared["all_mean_0"], "variance_1": shared["all_variance_0"]}
    members = (("all_moments", (channels, 3, 2)), ("finalize", (channels, 1e-5, 0.9)))
    found = run_kernel(coefficients(members, gpu()), {**gathered, **shared, **operands})
    wide = [value.astype(np.float64) for value in gathered.values()]
    mean, variance = reference_ranks.moments_of_all(*wide, {"ranks": 2})
    np.testing.assert_allclose(found["all_mean_0"], mean, rtol=1e-6)
    np.testing.assert_allclose(found["all_variance_0"], variance, rtol=1e-6)
    plain_operands = {name: operands[f"{name}_1"] for name in FINALIZE} | {"mean": mean, "variance": variance}
    agree(found, expected("BatchNormFinalize", plain_operands, epsilon=1e-5, momentum=0.9), "_1")
