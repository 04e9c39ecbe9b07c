"""Drop bias: no bias in a convolution that only BatchNorms read."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from bnfuse import passes, runtime

NOISE = 2e-3  # the source graph's gradients of such a bias are rounding errors, the rewritten one's are 0


def biased(model: ir.Model) -> list[str]:
    """Convolutions with a bias, and gradients that compute one's."""
    plain = {"Conv": lambda n: len(n.inputs) > 2, "ConvGrad": lambda n: len(n.outputs) > 2 and n.outputs[2].name}
    return sorted(n.name for n in model.graph if "Bias" in n.op_type or plain.get(n.op_type, lambda n: False)(n))


def changed(result, name: str = "bnff/drop-bias") -> int:
    return sum(entry.changed for entry in result.report.passes if entry.name == name)


def test_the_bias_leaves_the_convolution_and_the_running_mean_keeps_it(training, rewritten, golden):
    model = training("""
        a = conv(x, 4, k=3, bias=1)
        n = bn(a)
        r = relu(n)
        c = conv(r, 4, bias=1)
        out = bn(c)
    """)
    result = rewritten(model, tolerance=NOISE)  # compares every output, the running means and the gradients among them
    assert biased(result.model) == []
    golden.check(result.model)


def test_the_gradient_of_the_bias_is_zero(training, rewritten):
    result = rewritten(training("c = conv(x, 4, bias=1)\nn = bn(c)\nout = relu(n)"), tolerance=NOISE)
    graph = ir.to_proto(result.model).graph
    (node,) = (n for n in graph.node if "c/bias_grad" in n.output)
    (zeros,) = (t for t in graph.initializer if t.name == node.input[0])
    assert node.op_type == "Identity"
    assert not onnx.numpy_helper.to_array(zeros).any()


def test_a_transposed_convolution_loses_its_bias_and_the_sum_that_is_its_gradient(training, rewritten, ops):
    result = rewritten(training("u = up(x, 4, bias=1)\nn = bn(u)\nr = relu(n)\nout = conv(r, 4)"), tolerance=NOISE)
    (given,) = (value for value in result.model.graph.outputs if value.name == "u/bias_grad")
    assert given.producer().op_type == "Identity"
    assert {"ConvTransposeStatistics", "BatchNormGradConvTransposeGradWeight"} <= {*ops(result)}


def test_two_batch_norms_over_a_transposed_convolution_take_it_out_together(training, rewritten):
    result = rewritten(training("u = up(x, 4, bias=1)\na = bn(u)\nb = bn(u)\nout = add(a, b)"), tolerance=NOISE)
    (given,) = (value for value in result.model.graph.outputs if value.name == "u/bias_grad")
    assert given.producer().op_type == "Identity"
    assert biased(result.model) == []


def test_the_gradient_of_the_bias_alone_is_zeros_too(training, rewritten):
    """Where the weight of the transposed convolution is frozen it is a sum of its own."""
    model = training(
        "u = up(x, 4, bias=1)\nn = bn(u)\nr = relu(n)\nout = conv(r, 4)", train=["u/bias", "n/*", "out/*", "fc/*"]
    )
    sums = [node.name for node in model.graph if node.op_type == "ReduceSum"]
    result = rewritten(model, tolerance=NOISE)
    (given,) = (value for value in result.model.graph.outputs if value.name == "u/bias_grad")
    assert given.producer().op_type == "Identity"
    left = [node.name for node in result.model.graph if node.op_type == "ReduceSum"]
    assert len(sums) == len(left) + 1 and {*left} < {*sums}


def test_a_transposed_convolution_that_something_else_reads_keeps_its_bias(training, rewritten):
    result = rewritten(training("u = up(x, 4, bias=1)\nn = bn(u)\nout = add(n, u)"), "bnff", NOISE)
    refused = [r.reason for entry in result.report.passes if entry.name == "bnff/drop-bias" for r in entry.refused]
    assert refused == ["its bias stays: Add 'out' reads 'u' as well"]


