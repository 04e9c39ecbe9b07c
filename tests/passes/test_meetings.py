"""Forms in which passes meet: what each of them must not take for its own."""

import numpy as np
import pytest
from hand_made import Network, check
from onnx import helper
from random_modern import BATCH, SIZE


@pytest.mark.parametrize("level", ["bnff", "icf"])
def test_each_layer_scale_takes_the_sums_of_its_own_batch_norm(level):
    net = Network()
    x = net.conv("x", 4, 3)
    norms = [net.norm(x), net.norm(x)]
    net.nodes[-1].attribute.append(helper.make_attribute("epsilon", 0.5))
    y = net.put("Add", *(net.put("Mul", norm, net.scale(4)) for norm in norms))
    check(net.classified(net.block(y, 4)), level)


@pytest.mark.parametrize("width", [4, 6])
def test_a_matrix_that_is_read_both_ways(width):
    net = Network()
    p = net.put("Flatten", net.pooled(net.block("x", 4)))
    matrix = net.value(net.rng.standard_normal((4, width)))
    h = net.activate(net.norm(net.put("MatMul", p, matrix, width=width)))
    y = net.activate(net.norm(net.put("Gemm", h, matrix, width=4, transB=1)))
    check(net.with_logits(y, 4))


@pytest.mark.parametrize("first", [(0, 0), (2, 2)])
def test_pieces_without_channels(first):
    net = Network()
    x = net.block("x", 6)
    empty, piece = net.cut(x, *first), net.cut(x, first[0], first[0] + 2)
    check(net.classified(net.block(net.cat(empty, net.block(piece, 4), piece), 4)))


def test_two_graph_outputs_that_are_one_piece():
    net = Network()
    x = net.block("x", 6)
    outputs = {net.cut(x, 0, 2): (BATCH, 2, SIZE, SIZE), net.cut(x, 0, 2): (BATCH, 2, SIZE, SIZE)}
    outputs[net.block(net.cut(x, 2, 6), 4)] = (BATCH, 4, SIZE, SIZE)
    check(net.model(outputs), loss="none")


@pytest.mark.parametrize("level", ["bnff", "icf"])
def test_a_gate_whose_squeeze_is_no_mean(level):
    net = Network()
    y = net.block("x", 4)
    squeezed = net.put("ReduceSum", y, net.value([2, 3], np.int64), keepdims=1)
    gated = net.put("Mul", y, net.put("Sigmoid", squeezed))
    check(net.classified(net.block(gated, 4)), level)
