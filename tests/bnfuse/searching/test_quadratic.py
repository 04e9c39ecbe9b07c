"""The binary quadratic program against brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bnfuse.core.errors import BnfuseError
from bnfuse.searching import quadratic
from bnfuse.searching.quadratic import improve, relax, round_matrix, sign_form, solve, within_two_flips
from bnfuse.searching.surrogate import to_quadratic


def all_of(size):
    return np.array(list(itertools.product((0, 1), repeat=size)))


def drawn(size, seed):
    rng = np.random.default_rng(seed)
    return to_quadratic(rng.normal(), rng.standard_normal(size + size * (size - 1) // 2), size)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 10), seed=st.integers(0, 2**32 - 1))
def test_the_bound_holds_and_the_optimum_is_found(size, seed):
    f = drawn(size, seed)
    values = f(all_of(size))
    assert relax(f).bound >= values.max() - 1e-9
    assert f(np.array(solve(f, np.random.default_rng(seed)))) == pytest.approx(values.max(), abs=1e-9)


@settings(max_examples=20, deadline=None)
@given(size=st.integers(2, 6), seed=st.integers(0, 2**32 - 1), share=st.floats(0, 0.95))
def test_what_is_taken_is_not_proposed_but_the_best_of_the_rest(size, seed, share):
    f, rng = drawn(size, seed), np.random.default_rng(seed)
    everything = [tuple(int(b) for b in x) for x in all_of(size)]
    order = sorted(everything, key=lambda p: -f(np.array(p)))
    taken = {order[0], *(p for p in everything if rng.random() < share)}
    taken.discard(order[-1])
    found = solve(f, rng, taken=taken)
    assert found not in taken
    best = next(p for p in order if p not in taken)
    assert f(np.array(found)) == pytest.approx(f(np.array(best)), abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_of_many_blocks_what_is_taken_is_not_proposed(monkeypatch, seed):
    """The best of those that were met: here all are within two flips of one that is improved."""
    monkeypatch.setattr(quadratic, "FEW", 0)
    f = drawn(9, seed)
    first = solve(f, np.random.default_rng(seed))
    second = solve(f, np.random.default_rng(seed), taken={first})
    assert second != first
    order = np.sort(f(all_of(9)))
    assert f(np.array(second)) == pytest.approx(order[-2], abs=1e-9)


def test_nothing_left_is_said():
    with pytest.raises(BnfuseError, match="nothing is left"):
        solve(drawn(2, 0), np.random.default_rng(0), taken={(0, 0), (0, 1), (1, 0), (1, 1)})


def test_the_form_in_signs_has_the_same_values():
    f = drawn(5, 1)
    m, shift = sign_form(f)
    for x in all_of(5):
        s = np.concatenate([[1], 2 * x - 1])
        assert s @ m @ s + shift == pytest.approx(f(x))


def test_the_relaxed_matrix_is_a_correlation_and_rounding_follows_it():
    f = drawn(7, 2)
    matrix = relax(f).matrix
    assert np.allclose(np.diag(matrix), 1)
    assert np.linalg.eigvalsh(matrix)[0] > -1e-9
    signs = np.array([1, 1, -1, 1])
    assert (round_matrix(np.outer(signs, signs).astype(float), 20, np.random.default_rng(0)) == [1, 0, 1]).all()


def test_a_large_program_is_bounded_and_no_two_flips_improve_its_solution():
    """The first-order solver, whose accuracy is low: the bound holds all the same."""
    f = drawn(45, 3)
    x = np.array(solve(f, np.random.default_rng(0)))
    assert f(within_two_flips(x)).max() <= f(x) + 1e-9
    bound = relax(f).bound
    assert f(x) <= bound <= f(x) + 0.2 * abs(f(x))
    assert max(f(improve(f, y)) for y in np.random.default_rng(1).integers(0, 2, (20, 45))) <= bound


def test_a_solution_does_not_depend_on_what_was_solved_before():
    first = relax(drawn(45, 4)).matrix
    relax(drawn(45, 5))
    assert np.array_equal(first, relax(drawn(45, 4)).matrix)


def test_the_zero_function_is_solved():
    f = to_quadratic(0.25, np.zeros(6), 3)
    assert relax(f).bound == pytest.approx(0.25)
    assert len(solve(f, np.random.default_rng(0))) == 3


def test_two_flips_reach_every_neighbour_once():
    around = within_two_flips(np.array([1, 0, 1, 1]))
    assert len(np.unique(around, axis=0)) == len(around) == 1 + 4 + 6
    assert np.abs(around - [1, 0, 1, 1]).sum(1).max() == 2
