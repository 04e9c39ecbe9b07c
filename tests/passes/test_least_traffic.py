"""The least that a step must move: counted by hand on small networks, and what rewriting reaches on whole ones."""

import itertools

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import bnfuse
from bnfuse.analysis.bound import least_traffic
from bnfuse.build import build_training_graph
from bnfuse.graph.training_graph import open_graph
from bnfuse.models import build_forward

CHANNEL = 2 * 8 * 8 * 4  # bytes of one channel of a batch of two images
POOLED = 2 * 4  # of one channel of pooled ones


def least(model):
    found = least_traffic(open_graph(model))
    return found.forward, found.backward


def test_convolutions_around_a_batch_norm(training):
    model = training("""
        a = conv(x, 4)
        n = bn(a)
        r = relu(n)
        out = conv(r, 6, k=3)
    """)
    forward = (3 + 4) + (4 + 6) + 6  # each convolution, and the pooling
    backward = (4 + 4) + (4 + 4 + 3)  # reads a, writes the masked gradient; reads that, a and x
    assert least(model) == (forward * CHANNEL + 6 * POOLED, backward * CHANNEL + 6 * POOLED)


def test_a_residual_sum_that_much_reads_is_stored_once(training):
    model = training("""
        a = conv(x, 4)
        b = conv(a, 4, k=3)
        n = bn(b)
        s = add(n, a)
        c = conv(s, 4, k=3)
        out = add(c, s)
    """)
    forward = (3 + 4) + (4 + 4) + (4 + 4 + 4) + (4 + 4) + 4  # the sum reads two and writes one; the last is c's to add
    # c's: reads s and, for the reductions, b; b's, whose epilogue adds what s read of a: the gradient, b, a; a's
    backward = (4 + 4 + 4) + (4 + 4 + 4 + 4) + (4 + 3)
    assert least(model) == (forward * CHANNEL + 4 * POOLED, backward * CHANNEL + 4 * POOLED)


def test_a_sum_that_is_read_by_one_convolution_is_computed_there(training):
    model = training("""
        a = conv(x, 4)
        n = bn(a)
        b = conv(x, 4)
        m = bn(b)
        s = add(n, m)
        out = conv(s, 6)
    """)
    forward = (3 + 4) + (3 + 4) + (4 + 4 + 6) + 6
    backward = (4 + 4 + 4) + 2 * (4 + 4 + 3)
    assert least(model) == (forward * CHANNEL + 6 * POOLED, backward * CHANNEL + 6 * POOLED)


def test_concatenations_and_splits_move_nothing(training):
    model = training("""
        a = conv(x, 4)
        n = bn(a)
        b = conv(n, 2)
        t = cat(n, b)
        p, q = cut(t, 3, 3)
        out = conv(q, 6)
    """)
    forward = (3 + 4) + (4 + 2) + (1 + 2 + 6) + 6  # q is the last channel of n, and b
    assert least(model)[0] == forward * CHANNEL + 6 * POOLED


def test_statistics_behind_statistics_take_a_pass_of_their_own(training):
    one = training("""
        a = conv(x, 4)
        n = bn(a)
        r = relu(n)
        out = conv(r, 6)
    """)
    two = training("""
        a = conv(x, 4)
        n = bn(a)
        r = relu(n)
        m = bn(r)
        out = conv(m, 6)
    """)
    assert [b - a for a, b in zip(least(one), least(two), strict=True)] == [4 * CHANNEL, 2 * 4 * CHANNEL]


@pytest.mark.parametrize("tail", ["out = relu(s)", "out = bn(s)", "t = bn(s)\nout = relu(t)"])
def test_a_sum_that_a_pooling_reads_is_not_read_for_each_of_its_terms(training, tail):
    """RepVGG's last block: the masked gradient is made of all terms, and stored for the n BatchNorms behind them."""

    def branches(terms):
        lines = [line for i in range(terms) for line in (f"c{i} = conv(x, 4)", f"n{i} = bn(c{i})")]
        sums = [f"s{i} = add({f's{i - 1}' if i > 1 else 'n0'}, n{i})" for i in range(1, terms)]
        return training("\n".join([*lines, *sums, tail.replace("(s)", f"(s{terms - 1})")]))

    models = [branches(terms) for terms in (3, 4, 5, 6)]
    bounds = [sum(least(model)) for model in models]
    steps = [b - a for a, b in itertools.pairwise(bounds)]
    # of each term: its convolution, what the sum and its gradient's sums read, and its convolution's gradient
    assert max(steps) <= ((3 + 4) + 4 + 4 + (4 + 4 + 3)) * CHANNEL + 4 * POOLED, [s / CHANNEL for s in steps]
    assert all(bnfuse.diff(model, bnfuse.rewrite(model, level="icf")).over_least >= 1 for model in models)


def test_rows_are_no_maps():
    assert least(rows()) == (0, 0)


def rows():
    """A classifier whose only BatchNorm is of rows: no map of rank 4."""
    helper, rng = onnx.helper, np.random.default_rng(0)
    arrays = {"w": rng.standard_normal((4, 3)), "b": np.zeros(4), "v": np.ones(4), "fc": rng.standard_normal((5, 4))}
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["h"], name="h", transB=1),
        helper.make_node("BatchNormalization", ["h", "v", "b", "b", "v"], ["n", "m1", "v1"], name="n", training_mode=1),
        helper.make_node("Gemm", ["n", "fc"], ["logits"], name="logits", transB=1),
    ]
    ends = [helper.make_tensor_value_info(n, 1, shape) for n, shape in (("x", [4, 3]), ("logits", [4, 5]))]
    values = [onnx.numpy_helper.from_array(a.astype(np.float32), name) for name, a in arrays.items()]
    graph = helper.make_graph(nodes, "rows", ends[:1], ends[1:], values)
    return build_training_graph(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))


def test_of_a_fused_graph_there_is_none(training):
    model = training("""
        a = conv(x, 4)
        n = bn(a)
        out = conv(n, 6)
    """)
    after = bnfuse.rewrite(model, level="icf")
    assert least_traffic(open_graph(after.model)) is None
    assert bnfuse.diff(after, after).least is None


@pytest.mark.parametrize("name", ["densenet121", "googlenet", "mobilenetv2", "resnet50", "vgg11"])
def test_rewriting_comes_within_a_hundredth_of_it(name):
    forward = build_forward(name, batch=2, image=64, classes=5)
    before = ir.from_proto(build_training_graph(forward))
    found = bnfuse.diff(before, bnfuse.rewrite(before, level="icf", pool_first=False))
    assert 1 <= found.over_least < 1.01, found.over_least


def test_a_sum_with_a_number_is_elementwise(training):
    """A missing branch of MobileOne: the sum is stored for all that reads it, with or without the 0."""
    body = """
        a = conv(x, 4)
        n = bn(a)
        b = conv(x, 4)
        m = bn(b)
        s = add(n, m)
        {}
        c = conv(t, 4)
        d = conv(t, 4, k=3)
        out = add(c, d)
    """
    with_zero = least(training(body.format("t = zero(s)")))
    assert with_zero == least(training(body.format("").replace("(t,", "(s,")))
