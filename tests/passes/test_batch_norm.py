"""MVF and BNFF inside composite layers: fission of BatchNorm, forward and backward, and fusion of its halves."""

import pytest

from bnfuse.core.errors import BnfuseError

COMPOSITE = """
    a = conv(x, 4)
    n = bn(a)
    r = relu(n)
    b = conv(r, 6, k=3)
    m = bn(b)
    s = relu(m)
    out = conv(s, 4)
"""


def test_mvf_splits_each_batch_norm_into_halves(training, rewritten, golden):
    result = rewritten(training(COMPOSITE), "mvf")
    golden.check(result.model)


def test_bnff_leaves_no_sweep_of_its_own(training, rewritten, ops, golden):
    result = rewritten(training(COMPOSITE), "bnff")
    assert ops(result) == [
        "BatchNormGradConvGradWeight",
        "BatchNormGradNormalizeReluConvGradReluGradReduce",
        "ConvStatistics",
        "GlobalAveragePool",
        "GlobalAveragePoolGrad",
        "NormalizeReluConv",
        "NormalizeReluConvGradReluGradReduce",
        "NormalizeReluConvStatistics",
    ]
    assert (result.report.batch_norms, result.report.unfused) == (2, ())
    golden.check(result.model)


def test_level_none_changes_nothing(training, rewritten):
    model = training(COMPOSITE)
    result = rewritten(model, "none")
    assert (result.report.nodes_before, result.report.passes) == (result.report.nodes_after, ())
    assert {entry.node for entry in result.report.unfused} == {"n", "m"}


START = "a = conv(x, 6)\nn = bn(a)\n"
RELU = START + "r = relu(n)\n"
CASES = {
    "a plain BN": (START + "out = conv(n, 4)", "NormalizeConvGradReduce"),
    "ReLU6": (START + "r = relu6(n)\nout = conv(r, 4)", "NormalizeClipConvGradClipGradReduce"),
    "SiLU": (START + "r = silu(n)\nout = conv(r, 4)", "NormalizeQuickGeluConvGradQuickGeluGradReduce"),
    "a ReluGrad that holds the input": (RELU + "out = maxpool(r)", "NormalizeMaxPoolGradReluGradReduce"),
    "an average pool": (RELU + "out = avgpool(r, k=3, s=2, p=1, count=1)", "NormalizeAveragePoolGradReluGradReduce"),
    "a depthwise convolution": (RELU + "out = conv(r, 6, k=3, g=6)", "NormalizeReluConvGradReluGradReduce"),
    "a grouped convolution": (RELU + "out = conv(r, 4, k=3, g=2, s=2)", "NormalizeReluConvGradReluGradReduce"),
    "a bias": (RELU + "out = conv(r, 4, bias=1)", "NormalizeReluConvGradBiasGradReluGradReduce"),
    "several readers": (
        RELU + "b = conv(r, 4)\nc = conv(r, 4, k=3)\nout = add(b, c)",
        "NormalizeReluConvGradAddGradientReluGradReduce",
    ),
    "shared weights": (
        RELU + "b = conv(r, 6, w=9)\nm = bn(b)\nt = relu(m)\nout = conv(t, 6, w=9)",
        "BatchNormGradNormalizeReluConvGradReluGradReduce",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_halves_fuse_into(name, training, rewritten, ops):
    body, expected = CASES[name]
    result = rewritten(training(body), "bnff")
    assert expected in ops(result)
    assert result.report.unfused == ()


def test_a_batch_norm_with_two_consumers(training, rewritten, ops):
    result = rewritten(training(RELU + "b = conv(r, 4)\nc = conv(n, 4)\nout = add(b, c)"), "bnff")
    assert {"NormalizeReluConv", "NormalizeConv", "NormalizeReluConvGradReluGrad"} <= {*ops(result)}


def test_the_relu_after_a_residual_add_goes_into_the_add(training, rewritten, ops, golden):
    model = training("""
        a = conv(x, 4)
        n = bn(a)
        r = relu(n)
        p = maxpool(r)
        b = conv(p, 4, k=3)
        m = bn(b)
        s = add(m, p)
        t = relu(s)
        c = conv(t, 4)
        d = bn(c)
        u = add(d, t)
        v = relu(u)
        out = maxpool(v)
    """)
    result = rewritten(model, "bnff")
    assert ops(result).count("NormalizeAddReluPointwise") == 2
    assert result.report.unfused == ()
    golden.check(result.model)


def test_a_residual_of_two_batch_norms_has_one_gradient_for_both(training, rewritten, ops):
    model = training("""
        a = conv(x, 4)
        n = bn(a)
        b = conv(x, 4)
        m = bn(b)
        s = add(n, m)
        r = relu(s)
        out = maxpool(r)
    """)
    result = rewritten(model, "bnff")
    assert "NormalizeAddNormalizedReluPointwise" in ops(result)
    assert "MaxPoolGradReluGradReduceOtherReduceOther" in ops(result)
    assert result.report.unfused == ()


def test_a_relu_before_the_residual_add(training, rewritten, ops):
    model = training("""
        a = conv(x, 4)
        n = bn(a)
        r = relu(n)
        b = conv(x, 4)
        s = add(r, b)
        out = maxpool(s)
    """)
    assert "NormalizeReluAddPointwise" in ops(rewritten(model, "bnff"))


def test_a_batch_norm_after_an_add_gets_its_statistics_from_the_add(training, rewritten, ops):
    model = training("""
        a = conv(x, 4)
        b = conv(x, 4)
        s = add(a, b)
        n = bn(s)
        r = relu(n)
        out = conv(r, 4)
    """)
    result = rewritten(model, "bnff")
    assert "AddPointwiseStatistics" in ops(result)
    assert result.report.unfused == ()


def test_a_batch_norm_over_an_input_says_why_its_statistics_are_a_sweep(training, rewritten):
    result = rewritten(training("n = bn(x)\nr = relu(n)\nout = conv(r, 4)"), "bnff")
    assert [(entry.node, entry.half) for entry in result.report.unfused] == [("n", "statistics")]
    assert result.report.unfused[0].reason == "'x' is a graph input, which has no epilogue to compute statistics in"


def test_two_batch_norms_over_one_map_share_its_statistics(training, rewritten, ops):
    model = training("""
        a = conv(x, 4)
        n = bn(a)
        m = bn(a, eps=3)
        b = conv(n, 4)
        c = conv(m, 4)
        out = add(b, c)
    """)
    assert ops(rewritten(model, "bnff")).count("ConvStatistics") == 1


def test_an_unknown_level_lists_the_levels(training, rewritten):
    with pytest.raises(BnfuseError, match="there is no level 'max'; the levels are none, rcf, mvf, bnff, icf"):
        rewritten(training("out = conv(x, 4)"), "max")


def test_the_input_gradient_of_a_batch_norm_as_a_graph_output(training, rewritten):
    model = training("n = bn(x)\nr = relu(n)\nc = conv(r, 2)\nm = bn(c)\nout = relu(m)")
    gradient = next(n for n in model.graph if n.op_type == "BatchNormGrad" and not n.outputs[0].uses()).outputs[0]
    model.graph.outputs.append(gradient)
    assert gradient.name in {value.name for value in rewritten(model).model.graph.outputs}


def test_a_batch_norm_over_the_activated_result_of_another(training, rewritten):
    """The second mask is made from the first BN's stored result: it has no room for the first BN's steps."""
    model = training(RELU + "m = bn(r, eps=3)\ns = relu(m)\nt = cat(s, r)\nout = conv(t, 4)")
    for level in ("bnff", "icf"):
        rewritten(model, level)
