"""Learning rates by name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bnfuse.core.errors import BnfuseError
from bnfuse.training import cosine, parse_schedule

STEPS = 10


def rates(text, epochs=6, warm_up=0.0, **options):
    schedule = parse_schedule(text, warm_up, **options)
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
    st.sampled_from(["cosine", "constant", "poly:0.9", "step:1,2@0.3", "exp:0.9", "restarts:0.7x1.5"]),
    st.floats(0, 2.5),
    st.integers(1, 7),
    st.integers(3, 6),
)
def test_rates_are_never_negative_and_never_above_the_first(text, warm_up, steps, epochs):
    schedule = parse_schedule(text, warm_up)
    found = [schedule.rate(0.1, index, steps, epochs) for index in range(steps * epochs)]
    assert all(0 <= rate <= 0.1 + 1e-12 for rate in found)


@pytest.mark.parametrize(
    "text",
    [
        *("cosine", "constant", "step:30,60,80@0.1", "poly:2", "step:1.5@0.3"),
        *("exp:0.97", "one-cycle:0.25", "restarts:10", "restarts:5x2"),
    ],
)
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
        "exp",
        "exp:1.1",
        "one-cycle:1",
        "restarts",
        "restarts:0",
        "restarts:2x0.5",
        "restarts:2x",
    ],
)
def test_what_is_no_schedule_is_refused_with_those_there_are(text):
    with pytest.raises(BnfuseError, match="poly"):
        parse_schedule(text)


@pytest.mark.parametrize("warm_up", [-1, float("nan"), float("inf")])
def test_a_warm_up_is_a_number_of_epochs(warm_up):
    with pytest.raises(BnfuseError, match="warm-up"):
        parse_schedule("cosine", warm_up)


def of_torch(make, count, per_epoch):
    """The rates of torch's scheduler, which is stepped after each step or each epoch."""
    import torch

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    scheduler, found = make(torch.optim.lr_scheduler, optimizer), []
    for index in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if not per_epoch or (index + 1) % STEPS == 0:
            scheduler.step()
    return np.array(found)


TORCHS = {
    "cosine": ("cosine", {"min_lr": 0.01}, lambda s, o: s.CosineAnnealingLR(o, 60, eta_min=0.01)),
    "cosine, by epoch": (
        "cosine",
        {"min_lr": 0.01, "by": "epoch"},
        lambda s, o: s.CosineAnnealingLR(o, 6, eta_min=0.01),
    ),
    "warm-up, cosine, by epoch": (
        "cosine",
        {"warm_up": 2, "warm_up_lr": 0.04, "by": "epoch"},
        lambda s, o: s.SequentialLR(o, [s.LinearLR(o, 0.1, total_iters=2), s.CosineAnnealingLR(o, 4)], milestones=[2]),
    ),
    "warm-up, exp": (
        "exp:0.9",
        {"warm_up": 1, "warm_up_lr": 0.1, "by": "epoch"},
        lambda s, o: s.SequentialLR(o, [s.LinearLR(o, 0.25, total_iters=1), s.ExponentialLR(o, 0.9)], milestones=[1]),
    ),
    "steps": ("step:2,4@0.5", {"by": "epoch"}, lambda s, o: s.MultiStepLR(o, [2, 4], 0.5)),
    "poly": ("poly:0.9", {}, lambda s, o: s.PolynomialLR(o, 60, 0.9)),
    "one-cycle": ("one-cycle", {}, lambda s, o: s.OneCycleLR(o, 0.4, 60, cycle_momentum=False)),
    "one-cycle, short climb": (
        "one-cycle:0.1",
        {},
        lambda s, o: s.OneCycleLR(o, 0.4, 60, pct_start=0.1, cycle_momentum=False),
    ),
    "restarts": ("restarts:2", {"min_lr": 0.02}, lambda s, o: s.CosineAnnealingWarmRestarts(o, 20, eta_min=0.02)),
    "restarts, longer": ("restarts:1x2", {}, lambda s, o: s.CosineAnnealingWarmRestarts(o, 10, 2)),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", TORCHS)
def test_rates_are_torchs(name):
    text, options, make = TORCHS[name]
    np.testing.assert_allclose(
        rates(text, **options), of_torch(make, 60, options.get("by") == "epoch"), rtol=1e-9, atol=1e-12
    )


def test_no_rate_falls_below_the_least():
    assert min(rates("exp:0.5", min_lr=0.1)) == min(rates("step:1,2,3", min_lr=0.1)) == 0.1
    assert rates("one-cycle", min_lr=0.1)[-1] == pytest.approx(0.1)
    assert rates("one-cycle")[-1] == pytest.approx(0.4 / 25e4)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("one-cycle", {"warm_up": 1}, "climbs by itself"),
        ("constant", {"min_lr": 0.1}, "does not fall"),
        ("cosine", {"warm_up_lr": 0.1}, "give --warm-up"),
        ("cosine", {"min_lr": -1}, "min-lr"),
        ("cosine", {"by": "batch"}, "by step or by epoch"),
    ],
)
def test_an_option_that_means_nothing_is_refused(text, options, message):
    with pytest.raises(BnfuseError, match=message):
        parse_schedule(text, **options)


def test_a_least_rate_above_the_highest_is_refused():
    with pytest.raises(BnfuseError, match=r"--min-lr 0\.5 is above --lr 0\.1"):
        parse_schedule("cosine", min_lr=0.5).check(0.1)


def test_parts_of_epochs_that_are_whole_steps_are_these_steps():
    for epochs, steps in ((0.7, 10), (0.3, 10), (1.1, 10), (2.2, 390), (2.3, 10)):
        count = round(epochs * steps)
        fallen = [parse_schedule(f"step:{epochs}").rate(1.0, index, steps, 6) for index in (count - 1, count)]
        assert fallen == [1.0, 0.1]
        cycles = parse_schedule(f"restarts:{epochs}")
        assert [cycles.rate(1.0, count * turn, steps, 6) for turn in (1, 2)] == [1.0, 1.0]


@pytest.mark.parametrize(("factor", "starts"), [(1, [0, 7, 14, 21, 700]), (2, [0, 7, 21, 49, 105]), (1e300, [0, 7])])
def test_each_cycle_begins_at_the_top(factor, starts):
    cycles = parse_schedule(f"restarts:0.7x{factor}")
    for start in starts:
        assert cycles.rate(0.4, start, STEPS, 6) == 0.4
    lowest = cycles.rate(0.4, 6, STEPS, 6)
    assert lowest == pytest.approx(0.2 * (1 + np.cos(np.pi * 6 / 7)))


def test_a_cycle_without_a_step_is_refused_and_takes_no_time():
    schedule = parse_schedule("restarts:1e-300")
    assert schedule.rate(0.4, 59, STEPS, 6) <= 0.4
    with pytest.raises(BnfuseError, match="schedule 'restarts:1e-300': its first cycle is shorter than one step"):
        schedule.check(0.4, STEPS)
    with pytest.raises(BnfuseError, match="shorter than one epoch"):
        parse_schedule("restarts:0.5", by="epoch").check(0.4)
    parse_schedule("restarts:0.1").check(0.4, STEPS)


def test_numbers_are_told_as_they_are():
    for text in ("step:30,60@0.1", "exp:0.12345678", "restarts:0.33333333x1.0000001", "poly:2", "one-cycle:0.3000001"):
        assert str(parse_schedule(text)) == text
