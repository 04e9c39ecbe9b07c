"""The placement that a quadratic function likes best: a binary quadratic program ([Joardar22], V-B 2).

    maximise  b.x + sum_{i<j} Q_ij x_i x_j    over x in {0,1}^C

With x_i = (1 + s_i s_0) / 2 it is  k + max <M, s s'>  over signs s in {-1,1}^(C+1). The relaxation replaces s s' by any
positive semidefinite matrix with ones on its diagonal (Goemans and Williamson 1995). Its solution is rounded by random
hyperplanes: the rows of a factor are points on a sphere, and a point's sign is the side on which it lies. The best of
the roundings, and some random placements, are improved by single and double flips until none helps. The dual gives a
bound that no placement exceeds, whatever the solver's accuracy.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnfuse.core.errors import BnfuseError
from bnfuse.searching.space import Placement
from bnfuse.searching.surrogate import Array, Quadratic

INTERIOR = 40  # sides up to which the interior-point solver is used; beyond, the first-order one
SOLVERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("CLARABEL", {}),
    ("SCS", {"eps_abs": 1e-4, "eps_rel": 1e-4, "max_iters": 5000}),
)
ROUNDINGS, IMPROVED, SCATTERED = 200, 8, 16  # hyperplanes; of their roundings and of random placements, the improved
FEW = 12  # blocks up to which all placements are candidates, where some are taken
FLIPS = 10_000  # steps of an improvement, which ends far sooner


@dataclasses.dataclass(frozen=True)
class Relaxed:
    """The relaxation's solution: a correlation matrix [C + 1, C + 1] (row 0 is s_0), and an upper bound."""

    matrix: Array
    bound: float


def solve(
    function: Quadratic, rng: np.random.Generator, *, taken: set[Placement] | None = None, starts: NDArray | None = None
) -> Placement:
    """Give a placement at which `function` is largest, as far as rounding and improvement go, and that is not in
    `taken`.

    `starts` [k, C] are improved as well. Where the best placement is taken, the best of the others that were met:
    roundings, improved ones, and all within two flips of these; of a few blocks, all that there are.
    """
    size = len(function.linear)
    roundings = np.unique(round_matrix(relax(function).matrix, ROUNDINGS, rng), axis=0)
    best = roundings[np.argsort(-function(roundings), kind="stable")[:IMPROVED]]
    scattered = rng.integers(0, 2, (SCATTERED, size))
    begun = np.concatenate([best, scattered, *([] if starts is None else [np.asarray(starts)])]).astype(np.int8)
    found = np.concatenate([roundings, begun])
    improved = np.unique([improve(function, x) for x in begun], axis=0)
    met = [found, improved]
    if taken:
        met += [within_two_flips(x) for x in improved]
        met += [np.array(list(itertools.product((0, 1), repeat=size)), np.int8)] if size <= FEW else []
    return best_of(function, np.concatenate(met), taken or set())


def best_of(function: Quadratic, candidates: NDArray, taken: set[Placement]) -> Placement:
    """Give the best candidate [k, C] that is not taken; a flip further where all are."""
    for index in np.argsort(-function(candidates), kind="stable"):
        placement = to_placement(candidates[index])
        if placement not in taken:
            return placement
    around = np.unique(np.concatenate([within_two_flips(x) for x in candidates]), axis=0)
    if len(around) <= len(np.unique(candidates, axis=0)):
        raise BnfuseError(f"all {len(taken)} placements are evaluated: nothing is left to search")
    return best_of(function, around, taken)


def to_placement(x: NDArray) -> Placement:
    """Turn an array of zeros and ones into a placement."""
    return tuple(int(bit) for bit in x)


def sign_form(function: Quadratic) -> tuple[Array, float]:
    """Give M [C + 1, C + 1] and k with f(x) = k + s' M s for s = (1, 2x - 1)."""
    b, q = function.linear, function.pairs
    m = np.zeros((len(b) + 1, len(b) + 1))
    m[1:, 1:] = q / 8
    m[0, 1:] = m[1:, 0] = b / 4 + q.sum(1) / 8
    return m, function.constant + float(b.sum()) / 2 + float(q.sum()) / 8


def relax(function: Quadratic) -> Relaxed:
    """Give the semidefinite relaxation, and a bound that holds however far the solver came."""
    m, shift = sign_form(function)
    size = float(np.abs(m).max())
    if size == 0:
        return Relaxed(np.eye(len(m)), shift)
    matrix, prices = solve_semidefinite(m / size)
    return Relaxed(matrix, shift + size * dual_bound(m / size, prices))


