"""ICF: across composite layers, through Concat."""

import onnx_ir as ir
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
SWEEPS = {"BatchNorm", "BatchNormGrad", "PointwiseGradReluGrad", "Split", "Sum", "Slice"}


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
    refused = next(entry for entry in result.report.passes if entry.name == "icf/sink").refused
    reason = "Concat 't' keeps it: its operands have different activations"
    assert {refusal.reason for refusal in refused} == {reason}
    assert {(entry.half, entry.reason) for entry in result.report.unfused} == {("normalise", reason)}


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


LAYER = """
    {y}n = bn({x})
    {y}r = relu({y}n)
    {y} = conv({y}r, 2, k=3)
"""
# a meets b in one concatenation and c in another; b and c do not meet, though both stand behind a
PARTNERS = "a = conv(x, 2)\nb = conv(x, 2)\nc = conv(x, 2)\nt = cat(a, b)\nu = cat(a, c)" + LAYER.format(y="p", x="t")
# two concatenations meet in an Add: the BN reads the sum, and neither's leaves
ADDED = """
    a = conv(x, 2)
    b = conv(x, 2)
    c = conv(x, 2)
    d = conv(x, 2)
    t = cat(a, b)
    u = cat(c, d)
    v = add(t, u)
    n = bn(v)
    out = relu(n)
"""
# the gradient of a goes to p and to q, and p has a concatenation of its own
NESTED_SUMS = """
    p = conv(x, 2)
    q = conv(x, 2)
    a = add(p, q)
    b = conv(x, 2)
    t = cat(a, b)
    w = cat(p, b)
"""
# the gradient of s = 2*v counts twice beside what the BN makes of v
TWICE = """
    v = conv(x, 2, k=3)
    s = add(v, v)
    n = bn(v)
    r = relu6(n)
    t = cat(s, r)
    out = conv(t, 4)
"""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (PARTNERS + LAYER.format(y="q", x="u") + "out = cat(p, q)", "is not the sum of all the gradients"),
        (PARTNERS + "q = conv(u, 2)\nout = cat(p, q)", "is not the sum of all the gradients"),
        (ADDED, "Split"),
        (
            NESTED_SUMS + LAYER.format(y="m", x="t") + LAYER.format(y="o", x="w") + "out = cat(m, o)",
            "is not the sum of all the gradients",
        ),
        (TWICE, "is not the sum of all the gradients"),
    ],
    ids=["two partners", "plain reader", "sum of concatenations", "sum within a sum", "twice the same"],
)
def test_a_gradient_that_is_not_the_sum_of_all_at_its_channels_is_summed_as_it_was(body, reason, training, rewritten):
    result = rewritten(training(body))
    reasons = [refusal.reason for entry in result.report.passes for refusal in entry.refused]
    assert any(reason in given for given in reasons)


def test_a_gradient_that_nothing_reads_leaves_no_node(training, rewritten):
    result = rewritten(training("c = conv(x, 2)\nt = cat(x, c)\nn = bn(t)\nout = relu(n)"))
    outputs = set(result.model.graph.outputs)
    assert all(value.uses() or value in outputs for node in result.model.graph for value in node.outputs[:1])


def swept(result) -> list[str]:
    """The halves that keep a sweep."""
    return [entry.half for entry in result.report.unfused]


AGGREGATED = """
    s = conv(x, 5)
    ns = bn(s)
    rs = relu(ns)
    p = maxpool(rs, k=3, s=1)
    a = conv(p, 4, k=3)
    na = bn(a)
    ra = relu(na)
    b = conv(ra, 3, k=3)
    nb = bn(b)
    rb = relu(nb)
    t = cat(p, ra, rb)
    c = conv(t, 6)
    nc = bn(c)
    out = relu(nc)
"""


def test_an_operand_with_another_reader_and_a_pooled_one(training, rewritten, ops, golden):
    """VoVNet: the next convolution reads what is concatenated, and the first operand is stored as it is."""
    result = rewritten(training(AGGREGATED))
    assert swept(result) == []
    assert "NormalizeReluConvStatistics" in ops(result)  # a Relu leaves a pooled Relu as it is
    assert any("WhereReluGradReduce" in op for op in ops(result))  # only rb is masked where its gradient is written
    golden.check(result.model)


