"""GroupNorms and InstanceNorms: what they normalise is not stored, and neither is their input gradient."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnxruntime import InferenceSession

from bnfuse.exporting import inference_model
from bnfuse.graph.training_graph import open_graph
from bnfuse.opset.spec import find
from bnfuse.passes import rewrite
from bnfuse.verifying.interpreter import run, wide, widened

BLOCK = """
    c0 = conv(x, 12, k=3)
    n0 = gn(c0, groups={groups})
    r0 = {act}(n0)
    c1 = conv(r0, 12, k=3, g=4)
    n1 = gn(c1, groups={groups})
    r1 = {act}(n1)
    c2 = conv(r1, 12)
    n2 = gn(c2, groups={groups})
    t = add(r0, n2)
    r2 = {act}(t)
    c3 = conv(r2, 6, k=3, s=2)
    n3 = gn(c3, groups={groups})
    d = conv(r2, 6, s=2)
    n4 = gn(d, groups={groups})
    u = add(n3, n4)
    out = {act}(u)
"""
UNET = """
    c0 = conv(x, 6, k=3)
    n0 = gn(c0, groups=0)
    r0 = {act}(n0)
    p = maxpool(r0)
    c1 = conv(p, 8, k=3)
    n1 = gn(c1, groups=0)
    r1 = {act}(n1)
    u = up(r1, 6)
    n2 = {norm}(u)
    r2 = {act}(n2)
    t = cat(r0, r2)
    c3 = conv(t, 6, k=3)
    n3 = gn(c3, groups=2)
    out = {act}(n3)
"""
SHUFFLED = """
    c0 = conv(x, 8)
    n0 = gn(c0, groups=2)
    r0 = relu(n0)
    s = shuffle(r0)
    left, right = cut(s, 4, 4)
    c1 = conv(left, 4, k=3)
    n1 = gn(c1, groups=4)
    t = cat(n1, right)
    out = conv(t, 6)
"""


def of_groups(result):
    """What is left of GroupNorms beside steps, each with how often."""
    names = [node.op_type for node in result.model.graph if node.op_type.startswith("GroupNorm")]
    return {name: names.count(name) for name in names}


def pointwise(result):
    """The operators of steps that sweep maps."""
    found = [op for node in result.model.graph if (op := find(node.op_type))]
    return [op.name for op in found if getattr(op, "core", "") in ("Pointwise", "PointwiseGrad")]


def float64(model, result):
    """The worst relative error of what a rewritten graph gives, both in float64."""
    proto = ir.to_proto(model)
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    shape = [dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim]
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal(shape), "labels": rng.integers(0, 5, shape[0])}
    feeds |= {value.name: arrays[value.name] for value in proto.graph.input if value.name in arrays}
    expected = run(widened(proto), wide(feeds))
    found = run(widened(ir.to_proto(result.model)), wide(feeds))
    assert [*found] == [*expected]
    floor = 1e-3 * max(float(np.linalg.norm(value)) for name, value in expected.items() if name.endswith("_grad"))
    return max(float(np.linalg.norm(found[n] - v) / (np.linalg.norm(v) + floor)) for n, v in expected.items())


@pytest.mark.parametrize("groups", [1, 3, 6, 0])
@pytest.mark.parametrize("act", ["relu", "silu"])
def test_a_residual_network_stores_nothing_that_is_normalised(groups, act, training, rewritten, golden):
    model = training(BLOCK.format(groups=groups, act=act))
    result = rewritten(model, "icf", tolerance=5e-4)
    assert of_groups(result) == {"GroupNormFinalize": 5, "GroupNormGradReduce": 1, "GroupNormGradFinalize": 5}
    sums = [node.op_type for node in result.model.graph if "Image" in node.op_type]
    assert sum(name.endswith("ConvImageStatistics") for name in sums) == 5
    assert sum("ImageReduce" in name for name in sums) == 4  # of two over one gradient the other has a sweep
    assert not any("Grad" in name for name in pointwise(result) if "Normalize" in name or "BatchNormGrad" in name)
    assert float64(model, result) < 1e-9
    if (groups, act) == (3, "relu"):
        golden.check(result.model)


@pytest.mark.parametrize("level", ["none", "rcf", "mvf"])
def test_levels_without_fission_leave_them_whole(level, training, rewritten):
    result = rewritten(training(BLOCK.format(groups=3, act="relu")), level)
    assert of_groups(result) == {"GroupNorm": 5, "GroupNormGrad": 5}


@pytest.mark.parametrize("act", ["relu", "silu"])
@pytest.mark.parametrize("norm", ["gn", "bn"])
def test_they_sink_through_concats(norm, act, training, rewritten):
    model = training(UNET.format(act=act, norm=norm))
    result = rewritten(model, "icf", tolerance=5e-4)
    (concat,) = (n for n in result.model.graph if n.op_type == "Concat" and len(n.inputs[0].shape) == 4)
    assert concat.inputs[0].producer().op_type == "ConvImageStatistics"
    assert not [name for name in pointwise(result) if "Grad" not in name]
    assert float64(model, result) < 1e-9


def test_they_sink_through_shuffles_and_splits(training, rewritten):
    model = training(SHUFFLED)
    result = rewritten(model, "icf")
    assert float64(model, result) < 1e-9


def test_a_graph_output_keeps_the_map_that_it_is(training, rewritten):
    model = training(BLOCK.format(groups=3, act="relu"))
    model.graph.outputs.append(next(node for node in model.graph if node.op_type == "GroupNorm").outputs[0])
    result = rewrite(model)
    assert pointwise(result).count("NormalizePointwise") == 1


def test_one_sample(training, rewritten):
    model = training(BLOCK.format(groups=3, act="relu"), shape=(1, 3, 8, 8))
    assert float64(model, rewritten(model, tolerance=5e-4)) < 1e-9


def test_the_report_has_them_beside_batch_norms(training):
    report = rewrite(training(UNET.format(act="relu", norm="bn"))).report
    assert (report.batch_norms, report.group_norms) == (1, 3)
    assert report.unfused == ()
    report = rewrite(training(BLOCK.format(groups=3, act="relu"))).report
    assert [(entry.norm, entry.half) for entry in report.unfused] == [("GroupNorm", "gradient reductions")]
    assert report.to_json()["unfused"][0]["norm"] == "GroupNorm"


BESIDE = """
    c0 = conv(x, 6, k=3)
    n0 = bn(c0)
    r0 = relu(n0)
    c1 = conv(r0, 6)
    n1 = bn(c1)
    c2 = conv(r0, 6, k=3)
    n2 = gn(c2, groups=3)
    {joined}
    r1 = {act}(t)
    c3 = conv(r1, 6, bias=1)
    n3 = gn(c3, groups=0)
    out = {act}(n3)
