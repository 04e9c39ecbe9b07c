"""Sums of more than two maps: one sweep, whatever the order in which they are added."""

import pytest

from bnfuse.passes import rewrite

BRANCHES = """
    p = conv(x, 6)
    o = bn(p)
    z = relu(o)
    a = conv(z, 6, k=3)
    n1 = bn(a)
    b = conv(z, 6)
    n2 = bn(b)
    n3 = bn(z)
"""
TAIL = """
    u = relu(t)
    n4 = bn(u)
    c = conv(u, 6)
    n5 = bn(c)
    w = add(n4, n5)
    out = relu(w)
"""
ORDERS = {
    "the sum is the second operand": ("s = add(n1, n2)", "t = add(n3, s)"),
    "the sum is the first operand": ("s = add(n1, n2)", "t = add(s, n3)"),
    "the identity first": ("s = add(n3, n2)", "t = add(n1, s)"),
}


@pytest.mark.parametrize("level", ["bnff", "icf"])
@pytest.mark.parametrize("order", ORDERS)
def test_three_branches_are_one_sweep(training, rewritten, ops, order, level):
    lines = "\n".join(ORDERS[order])
    result = rewritten(training(f"{BRANCHES}\n{lines}\n{TAIL}"), level)
    assert "NormalizeAddNormalizedPlusNormalizedReluPointwiseStatistics" in ops(result)
    assert not any(name.startswith("NormalizeAddNormalizedPointwise") for name in ops(result))
    again = rewrite(result.model, level=level)
    assert [entry.name for entry in again.report.passes if entry.changed] == []


def test_two_of_four_terms_may_be_activated(training, rewritten, ops):
    result = rewritten(
        training("""
        a = conv(x, 6)
        n1 = bn(a)
        r1 = relu(n1)
        b = conv(x, 6)
        n2 = bn(b)
        c = conv(x, 6)
        n3 = bn(c)
        r3 = hardswish(n3)
        d = conv(x, 6)
        s = add(d, n2)
        t = add(s, r3)
        out = add(r1, t)
    """)
    )
    sums = [name for name in ops(result) if "Plus" in name]
    assert len(sums) == 1 and {"Relu", "HardSwish"} == {
        kind for kind in ("Relu", "HardSwish") if kind in sums[0].split("Pointwise")[0]
    }


def test_a_sum_that_something_else_reads_is_stored(training, rewritten, ops):
    result = rewritten(
        training("""
        a = conv(x, 6)
        n1 = bn(a)
        b = conv(x, 6)
        n2 = bn(b)
        s = add(n1, n2)
        c = conv(s, 6)
        n3 = bn(c)
        out = add(s, n3)
    """)
    )
    assert not any("Plus" in name for name in ops(result))


def test_a_third_activated_term_keeps_the_inner_sum(training, rewritten, ops):
    result = rewritten(
        training("""
        a = conv(x, 6)
        n1 = bn(a)
        r1 = relu(n1)
        b = conv(x, 6)
        n2 = bn(b)
        r2 = relu(n2)
        c = conv(x, 6)
        n3 = bn(c)
        r3 = relu(n3)
        s = add(r1, r2)
        out = add(r3, s)
    """)
    )
    assert "NormalizeReluSkipReluAddNormalizedPointwise" in ops(result)
    assert not any("Plus" in name for name in ops(result))


def test_a_zero_that_stands_for_a_missing_branch_is_no_term(training, rewritten, ops):
    model = training("""
        a = conv(x, 6)
        n1 = bn(a)
        b = conv(x, 6)
        n2 = bn(b)
        s = add(n1, n2)
        t = zero(s)
        c = conv(x, 6)
        n3 = bn(c)
        u = add(t, n3)
        out = relu(u)
    """)
    result = rewritten(model)
    assert "NormalizeAddNormalizedPlusNormalizedReluPointwise" in ops(result)
    assert "Add" not in ops(result)
