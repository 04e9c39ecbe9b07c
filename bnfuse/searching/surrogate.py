"""What a few trainings tell of all placements: a second-order linear model, horseshoe prior ([Joardar22], V-B, eq. 1).

    f(x) = t0 + sum_i t_i x_i + sum_{i<j} t_ij x_i x_j        p = C + C(C-1)/2 coefficients besides t0

The model, for n evaluated placements X [n, p] and scores y [n] with normal noise of variance v:

    t_j ~ N(0, l_j tau v),   sqrt(l_j), sqrt(tau) ~ half-Cauchy(0, 1),   p(t0) flat,   v ~ IG(a, b)

The horseshoe leaves coefficients that no placement has tested yet unbounded. As no effect is many times the spread of
all scores, each coefficient is also observed as 0 +- SLAB, which cuts those tails and changes no other conditional
(Nishimura and Suchard 2023, "Shrinkage with shrunken shoulders").

A half-Cauchy is an inverse gamma whose scale is an inverse gamma itself (Makalic and Schmidt 2016, "A simple sampler
for the horseshoe estimator"), so that every conditional of the Gibbs sampler is a normal or an inverse gamma. t0 is
integrated out by centring. One draw of the coefficients takes O(n^2 p) where p > n (Bhattacharya, Chakraborty and
Mallick 2016, "Fast sampling with Gaussian scale mixture priors") and O(p^3) elsewhere, both as systems whose
eigenvalues are 1 or more: whatever the scales, they have a Cholesky factor.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SMALLEST, LARGEST = 1e-12, 1e12  # of scales: beyond, a coefficient is 0 or free for any data
NOISE_SHAPE, NOISE_SCALE = 1.0, 0.005  # prior of the noise variance, in units of the scores' variance
SLAB = 2.0  # in standard deviations of the scores
SWEEPS, FEWEST_SWEEPS = 1000, 200  # of a chain: as many as WORK multiplications allow
WORK = 6e10


@dataclasses.dataclass(frozen=True)
class Quadratic:
    """f(x) = constant + linear . x + sum_{i<j} pairs[i, j] x_i x_j; `pairs` [C, C] is symmetric, 0 on its diagonal."""

    constant: float
    linear: Array
    pairs: Array

    def __call__(self, placements: NDArray) -> Array:
        """Of x [..., C]: values [...]."""
        x = np.asarray(placements, np.float64)
        return self.constant + x @ self.linear + 0.5 * np.einsum("...i,...i->...", x @ self.pairs, x)

    def minus(self, slopes: Array) -> Quadratic:
        """Give f(x) - slopes . x."""
        return Quadratic(self.constant, self.linear - slopes, self.pairs)


@dataclasses.dataclass
class Scales:
    """The state of the chain besides the coefficients: local [p] and global scales, their auxiliaries, the noise."""

    local: Array
    local_auxiliary: Array
    overall: float
    overall_auxiliary: float
    noise: float

    @classmethod
    def start(cls, count: int) -> Scales:
        """Start from coefficients near 0: a wide model leaves a start from large ones only after thousands of
        sweeps."""
        return cls(np.ones(count), np.ones(count), count**-2.0, 1.0, 1.0)

    @property
    def prior(self) -> Array:
        """Prior variances of the coefficients in units of the noise's, [p]."""
        return clip(self.local * self.overall)

    @property
    def bounded(self) -> Array:
        """The same with the slab."""
        return 1 / (1 / self.prior + self.noise / SLAB**2)


def features(placements: NDArray) -> Array:
    """Extend x [n, C] to [n, C + C(C-1)/2]: x_i, then x_i x_j for i < j."""
    x = np.asarray(placements, np.float64)
    first, second = np.triu_indices(x.shape[1], 1)
    return np.concatenate([x, x[:, first] * x[:, second]], 1)


def to_quadratic(constant: float, coefficients: Array, size: int) -> Quadratic:
    """Turn coefficients [C + C(C-1)/2] into linear terms and a symmetric matrix: the reverse of `features`."""
    pairs = np.zeros((size, size))
    pairs[np.triu_indices(size, 1)] = coefficients[size:]
    return Quadratic(constant, coefficients[:size], pairs + pairs.T)


def sweeps_for(rows: int, count: int) -> int:
    """Choose the sweeps of the sampler for `count` coefficients: fewer where each is dear, so that a draw takes
    seconds."""
    work = min(rows**2 * count, count**3) + 1
    return int(np.clip(WORK / work, FEWEST_SWEEPS, SWEEPS))


