"""The difference of two graphs: nodes, edges, BatchNorm halves, traffic."""

import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import bnfuse
from bnfuse.analysis import match
from bnfuse.build.named import build_model
from bnfuse.diffing import diff_graphs
from bnfuse.graph.training_graph import TrainingGraph, open_graph
from bnfuse.opset.schemas import infer_shapes

MAP = 2 * 8 * 4 * 4 * 4  # bytes of a map of 8 channels
IMAGE = 2 * 3 * 4 * 4 * 4

HEADER = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>'
SIGNATURE = """g (float[2,3,4,4] x, float[2,8,4,4] labels, float[8,3,1,1] w,
     float[8] gamma, float[8] beta, float[8] mean, float[8] var)
    => (float loss, float[8] new_mean, float[8] new_var, float[8,3,1,1] w_grad, float[8] gamma_grad, float[8] beta_grad)
    <float[1] seed = {1}>"""
FORWARD = """
    [conv] y = Conv(x, w)
    [bn] z, new_mean, new_var, m, s =
        com.microsoft.BatchNormInternal <epsilon = 1e-5, momentum = 0.9> (y, gamma, beta, mean, var)
    [relu] t = Relu(z)
    [sub] d = Sub(t, labels)
    [mul] q = Mul(d, d)
    [loss] loss = ReduceMean <keepdims = 0> (q)"""
BACKWARD = """
    [mul_grad] dt = Mul(d, seed)
    [relu_grad] dz = com.microsoft.ReluGrad(dt, t)
    [bn_grad] dy, gamma_grad, beta_grad = com.microsoft.BatchNormalizationGrad <epsilon = 1e-5> (dz, y, gamma, m, s)
    [conv_grad] , w_grad = com.microsoft.ConvGrad(dy, x, w)"""
ROLES = {
    "data": ["x"],
    "labels": ["labels"],
    "trainable": ["w", "gamma", "beta"],
    "frozen": [],
    "running": {"mean": "new_mean", "var": "new_var"},
    "gradients": {"w": "w_grad", "gamma": "gamma_grad", "beta": "beta_grad"},
    "loss": "loss",
}


def graph(forward: str = FORWARD, backward: str = BACKWARD) -> TrainingGraph:
    proto = onnx.parser.parse_model(f"{HEADER} {SIGNATURE} {{{forward}{backward}\n}}")
    for value in proto.graph.input[2:]:
        dims = [d.dim_value for d in value.type.tensor_type.shape.dim]
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(dims, np.float32), value.name))
    proto.metadata_props.add(key="bnfuse.roles", value=json.dumps(ROLES))
    return open_graph(infer_shapes(proto))


@pytest.fixture(scope="module")
def densenet():
    """A small DenseNet before and after."""
    built = build_model("densenet40", zoo={"batch": 2, "image": 16, "growth": 4, "depth": 3}).model
    return built, bnfuse.rewrite(built, level="icf")


def test_a_graph_equals_itself():
    found = diff_graphs(graph(), graph())
    assert found.equal
    assert str(found).startswith("the graphs are equal")
    assert not any(found.to_json()[key] for key in ("added", "removed", "changed", "rewired", "renamed"))


def test_every_operand_of_every_node_is_counted_once():
    traffic = diff_graphs(graph(), graph()).traffic_before
    # forward: conv x->y, bn y->z, relu z->t, sub t,labels->d, mul d,d->q, mean q
    assert traffic.forward.sweeps == 2 + 2 + 2 + 3 + 3 + 1
    assert traffic.forward.bytes == IMAGE + 12 * MAP
    # backward: mul d->dt, relu_grad dt,t->dz, bn_grad dz,y->dy, conv_grad dy,x
    assert traffic.backward.sweeps == 2 + 3 + 3 + 2
    assert traffic.backward.bytes == IMAGE + 9 * MAP
    assert traffic.total.aliased_sweeps == 0


def test_an_attribute_that_changed_is_told_with_both_values():
    found = diff_graphs(graph(), graph(FORWARD.replace("momentum = 0.9", "momentum = 0.5")))
    (node,) = found.changed
    assert node.name == "bn"
    assert node.attributes["momentum"] == pytest.approx((0.9, 0.5))
    assert not found.added and not found.removed


def test_an_edge_that_moved_is_told_with_its_position():
    found = diff_graphs(graph(), graph(backward=BACKWARD.replace("ReluGrad(dt, t)", "ReluGrad(dt, z)")))
    (node,) = found.rewired
    assert (node.name, node.inputs) == ("relu_grad", {1: ("t", "z")})


