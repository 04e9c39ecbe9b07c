"""Whole searches over functions that cost nothing: methods, results, and BO against its baselines."""

import dataclasses
import itertools

import numpy as np
import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.searching.evaluation import Evaluation, Score, Settings, best_of, default_lambda, pareto
from bnfuse.searching.loop import evaluations_of, search
from bnfuse.searching.proposals import bounded_accuracies, propose
from bnfuse.searching.replay import replay, table_of
from bnfuse.searching.result import SearchResult
from bnfuse.searching.space import Space, from_text, to_text

SPACE = Space(tuple(f"norm{i}" for i in range(1, 9)), (1.0,) * 8)


def accuracy(placement):
    """Two BatchNorms are needed, a third helps, two others are needed only together; removing nearly all diverges."""
    gone = 1 - np.array(placement)
    loss = 0.2 * gone[2] + 0.1 * gone[5] + 0.006 * gone[0] + 0.05 * gone[3] * gone[6] + 0.002 * gone.sum()
    return max(0.1, 0.98 - loss) if gone.sum() < 7 else 0.1


def objective(placement):
    value = accuracy(placement)
    return Score((value,), int(value == 0.1))


def of(text, value, iteration=0):
    return Evaluation(iteration, from_text(text), Score((value,)))


@pytest.mark.parametrize("method", ["bo", "random", "annealing", "exhaustive"])
def test_a_method_never_repeats_a_placement_and_begins_with_all(method):
    history = search(SPACE, objective, Settings(method, 14, 3))
    assert history[0].placement == SPACE.everything
    assert [e.iteration for e in history] == list(range(14))
    assert len({e.placement for e in history}) == 14


def test_nothing_is_measured_by_a_reference_that_diverged():
    stored = []
    with pytest.raises(BnfuseError, match="with all BatchNorms diverged"):
        search(SPACE, lambda _: Score((0.9, 0.1), 1), Settings("random", 3, 1), store=stored.append)
    assert not stored


@pytest.mark.parametrize("method", ["bo", "random", "annealing", "exhaustive"])
def test_a_search_ends_where_all_placements_are_evaluated(method):
    space = Space(("a", "b", "c"), (1.0, 1.0, 1.0))
    history = search(space, lambda p: Score((0.5 + 0.1 * sum(p),)), Settings(method, 100, 2))
    assert len(history) == 8
    with pytest.raises(BnfuseError, match="nothing is left"):
        propose(space, Settings(method, 100, 2), history)


@pytest.mark.parametrize("method", ["bo", "random", "annealing"])
def test_a_search_taken_up_again_proposes_the_same(method):
    settings = Settings(method, 10, 3, seed=5)
    whole = search(SPACE, objective, settings)
    half = search(SPACE, objective, dataclasses.replace(settings, iterations=6))
    rest = search(SPACE, objective, settings, history=half)
    assert [e.placement for e in rest] == [e.placement for e in whole]


def test_methods_share_their_first_placements():
    """The reference and the random ones: what differs is what a method makes of them."""
    first = {
        tuple(e.placement for e in search(SPACE, objective, Settings(m, 4, 3))) for m in ("bo", "random", "annealing")
    }
    assert len(first) == 1


def test_another_seed_makes_another_search():
    one, other = (search(SPACE, objective, Settings("random", 6, 3, seed=seed)) for seed in (0, 1))
    assert [e.placement for e in one] != [e.placement for e in other]


def test_bo_finds_sparser_valid_placements_than_random_search_and_annealing():
    table = {p: objective(p) for p in SPACE.all_placements()}
    found = {m: replay(SPACE, table, Settings(m, 14, 4), range(6)) for m in ("bo", "random", "annealing")}
    mean = {method: float(result.fewest[:, -1].mean()) for method, result in found.items()}
    optimum = min(sum(p) for p, s in table.items() if s.accuracy >= table[SPACE.everything].accuracy - 0.01)
    assert all(result.optimum == optimum for result in found.values())
    assert mean["bo"] < mean["random"] - 0.3
    assert mean["bo"] < mean["annealing"]
    half = {method: result.to_json()["found_half"] for method, result in found.items()}
    assert half["bo"] >= half["random"]