def draw_surrogate(
    placements: NDArray, scores: NDArray, rng: np.random.Generator, sweeps: int | None = None
) -> Quadratic:
    """Draw f from its posterior: the last state of a chain of `sweeps` that starts anew."""
    x, y = features(placements), np.asarray(scores, np.float64)
    centre, spread = float(y.mean()), float(y.std())
    size = np.shape(placements)[1]
    if spread == 0:
        spread = 1.0
    mean = x.mean(0)
    chain = horseshoe(x - mean, (y - centre) / spread, rng, sweeps or sweeps_for(*x.shape))
    coefficients, noise = chain[0] * spread, chain[1].noise * spread**2
    constant = centre - float(mean @ coefficients) + float(rng.standard_normal() * np.sqrt(noise / len(y)))
    return to_quadratic(constant, coefficients, size)


def horseshoe(x: Array, y: Array, rng: np.random.Generator, sweeps: int) -> tuple[Array, Scales]:
    """Give the state after `sweeps` of the Gibbs sampler: coefficients [p] and scales. x [n, p] and y [n] are
    centred."""
    scales = Scales.start(x.shape[1])
    gram = Gram.of(x, y)
    coefficients = np.zeros(x.shape[1])
    for _ in range(sweeps):
        coefficients = draw_coefficients(gram, scales.bounded, scales.noise, rng)
        scales.noise = draw_noise(gram, coefficients, scales.prior, rng)
        draw_scales(scales, coefficients, rng)
    return coefficients, scales


@dataclasses.dataclass(frozen=True)
class Gram:
    """The data, and what of them every sweep needs again."""

    x: Array  # [n, p]
    y: Array  # [n]
    square: Array | None  # x'x [p, p], where p <= n
    moments: Array | None  # x'y [p], where p <= n

    @classmethod
    def of(cls, x: Array, y: Array) -> Gram:
        """Compute the products that every sweep needs, unless there are more columns than rows."""
        wide = x.shape[1] > x.shape[0]
        return cls(x, y, None if wide else x.T @ x, None if wide else x.T @ y)


def draw_coefficients(data: Gram, prior: Array, noise: float, rng: np.random.Generator) -> Array:
    """Draw from N(A^-1 x'y, noise A^-1) with A = x'x + diag(1 / prior)."""
    root, sigma = np.sqrt(prior), float(np.sqrt(noise))
    count = len(prior)
    if data.square is not None and data.moments is not None:  # t = root * b, b's matrix is root x'x root + 1
        factor = np.linalg.cholesky(data.square * np.outer(root, root) + np.eye(count))
        half = np.linalg.solve(factor, root * data.moments)
        return root * np.linalg.solve(factor.T, half + sigma * rng.standard_normal(count))
    x, rows = data.x * root, len(data.y)
    u = rng.standard_normal(count)
    v = x @ u + rng.standard_normal(rows)
    w = np.linalg.solve(x @ x.T + np.eye(rows), data.y / sigma - v)
    return sigma * root * (u + x.T @ w)


def draw_noise(data: Gram, coefficients: Array, prior: Array, rng: np.random.Generator) -> float:
    """Give the variance of the noise given the coefficients; centring took one degree of freedom."""
    errors = data.y - data.x @ coefficients
    squares = float(errors @ errors + np.sum(coefficients**2 / prior))
    shape = NOISE_SHAPE + 0.5 * (len(data.y) - 1 + len(coefficients))
    return float(clip((NOISE_SCALE + 0.5 * squares) / rng.standard_gamma(shape)))


def draw_scales(scales: Scales, coefficients: Array, rng: np.random.Generator) -> None:
    """Draw new local and global scales and their auxiliaries, in place."""
    squares, count = 0.5 * coefficients**2 / scales.noise, len(coefficients)
    scales.local = clip((1 / scales.local_auxiliary + squares / scales.overall) / rng.standard_exponential(count))
    rate = 1 / scales.overall_auxiliary + float(np.sum(squares / scales.local))
    scales.overall = float(clip(rate / rng.standard_gamma(0.5 * (count + 1))))
    scales.local_auxiliary = clip((1 + 1 / scales.local) / rng.standard_exponential(count))
    scales.overall_auxiliary = float(clip((1 + 1 / scales.overall) / rng.standard_exponential()))


def clip(values: Array | float) -> Array:
    """Keep scales within what float64 can divide by."""
    return np.clip(values, SMALLEST, LARGEST)
