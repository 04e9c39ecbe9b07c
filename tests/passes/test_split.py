"""ICF: across channel Splits, and the canonical form of what cuts channels."""

import pytest

HALVES = """
    c = conv(x, 8, k=3)
    n = bn(c)
    r = relu(n)
    p, q = cut(r, 3, 5)
    d = conv(p, 4, k=3)
    e = conv(q, 4)
    out = cat(d, e)
"""
SWEEPS = {"NormalizeReluPointwise", "NormalizePointwiseGradReluGradReduce", "BatchNormGradPointwiseGrad"}


def test_batch_norms_sink_through_a_split(training, rewritten, ops, golden):
    result = rewritten(training(HALVES))
    assert result.report.unfused == ()
    assert not SWEEPS & {*ops(result)}
    assert "NormalizeReluConv" in ops(result)
    assert "NormalizeReluConvGradReluGradReduce" in ops(result)
    golden.check(result.model)


@pytest.mark.parametrize("activation", ["relu", "relu6", "silu"])
def test_each_piece_has_the_activation_of_the_whole(activation, training, rewritten):
    assert rewritten(training(HALVES.replace("relu", activation))).report.unfused == ()


def test_a_map_that_is_normalised_alone_is_reduced_piece_by_piece(training, rewritten, ops):
    result = rewritten(training(HALVES.replace("    r = relu(n)\n", "").replace("(r,", "(n,")))
    assert result.report.unfused == ()
    assert [op for op in ops(result) if "Reduce" in op].count("NormalizeConvGradReduce") == 2


def test_a_piece_that_nothing_takes_keeps_its_sweep_alone(training, rewritten):
    model = training("""
        c = conv(x, 8, k=3)
        n = bn(c)
        r = silu(n)
        p, q = cut(r, 3, 5)
        d = conv(p, 5, k=3)
        s = silu(q)
        out = add(d, s)
    """)
    result = rewritten(model)
    assert [(entry.node, entry.half) for entry in result.report.unfused] == [
        ("n", half) for half in ("normalise", "gradient reductions")
    ]
    swept = next(node for node in result.model.graph if node.op_type == "NormalizeQuickGeluPointwise")
    assert swept.outputs[0].shape[1] == 5


def test_a_map_that_is_an_output_or_is_read_whole_stays_and_says_why(training, rewritten):
    model = training("""
        c = conv(x, 8, k=3)
        n = bn(c)
        r = silu(n)
        p, q = cut(r, 4, 4)
        d = conv(p, 4)
        e = conv(q, 4)
        f = cat(d, e)
        u = silu(r)
        out = add(f, u)
    """)
    result = rewritten(model)
    assert [entry.half for entry in result.report.unfused] == ["normalise", "gradient reductions"]
    (sink,) = [entry for entry in result.report.passes if entry.name == "icf/sink"]
    assert any("reads r whole and has no room for its steps" in refusal.reason for refusal in sink.refused)


@pytest.mark.parametrize(
    "cuts",
    [
        "p = part(r, 0, 3)\n    q = part(r, 3, 8)",
        "p, u1 = cut(r, 3, 5)\n    u2, q = cut(r, 3, 5)",
        "p = part(r, 0, 3)\n    u2, q = cut(r, 3, 5)",
        "p = part(r, -8, 3)\n    q = part(r, -5, 8)",
    ],
    ids=["slices", "splits", "both", "from_the_end"],
)
def test_what_cuts_a_map_several_times_becomes_one_split(cuts, training, rewritten, ops):
    result = rewritten(training(HALVES.replace("p, q = cut(r, 3, 5)", cuts)))
    assert result.report.unfused == ()
    assert ops(result).count("Split") == ops(rewritten(training(HALVES))).count("Split")
    assert not {"Slice", "Sum", "Pad", "ConstantOfShape"} & {*ops(result)}


def test_channels_that_nothing_reads_are_a_piece_of_their_own(training, rewritten, ops):
    cuts = "p = part(r, 1, 3)\n    q = part(r, 4, 7)"
    result = rewritten(training(HALVES.replace("p, q = cut(r, 3, 5)", cuts)))
    assert not {"Slice"} & {*ops(result)}


def test_ranges_that_overlap_stay(training, rewritten, ops):
    cuts = "p = part(r, 0, 5)\n    q = part(r, 3, 8)"
    result = rewritten(training(HALVES.replace("p, q = cut(r, 3, 5)", cuts)))
    assert ops(result).count("Slice") == 2


def test_statistics_of_a_piece_are_a_piece_of_the_statistics(training, rewritten, ops):
    model = training("""
        c = conv(x, 8, k=3)
        p, q = cut(c, 3, 5)
        d = conv(x, 4)
        t = cat(q, d)
        n = bn(t)
        r = relu(n)
        e = conv(r, 3)
        out = cat(e, p)
    """)
    result = rewritten(model)
    assert "BatchNormStatistics" not in ops(result)
    assert [entry for entry in result.report.unfused if entry.half == "statistics"] == []


JOINED = """
    c = conv(x, 10)
    n = bn(c)
    p, q, r, s, t = cut(n, 2, 2, 2, 2, 2)
    z = conv(x, 2)
    u = cat({pieces})
    d = conv(u, 4, k=3)
    e = conv({rest}, 4)
    out = add(d, e)
"""


@pytest.mark.parametrize("is_output", [False, True], ids=["inner", "output"])
@pytest.mark.parametrize("level", ["rcf", "icf"])
@pytest.mark.parametrize(
    ("pieces", "rest", "lengths"),
    [
        ("p, q, z", "t", [4, 2, 2, 2]),
        ("s, t, z, p, q", "r", [4, 2, 4]),
        ("p, q, z, r", "t", [4, 2, 2, 2]),
        ("p, q, r, s, t", "z", None),
    ],
    ids=["one run", "two runs", "a run and one", "all"],
)
def test_neighbouring_pieces_put_together_are_one(pieces, rest, lengths, level, is_output, training, rewritten):
    """Whether the Concat is an output of the graph too or not: all pieces in order are still read as the whole."""
    model = training(JOINED.format(pieces=pieces, rest=rest))
    u = next(value for node in model.graph for value in node.outputs if value.name == "u")
    if is_output:
        model.graph.outputs.append(u)
    after = rewritten(model, level=level).model.graph
    if level == "rcf":
        n = next(value for node in after for value in node.outputs if value.name == "n")
        found = [[v.shape[1] for v in use.node.outputs] for use in n.uses() if use.node.op_type == "Split"]
        assert found == ([lengths] if lengths else [[2] * 5] * is_output)
        reader = next(node for node in after if node.name == "d")
        assert (reader.inputs[0] is n) == (lengths is None)
