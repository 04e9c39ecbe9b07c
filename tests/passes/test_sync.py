"""SyncBN: statistics of all ranks, and what one rank at the global batch would compute."""

import autograd
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import simulated_ranks
from small_networks import DENSE, RESIDUAL

from bnfuse.build import build, build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.diffing import diff_graphs
from bnfuse.graph.exchanges import Exchanged, exchanges, without_exchanges
from bnfuse.graph.training_graph import open_graph
from bnfuse.opset.schemas import check_model
from bnfuse.passes import rewrite

LEVELS = ("none", "rcf", "mvf", "bnff", "icf")
CHAIN = """
    a = conv(x, 4, k=3, bias=1)
    n = bn(a)
    out = relu(n)
"""
BRANCHES = """
    a = conv(x, 4)
    n = bn(a)
    r = relu(n)
    b = conv(r, 4, k=3)
    m = bn(b)
    c = conv(r, 4)
    k = bn(c)
    s = add(m, k)
    out = relu(s)
"""
EXCHANGES = ("AllReduceMoments", "AllReduceTerms")


def kinds(model):
    return [node.op_type for node in model.graph if node.op_type not in EXCHANGES]


def parts(size, seed=1, **more):
    """Images and labels of each rank, and of all of them."""
    rng = np.random.default_rng(seed)
    images = rng.standard_normal((2 * size, 3, 8, 8)) + rng.standard_normal((2 * size, 1, 1, 1))  # ranks differ
    labels = rng.integers(0, 5, 2 * size)
    feeds = [{"x": x, "labels": y, **more} for x, y in zip(np.split(images, size), np.split(labels, size), strict=True)]
    return feeds, {"x": images, "labels": labels, **more}


@pytest.mark.parametrize("level", ["none", "bnff"])
def test_the_graph(level, training, golden):
    golden.check(rewrite(training(CHAIN), level=level, sync=True).model)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("body", "size"),
    [(RESIDUAL, 2), (DENSE, 2), (DENSE, 4), (BRANCHES, 2)],
    ids=["residual", "dense", "dense 4", "branches"],
)
def test_ranks_compute_what_one_does_at_the_global_batch(body, size, network, oracle):
    """By torch's autograd in float64: loss, logits, gradients, running statistics, which are the same on all ranks."""
    forward = network(body)
    feeds, everything = parts(size)
    expected = autograd.differentiate(oracle, forward, {"x": everything["x"]}, everything["labels"], autograd.full)
    model = ir.from_proto(build_training_graph(forward))
    for level in LEVELS if size == 2 and body != BRANCHES else ("none", "icf"):
        after = ir.to_proto(rewrite(model, level=level, sync=True).model)
        check_model(after)
        found = simulated_ranks.of_all(simulated_ranks.evaluate(oracle, after, feeds))
        assert {*expected} <= {*found}
        if level in ("bnff", "icf"):  # the rounding errors of the bias's gradient, of which the level makes 0
            expected = {k: v for k, v in expected.items() if not k.endswith(("a/bias_grad", "b/bias_grad"))}
        assert autograd.worst(expected, found) < 1e-9, level


@pytest.mark.torch
def test_statistics_of_some_ranks_and_their_gradient(network, oracle):
    """All are normalised by the statistics of the first ranks, through which alone their samples matter to others."""
    forward = network(BRANCHES)
    feeds, everything = parts(4)

    def of_the_first(name, x, p):
        first = x[:6]  # of three ranks
        return autograd.normalised(x, first.mean((0, 2, 3)), first.var((0, 2, 3), correction=0), p)

    expected = autograd.differentiate(oracle, forward, {"x": everything["x"]}, everything["labels"], of_the_first)
    model = ir.from_proto(build_training_graph(forward))
    for level in ("none", "bnff"):
        after = ir.to_proto(rewrite(model, level=level, sync=True, sync_ranks=3).model)
        found = simulated_ranks.of_all(simulated_ranks.evaluate(oracle, after, feeds))
        assert autograd.worst(expected, found) < 1e-9, level


