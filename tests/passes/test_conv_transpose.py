"""Transposed convolutions take the halves of the BatchNorms before and behind them, as convolutions do."""

import onnx_ir as ir
import pytest

from bnfuse.passes import rewrite

GENERATOR = """
    a = up(x, 8, k=4, p=1)
    n = bn(a)
    r = relu(n)
    b = up(r, 6, k=4, p=1)
    m = bn(b)
    s = relu(m)
    out = up(s, 3, k=4, p=1, bias=1)
"""


def test_a_generator_is_left_with_no_sweep_of_its_own(training, rewritten, ops, golden):
    result = rewritten(training(GENERATOR), "bnff")
    assert ops(result) == [
        "BatchNormGradConvTransposeGradWeight",
        "BatchNormGradNormalizeReluConvTransposeGradInputReluGradReduce",
        "BatchNormGradNormalizeReluConvTransposeGradWeight",
        "ConvTransposeStatistics",
        "GlobalAveragePool",
        "GlobalAveragePoolGrad",
        "NormalizeReluConvTransposeBias",
        "NormalizeReluConvTransposeGradInputReluGradReduce",
        "NormalizeReluConvTransposeGradWeightBiasGrad",
        "NormalizeReluConvTransposeStatistics",
    ]
    assert (result.report.batch_norms, result.report.unfused) == (2, ())
    golden.check(result.model)


START = "a = up(x, 6, {})\nn = bn(a)\nr = {}\n"
WINDOWS = ("k=2", "k=4, p=1", "k=3, p=1, more=1", "k=3, s=1, p=1", "k=3, s=3, g=3", "k=1, s=1", "k=1, s=2, more=1")


@pytest.mark.parametrize("activation", ["relu(n)", "relu6(n)", "silu(n)"])
def test_activations(activation, training, rewritten):
    body = START.format("k=4, p=1", activation) + "out = up(r, 4, k=3, p=1)"
    assert rewritten(training(body), "bnff").report.unfused == ()


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("batch", [1, 3])
def test_windows(window, batch, training, rewritten):
    body = START.format(window, "relu(n)") + f"out = up(r, 9, {window})"
    result = rewritten(training(body, shape=(batch, 3, 4, 5)), "icf", tolerance=3e-4)
    assert result.report.unfused == ()


def test_a_convolution_between_transposed_ones(training, rewritten):
    body = START.format("k=2", "relu(n)") + "c = conv(r, 5, k=3)\nm = bn(c)\ns = relu(m)\nout = up(s, 4)"
    assert rewritten(training(body), "bnff").report.unfused == ()


def test_a_map_that_a_convolution_and_a_transposed_one_read(training, rewritten, ops):
    body = START.format("k=2", "relu(n)") + "b = up(r, 4, k=3, s=1, p=1)\nc = conv(r, 4, k=3)\nout = add(b, c)"
    result = rewritten(training(body), "bnff")
    assert result.report.unfused == ()
    assert any("AddGradientReluGradReduce" in name for name in ops(result))


def test_statistics_of_what_two_batch_norms_read(training, rewritten, ops):
    body = "u = up(x, 4)\na = bn(u)\nb = bn(u)\ns = relu(a)\nt = conv(s, 4)\nv = conv(b, 4)\nout = add(t, v)"
    assert ops(rewritten(training(body), "bnff")).count("ConvTransposeStatistics") == 1


def test_the_relu_alone_moves_at_the_lowest_level(training, rewritten, ops):
    result = rewritten(training("a = up(x, 4)\nr = relu(a)\nout = up(r, 4)"), "rcf")
    assert {"ReluConvTranspose", "ReluConvTransposeGradInputReluGrad", "ReluConvTransposeGradWeight"} <= {*ops(result)}


def test_mvf_leaves_the_halves_where_they_are(training, rewritten, ops):
    assert {"ConvTranspose", "BatchNormStatistics"} <= {*ops(rewritten(training(GENERATOR), "mvf"))}


def test_one_whose_size_is_not_known_stays(training):
    """A map of an unknown size is none that kernels take."""
    model = training("a = up(x, 4)\nn = bn(a)\nout = relu(n)")
    a = next(node for node in model.graph if node.op_type == "ConvTranspose").outputs[0]
    a.shape = ir.Shape(("N", 4, "H", "W"))
    result = rewrite(model, level="bnff")
    assert any(node.op_type == "ConvTranspose" and not node.domain for node in result.model.graph)