"""
EXPORTED = {
    "groups": BLOCK.format(groups=3, act="relu"),
    "one group": BLOCK.format(groups=1, act="silu"),
    "a channel each": BLOCK.format(groups=0, act="relu"),
    "through a Concat": UNET.format(act="relu", norm="gn"),
    "through a Concat, beside a BatchNorm": UNET.format(act="silu", norm="bn"),
    "through a shuffle": SHUFFLED,
    "a BatchNorm in a sum": BESIDE.format(joined="t = add(n1, n2)", act="relu"),
    "a BatchNorm in a Concat": BESIDE.format(joined="t = cat(n1, n2)", act="relu"),
    "both over one map": BESIDE.format(joined="n4 = bn(c2)\n t = add(n4, n2)", act="silu"),
    "behind another": BESIDE.format(joined="n4 = gn(n2, groups=2)\n t = add(n1, n4)", act="relu"),
    "through a pooling": BESIDE.format(joined="p = maxpool(n2)\n t = bn(p)", act="relu"),
}


def evaluating(model):
    """The forward model by its running statistics."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    for node in copy.graph.node:
        if node.op_type == "BatchNormalization":
            del node.output[1:]
            kept = [attribute for attribute in node.attribute if attribute.name == "epsilon"]
            node.ClearField("attribute")
            node.attribute.extend(kept)
    return copy


@pytest.mark.parametrize("level", ["none", "rcf", "mvf", "bnff", "icf"])
@pytest.mark.parametrize("body", EXPORTED.values(), ids=EXPORTED)
def test_every_level_exports_to_the_network_itself(body, level, training, network):
    """Also where the statistics are taken by what writes the map, and for another number of samples."""
    graph = open_graph(rewrite(training(body), level=level).model)
    exported = inference_model(graph, graph.state())
    assert {node.domain for node in exported.graph.node} == {""}
    if body == EXPORTED["groups"]:  # nothing of the halves is left
        assert [node.op_type for node in exported.graph.node].count("InstanceNormalization") == 5
    x = np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float32)
    expected, found = (inferred(model, x) for model in (evaluating(network(body)), exported))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    if exported.graph.input[0].type.tensor_type.shape.dim[0].HasField("dim_param"):
        np.testing.assert_allclose(inferred(exported, x[:1]), found[:1], rtol=1e-5, atol=1e-6)


def inferred(model, x):
    """What plain onnxruntime computes of images."""
    (found,) = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    return found
