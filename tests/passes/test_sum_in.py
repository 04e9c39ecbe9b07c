"""Residual sums that one 1x1 convolution reads: it and its gradient read both terms."""

import pytest

import bnfuse
from bnfuse.passes import rewrite

BOTTLENECK = """
    a = conv(x, 6)
    n = bn(a)
    b = conv(n, 6, k=3, g=6)
    m = bn(b)
    {}
    s = add({})
    c = conv(s, 8)
    o = bn(c)
    out = relu(o)
"""
CASES = {
    "both normalised": ("", "m, n", "NormalizeAddNormalizedConv"),
    "one as it is": ("", "m, a", "NormalizeAddConv"),
}


@pytest.mark.parametrize("level", ["bnff", "icf"])
@pytest.mark.parametrize("case", CASES)
def test_the_convolution_and_its_gradient_add_the_terms_up(training, rewritten, ops, case, level):
    line, terms, wanted = CASES[case]
    result = rewritten(training(BOTTLENECK.format(line, terms)), level)
    assert {f"{wanted}Statistics"} < {*ops(result)}
    assert any(f"{wanted}Grad" in name for name in ops(result))
    assert not any(name.endswith("Pointwise") for name in ops(result) if "Add" in name)
    again = rewrite(result.model, level=level)
    assert [entry.name for entry in again.report.passes if entry.changed] == []


@pytest.mark.parametrize("case", CASES)
def test_it_computes_the_same_when_it_is_compiled(training, case):
    line, terms, _ = CASES[case]
    model = training(BOTTLENECK.format(line, terms))
    found = bnfuse.verify(model, bnfuse.rewrite(model), runtime="tvm", threads=1)
    assert found.equal, found.worst


def test_a_sum_of_an_activated_map_is_stored(training, rewritten, ops):
    result = rewritten(training(BOTTLENECK.format("r = hardswish(m)", "n, r")))
    assert "NormalizeSkipHardSwishAddNormalizedPointwise" in ops(result)


@pytest.mark.parametrize(
    ("behind", "reason"),
    [
        ("c = conv(s, 8, k=3)", "is read by what is no 1x1 convolution"),
        ("c = conv(s, 8)\n    d = conv(s, 8)\n    e = add(c, d)", "more than two operators read"),
        ("c = conv(s, 6)\n    e = add(c, s)", "more than two operators read"),
    ],
)
def test_a_sum_that_windows_or_many_read_is_stored(training, rewritten, ops, behind, reason):
    last = "e" if "e = " in behind else "c"
    result = rewritten(
        training(f"""
        a = conv(x, 6)
        n = bn(a)
        b = conv(n, 6, k=3)
        m = bn(b)
        s = add(m, n)
        {behind}
        o = bn({last})
        out = relu(o)
    """)
    )
    assert "NormalizeAddNormalizedPointwise" in ops(result)
    refused = [each.reason for entry in result.report.passes if entry.name == "icf/sum-in" for each in entry.refused]
    assert any(reason in each for each in refused)
