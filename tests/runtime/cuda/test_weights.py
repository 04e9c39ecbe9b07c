"""Packed weights: every element where the convolutions look for it, in their type, and zeros behind."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_kernels import assert_no_spills, gpu, run_kernel
from hypothesis import example, given
from hypothesis import strategies as st
from packed_weights import ROUNDED, packed

from bnfuse.runtime.kernels.cuda.weights import (
    BACKWARD,
    FORWARD,
    LINE,
    NEVER,
    RUN,
    VECTOR,
    Member,
    pack_weights,
    reciprocal,
    table,
)

FORMS = (FORWARD, BACKWARD)
CASES = (  # OIHW, groups, of which so many are multiplied as one
    ((7, 5, 3, 3), 1, 1),
    ((16, 16, 1, 1), 1, 1),
    ((24, 3, 1, 2), 4, 1),  # few channels: flat
    ((10, 3, 7, 7), 1, 1),
    ((6, 5, 1, 1), 2, 1),
    ((16, 8, 2, 2), 2, 1),
    ((3, 33, 7, 7), 1, 1),
    ((40, 70, 3, 3), 1, 1),  # more than one block
    ((24, 4, 3, 3), 6, 3),
    ((30, 6, 1, 2), 6, 2),  # of groups that share vectors
    ((14, 11, 2, 1), 2, 2),
)


def members() -> tuple[Member, ...]:
    found, source, target = [], 11, 0
    for weight, group, merged in CASES:
        for form in FORMS:
            found.append(Member(weight, group, form, source, target, merged))
            target += -(-found[-1].vectors * VECTOR // LINE) * LINE
        source += int(np.prod(weight)) + 3
    return tuple(found)


@pytest.mark.parametrize("precision", ROUNDED)
def test_every_element_is_where_kernels_read_it(precision):
    all_of_them = members()
    last = all_of_them[-1]
    source = np.random.default_rng(1).standard_normal(last.source + int(np.prod(last.weight)) + 1, np.float32)
    size = last.target + last.vectors * VECTOR
    kernel = pack_weights(all_of_them, source.size, size, gpu(precision))
    assert max(member.vectors for member in all_of_them) > RUN
    found = run_kernel(kernel, {"parameters": source, "table": table(all_of_them)})["packed"]
    for m in all_of_them:
        weight = source[m.source : m.source + int(np.prod(m.weight))].reshape(m.weight)
        wanted = ROUNDED[precision](packed(weight, m.group, m.form, m.merged))
        own = found[m.target : m.target + m.vectors * VECTOR]
        np.testing.assert_array_equal(own.view(np.uint8), np.ascontiguousarray(wanted).view(np.uint8), str(m))


@pytest.mark.parametrize(("precision", "arch"), [("bf16", "sm_80"), ("fp32", "sm_90")])
def test_registers_suffice(arch, precision):
    assert_no_spills(pack_weights(members(), 100_000, 1 << 20, gpu(precision, arch)))


@given(st.integers(1, NEVER), st.integers(0, (1 << 31) - 1))
@example(NEVER, (1 << 31) - 1)
@example(NEVER - 1, (1 << 31) - 1)
@example(3, (1 << 31) - 2)
def test_a_reciprocal_divides(divisor, number):
    factor, shift = reciprocal(divisor)
    assert factor < 1 << 32
    for near in {number, number // divisor * divisor, max(number // divisor * divisor - 1, 0)}:
        assert near * factor >> shift == near // divisor
