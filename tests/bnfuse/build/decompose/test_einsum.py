"""Einsum is Transpose, Mul and MatMul."""

from __future__ import annotations

import numpy as np
import pytest
from decomposed import by_reference, check_gradients, check_same, floats, model_of
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from bnfuse.core.errors import BnfuseError

SIZES = dict(zip("abcdef", (2, 3, 4, 5, 6, 2), strict=True))
EQUATIONS = (
    *(
        "bhqd,bhkd->bhqk",
        "bhqk,bhkd->bhqd",
        "bchw,bc->bchw",
        "ij,jk",
        "ij->ji",
        "ij->j",
        "ij->",
        "i,j->ij",
        "bij,bjk->bik",
    ),
    *(
        "...ij,...jk->...ik",
        "...i,i->...",
        "b...,b->...b",
        "i,i->",
        "bn,anm,bm->ba",
        "...",
        "ij,kj->ik",
        "abc,cd,db->a",
    ),
)


def run(equation: str, shapes: list[list[int]]) -> None:
    feeds = {f"x{i}": floats(*shape, seed=i) for i, shape in enumerate(shapes)}
    node = helper.make_node("Einsum", [*feeds], ["y"], equation=equation)
    check_same(model_of([node], feeds), feeds, before=by_reference, tolerance=1e-5)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_equations(equation):
    sizes = {label: 2 + index % 4 for index, label in enumerate(sorted(set(equation) - set(".,->")))}
    parts = equation.partition("->")[0].replace("...", "?").split(",")
    run(equation, [[d for c in part for d in ([3, 2] if c == "?" else [sizes[c]])] for part in parts])


@given(data=st.data(), count=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_any_equation_without_diagonals(data, count):
    labels = st.lists(st.sampled_from("abcdef"), unique=True, min_size=1, max_size=4)
    terms = [data.draw(labels) for _ in range(count)]
    every = sorted({label for term in terms for label in term})
    result = data.draw(st.lists(st.sampled_from(every), unique=True, max_size=4))
    equation = ",".join(map("".join, terms)) + "->" + "".join(result)
    run(equation, [[SIZES[label] for label in term] for term in terms])


def test_axes_of_one_broadcast():
    run("...ij,...jk->...ik", [[2, 1, 3, 4], [1, 5, 4, 2]])


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ii->i", [[3, 3]]),
        ("ii", [[3, 3]]),
        ("bii->bi", [[2, 3, 3]]),
        ("iji,j->ji", [[3, 2, 3], [2]]),
        ("iii->i", [[3, 3, 3]]),
        ("...ii->...", [[2, 3, 3]]),
        ("ijij,ik->jk", [[2, 3, 2, 3], [2, 4]]),
    ],
)
@pytest.mark.torch
def test_diagonals(equation, shapes):
    feeds = {f"x{i}": floats(*shape, seed=i).astype(np.float64) for i, shape in enumerate(shapes)}
    node = helper.make_node("Einsum", [*feeds], ["y"], "it", equation=equation)
    check_gradients([node], feeds, lambda torch, *x: torch.einsum(equation, *x))


def test_a_diagonal_of_axes_that_are_not_equal_is_refused():
    model = model_of([helper.make_node("Einsum", ["x"], ["y"], name="e", equation="ii->i")], {"x": floats(3, 1)})
    with pytest.raises(BnfuseError, match=r"^node 'e' \(Einsum\) takes the diagonal 'i' of axes of 3 and 1"):
        check_same(model, {"x": np.ones((3, 1), np.float32)})
