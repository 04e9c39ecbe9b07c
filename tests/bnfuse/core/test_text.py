"""Numbers as people read them."""

from __future__ import annotations

import pytest

from bnfuse.core.text import duration, percent


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0 s"),
        (2.5e-10, "0.25 ns"),
        (2.5e-7, "250 ns"),
        (9.99e-4, "999 us"),
        (9.996e-4, "1 ms"),
        (0.0123456, "12.3 ms"),
        (0.9996, "1 s"),
        (2.345, "2.35 s"),
        (12_345.6, "12,346 s"),
    ],
)
def test_a_duration_has_three_digits_in_the_unit_that_fits(seconds, text):
    assert duration(seconds) == text


def test_a_share_has_one_decimal():
    assert percent(0.46149) == "46.1 %"
