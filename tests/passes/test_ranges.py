"""Ranges of channels: what is done to some of a map's channels alone, and what is written around it."""

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
