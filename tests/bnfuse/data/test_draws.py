"""One number at a time is the same number as many at once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bnfuse.data.draws import Draw, drawn, log_uniform


@given(st.integers(0, 1 << 62), st.integers(1, 1 << 20), st.integers(0, 1 << 40), st.integers(0, 500))
def test_one_draw_is_that_of_the_array(seed, epoch, index, stream):
    assert Draw(seed, epoch, index).word(stream) == int(drawn(seed, epoch, np.array([index]), stream)[0])


def test_reals_are_uniform_and_orders_are_orders():
    draws = [Draw(3, 1, index) for index in range(4096)]
    reals = np.array([draw.real(7, 2.0, 4.0) for draw in draws])
    assert 2 <= reals.min() < reals.max() < 4
    assert abs(reals.mean() - 3) < 4 * 0.577 / 64
    orders = [tuple(draw.order(20, 3)) for draw in draws]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 6 and min(counts) > 4096 / 6 - 4 * 24
    ratios = np.log([log_uniform(draw, 9, 0.75, 4 / 3) for draw in draws])
    assert abs(ratios.mean()) < 4 * 0.166 / 64