@pytest.mark.parametrize("activation", ["silu", "relu6"])
def test_an_activation_is_of_the_channels_that_had_it(activation, training, rewritten, ops):
    result = rewritten(training(AGGREGATED.replace("relu", activation)))
    assert swept(result) == []
    assert any(op.startswith("NormalizeWhere") and op.endswith("ConvStatistics") for op in ops(result))


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_a_map_that_is_not_normalised_is_not_activated(activation, training, rewritten, ops):
    """U-Net: what is made larger has no BN, the skip has one."""
    model = training(f"""
        a = conv(x, 4, k=3)
        n = bn(a)
        r = {activation}(n)
        b = conv(r, 6, s=2)
        u = up(b, 3)
        t = cat(u, r)
        c = conv(t, 5, k=3)
        m = bn(c)
        out = relu(m)
    """)
    result = rewritten(model)
    assert swept(result) == []
    assert any(op.startswith("NormalizeWhere") for op in ops(result))


def test_normalised_maps_without_activation_are_reduced_behind_a_residual_sum(training, rewritten, ops):
    """GhostNet: halves without an activation are concatenated and added to a skip."""
    model = training("""
        s = conv(x, 7)
        a = conv(s, 4, k=3)
        na = bn(a)
        b = conv(na, 3, k=3)
        nb = bn(b)
        t = cat(na, nb)
        e = add(t, s)
        c = conv(e, 6)
        d = conv(e, 6)
        out = add(c, d)
    """)
    result = rewritten(model)
    assert "NormalizeAddPointwise" in ops(result)
    assert "normalise" not in swept(result)


def test_concats_within_concats(training, rewritten, ops):
    """Inception-v3: branches fork once more before they are joined."""
    model = training("""
        s = conv(x, 4)
        ns = bn(s)
        rs = relu(ns)
        a = conv(rs, 3)
        na = bn(a)
        ra = relu(na)
        b = conv(rs, 2, k=3)
        nb = bn(b)
        rb = relu(nb)
        c = conv(rs, 5)
        nc = bn(c)
        rc = relu(nc)
        u = cat(ra, rb)
        t = cat(rc, u)
        p = maxpool(t, k=3, s=1)
        d = conv(p, 4)
        e = conv(t, 4)
        out = add(d, e)
    """)
    result = rewritten(model)
    assert swept(result) == []
    assert {"NormalizeReluMaxPool", "NormalizeReluConv"} <= {*ops(result)}


def test_a_map_that_is_pooled_and_concatenated_with_what_comes_of_it(training, rewritten):
    """YOLO's SPPF."""
    model = training("""
        a = conv(x, 4)
        n = bn(a)
        r = silu(n)
        p = maxpool(r, k=3, s=1)
        q = maxpool(p, k=3, s=1)
        t = cat(r, p, q)
        c = conv(t, 5)
        m = bn(c)
        out = silu(m)
    """)
    assert swept(rewritten(model)) == []


def test_a_cross_stage_partial_block(training, rewritten):
    """CSP: one half of a split map goes through layers, then both are joined."""
    model = training("""
        a = conv(x, 8)
        n = bn(a)
        r = silu(n)
        p, q = cut(r, 4, 4)
        b = conv(q, 4, k=3)
        nb = bn(b)
        rb = silu(nb)
        t = cat(p, rb)
        c = conv(t, 6)
        m = bn(c)
        out = silu(m)
    """)
    assert swept(rewritten(model)) == []


SUM_IN_CONCAT = """
    b = conv(x, 3)
    nb = bn(b)
    rb = relu(nb)
    c = conv(rb, 3, k=3)
    nc = bn(c)
    d = conv(x, 3)
    nd = bn(d)
    s = add(nc, nd)
    r = relu(s)
    t = cat(r, rb)
    e = conv(t, 4)
    n = bn(e)
    out = relu(n)
"""


