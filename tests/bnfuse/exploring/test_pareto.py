"""Fronts, against a search of all pairs."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bnfuse.core.errors import BnfuseError
from bnfuse.exploring.pareto import front, goals
from bnfuse.exploring.points import Point


def point(**values):
    return Point({}, {}, **values)


def test_less_is_better_but_for_accuracy_and_speed_up():
    assert [str(goal) for goal in goals("parameters,accuracy,speedup")] == [
        "least parameters",
        "most accuracy",
        "most speedup",
    ]
    assert [str(goal) for goal in goals("max:flops, min:accuracy")] == ["most flops", "least accuracy"]


@pytest.mark.parametrize("text", ["", "size", "best:time", "time,", "time,max:time", ":time:"])
def test_goals_that_make_no_sense_are_refused(text):
    with pytest.raises(BnfuseError):
        goals(text)


def test_a_point_that_lacks_a_quantity_is_not_on_the_front():
    points = [point(parameters=1, time_s=2.0), point(parameters=2, time_s=1.0), point(parameters=0)]
    assert front(points, goals("parameters,time")) == (True, True, False)
    assert front(points, goals("max:parameters,time")) == (False, True, False)


def test_equal_points_are_both_on_the_front():
    points = [point(parameters=1, flops=1), point(parameters=1, flops=1), point(parameters=1, flops=2)]
    assert front(points, goals("parameters,flops")) == (True, True, False)


def test_sweeps_are_those_of_the_source_where_nothing_was_fused():
    points = [point(sweeps=5), point(sweeps=9, sweeps_after=4)]
    assert front(points, goals("sweeps")) == (False, True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_no_point_beats_one_of_the_front_and_some_point_beats_every_other(values):
    points = [point(parameters=a, flops=b, accuracy=float(c)) for a, b, c in values]
    marks = front(points, goals("parameters,flops,accuracy"))
    for (a, b, c), mark in zip(values, marks, strict=True):
        better = [v for v in values if v[0] <= a and v[1] <= b and v[2] >= c and v != (a, b, c)]
        assert mark == (not better)


def test_points_are_data():
    assert dataclasses.asdict(point(parameters=3))["parameters"] == 3
    assert point(time_before_s=3.0, time_s=2.0).to_json()["speedup"] == 1.5
    assert point(time_s=2.0).speedup is None
