"""Training graphs as workloads: bytes by hand and as `bnfuse diff` counts them, parts, views, accumulation in place."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from hand_made import Network

import bnfuse
from bnfuse.analysis.ancestors import forward_nodes
from bnfuse.analysis.owners import layer_name
from bnfuse.analysis.traffic import graph_traffic
from bnfuse.analysis.work import flops
from bnfuse.build import build_training_graph
from bnfuse.build.named import build_model
from bnfuse.estimating.node_costs import costs_of
from bnfuse.estimating.training import covered, training_workload
from bnfuse.estimating.workload import Layer, Workload
from bnfuse.graph.training_graph import TrainingGraph, open_graph
from bnfuse.opset.spec import find
from bnfuse.passes import LEVELS

BATCH, IMAGE = 2, 16
PIXELS = BATCH * IMAGE * IMAGE  # of the maps of the first block
CHANNEL = 4 * PIXELS  # bytes of one channel there
STEM, GROWTH = 16, 4


@pytest.fixture(scope="module")
def built():
    """A small DenseNet: stem of 16 channels, then blocks of three 3x3 convolutions that add 4 channels each."""
    return build_model("densenet40", zoo={"batch": BATCH, "image": IMAGE, "growth": GROWTH, "depth": 3}).model


@pytest.fixture(scope="module")
def graphs(built) -> dict[str, TrainingGraph]:
    return {level: open_graph(bnfuse.rewrite(built, level=level)) for level in LEVELS}


def layer(workload: Workload, name: str) -> Layer:
    (found,) = [layer for layer in workload.layers if layer.name == name]
    return found


def maps(workload: Workload, accesses) -> dict[str, int]:
    """Bytes by tensor, of maps and data."""
    kinds = ("map", "map_gradient", "data")
    return {workload.tensors[a.tensor].name: a.bytes for a in accesses if workload.tensors[a.tensor].kind in kinds}


def map_bytes(graph: TrainingGraph, workload: Workload) -> int:
    """All bytes of tensors with an axis of images and at least four axes, which is what `diff` calls a feature map."""
    values = [v for node in graph.model.graph for v in node.outputs] + list(graph.model.graph.inputs)
    rows = graph.batch + sum(graph.shape_of(name)[0] for name in graph.signature.virtual)
    wide = {
        v.name
        for v in values
        if v.shape is not None and len(v.shape) >= 4 and v.shape[0] == rows and not v.is_initializer()
    }
    accesses = [a for each in workload.layers for a in each.accesses]
    return sum(a.bytes for a in accesses if workload.tensors[a.tensor].name in wide)


@pytest.mark.parametrize("name", ["BatchNorm", "BatchNormGrad"])
def test_a_whole_batch_norm_has_work_and_sweeps(name):
    maps = [ir.Value(name=name, shape=ir.Shape((2, 3, 4, 4))) for name in ("x", "dy")]
    vectors = [ir.Value(name=name, shape=ir.Shape((3,))) for name in "abcd"]
    operands = [maps[0], *vectors] if name == "BatchNorm" else [*maps[::-1], *vectors[:3]]
    node = ir.Node("ai.bnfuse", name, operands, num_outputs=5 if name == "BatchNorm" else 3, name="n")
    node.outputs[0].name, node.outputs[0].shape = "result", maps[0].shape
    costs = costs_of(node, find(name))
    assert costs.type == "BatchNorm" and costs.flops and costs.swept


@pytest.mark.parametrize("level", LEVELS)
def test_with_views_as_copies_it_counts_the_bytes_that_diff_counts(graphs, level):
    graph = graphs[level]
    assert map_bytes(graph, training_workload(graph, views=True)) == graph_traffic(graph).total.bytes


@pytest.mark.parametrize("network", ["resnet18", "mobilenetv2", "squeezenet"])
def test_other_networks_too_once_the_gradient_of_a_clip_is_one_node(network):
    graph = open_graph(bnfuse.rewrite(build_model(network, zoo={"batch": 2, "image": 32}).model, level="icf"))
    assert map_bytes(graph, training_workload(graph, views=True)) == graph_traffic(graph).total.bytes


@pytest.mark.parametrize("sample", ["fs:1/4", "bs:1", "frs:1/4", "vdn:1"])
def test_a_sample_is_counted_as_far_as_it_goes(built, sample):
    graph = open_graph(bnfuse.rewrite(built, level="icf", sample=sample))
    workload = training_workload(graph, views=True)
    assert map_bytes(graph, workload) == graph_traffic(graph).total.bytes
    check_order(training_workload(graph))


def check_order(workload: Workload) -> None:
    """Every tensor is there before it is read, is touched by somebody, and no access is longer than it."""
    there = {index for index, tensor in enumerate(workload.tensors) if tensor.given}
    touched = set()
    for each in workload.layers:
        for access in each.reads:
            assert access.tensor in there, (each.name, workload.tensors[access.tensor].name)
        for access in each.accesses:
            assert 0 < access.bytes <= workload.tensors[access.tensor].bytes, (each.name, access)
            assert access.sweeps >= 1
        there |= {access.tensor for access in each.writes}
        touched |= {access.tensor for access in each.accesses}
        assert len({a.tensor for a in each.reads}) == len(each.reads)
    assert touched == {*range(len(workload.tensors))}


@pytest.mark.parametrize("order", ["file", "dfs"])
@pytest.mark.parametrize("level", LEVELS)
def test_tensors_are_given_or_written_before_they_are_read(graphs, level, order):
    workload = training_workload(graphs[level], order=order, optimizer="momentum")
    check_order(workload)
    kept = {tensor.name for tensor in workload.tensors if tensor.kept}
    signature = graphs[level].signature
    results = {signature.loss, *signature.gradients.values(), *signature.running.values()}
    assert results | {*signature.trainable} <= kept


def test_the_gradient_of_a_bias_that_was_dropped_is_a_constant_that_is_there():
    graph = open_graph(bnfuse.rewrite(build_model("vgg11", zoo={"batch": 2, "image": 32}).model, level="bnff"))
    workload = training_workload(graph, optimizer="sgd")
    check_order(workload)
    assert next(t for t in workload.tensors if t.name == "stage1/layer1/conv/bias_grad").given


def test_local_statistics_are_coefficients_and_no_maps(built):
    workload = training_workload(open_graph(bnfuse.rewrite(built, level="none", local_bn=1)))
    check_order(workload)
    found = [t for t in workload.tensors if t.name.endswith("/inv_std")]
    assert found and {t.kind for t in found} == {"vector"}


def test_each_level_moves_less_than_the_one_before_it(graphs):
    moved = []
    for level in LEVELS:
        workload = training_workload(graphs[level])
        moved.append(sum(a.bytes * a.sweeps for each in workload.layers for a in each.accesses))
    assert moved == sorted(moved, reverse=True) and len({*moved}) == len(LEVELS)


def test_a_batch_norm_of_the_source_sweeps_three_times_over_the_parts_of_a_concatenation(graphs):
    workload = training_workload(graphs["none"])
    norm = layer(workload, "block1/layer2/norm1")
    parts = {"stem/conv": STEM * CHANNEL, "block1/layer1/conv1": GROWTH * CHANNEL}
    assert maps(workload, norm.reads) == parts
    assert {a.sweeps for a in norm.reads if workload.tensors[a.tensor].kind == "map"} == {3}
    assert maps(workload, norm.writes) == {"block1/layer2/norm1": (STEM + GROWTH) * CHANNEL}
    backward = (x for x in workload.layers if x.phase == "backward")
    gradient = next(x for x in backward if x.name.startswith("block1/layer2/norm1/grad"))
    assert (gradient.type, gradient.part) == ("BatchNorm", "block1/layer2/norm1")
    dz = "block1/layer2/relu1/grad/dx"
    assert maps(workload, gradient.reads) == {dz: (STEM + GROWTH) * CHANNEL, **parts}
    assert {a.sweeps for a in gradient.reads if workload.tensors[a.tensor].kind != "vector"} == {2}


def test_below_bnff_the_statistics_are_one_sweep_and_normalising_another(graphs):
    workload = training_workload(graphs["mvf"])
    for name in ("block1/layer2/norm1/statistics", "block1/layer2/norm1"):
        found = layer(workload, name)
        assert sum(maps(workload, found.reads).values()) == (STEM + GROWTH) * CHANNEL
        assert {a.sweeps for a in found.reads} == {1} and found.part == "block1/layer2/norm1"


def test_a_fused_convolution_reads_the_maps_before_the_batch_norm(graphs):
    """NormalizeReluConvStatistics of the second layer: 20 channels in, 4 out, 3x3."""
    workload = training_workload(graphs["icf"])
    conv = layer(workload, "block1/layer2/conv1")
    assert (conv.type, conv.phase, conv.part) == ("Conv2D", "forward", "block1/layer2/conv1")
    assert maps(workload, conv.reads) == {"stem/conv": STEM * CHANNEL, "block1/layer1/conv1": GROWTH * CHANNEL}
    assert maps(workload, conv.writes) == {"block1/layer2/conv1": GROWTH * CHANNEL}
    named = {workload.tensors[a.tensor].name: workload.tensors[a.tensor].kind for a in conv.reads}
    assert named["block1/layer2/conv1/weight"] == "weight"
    assert list(named.values()).count("vector") == 2  # a and b
    dense = 2 * PIXELS * GROWTH * (STEM + GROWTH) * 9
    assert conv.flops == dense + 3 * PIXELS * (STEM + GROWTH) + 4 * PIXELS * GROWTH  # a*x + b and max; statistics


def test_a_fused_gradient_accumulates_in_the_tensor_that_it_adds_to(graphs):
    """dy is a slice of the channels of the gradient that dx is added to."""
    workload = training_workload(graphs["icf"])
    (grad,) = [x for x in workload.layers if x.part == "block1/layer2/conv1" and x.type == "Conv2D"][1:]
    assert grad.phase == "backward"
    (total,) = maps(workload, grad.writes)  # 28 channels: 16 of the stem, 4 of each layer
    assert next(t.bytes for t in workload.tensors if t.name == total) == (STEM + 3 * GROWTH) * CHANNEL
    assert maps(workload, grad.writes) == {total: (STEM + GROWTH) * CHANNEL}
    assert maps(workload, grad.reads) == {
        total: (STEM + 2 * GROWTH) * CHANNEL,  # its own slice, and what it is added to
        "stem/conv": STEM * CHANNEL,
        "block1/layer1/conv1": GROWTH * CHANNEL,
        "block1/layer2/conv1": GROWTH * CHANNEL,  # grad_x of the BN that follows
    }


@pytest.mark.parametrize("level", LEVELS)
def test_every_layer_has_a_part_and_gradients_are_twice_the_work_of_their_convolution(graphs, level):
    workload = training_workload(graphs[level])
    forward = forward_nodes(graphs[level].model.graph, graphs[level].signature)
    assert {x.part for x in workload.layers} <= {layer_name(node) for node in forward}
    for part in ("block1/layer3/conv1", "block2/layer1/conv1"):
        own = [x for x in workload.layers if x.part == part and x.type == "Conv2D"]
        assert [x.phase for x in own] == ["forward", "backward"]
        assert 1.8 < own[1].flops / own[0].flops < 2.3
    pool = [x.phase for x in workload.layers if x.part == "transition1/pool" and x.type == "Pool"]
    assert pool == ["forward", "backward"]


def test_types_are_those_that_times_are_summed_by():
    graph = open_graph(bnfuse.rewrite(build_model("mobilenetv2", zoo={"batch": 2, "image": 32}).model, level="icf"))
    kinds = {x.type for x in training_workload(graph).layers}
    assert {"Conv2D", "DepthwiseConv2D", "Dense", "BatchNorm", "Pool", "Loss"} <= kinds


def test_the_five_nodes_of_a_clips_gradient_are_one_layer():
    graph = open_graph(build_model("mobilenetv2", zoo={"batch": 2, "image": 32}).model)
    workload = training_workload(graph)
    assert not any(t.name.endswith("_mask_cast") for t in workload.tensors)
    clips = [x for x in workload.layers if x.type == "Activation" and x.phase == "backward"]
    assert len(clips) == sum(node.op_type == "Clip" for node in graph.model.graph)
    for each in clips:
        sizes = {a.bytes for a in each.accesses}
        assert (len(each.reads), len(each.writes), len(sizes)) == (2, 1, 1)


def test_views_are_layers_where_they_are_copies(graphs):
    graph = graphs["none"]
    plain, copied = training_workload(graph), training_workload(graph, views=True)
    kinds = [x.type for x in plain.layers]
    assert "Concat" not in kinds and "Concat" in [x.type for x in copied.layers]
    extra = [x for x in copied.layers if x.name not in {y.name for y in plain.layers}]
    assert extra and all(x.flops == 0 for x in extra)


@pytest.mark.parametrize(("optimizer", "moments"), [("sgd", 0), ("momentum", 1), ("adamw", 2), ("lion", 1)])
def test_an_update_reads_parameter_gradient_and_moments_and_writes_all_but_the_gradient(graphs, optimizer, moments):
    graph = graphs["icf"]
    workload = training_workload(graph, optimizer=optimizer)
    updates = [x for x in workload.layers if x.phase == "update"]
    assert len(updates) == len(graph.signature.trainable)
    for each in updates:
        size = workload.tensors[each.writes[0].tensor].bytes
        assert [a.bytes for a in each.writes] == [size] * (1 + moments)
        assert [a.bytes for a in each.reads] == [size] * (2 + moments)
    assert not [x for x in training_workload(graph).layers if x.phase == "update"]


def test_ranges_of_channels_count_once_where_they_overlap():
    assert covered([(0, 4), (2, 6), (8, 9)]) == 7
    assert covered([(3, 5), (0, 9)]) == 9
    assert covered([]) == 0


@pytest.mark.parametrize(("mode", "taps"), [("nearest", 1), ("linear", 4)])
def test_a_resample_counts_the_entries_of_its_matrices(mode, taps):
    """Of 4x4 pixels 8x8 are made, of one each or of two along each axis but for the borders' (14 of 16 entries)."""
    net = Network()
    small = net.put("MaxPool", net.block("x", 6), kernel_shape=[2, 2], strides=[2, 2])
    scales = net.value([1.0, 1.0, 2.0, 2.0])
    y = net.put("Resize", small, "", scales, mode=mode, coordinate_transformation_mode="half_pixel")
    model = bnfuse.rewrite(build_training_graph(net.classified(net.block(y, 4)))).model
    found = {find(node.op_type).core: node for node in model.graph if "Resample" in node.op_type}
    assert {*found} == {"Resample", "ResampleGrad"}
    entries = 8 if taps == 1 else 14
    for core, node in found.items():
        by_axis = entries * 4 + 8 * entries if core == "Resample" else entries * 8 + 4 * entries
        costs = costs_of(node, find(node.op_type))
        assert flops(node) == 2 * 2 * 6 * min(entries * entries, by_axis)
        assert (costs.type, costs.flops >= flops(node)) == ("Other", True)
