"""Why a half of a BN is a kernel of its own: every reason names what is in the way."""

import pytest
from small_networks import DENSE

from bnfuse.passes import rewrite

PRE_ACTIVATION = """
    c = conv(x, 4)
    n1 = bn(c)
    r1 = relu(n1)
    a = conv(r1, 4, k=3)
    s1 = add(a, c)
    n2 = bn(s1)
    r2 = relu(n2)
    b = conv(r2, 4, k=3)
    s2 = add(b, s1)
    n3 = bn(s2)
    out = relu(n3)
"""
BRANCHES = """
    c = conv(x, 4)
    r0 = relu(c)
    i1 = bn(r0)
    a1 = conv(r0, 4, k=3)
    n1 = bn(a1)
    s1 = add(i1, n1)
    r1 = relu(s1)
    i2 = bn(r1)
    n2 = bn(r1, eps=3)
    s2 = add(i2, n2)
    out = relu(s2)
"""


def reasons(training, body, level="icf"):
    report = rewrite(training(body), level=level).report
    return {(entry.node, entry.half): entry.reason for entry in report.unfused}


def test_a_sum_of_gradients_that_one_operator_reads_names_it(training):
    found = reasons(training, PRE_ACTIVATION)
    assert {*found} == {("n1", "gradient input")}  # a convolution and a skip read the sum that n2's is part of
    reason = found["n1", "gradient input"]
    assert "is a sum of gradients, and only " in reason and "'c/grad' reads it" in reason
    assert "level" not in reason


def test_reductions_over_what_a_batch_norm_gives_back_name_its_sweep(training):
    found = reasons(training, BRANCHES)
    for node in ("n1", "i1"):
        assert "in the input gradient of a BatchNorm" in found[node, "gradient reductions"]
        assert "'i2/" in found[node, "gradient reductions"]


@pytest.mark.parametrize(("level", "told"), [("none", "mvf splits"), ("rcf", "mvf splits"), ("mvf", "bnff moves")])
def test_lower_levels_name_the_one_that_moves_the_halves(training, level, told):
    found = reasons(training, DENSE, level)
    assert all(reason.startswith(f"level {level} leaves ") and told in reason for reason in found.values())


def test_bnff_names_the_level_that_crosses_concatenations(training):
    found = reasons(training, DENSE, "bnff")
    statistics = found["n2", "statistics"]
    assert "Concat 't2'" in statistics and statistics.endswith("level icf works across concatenations")
    assert all("icf" in reason for reason in found.values()), found
    assert not reasons(training, DENSE, "icf")


def test_two_activations_with_an_attribute_of_one_name_stay_in_two_operators(training, rewritten, ops):
    """SiLU and Elu both have an alpha, and an operator could not give them two."""
    result = rewritten(
        training("""
        a = conv(x, 6)
        n = bn(a)
        r = silu(n)
        e = elu(r)
        m = bn(e)
            o = bn(m)
        out = conv(o, 6)
    """)
    )
    assert result.report.unfused
    assert not any("Elu" in name and "QuickGelu" in name for name in ops(result))
