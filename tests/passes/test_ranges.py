"""Ranges of channels: what is done to some of a map's channels alone, and what is written around it."""

import numpy as np
import pytest
from hand_made import Network, check


def test_a_shortcut_to_some_channels_alone():
    net = Network()
    net.act = "Silu"
    x = net.block("x", 4)
    y = net.norm(net.conv(x, 6))
    head, tail = net.cut(y, 0, 4), net.cut(y, 4, 6)
    result = check(net.classified(net.block(net.cat(net.put("Add", head, x), tail), 4)))
    assert result.report.unfused == ()
    cut_and_joined = [node.name for node in result.model.graph if node.op_type == "Concat" and "grad" in node.name]
    assert cut_and_joined == []


def test_pieces_that_are_put_together_again_beside_others():
    net = Network()
    y = net.norm(net.conv(net.block("x", 4), 6))
    pieces = net.split(y, 2, 4)
    result = check(net.classified(net.block(net.cat(net.block("x", 3), *pieces), 4)))
    assert result.report.unfused == ()
    joins = [node for node in result.model.graph if node.op_type == "Concat" and len(node.outputs[0].shape) == 4]
    assert [[value.shape[1] for value in node.inputs] for node in joins] == [[3, 6]]


def test_sums_that_begin_with_zero_and_products_with_one():
    net = Network()
    y = net.put("Add", net.value(0.0), net.block("x", 4), width=4)
    z = net.put("Mul", net.put("Sub", y, net.value(0.0)), net.value(1.0))
    result = check(net.classified(net.block(z, 4)))
    assert result.report.unfused == ()
    assert not {"Add", "Sub", "Mul"} & {node.op_type for node in result.model.graph if "grad" not in (node.name or "")}


def stage(net: Network, x: str, *, first: bool) -> str:
    """Write a cross-stage part whose last sum is an operand of a Concat."""
    a, b = net.block(x, 4), net.block(x, 3)
    summed = net.put("Add", a, net.block(a, 4))
    return net.block(net.cat(*((summed, b) if first else (b, summed))), 5)


@pytest.mark.parametrize("activation", ["Relu", "Silu", "Relu6"])
def test_a_batch_norm_behind_one_operand_of_a_concat_reduces_over_its_part(activation):
    net = Network()
    net.act = activation
    result = check(net.classified(stage(net, stage(net, "x", first=True), first=False)))
    assert result.report.unfused == ()
    found = [node for node in result.model.graph if "PartReduce" in node.op_type]
    assert sorted(node.attributes["start_1"].as_int() for node in found) == [0, 3]


def test_a_part_stays_a_sweep_at_the_level_of_a_layer():
    net = Network()
    net.act = "Silu"
    result = check(net.classified(stage(net, "x", first=True)), level="bnff")
    assert not any("Part" in node.op_type for node in result.model.graph)
    assert {entry.half for entry in result.report.unfused} >= {"gradient reductions"}


def residual(net: Network, x: str, width: int) -> str:
    """Write a residual block whose sum is activated."""
    return net.put("Relu", net.put("Add", net.norm(net.conv(net.block(x, width), width, 3)), x))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_activated_sums_in_a_concat_are_masked_by_what_reads_the_concat(order):
    net = Network()
    x = net.block("x", 4)
    found = [x, residual(net, x, 4)]
    found.append(residual(net, net.block(x, 3), 3))
    result = check(net.classified(net.block(net.cat(*(found[place] for place in order)), 5)))
    assert result.report.unfused == ()
    made = [node for node in result.model.graph if "WhereReluGradPartReduceOther" in node.op_type]
    assert len(made) == 1
    assert made[0].op_type.count("PartReduceOther") == 2


def weighted(net: Network, weights: str, *xs: str) -> str:
    """Write a sum of maps, each times a number that is learned, as BiFPN does."""
    total = ""
    for index, x in enumerate(xs):
        number = net.put("Gather", weights, net.value(index, np.int64), width=1)
        product = net.put("Mul", number, x, width=net.width[x])
        total = net.put("Add", total, product) if total else product
    return net.activate(total)


@pytest.mark.parametrize("level", ["bnff", "icf"])
@pytest.mark.parametrize("activation", ["Relu", "Silu"])
def test_weighted_sums_store_no_product_and_no_normalised_map(activation, level):
    net = Network()
    net.act = activation
    weights = net.put("Tanh", net.value([0.5, -1.5, 2.0]), width=3)
    x = net.block("x", 4)
    y = weighted(net, weights, net.block(x, 4), net.norm(net.conv(x, 4)))
    result = check(net.classified(net.block(weighted(net, weights, y, net.block(y, 4)), 4)), level)
    assert result.report.unfused == ()
    sums = [node.op_type for node in result.model.graph if node.op_type.endswith("GateGlobalAveragePool")]
    assert len(sums) == 4


def test_a_constant_factor_goes_with_the_normalised_map():
    net = Network()
    halved = net.put("Mul", net.block("x", 4), net.value(0.5))
    result = check(net.classified(net.block(halved, 4)))
    assert result.report.unfused == ()
    assert "NormalizeReluGateConvStatistics" in [node.op_type for node in result.model.graph]


@pytest.mark.parametrize("level", ["bnff", "icf"])
def test_two_gated_branches_beside_a_shortcut_are_not_stored(level):
    net = Network()
    x = net.block("x", 4)
    branches = net.split(net.block(x, 8), 4, 4)
    summed = ""
    for branch in branches:
        gate = net.put("Sigmoid", net.conv(net.pooled(branch), 4, bias=True))
        gated = net.put("Mul", branch, gate)
        summed = net.put("Add", summed, gated) if summed else gated
    y = net.put("Relu", net.put("Add", x, net.norm(net.conv(net.put("Add", x, summed), 4))))
    result = check(net.classified(y), level)
    assert "NormalizeReluGatePointwise" not in [node.op_type for node in result.model.graph]
    if level == "icf":
        assert result.report.unfused == ()
