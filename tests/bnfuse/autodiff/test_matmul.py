"""Gradients of products of matrices: broadcast batches, vectors, and all attributes of Gemm."""

from __future__ import annotations

import pytest
from differentiated import broadcast, check, differentiated, few, floats, many, node, seeds
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.torch


@many
@given(broadcast(most=2), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), seeds)
def test_batches_of_matrices_that_broadcast(batches, n, k, m, seed):
    a, b = floats(*batches[0], n, k, seed=seed), floats(*batches[1], k, m, seed=seed + 1)
    check([node("MatMul", "a b", "y")], {"a": a, "b": b}, lambda torch, a, b: a @ b)


@few
@given(st.lists(st.integers(1, 3), max_size=3), st.integers(1, 4), st.booleans(), seeds)
def test_a_vector_is_a_matrix_of_one_row_or_column(batch, k, first, seed):
    vector, matrix = floats(k, seed=seed), floats(*batch, *((k, 3) if first else (3, k)), seed=seed + 1)
    a, b = (vector, matrix) if first else (matrix, vector)
    check([node("MatMul", "a b", "y")], {"a": a, "b": b}, lambda torch, a, b: torch.matmul(a, b))


def test_the_product_of_two_vectors_is_a_number():
    feeds = {"a": floats(4), "b": floats(4, seed=1)}
    check([node("MatMul", "a b", "y")], feeds, lambda torch, a, b: a @ b)


@pytest.mark.parametrize(("a", "b"), [((3, 4), (4, 5)), ((4,), (4, 5)), ((3, 4), (4,))])
def test_products_of_two_matrices_are_turned_by_gemm(a, b):
    found = differentiated([node("MatMul", "a b", "y")], {"a": floats(*a), "b": floats(*b)})
    assert sorted({*found.operators()} - {"Reshape"}) == ["Gemm"]
    assert "Transpose" not in found.operators()


def test_many_rows_times_one_matrix_are_products_of_two_matrices():
    found = differentiated([node("MatMul", "a b", "y")], {"a": floats(2, 3, 4), "b": floats(4, 5)})
    assert found.operators().count("Gemm") == 2
    assert {*found.operators()} == {"Gemm", "Reshape"}


SPREADS = [(3, 5), (5,), (1, 5), (3, 1), (1,), (), (1, 1)]


@pytest.mark.parametrize("turned", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("spread", [None, *SPREADS])
def test_gemm(turned, spread):
    a, b = floats(*((4, 3) if turned[0] else (3, 4))), floats(*((5, 4) if turned[1] else (4, 5)), seed=1)
    feeds = {"a": a, "b": b, **({} if spread is None else {"c": floats(*spread, seed=2)})}

    def function(torch, a, b, c=0.0):
        return 0.5 * ((a.T if turned[0] else a) @ (b.T if turned[1] else b)) + 2.0 * c

    nodes = [node("Gemm", " ".join(feeds), "y", alpha=0.5, beta=2.0, transA=turned[0], transB=turned[1])]
    check(nodes, feeds, function)


def test_a_gemm_without_attributes_takes_two_products_and_a_sum():
    feeds = {"a": floats(3, 4), "b": floats(4, 5), "c": floats(5)}
    found = differentiated([node("Gemm", "a b c", "y")], feeds)
    assert sorted(found.operators()) == ["Gemm", "Gemm", "ReduceSum"]
