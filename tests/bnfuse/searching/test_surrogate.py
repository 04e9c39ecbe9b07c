"""The Bayesian model: draws against exact posteriors, recovery of a sparse function, behaviour at the edges."""

import numpy as np
import pytest

from bnfuse.searching import surrogate
from bnfuse.searching.surrogate import Gram, Scales, draw_coefficients, draw_noise, draw_surrogate, features, horseshoe

DRAWS = 4000


def problem(rows, count, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, count))
    y = x @ rng.standard_normal(count) + 0.3 * rng.standard_normal(rows)
    return x - x.mean(0), y - y.mean()


@pytest.mark.parametrize(("rows", "count"), [(12, 4), (4, 9)], ids=["tall", "wide"])
def test_coefficients_have_the_normal_posterior(rows, count):
    x, y = problem(rows, count)
    prior, noise = np.linspace(0.2, 2.0, count), 0.4
    precision = (x.T @ x + np.diag(1 / prior)) / noise
    mean, covariance = np.linalg.solve(precision, x.T @ y) / noise, np.linalg.inv(precision)
    rng = np.random.default_rng(1)
    data = Gram.of(x, y)
    assert (data.square is None) == (count > rows)
    draws = np.array([draw_coefficients(data, prior, noise, rng) for _ in range(DRAWS)])
    error = np.sqrt(np.diag(covariance) / DRAWS)
    assert np.all(np.abs(draws.mean(0) - mean) < 5 * error)
    assert np.allclose(np.cov(draws.T), covariance, atol=6 * np.diag(covariance).max() / np.sqrt(DRAWS))


def test_noise_has_the_inverse_gamma_posterior():
    x, y = problem(12, 4)
    coefficients, prior = np.array([0.5, -1.0, 0.0, 2.0]), np.array([1.0, 0.5, 2.0, 1.0])
    shape = surrogate.NOISE_SHAPE + (12 - 1 + 4) / 2
    errors = y - x @ coefficients
    scale = surrogate.NOISE_SCALE + (errors @ errors + np.sum(coefficients**2 / prior)) / 2
    rng = np.random.default_rng(2)
    draws = np.array([draw_noise(Gram.of(x, y), coefficients, prior, rng) for _ in range(DRAWS)])
    mean, deviation = scale / (shape - 1), scale / (shape - 1) / np.sqrt(shape - 2)
    assert abs(draws.mean() - mean) < 5 * deviation / np.sqrt(DRAWS)


def test_a_chain_with_fixed_scales_has_the_conjugate_posterior(monkeypatch):
    """With the scales fixed and no slab, coefficients and noise together are normal-inverse-gamma: their marginal is
    Student's t around the ridge solution, with covariance scale / (shape - 1) A^-1."""
    x, y = problem(10, 3, seed=3)
    monkeypatch.setattr(surrogate, "SLAB", 1e9)
    data, scales, rng = (
        Gram.of(x, y),
        Scales(np.array([0.5, 1.0, 2.0]), np.ones(3), 1.0, 1.0, 1.0),
        np.random.default_rng(4),
    )
    draws = []
    for _ in range(DRAWS):
        draws.append(draw_coefficients(data, scales.bounded, scales.noise, rng))
        scales.noise = draw_noise(data, draws[-1], scales.prior, rng)
    a = x.T @ x + np.diag(1 / scales.prior)
    mean = np.linalg.solve(a, x.T @ y)
    shape, scale = surrogate.NOISE_SHAPE + 9 / 2, surrogate.NOISE_SCALE + (y @ y - mean @ a @ mean) / 2
    covariance = scale / (shape - 1) * np.linalg.inv(a)
    found = np.array(draws[50:])
    assert np.all(np.abs(found.mean(0) - mean) < 6 * np.sqrt(np.diag(covariance) / DRAWS))
    assert np.allclose(np.cov(found.T), covariance, rtol=0.2, atol=0.1 * np.diag(covariance).max())


