"""ICF: across composite layers, through Concat."""

import pytest

FLAT = """
    c0 = conv(x, 4)
    t1 = cat(c0)
    n1 = bn(t1)
    r1 = relu(n1)
    y1 = conv(r1, 3, k=3)
    t2 = cat(c0, y1)
    n2 = bn(t2, eps=3)
    r2 = relu(n2)
    y2 = conv(r2, 2, k=3)
    t3 = cat(c0, y1, y2)
    n3 = bn(t3)
    out = relu(n3)
"""
NESTED = FLAT.replace("t3 = cat(c0, y1, y2)", "t3 = cat(t2, y2)")
REVERSED = FLAT.replace("t2 = cat(c0, y1)", "t2 = cat(y1, c0)").replace("t3 = cat(c0, y1, y2)", "t3 = cat(y2, t2)")
SWEEPS = {"BatchNormInternal", "BatchNormalizationGrad", "ReluGrad", "ConcatTraining", "SplitTraining", "Sum", "Slice"}


@pytest.mark.parametrize("body", [FLAT, NESTED, REVERSED], ids=["flat", "nested", "reversed"])
def test_a_dense_block_is_left_with_no_sweep_but_its_convolutions(body, training, rewritten, ops, golden):
    result = rewritten(training(body))
    assert ops(result) == sorted(
        [
            *["Concat"] * (2 + 2 * 2),  # the maps, and two sets of statistics each
            "ConvStatistics",
            "NormalizeReluConvStatistics",
            "NormalizeReluConvStatistics",
            "NormalizeReluGlobalAveragePool",
            "NormalizeGlobalAveragePoolGradReluGradReduceScale",
            "SliceBatchNormGradNormalizeReluConvGradReluGradReduceAccumulate",
            "SliceBatchNormGradNormalizeReluConvGradReluGradReduceAccumulate",
            "BatchNormGradConvGradWeight",
        ]
    )
    assert not SWEEPS & {*ops(result)}
    assert (result.report.batch_norms, result.report.unfused) == (3, ())
    golden.check(result.model)


def test_below_icf_a_batch_norm_over_a_concat_keeps_its_sweeps(training, rewritten):
    result = rewritten(training(FLAT), "bnff")
    assert {(entry.node, entry.half) for entry in result.report.unfused if entry.node != "n1"} == {
        *[(node, half) for node in ("n2", "n3") for half in ("statistics", "gradient input")]
    }


def test_a_reader_that_is_no_batch_norm_adds_its_gradient_to_the_accumulated_one(training, rewritten, ops):
    model = training("""
        c0 = conv(x, 4)
        c1 = conv(x, 3)
        t = cat(c0, c1)
        n = bn(t)
        r = relu(n)
        a = conv(r, 4)
        b = conv(t, 4, k=3)
        out = add(a, b)
    """)
    result = rewritten(model)
    assert result.report.unfused == ()
    assert not SWEEPS & {*ops(result)}


def test_a_leaf_with_a_reader_of_its_own(training, rewritten, ops):
    model = training("""
        c0 = conv(x, 4)
        c1 = conv(c0, 3)
        t = cat(c0, c1)
        n = bn(t)
        r = relu(n)
        out = conv(r, 4)
    """)
    assert rewritten(model).report.unfused == ()


def test_batch_norms_sink_through_a_concat(training, rewritten, ops, golden):
    model = training("""
        a = conv(x, 4)
        na = bn(a)
        ra = relu(na)
        b = conv(x, 3, k=3)
        nb = bn(b)
        rb = relu(nb)
        t = cat(ra, rb)
        p = maxpool(t, k=3, s=1)
        c = conv(p, 4)
        d = conv(t, 4)
        out = add(c, d)
    """)
    result = rewritten(model)
    assert "NormalizeReluMaxPool" in ops(result)
    assert "NormalizeReluConv" in ops(result)
    assert result.report.unfused == ()
    golden.check(result.model)


def test_a_concat_of_different_activations_stays_and_says_why(training, rewritten):
    model = training("""
        a = conv(x, 4)
        na = bn(a)
        ra = relu(na)
        b = conv(x, 3)
        nb = bn(b)
        rb = relu6(nb)
        t = cat(ra, rb)
        out = conv(t, 4)
    """)
    result = rewritten(model)
    refused = next(entry for entry in result.report.passes if entry.name == "icf/concat-sink").refused
    assert [refusal.reason for refusal in refused] == ["its operands have different activations"]
    assert {entry.half for entry in result.report.unfused} == {"normalise", "gradient reductions"}


def test_concatenations_that_do_not_nest_stay_and_say_why(training, rewritten):
    model = training("""
        c0 = conv(x, 4)
        c1 = conv(x, 3)
        c2 = conv(x, 2)
        t = cat(c0, c1)
        n = bn(t)
        a = conv(n, 4)
        u = cat(c1, c2)
        m = bn(u)
        b = conv(m, 4)
        out = add(a, b)
    """)
    result = rewritten(model)
    halves = {(entry.node, entry.half) for entry in result.report.unfused}
    assert halves == {("n", "gradient input"), ("m", "gradient input")}
    assert "covers channels" in result.report.unfused[0].reason


def test_constant_channels_and_a_zero_scale(training, rewritten):
    """γ = 0 makes every p zero, but not dgamma: the reductions must not go through p."""
    model = training(FLAT.replace("n2 = bn(t2, eps=3)", "n2 = bn(t2, zero=1)"))
    assert rewritten(model).report.unfused == ()
