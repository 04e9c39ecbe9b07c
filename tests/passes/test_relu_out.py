"""A Relu in front of a BatchNorm: the convolution that writes its map stores its result."""

import pytest

from bnfuse.passes import rewrite

MIXER = """
    a = conv(x, 6, bias=1)
    r = relu(a)
    n = bn(r)
    b = conv(n, 6, k=3, g=6, bias=1)
    s = relu(b)
    m = bn(s)
    t = add(m, n)
    c = conv(t, 6, bias=1)
    u = relu(c)
    out = bn(u)
"""


@pytest.mark.parametrize("level", ["bnff", "icf"])
def test_the_convolutions_of_a_mixer_store_what_is_behind_their_relus(training, rewritten, ops, level):
    result = rewritten(training(MIXER), level)
    assert {"ConvBiasReluStatistics", "NormalizeConvBiasReluStatistics"} < {*ops(result)}
    assert not any(name.startswith("ReluPointwise") for name in ops(result))
    assert result.report.unfused == ()


def test_rewriting_a_mixer_again_changes_nothing(training):
    result = rewrite(training(MIXER))
    again = rewrite(result.model)
    assert [entry.name for entry in again.report.passes if entry.changed] == []


def test_a_map_that_is_read_as_it_is_before_its_relu_keeps_the_relu_in_a_sweep(training, rewritten, ops):
    model = training("""
        a = conv(x, 6)
        r = relu(a)
        n = bn(r)
        out = add(n, a)
    """)
    result = rewritten(model)
    assert "ReluPointwiseStatistics" in ops(result)
    (refused,) = [each for entry in result.report.passes if entry.name == "icf/relu-out" for each in entry.refused]
    assert refused.reason == "a has other readers"


def test_a_relu_behind_a_pooling_keeps_its_sweep(training, rewritten, ops):
    model = training("""
        a = conv(x, 6)
        p = maxpool(a)
        r = relu(p)
        out = bn(r)
    """)
    result = rewritten(model)
    assert "ReluPointwiseStatistics" in ops(result)
    reasons = {each.reason for entry in result.report.passes if entry.name == "icf/relu-out" for each in entry.refused}
    assert reasons == {"p is written by no convolution"}


def test_a_bias_before_a_relu_is_not_taken_for_one_that_a_batch_norm_takes_out(training, rewritten, ops):
    result = rewritten(
        training("""
        a = conv(x, 6, bias=1)
        r = relu(a)
        out = bn(r)
    """)
    )
    assert "ConvBiasReluStatistics" in ops(result)
    assert "ConvBiasReluStatistics" in ops(rewrite(result.model))
