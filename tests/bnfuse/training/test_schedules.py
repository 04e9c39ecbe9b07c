"""Learning rates by name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bnfuse.core.errors import BnfuseError
from bnfuse.training import cosine, parse_schedule

STEPS = 10


def rates(text, epochs=6, warm_up=0.0):
    schedule = parse_schedule(text, warm_up)
    return np.array([schedule.rate(0.4, index, STEPS, epochs) for index in range(epochs * STEPS)])


def test_a_cosine_falls_from_the_first_rate_to_almost_nothing():
    found = rates("cosine")
    assert found[0] == 0.4
    assert found[30] == pytest.approx(0.2)
    assert np.all(np.diff(found) < 0)
    assert found[-1] < 0.001
    assert found[7] == cosine(0.4, 7, 60)


def test_steps_divide_the_rate_after_these_epochs():
    found = rates("step:2,4@0.5")
    assert found.tolist() == [0.4] * 20 + [0.2] * 20 + [0.1] * 20
    assert rates("step:3")[-1] == pytest.approx(0.04)


def test_powers_fall_to_nothing():
    assert np.allclose(rates("poly"), 0.4 * (1 - np.arange(60) / 60))
    assert np.allclose(rates("poly:2"), 0.4 * (1 - np.arange(60) / 60) ** 2)


def test_a_constant_rate_stays():
    assert set(rates("constant")) == {0.4}


@pytest.mark.parametrize("text", ["constant", "cosine", "poly:2", "step:3"])
def test_a_warm_up_climbs_linearly_and_joins_the_schedule_at_its_top(text):
    found = rates(text, warm_up=2)
    assert np.allclose(found[:20], 0.4 * np.arange(1, 21) / 20)
    assert found[20] == pytest.approx(0.4)
    assert found[-1] <= 0.4


def test_half_an_epoch_of_warm_up():
    assert np.allclose(rates("constant", warm_up=0.5)[:6], 0.4 * np.array([0.2, 0.4, 0.6, 0.8, 1, 1]))


@given(
    st.sampled_from(["cosine", "constant", "poly:0.9", "step:1,2@0.3"]),
    st.floats(0, 2.5),
    st.integers(1, 7),
    st.integers(3, 6),
)
def test_rates_are_never_negative_and_never_above_the_first(text, warm_up, steps, epochs):
    schedule = parse_schedule(text, warm_up)
    found = [schedule.rate(0.1, index, steps, epochs) for index in range(steps * epochs)]
    assert all(0 <= rate <= 0.1 + 1e-12 for rate in found)


@pytest.mark.parametrize("text", ["cosine", "constant", "step:30,60,80@0.1", "poly:2", "step:1.5@0.3"])
def test_a_schedule_is_spelt_as_it_is_read(text):
    assert str(parse_schedule(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cosine:2",
        "linear",
        "step",
        "step:",
        "step:a",
        "step:3,2",
        "step:0",
        "step:1@0",
        "poly:",
        "poly:-1",
        "poly:nan",
    ],
)
def test_what_is_no_schedule_is_refused_with_those_there_are(text):
    with pytest.raises(BnfuseError, match="poly"):
        parse_schedule(text)


@pytest.mark.parametrize("warm_up", [-1, float("nan"), float("inf")])
def test_a_warm_up_is_a_number_of_epochs(warm_up):
    with pytest.raises(BnfuseError, match="warm-up"):
        parse_schedule("cosine", warm_up)