def test_an_exhaustive_search_finds_the_optimum():
    history = search(SPACE, objective, Settings("exhaustive", None))
    assert len(history) == 256
    reference = accuracy(SPACE.everything)
    fewest = min(sum(p) for p in itertools.product((0, 1), repeat=8) if accuracy(p) >= reference - 0.01)
    assert best_of(SPACE, history, 0.01).kept == fewest
    assert len(table_of(SPACE, history)) == 256
    with pytest.raises(BnfuseError, match="255 of 256"):
        table_of(SPACE, history[:-1])


def test_an_exhaustive_search_of_many_is_refused():
    space = Space(tuple(map(str, range(20))), (1.0,) * 20)
    with pytest.raises(BnfuseError, match="at most 16"):
        evaluations_of(space, Settings("exhaustive", None))


def test_the_model_sees_accuracies_as_far_as_they_matter():
    """Neither a diverged training nor one that beats the reference is an outlier."""
    history = (of("111", 0.98), of("011", 0.1, 1), of("101", 0.97, 2), of("110", 0.995, 3))
    assert np.allclose(bounded_accuracies(history, 0.01, 0.02), [0.98, 0.88, 0.97, 0.98])
    assert np.allclose(bounded_accuracies(history, 0.01, 0.2), [0.98, 0.58, 0.97, 0.98])


def test_a_quarter_of_the_batch_norms_is_worth_the_tolerance():
    assert 2 * default_lambda(0.01, 8) == pytest.approx(0.01)
    assert Settings(lambdas=(0.1, 0.2)).lambda_at(3, 8) == 0.2


def test_the_pareto_set_is_what_nothing_beats():
    space = Space(("a", "b", "c"), (1.0, 1.0, 1.0))
    history = (
        of("111", 0.98),
        of("110", 0.99, 1),
        of("011", 0.97, 2),
        of("100", 0.9, 3),
        of("010", 0.9, 4),
        of("000", 0.1, 5),
    )
    assert [to_text(e.placement) for e in pareto(space, history)] == ["000", "100", "110"]
    assert to_text(best_of(space, history, 0.01).placement) == "110"
    assert to_text(best_of(space, history, 0.1).placement) == "100"


def test_the_reference_is_the_best_where_nothing_else_is_valid():
    assert best_of(SPACE, (of("11111111", 0.9), of("01111111", 0.5, 1)), 0.01).kept == 8


def test_costs_in_bytes_change_what_is_best():
    space = Space(("large", "small", "tiny"), (100.0, 10.0, 1.0))
    history = (of("111", 0.9), of("100", 0.9, 1), of("011", 0.9, 2))
    assert to_text(best_of(space, history, 0.01).placement) == "011"
    assert space.cost((0, 1, 1)) == pytest.approx(11 / 111)
    assert space.weights().sum() == pytest.approx(3)


def test_a_result_says_how_to_rewrite():
    history = (of("11111111", 0.9), of("01101111", 0.9, 1))
    result = SearchResult(SPACE, history, 0.01, {"epochs": 3}, "train.onnx", keep_affine=True)
    assert result.command == "bnfuse rewrite train.onnx --remove 1,4 --keep-affine -o fused.onnx"
    found = result.to_json()
    assert found["remove"] == "1,4"
    assert found["best"]["removed"] == [1, 4]
    assert found["best"]["cost"] == pytest.approx(0.75)
    first = {"model", "batch_norms", "tolerance", "reference", "best", "pareto", "evaluations"}
    assert set(found) == first | {"remove", "command", "settings"}
    assert str(result).splitlines()[-1].strip() == result.command


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"method": "grid"}, "unknown"),
        ({"iterations": 0}, "iterations=0"),
        ({"iterations": None}, "needs --iterations"),
        ({"initial": -1}, "initial=-1"),
        ({"tolerance": 1.0}, "tolerance=1"),
        ({"lambdas": ()}, "lambda"),
        ({"lambdas": (-0.1,)}, "lambda"),
        ({"tolerance": float("nan")}, "tolerance"),
    ],
)
def test_wrong_settings_are_refused(wrong, what):
    with pytest.raises(BnfuseError, match=what):
        Settings(**wrong)
