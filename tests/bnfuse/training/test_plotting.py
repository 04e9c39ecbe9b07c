"""The picture of a training run."""

import pytest


@pytest.mark.parametrize("last", [1, 2, 7])
def test_epochs_are_whole_numbers(last):
    figures = pytest.importorskip("matplotlib.figure")
    from bnfuse.training.plotting import finish

    axis = figures.Figure().subplots()
    axis.plot(range(1, last + 1), range(last), marker=".")
    finish(axis, "training loss")
    low, high = axis.get_xlim()
    shown = [tick for tick in axis.get_xticks() if low <= tick <= high]
    assert shown and all(float(tick).is_integer() for tick in shown)