@pytest.mark.torch
@pytest.mark.parametrize("spec", ["vdn:1", "fs:1/4+vdn:1@0.25"])
def test_sampled_statistics_are_those_of_one_rank_at_the_global_batch(spec, training, oracle):
    """Of the same patch, and of the same virtual samples, which all ranks have."""
    size = 2
    small, large = training(RESIDUAL), training(RESIDUAL, shape=(2 * size, 3, 8, 8))
    feeds, everything = parts(size)
    after = ir.to_proto(rewrite(small, sample=spec, sync=True).model)
    check_model(after)
    places = {v.name: np.array([0, 2, 3]) for v in after.graph.input if "/offset" in v.name}
    if "vdn" in spec:
        places = {name: np.array([1, *place[1:]]) for name, place in places.items()}
        places["virtual"] = np.random.default_rng(2).standard_normal((1, 3, 8, 8))
    found = simulated_ranks.of_all(simulated_ranks.evaluate(oracle, after, [{**own, **places} for own in feeds]))
    expected = oracle.evaluate(ir.to_proto(rewrite(large, sample=spec).model), {**everything, **places})
    sent = rewrite(small, sample=spec, sync=True).report.exchanged
    assert (sent.moments, sent.terms) == ((0, 0) if spec == "vdn:1" else (3, 3))
    assert autograd.worst(expected, found) < 1e-9


@pytest.mark.torch
def test_a_variance_far_from_zero_is_not_lost(network, oracle):
    forward = network("n = bn(x)\nout = relu(n)")
    feeds, everything = parts(2)
    for own in (*feeds, everything):
        own["x"] = own["x"] + 1e6
    expected = autograd.differentiate(oracle, forward, {"x": everything["x"]}, everything["labels"], autograd.full)
    after = ir.to_proto(rewrite(ir.from_proto(build_training_graph(forward)), sync=True).model)
    found = simulated_ranks.of_all(simulated_ranks.evaluate(oracle, after, feeds))
    assert autograd.worst(expected, found) < 1e-7  # 1e-10 of the mean's square


@pytest.mark.torch
@pytest.mark.parametrize("spec", [None, "bn+vdn:1@0.25"])
def test_unbiased_running_variances_are_by_the_elements_of_all_ranks(spec, network, oracle):
    small = ir.from_proto(build(network(BRANCHES), running_variance="torch").model)
    feeds, everything = parts(
        4, **({"virtual": np.random.default_rng(2).standard_normal((1, 3, 8, 8))} if spec else {})
    )
    large = network(BRANCHES)
    for value, dims in ((large.graph.input[0], (8, 3, 8, 8)), (large.graph.output[0], (8, 5))):
        for dim, count in zip(value.type.tensor_type.shape.dim, dims, strict=True):
            dim.dim_value = count
    whole = rewrite(ir.from_proto(build(large, running_variance="torch").model), sample=spec).model
    expected = oracle.evaluate(ir.to_proto(whole), everything)
    after = ir.to_proto(rewrite(small, sample=spec, sync=True).model)
    found = simulated_ranks.of_all(simulated_ranks.evaluate(oracle, after, feeds))
    assert autograd.worst(expected, found) < 1e-9


def test_one_rank_in_onnxruntime_computes_what_it_did(training, onnxruntime):
    model = training(DENSE)
    for level in ("none", "icf"):
        before, after = (ir.to_proto(rewrite(model, level=level, **more).model) for more in ({}, {"sync": True}))
        check_model(after)
        tolerance = 0 if level == "icf" else 2e-4  # at none, BatchNorms are whole without exchanges
        assert autograd.worst(onnxruntime(before), onnxruntime(after)) <= tolerance


@pytest.mark.parametrize("body", [RESIDUAL, DENSE], ids=["residual", "dense"])
def test_fusion_is_what_it_is_without(body, training):
    model = training(body)
    for level in ("bnff", "icf"):
        plain, synced = rewrite(model, level=level), rewrite(model, level=level, sync=True)
        assert kinds(synced.model) == kinds(plain.model)
        assert synced.report.unfused == plain.report.unfused
        again = rewrite(synced.model, level=level)
        assert [entry.name for entry in again.report.passes if entry.changed] == []
        assert [*map(str, again.model.graph)] == [*map(str, synced.model.graph)]
        assert without_exchanges(synced.model.graph) == synced.report.exchanged.moments + synced.report.exchanged.terms
        assert [*map(str, synced.model.graph)] == [*map(str, plain.model.graph)]


