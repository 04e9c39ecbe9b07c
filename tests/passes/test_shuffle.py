"""Channel shuffles are permutations of channels, and what is per channel crosses them."""

import pytest

BRANCH = """
    c = conv(x, 6)
    n = bn(c)
    r = {act}(n)
    s = shuffle(r, g={g})
    out = conv(s, 4, k=3)
"""


@pytest.mark.parametrize("act", ["relu", "silu", "relu6"])
@pytest.mark.parametrize("g", [2, 3])
def test_a_batch_norm_and_its_activation_sink_through_a_shuffle(act, g, training, rewritten, ops):
    result = rewritten(training(BRANCH.format(act=act, g=g)))
    step = {"relu": "Relu", "silu": "QuickGelu", "relu6": "Clip"}[act]
    assert result.report.unfused == ()
    assert [op for op in ops(result) if op not in ("GlobalAveragePool", "GlobalAveragePoolGrad")] == sorted(
        [
            "BatchNormGradConvGradWeight",
            "ConvStatistics",
            *["Gather"] * (2 + 4 + 2),  # the map and its gradient, two coefficients and two statistics, two sums
            f"Normalize{step}Conv",
            f"Normalize{step}ConvGrad{step}GradReduce",
        ]
    )


def test_a_shuffle_is_one_gather_at_every_level_that_moves_anything(training, rewritten, ops):
    result = rewritten(training("c = conv(x, 6)\ns = shuffle(c)\nout = conv(s, 4)"), "rcf")
    assert [op for op in ops(result) if op in ("Transpose", "Gather")] == ["Gather"] * 2


def test_a_shuffled_map_that_something_else_reads_stays_and_says_so(training, rewritten):
    model = training("c = conv(x, 6)\nn = bn(c)\nr = relu(n)\ns = shuffle(r)\nout = conv(s, 4)")
    (relu,) = [node for node in model.graph if node.op_type == "Relu"]
    model.graph.outputs.append(relu.outputs[0])
    result = rewritten(model)
    sinks = [entry for entry in result.report.passes if entry.name in ("icf/sink", "icf/sink-gradient")]
    assert {refusal.reason for entry in sinks for refusal in entry.refused} == {
        "r has another reader",
        "c, which it is made of, is not shuffled",
    }


def test_a_unit_of_two_halves(training, rewritten):
    """ShuffleNetV2's: one half passes on as it is, the other through a convolution."""
    model = training("""
        a = conv(x, 6)
        m = bn(a)
        q = relu(m)
        c = conv(x, 6, k=3)
        n = bn(c)
        r = relu(n)
        t = cat(q, r)
        s = shuffle(t)
        out = conv(s, 4, k=3)
    """)
    assert rewritten(model).report.unfused == ()