def test_two_batch_norms_over_one_convolution_take_it_out_together(training, rewritten):
    result = rewritten(training("c = conv(x, 4, bias=1)\na = bn(c)\nb = bn(c)\nout = add(a, b)"), tolerance=NOISE)
    assert changed(result) == 2  # the convolution and its gradient
    assert biased(result.model) == []


def test_pooling_first_leaves_the_bias_to_the_batch_norm_behind_the_pooling(training, rewritten):
    result = rewritten(training("c = conv(x, 4, bias=1)\np = avgpool(c)\nn = bn(p)\nout = relu(n)"), tolerance=NOISE)
    assert biased(result.model) == []


@pytest.mark.parametrize("level", ["none", "rcf", "mvf"])
def test_lower_levels_keep_the_bias(level, training, rewritten):
    assert biased(rewritten(training("c = conv(x, 4, bias=1)\nn = bn(c)\nout = relu(n)"), level).model) != []


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("c = conv(x, 4, bias=1)\nn = bn(c)\nout = add(n, c)", "its bias stays: Add 'out' reads 'c' as well"),
        (
            "c = conv(x, 4, bias=1)\nn = bn(c)\nr = relu(c)\nout = add(n, r)",
            "its bias stays: Relu 'r' reads 'c' as well",
        ),
    ],
)
def test_it_refuses(body, reason, training, rewritten):
    result = rewritten(training(body), "bnff", NOISE)
    assert changed(result) == 0
    refused = [r.reason for entry in result.report.passes if entry.name == "bnff/drop-bias" for r in entry.refused]
    assert refused[0] == reason


def test_it_refuses_where_the_mean_of_the_batch_is_a_graph_output(training, rewritten):
    model = training("c = conv(x, 4, bias=1)\nn = bn(c)\nout = relu(n)")
    (norm,) = (node for node in model.graph if node.op_type == "BatchNorm")
    model.graph.outputs.append(norm.outputs[3])
    result = rewritten(model, tolerance=NOISE)  # compares the mean too
    assert changed(result) == 0


def test_it_refuses_where_something_reads_the_mean_of_the_batch(training, rewritten):
    model = training("c = conv(x, 4, bias=1)\nn = bn(c)\nout = relu(n)")
    (norm,) = (node for node in model.graph if node.op_type == "BatchNorm")
    seen = ir.node("Neg", [norm.outputs[3]], name="seen")
    seen.outputs[0].name, seen.outputs[0].shape, seen.outputs[0].type = "seen", ir.Shape([4]), norm.outputs[3].type
    model.graph.append(seen)
    model.graph.outputs.append(seen.outputs[0])
    result = rewritten(model, tolerance=NOISE)
    refused = [r.reason for entry in result.report.passes if entry.name == "bnff/drop-bias" for r in entry.refused]
    assert refused == ["its bias stays: Neg 'seen' reads 'n/batch_mean', the mean of its output"]


def test_a_convolution_without_a_batch_norm_keeps_its_bias(training, rewritten):
    result = rewritten(
        training("a = conv(x, 4, bias=1)\nn = bn(a)\nc = conv(n, 4, bias=1)\nout = relu(c)"), tolerance=NOISE
    )
    assert changed(result) == 2
    assert len(biased(result.model)) == 2  # c and its gradient


@pytest.mark.parametrize("level", ["bnff", "icf"])
def test_evaluation_by_running_statistics_is_the_same(level, training):
    model = training("a = conv(x, 4, k=3, bias=1)\nn = bn(a)\nr = relu(n)\nc = conv(r, 4, bias=1)\nout = bn(c)")
    rng = np.random.default_rng(3)
    images, labels = rng.standard_normal((2, 3, 8, 8)).astype(np.float32), rng.integers(0, 5, 2)
    logits = []
    for name in ("none", level):
        step = runtime.compile_step(passes.rewrite(model, level=name).model, optimizer=runtime.SGD(lr=0.05), threads=1)
        for _ in range(3):
            step(images, labels)
        logits.append(step.evaluate(images))
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-5)