def test_each_channel_of_a_concatenation_is_exchanged_once(training):
    """Three BatchNorms read 4, 4 + 3 and 4 + 3 + 2 channels; at icf 9 are exchanged, forward and backward."""
    model = training(DENSE)
    assert rewrite(model, level="icf", sync=True).report.exchanged == Exchanged(3, 3, 9 * 8, 9 * 8)
    assert rewrite(model, level="bnff", sync=True).report.exchanged == Exchanged(3, 3, 20 * 8, 20 * 8)


def test_a_synced_graph_stays_one_at_another_level(training):
    model = training(DENSE)
    once = rewrite(rewrite(model, level="none", sync=True).model, level="icf")
    assert {node.op_type for node in exchanges(once.model.graph)} == {*EXCHANGES}
    assert once.report.exchanged == Exchanged(3, 3, 9 * 8, 9 * 8)
    few = rewrite(rewrite(model, sync=True, sync_ranks=2).model).model
    assert {node.attributes["ranks"].as_int() for node in exchanges(few.graph)} == {2}
    first = next(exchanges(few.graph))
    for damaged, what in ((3, "is an exchange of 2 ranks, and others are of 3"), (-2, "is of -2 ranks")):
        first.attributes["ranks"] = ir.AttrInt64("ranks", damaged)
        with pytest.raises(BnfuseError, match=f"{what}: rewrite the source graph anew"):
            rewrite(few)


def test_what_became_of_each_batch_norm_is_as_without(training):
    model = training(DENSE)
    before = open_graph(model)
    plain, synced = (diff_graphs(before, open_graph(rewrite(model, sync=sync).model)) for sync in (False, True))
    assert synced.batch_norms == plain.batch_norms
    assert synced.traffic_after.total == plain.traffic_after.total


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_bn": 1}, "sync takes statistics over all ranks, local-bn over groups of one's samples: leave one out"),
        ({"sample": "l1bn"}, "sync: node 'n/statistics': l1bn estimates the variance by absolute deviations"),
        ({"sample": "rbn"}, "sync: node 'n/statistics': rbn estimates the variance by the range"),
        ({"sync_ranks": 0}, "sync-ranks 0: statistics are of at least one rank: take 1 or more"),
        ({"sync": False, "sync_ranks": 2}, "sync-ranks says which ranks statistics are of: give sync too"),
        ({"remove": "all"}, "sync: no BatchNorm takes statistics of its batch, so there are none to exchange"),
    ],
)
def test_what_does_not_go_together(options, message, training):
    with pytest.raises(BnfuseError) as caught:
        rewrite(training(CHAIN), **{"sync": True, **options})
    assert str(caught.value).startswith(message)


def test_a_batch_norm_of_another_rank_is_refused_and_not_left_to_each_rank():
    shapes = {"scale": [3], "bias": [3], "mean": [3], "var": [3], "w": [5, 24]}
    values = [onnx.numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in shapes.items()]
    norm = ["x", "scale", "bias", "mean", "var"]
    nodes = [
        onnx.helper.make_node("BatchNormalization", norm, ["y", "m", "v"], name="n", training_mode=1),
        onnx.helper.make_node("Flatten", ["y"], ["flat"], name="flat"),
        onnx.helper.make_node("Gemm", ["flat", "w"], ["logits"], name="gemm", transB=1),
    ]
    x, logits = (onnx.helper.make_tensor_value_info(*each) for each in (("x", 1, [2, 3, 8]), ("logits", 1, [2, 5])))
    forward = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [x], [logits], values), ir_version=8)
    forward.opset_import[0].version = 17
    model = ir.from_proto(build_training_graph(forward))
    for level in ("none", "icf"):
        with pytest.raises(BnfuseError, match=r"node 'n' .* no static float32 map of rank 4. Leave sync out"):
            rewrite(model, level=level, sync=True)