def test_auxiliary_scales_give_half_cauchy_draws():
    """The prior alone: with coefficients drawn from it, the chain leaves the horseshoe's local scales as they are,
    whose square roots have the median 1 and the quartiles tan(pi/8) and tan(3 pi/8)."""
    rng, found = np.random.default_rng(5), []
    scales = Scales(np.ones(400), np.ones(400), 1.0, 1.0, 1.0)
    for sweep in range(400):
        scales.overall, scales.overall_auxiliary = 1.0, 1.0
        coefficients = np.sqrt(scales.local) * rng.standard_normal(400)
        surrogate.draw_scales(scales, coefficients, rng)
        if sweep > 50:
            found.append(np.sqrt(scales.local))
    quartiles = np.quantile(np.concatenate(found), [0.25, 0.5, 0.75])
    # `overall` was drawn after `local` and put back to 1, so that only the local scales move
    assert np.allclose(quartiles, [np.tan(np.pi / 8), 1.0, np.tan(3 * np.pi / 8)], rtol=0.06)


def sparse(x):
    """Two single effects and one pair."""
    return 0.9 + 0.06 * x[:, 1] - 0.03 * x[:, 4] + 0.05 * x[:, 0] * x[:, 3]


def test_a_sparse_second_order_function_is_recovered():
    rng = np.random.default_rng(6)
    x = rng.integers(0, 2, (60, 12))
    y = sparse(x) + 0.002 * rng.standard_normal(60)
    fits = [draw_surrogate(x, y, np.random.default_rng(seed)) for seed in range(8)]
    linear, pairs = np.mean([f.linear for f in fits], 0), np.mean([f.pairs for f in fits], 0)
    assert np.allclose(linear, [0, 0.06, 0, 0, -0.03, *[0] * 7], atol=0.006)
    wanted = np.zeros((12, 12))
    wanted[0, 3] = wanted[3, 0] = 0.05
    assert np.allclose(pairs, wanted, atol=0.012)
    others = rng.integers(0, 2, (300, 12))
    assert np.sqrt(np.mean((np.mean([f(others) for f in fits], 0) - sparse(others)) ** 2)) < 0.003


def test_a_quadratic_is_its_features_times_its_coefficients():
    rng = np.random.default_rng(7)
    x, coefficients = rng.integers(0, 2, (5, 4)), rng.standard_normal(10)
    f = surrogate.to_quadratic(0.5, coefficients, 4)
    assert np.allclose(f(x), 0.5 + features(x) @ coefficients)
    slopes = np.array([1.0, 0.0, 2.0, 0.5])
    assert np.allclose(f.minus(slopes)(x), f(x) - x @ slopes)


@pytest.mark.parametrize("scores", [[0.9, 0.9, 0.9], [0.1, 0.9, 0.1], [0.5]], ids=["equal", "far", "one"])
def test_few_or_equal_scores_give_finite_functions(scores):
    x = np.eye(8, dtype=int)[: len(scores)]
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        f = draw_surrogate(x, scores, np.random.default_rng(0))
    assert np.isfinite(f.linear).all()
    assert np.isfinite(f.pairs).all()


def test_extreme_scales_are_safe():
    """Coefficients that are free beside ones that are nailed to 0, for either way of drawing."""
    for rows, count in ((12, 4), (4, 9)):
        x, y = problem(rows, count)
        prior = np.where(np.arange(count) % 2, surrogate.SMALLEST, surrogate.LARGEST)
        drawn = draw_coefficients(Gram.of(x, y), prior, 1e-6, np.random.default_rng(0))
        assert np.isfinite(drawn).all()
        assert np.abs(drawn[1::2]).max() < 1e-6


def test_densenet121_takes_a_bounded_number_of_multiplications():
    assert surrogate.sweeps_for(20, 36) == surrogate.SWEEPS
    count = 121 * 122 // 2
    for rows in (20, 100, 150):
        assert surrogate.sweeps_for(rows, count) * rows**2 * count <= surrogate.WORK
    coefficients, _ = horseshoe(*problem(20, count), np.random.default_rng(0), sweeps=20)
    assert np.isfinite(coefficients).all()
