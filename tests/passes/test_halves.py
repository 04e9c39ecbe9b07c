"""A Split beside a skip (selective kernels on halves of a map): the skip's gradient is added to the pieces."""

from bnfuse.passes import rewrite

HALVES = """
    a = conv(x, 8)
    n = bn(a)
    e = conv(x, 8)
    m = bn(e)
    s = add(n, m)
    y = relu(s)
    p, q = cut(y, 4, 4)
    b = conv(p, 8, k=3)
    c = conv(q, 8, k=3)
    bb = bn(b)
    cc = bn(c)
    t = add(bb, cc)
    u = add(t, y)
    out = relu(u)
"""


def test_the_gradient_of_a_skip_is_added_to_the_pieces_and_masked_there(training, rewritten, ops, golden):
    result = rewritten(training(HALVES))
    assert result.report.unfused == ()
    assert ops(result).count("BatchNormGradConvGradAddGradientReluGradReduceOtherReduceOther") == 2
    assert "Sum" not in ops(result)
    golden.check(result.model)


def test_rewriting_it_again_changes_nothing(training):
    result = rewrite(training(HALVES))
    again = rewrite(result.model)
    assert [entry.name for entry in again.report.passes if entry.changed] == []


def test_below_icf_the_sum_goes_into_the_sweep_that_masks_it(training, rewritten, ops):
    result = rewritten(training(HALVES), "bnff")
    assert "PointwiseGradAddGradientReluGradReduceOtherReduceOther" in ops(result)


def test_pieces_that_are_written_without_room_for_a_sum_stay_one_sum(training, rewritten):
    result = rewritten(
        training("""
        a = conv(x, 8)
        n = bn(a)
        y = relu(n)
        p, q = cut(y, 4, 4)
        u = mul(p, q)
        w = conv(u, 8)
        out = add(w, y)
    """)
    )
    refused = [each for entry in result.report.passes if entry.name == "icf/sink-gradient" for each in entry.refused]
    assert "no operator that writes a piece of" in " ".join(each.reason for each in refused)