def dual_bound(m: Array, prices: Array) -> float:
    """Bound max <M, X> by sum(y), which holds wherever diag(y) - M is positive semidefinite; y is raised until it
    is."""
    lowest = float(np.linalg.eigvalsh(np.diag(prices) - m)[0])
    slack = max(0.0, -lowest) + 1e-12
    return float(prices.sum()) + len(prices) * slack


def solve_semidefinite(m: Array) -> tuple[Array, Array]:
    """Solve max <M, X> with X positive semidefinite and ones on its diagonal. Gives X, made feasible, and the dual's
    prices."""
    cvxpy = import_cvxpy()
    problem, parameter, x, ones = problem_of(len(m))
    parameter.value = m
    for solver, options in SOLVERS if len(m) <= INTERIOR else SOLVERS[1:]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an inaccurate solution is good enough to be rounded
            try:  # no warm start: a solution must not depend on what was solved before it
                problem.solve(solver=solver, warm_start=False, **options)
            except cvxpy.error.SolverError:
                continue
        if x.value is not None and np.isfinite(x.value).all() and np.isfinite(ones.dual_value).all():
            return correlation(np.asarray(x.value)), np.asarray(ones.dual_value, np.float64)
    raise BnfuseError(f"the semidefinite relaxation of {len(m) - 1} BatchNorms cannot be solved: {problem.status}")


def correlation(x: Array) -> Array:
    """Give the nearest matrix that is easily had: symmetric, positive semidefinite, ones on the diagonal."""
    values, vectors = np.linalg.eigh((x + x.T) / 2)
    factor = vectors * np.sqrt(np.clip(values, 0, None))
    factor /= np.maximum(np.linalg.norm(factor, axis=1, keepdims=True), 1e-12)
    return factor @ factor.T


@functools.lru_cache(maxsize=4)
def problem_of(side: int) -> tuple[Any, Any, Any, Any]:
    """Give the relaxation for any M of this side, so that a search lets cvxpy translate it once."""
    cvxpy = import_cvxpy()
    parameter = cvxpy.Parameter((side, side), symmetric=True)
    x = cvxpy.Variable((side, side), PSD=True)
    ones = cvxpy.diag(x) == 1
    problem = cvxpy.Problem(cvxpy.Maximize(cvxpy.trace(parameter @ x)), [ones])
    return problem, parameter, x, ones


def import_cvxpy() -> Any:
    """Import cvxpy. Raises BnfuseError where it is not installed."""
    try:
        import cvxpy
    except ImportError:
        raise BnfuseError("a Bayesian search needs cvxpy: pip install 'bnfuse[search]'") from None
    return cvxpy


def round_matrix(matrix: Array, count: int, rng: np.random.Generator) -> NDArray:
    """Round to placements [count, C] by random hyperplanes through a correlation matrix [C + 1, C + 1]."""
    values, vectors = np.linalg.eigh(matrix)
    points = vectors * np.sqrt(np.clip(values, 0, None))
    signs = rng.standard_normal((count, len(matrix))) @ points.T >= 0
    return (signs[:, 1:] == signs[:, :1]).astype(np.int8)


def improve(function: Quadratic, start: NDArray) -> NDArray:
    """Give the best single or double flip, again and again while it gains: [C] -> [C]."""
    x = np.array(start, np.int8)
    first, second = np.triu_indices(len(x), 1)
    for _ in range(FLIPS):
        turns = 1.0 - 2.0 * x
        single = turns * (function.linear + function.pairs @ x)
        double = single[first] + single[second] + turns[first] * turns[second] * function.pairs[first, second]
        best, pair = int(np.argmax(single)), int(np.argmax(double)) if len(double) else -1
        small = 1e-12 * (1 + float(np.abs(single).max()))
        if pair >= 0 and double[pair] > max(single[best], small):
            x[[first[pair], second[pair]]] ^= 1
        elif single[best] > small:
            x[best] ^= 1
        else:
            break
    return x


def within_two_flips(x: NDArray) -> NDArray:
    """List x itself, its C neighbours and their neighbours: [1 + C + C(C-1)/2, C]."""
    size = len(x)
    first, second = np.triu_indices(size, 1)
    flips = np.zeros((1 + size + len(first), size), np.int8)
    flips[np.arange(1, size + 1), np.arange(size)] = 1
    rows = np.arange(len(first)) + 1 + size
    flips[rows, first] = flips[rows, second] = 1
    return flips ^ np.asarray(x, np.int8)
