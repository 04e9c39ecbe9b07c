"""RCF: the ReLU moves into the convolutions that read it."""


def test_relu_moves_into_both_convolutions_that_read_it(training, rewritten, ops, golden):
    model = training("""
        a = conv(x, 4)
        r = relu(a)
        b = conv(r, 4, k=3)
        c = conv(r, 4)
        out = add(b, c)
    """)
    result = rewritten(model, "rcf")
    assert [op for op in ops(result) if "Relu" in op] == [
        "PointwiseGradReluGrad",
        "ReluConv",
        "ReluConv",
        "ReluConvGrad",
        "ReluConvGrad",
    ]
    golden.check(result.model)


def test_with_one_reader_the_mask_moves_too(training, rewritten, ops):
    model = training("""
        a = conv(x, 4)
        r = relu(a)
        out = conv(r, 4, k=3)
    """)
    assert [op for op in ops(rewritten(model, "rcf")) if "Relu" in op] == ["ReluConv", "ReluConvGradReluGrad"]


def test_relu_that_a_pooling_reads_stays_and_says_why(training, rewritten, ops):
    model = training("""
        a = conv(x, 4)
        r = relu(a)
        p = maxpool(r)
        q = conv(r, 4, s=2)
        out = add(p, q)
    """)
    result = rewritten(model, "rcf")
    assert "Relu" in ops(result)
    (refusal,) = next(entry for entry in result.report.passes if entry.name == "rcf").refused
    assert (refusal.node, refusal.reason) == ("r", "r is also read by MaxPool, MaxPoolGrad")
