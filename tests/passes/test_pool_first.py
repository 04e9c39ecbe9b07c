"""Pool first: an average pooling moves before the 1x1 convolution that it follows."""

import pytest


def test_the_pooling_moves_before_the_convolution_forward_and_backward(training, rewritten, ops, golden):
    model = training("""
        a = conv(x, 4)
        n = bn(a)
        r = relu(n)
        c = conv(r, 6)
        p = avgpool(c)
        m = bn(p)
        out = relu(m)
    """)
    result = rewritten(model)
    assert "NormalizeReluAveragePool" in ops(result)
    assert "NormalizeAveragePoolGradReluGradReduce" in ops(result)
    assert result.report.unfused == ()
    golden.check(result.model)


def test_it_can_be_left_out(training, rewritten, ops):
    model = training("c = conv(x, 6)\nout = avgpool(c)")
    assert "pool-first" in [entry.name for entry in rewritten(model).report.passes]
    assert "pool-first" not in [entry.name for entry in rewritten(model, pool_first=False).report.passes]
    first = rewritten(model, "none", pool_first=True)
    assert [node.op_type for node in first.model.graph][:2] == ["AveragePool", "Conv"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("a = conv(x, 4)\nc = conv(a, 6, s=2)\nout = avgpool(c)", "c is strided or padded"),
        ("a = conv(x, 4)\nc = conv(a, 6, k=3)\nout = avgpool(c)", "c has a (3, 3) kernel, not 1x1"),
        (
            "a = conv(x, 4)\nc = conv(a, 6)\np = avgpool(c)\nq = conv(c, 6, s=2)\nout = add(p, q)",
            "c has another reader",
        ),
        (
            "a = conv(x, 4)\nc = conv(a, 6, bias=1)\nout = avgpool(c, k=3, s=1, p=1, count=1)",
            "c has a bias, and the padded pooling averages zeros",
        ),
    ],
)
def test_it_refuses(body, reason, training, rewritten):
    report = rewritten(training(body)).report
    assert [refusal.reason for refusal in report.passes[0].refused] == [reason]


def test_a_padded_pooling_that_leaves_its_zeros_out_keeps_the_bias(training, rewritten):
    model = training("a = conv(x, 4)\nc = conv(a, 6, bias=1)\nout = avgpool(c, k=3, s=1, p=1, count=0)")
    assert rewritten(model).report.passes[0].changed == 2  # both convolutions are 1x1