def test_nodes_and_tensors_with_new_names_are_matched_by_their_structure():
    renamed = graph(FORWARD.replace("[conv] y", "[c] why").replace("(y,", "(why,"), BACKWARD.replace(" y,", " why,"))
    found = diff_graphs(graph(), renamed)
    assert [(n.before, n.after) for n in found.renamed] == [("conv", "c")]
    assert not found.added and not found.removed and not found.rewired


def test_another_operator_under_the_same_name_is_removed_and_added():
    found = diff_graphs(graph(), graph(FORWARD.replace("[relu] t = Relu", "[relu] t = Sigmoid")))
    assert [(n.name, n.op) for n in found.added] == [("relu", "Sigmoid")]
    assert [(n.name, n.op) for n in found.removed] == [("relu", "Relu")]


def test_an_initial_value_that_changed_is_told():
    other = graph()
    value = other.model.graph.initializers["gamma"]
    value.const_value = ir.tensor(np.full(8, 2, np.float32), name="gamma")
    found = diff_graphs(graph(), other)
    assert found.initializers.changed == ("gamma",)
    assert not found.equal


def test_every_half_of_a_fused_batch_norm_is_found_where_it_went(densenet):
    found = bnfuse.diff(*densenet)
    assert len(found.batch_norms) == 3 * 3 + 3  # one a layer, one a transition, one in the head
    assert all(fate.fused for fate in found.batch_norms)
    first = next(f for f in found.batch_norms if f.name == "block1/layer1/norm1")
    assert [str(p) for p in first.statistics] == ["epilogue of stem/conv"]
    assert [str(p) for p in first.normalize] == ["prologue of block1/layer1/conv1"]
    assert [p.where for p in first.gradient_reduce] == ["epilogue"]
    assert {p.where for p in first.gradient_input} == {"prologue"}


def test_a_batch_norm_over_a_concat_takes_statistics_from_every_producer(densenet):
    found = bnfuse.diff(*densenet)
    first = next(f for f in found.batch_norms if f.name == "block1/layer3/norm1")
    assert len(first.statistics) == 3  # the stem and two layers


@pytest.mark.parametrize("level", ["none", "rcf"])
def test_a_batch_norm_that_is_still_whole_is_told_apart(densenet, level):
    before, _ = densenet
    found = bnfuse.diff(before, bnfuse.rewrite(before, level=level))
    assert found.batch_norms and all(fate.whole and not fate.fused for fate in found.batch_norms)


def test_split_halves_that_still_sweep_are_their_own_kernels(densenet):
    before, _ = densenet
    found = bnfuse.diff(before, bnfuse.rewrite(before, level="mvf"))
    assert not any(fate.fused for fate in found.batch_norms)


def test_added_nodes_name_their_sources_and_removed_nodes_what_they_became(densenet):
    before, after = densenet
    found = bnfuse.diff(before, after)
    names = {node.name for node in before.graph.node}
    assert found.added and all(node.sources and node.made_by for node in found.added)
    assert all(source in names for node in found.added for source in node.sources)
    ours = {node.name for node in after.model.graph}
    became = [node for node in found.removed if node.op == "BatchNorm"]
    assert became and all(node.into and set(node.into) <= ours for node in became)


def test_counts_and_traffic_fall_and_agree_with_the_graphs(densenet):
    before, after = densenet
    found = bnfuse.diff(before, after).to_json()
    assert sum(found["ops"]["before"].values()) == len(before.graph.node)
    assert sum(found["ops"]["after"].values()) == len(after.model.graph)
    for key in ("feature_map_bytes", "feature_map_sweeps"):
        for phase in ("forward", "backward"):
            assert 0 < found[key]["after"][phase] < 0.75 * found[key]["before"][phase]
    for phase in ("forward", "backward"):
        assert found["aliased_bytes"]["before"][phase] <= found["feature_map_bytes"]["before"][phase]


def test_the_json_survives_a_round_trip_and_has_the_documented_keys(densenet):
    found = bnfuse.diff(*densenet).to_json()
    assert json.loads(json.dumps(found)) == found
    assert {"added", "removed", "renamed", "changed", "rewired", "ops", "batch_norms"} <= found.keys()
    assert {"feature_map_bytes", "feature_map_sweeps", "aliased_bytes", "aliased_sweeps"} <= found.keys()


def test_the_text_has_traffic_first_and_a_line_for_each_batch_norm(densenet):
    text = str(bnfuse.diff(*densenet))
    assert text.startswith("Feature maps read and written")
    assert "BatchNorms: 12, split 12, whole 0" in text
    assert "block1/layer1/norm1" in text


def test_matching_prefers_the_name_over_the_structure():
    twins = FORWARD.replace("[conv] y = Conv(x, w)", "[other] y2 = Conv(x, w)\n    [conv] y = Conv(x, w)")
    found = match.match_nodes(graph().model.graph, graph(twins).model.graph)
    assert [node.name for node in found.added] == ["other"]