@pytest.mark.parametrize("reader", [None, "output", "node"])
def test_a_gradient_is_not_masked_by_its_writer_where_something_else_reads_it(reader, training, rewritten, ops):
    """The gradient of a Concat is masked in a sum's channels where nothing but the Split of its pieces reads it."""
    model = training(SUM_IN_CONCAT)
    whole = next(value for node in model.graph for value in node.outputs if value.name == "e/grad/dx")
    if reader == "output":
        model.graph.outputs.append(whole)
    elif reader == "node":
        node = ir.Node("", "Tanh", [whole], num_outputs=1, name="more")
        node.outputs[0].name, node.outputs[0].shape, node.outputs[0].type = "more", whole.shape, whole.type
        model.graph.append(node)
        model.graph.outputs.append(node.outputs[0])
    masked = [op for op in ops(rewritten(model)) if "ConvGradWhereReluGradPartReduceOther" in op]
    assert bool(masked) == (reader is None)


def test_what_has_no_room_keeps_the_maps_apart(training, rewritten, ops):
    """Storing the whole normalised would move more than storing the half that is."""
    model = training("""
        a = conv(x, 4)
        na = bn(a)
        ra = relu6(na)
        b = conv(x, 6)
        t = cat(ra, b)
        u = silu(t)
        out = conv(u, 4)
    """)
    result = rewritten(model)
    assert "NormalizeClipPointwise" in ops(result)
    refused = next(entry for entry in result.report.passes if entry.name == "icf/sink").refused
    assert ["would have to be stored normalised" in refusal.reason for refusal in refused] == [True]


def test_where_all_are_normalised_one_sweep_takes_the_place_of_several(training, rewritten, ops):
    model = training("""
        a = conv(x, 4)
        na = bn(a)
        ra = relu6(na)
        b = conv(x, 6)
        nb = bn(b)
        rb = relu6(nb)
        t = cat(ra, rb)
        u = silu(t)
        out = conv(u, 4)
    """)
    assert ops(rewritten(model)).count("NormalizeClipPointwise") == 1


@pytest.mark.parametrize(("others", "moves"), [(4, True), (9, False)])
def test_a_pooling_reads_the_whole_only_where_that_is_less_than_the_sweeps(others, moves, training, rewritten, ops):
    model = training(f"""
        a = conv(x, 4)
        n = bn(a)
        r = relu6(n)
        b = conv(x, {others})
        t = cat(r, b)
        p = maxpool(t, k=2)
        out = conv(p, 4)
    """)
    result = rewritten(model)
    assert ("NormalizeMaxPoolGradWhereClipGradReduce" in ops(result)) == moves
    assert ("MaxPoolGradPartReduceClipGrad" in ops(result)) != moves  # else the part that is the BatchNorm's is read
    assert swept(result) == []


RES2NET = """
    a = conv(x, 6)
    n = bn(a)
    r = relu(n)
    p, q, u = cut(r, 2, 2, 2)
    b = conv(p, 2, k=3)
    nb = bn(b)
    rb = relu(nb)
    s = add(rb, q)
    c = conv(s, 2, k=3)
    nc = bn(c)
    rc = relu(nc)
    t = cat(rb, rc, u)
    d = conv(t, 6)
    nd = bn(d)
    out = relu(nd)
"""


def test_a_gradient_that_goes_to_a_piece_and_to_the_layer_before(training, rewritten, ops):
    """Res2Net: a piece of the map that is split is added to what the layer before makes."""
    result = rewritten(training(RES2NET))
    assert "Sum" not in ops(result)
    assert swept(result) == []


def test_a_sum_that_no_writer_takes_is_made_where_it_is_masked(training, rewritten, ops):
    """Of ranges that overlap the gradients are padded, and what pads has no way out."""
    model = training("""
        a = conv(x, 6)
        n = bn(a)
        r = relu(n)
        p = part(r, 0, 4)
        q = part(r, 2, 6)
        b = conv(p, 4)
        c = conv(q, 4)
        out = add(b, c)
    """)
    result = rewritten(model)
    assert "Sum" not in ops(result)
    assert ops(result).count("NormalizePointwiseGradAddGradientReluGradReduce") == 1


def test_a_sum_that_a_convolution_takes_goes_there_and_not_into_a_sweep(training, rewritten, ops):
    body = RES2NET.replace("s = add(rb, q)", "s = add(rb, rb)")
    result = rewritten(training(body))
    assert not any("PointwiseGradAddGradient" in op for op in ops(result))
