"""Gates: what they multiply is not stored, and their gradient reads what it is a sum of on the way in."""

import numpy as np
import onnx_ir as ir
import pytest

import bnfuse
from bnfuse.opset.spec import OpSpec, find
from bnfuse.passes import rewrite

SQUEEZE = """
    c0 = conv(x, 7)
    n0 = bn(c0)
    a0 = {act}(n0)
    c1 = conv(a0, 7, k=3, g=7)
    n1 = bn(c1)
    a1 = {act}(n1)
    m = mean(a1, reduce={reduce})
    s1 = conv(m, 3, bias=1)
    s2 = relu(s1)
    s3 = conv(s2, 7, bias=1)
    g = sigmoid(s3, hard={hard})
    u = mul({order})
    c2 = conv(u, 5)
    n2 = bn(c2)
    c3 = conv(n2, 6, k=3)
    n3 = bn(c3)
    out = {act}(n3)
"""


def squeeze(act="relu", reduce=0, hard=0, order="a1, g"):
    return SQUEEZE.format(act=act, reduce=reduce, hard=hard, order=order)


def steps_of(result):
    return {step for node in result.model.graph if (op := find(node.op_type)) for step in getattr(op, "prologue", ())}


def gated_sums(result):
    """How many sums of maps have a gate for an operand."""
    prologues = [op.prologue for node in result.model.graph if isinstance(op := find(node.op_type), OpSpec)]
    return sum(bool({"Gate", "SkipGate"} & {*p}) and bool({"Add", "AddNormalized"} & {*p}) for p in prologues)


def test_squeeze_excitation_leaves_no_sweep_of_a_normalised_map(training, rewritten, ops, golden):
    result = rewritten(training(squeeze()), "bnff")
    assert result.report.unfused == ()
    found = ops(result)
    assert "NormalizeReluGateConvStatistics" in found
    assert "BatchNormGradNormalizeReluGateConvGradImageGateRelu" in found
    assert "GateGradAddGradReluGradBatchNormGradNormalizeReluConvGradReluGradReduce" in found
    assert not any("Gate" in name and "GlobalAveragePool" in name for name in found)
    maps = [node for node in result.model.graph if node.op_type == "Mul" and 8 in (node.outputs[0].shape or ())]
    assert not maps
    golden.check(result.model)


@pytest.mark.parametrize("act", ["relu", "silu", "relu6", "hardswish"])
@pytest.mark.parametrize(("reduce", "hard", "order"), [(0, 1, "a1, g"), (1, 0, "g, a1")])
def test_gates_of_any_activation_and_spelling(act, reduce, hard, order, training, rewritten):
    result = rewritten(training(squeeze(act, reduce, hard, order)), "icf", tolerance=5e-4)
    assert result.report.unfused == ()
    assert "Gate" in steps_of(result)


RESIDUAL = """
    c0 = conv(x, 6)
    n0 = bn(c0)
    skip = relu(n0)
    c1 = conv(skip, 6, k=3)
    n1 = bn(c1)
    m = mean(n1)
    s1 = conv(m, 6)
    g = sigmoid(s1)
    u = mul(n1, g)
    t = {}
    r = relu(t)
    out = conv(r, 5)
"""


@pytest.mark.parametrize("sum_", ["add(u, skip)", "add(skip, u)"])
def test_a_gate_in_front_of_a_residual_sum_goes_into_the_sum(sum_, training, rewritten, ops):
    model = training(RESIDUAL.format(sum_))
    result = rewritten(model, "bnff")
    assert gated_sums(result) == 1
    assert any(name.endswith("ImageGate") for name in ops(result))
    assert any(name.startswith("GateGradAddGradBatchNormGrad") for name in ops(result))


def test_a_gated_and_a_normalised_map_are_added_in_one_sweep(training, rewritten):
    body = RESIDUAL.format("add(d, u)")
    body = body.replace("    t =", "    e = conv(skip, 6)\n    d = bn(e)\n    t =")
    result = rewritten(training(body), "bnff")
    assert gated_sums(result) == 1


DROP = """
    c0 = conv(x, 6)
    n0 = bn(c0)
    r0 = relu(n0)
    c1 = conv(r0, 6, k=3)
    n1 = bn(c1)
    d = drop(n1, divide={})
    t = add(d, r0)
    c2 = conv(t, 5)
    n2 = bn(c2)
    out = relu(n2)
"""


@pytest.mark.parametrize("divide", [0, 1, 2])
def test_a_drop_path_reads_and_writes_no_map_of_its_own(divide, training, rewritten, ops):
    result = rewritten(training(DROP.format(divide)), "bnff")
    found = ops(result)
    assert result.report.unfused == ()
    assert gated_sums(result) == 1
    assert any("ReduceGated" in name for name in found)
    assert any(name.startswith("GateGradBatchNormGrad") for name in found)
    assert not [n for n in result.model.graph if n.op_type in ("Mul", "Div") and 8 in (n.outputs[0].shape or ())]


def test_a_drop_path_beside_a_stored_map(training, rewritten):
    body = (
        DROP.format(0)
        .replace("add(d, r0)", "add(d, p)")
        .replace("c1 = conv(r0", "p = maxpool(r0, k=3, s=1)\n    c1 = conv(p")
    )
    result = rewritten(training(body), "bnff")
    assert result.report.unfused == ()
    assert gated_sums(result) == 1


def test_a_gated_map_that_is_an_output_stays(training, rewritten):
    model = training(squeeze())
    model.graph.outputs.append(next(node.outputs[0] for node in model.graph if node.name == "u"))
    result = rewritten(model, "bnff")
    (left,) = result.report.unfused
    assert left.half == "normalise"


def test_a_product_of_two_maps_is_no_gate(training, rewritten, ops):
    body = "a = conv(x, 4)\nn = bn(a)\nr = relu(n)\nb = conv(x, 4)\np = mul(r, b)\nout = conv(p, 5)"
    result = rewritten(training(body), "bnff")
    assert "Mul" in ops(result)
    assert not any("Gate" in name for name in ops(result))


@pytest.mark.torch
@pytest.mark.parametrize(
    "body",
    [squeeze("hardswish", hard=1), squeeze("silu"), DROP.format(2), RESIDUAL.format("add(u, skip)")],
    ids=["hardswish", "silu", "drop", "residual"],
)
def test_the_same_in_float64(body, training, oracle):
    source = training(body)
    data = {"x": np.random.default_rng(0).standard_normal((2, 3, 8, 8)), "labels": np.array([1, 3])}
    before = oracle.evaluate(ir.to_proto(source), data)
    after = oracle.evaluate(ir.to_proto(rewrite(source).model), data)
    floor = 1e-3 * max(float(np.linalg.norm(value)) for name, value in before.items() if name.endswith("_grad"))
    for name, value in before.items():
        assert np.linalg.norm(after[name] - value) <= 1e-11 * (np.linalg.norm(value) + floor), name


@pytest.mark.parametrize(
    "body",
    [squeeze("hardswish", hard=1), RESIDUAL.format("add(u, skip)"), DROP.format(0)],
    ids=["squeeze", "residual", "drop"],
)
def test_a_compiled_step_computes_the_same(body, training):
    source = training(body)
    assert bnfuse.verify(source, rewrite(source).model, runtime="tvm", threads=1).equal


SELECT = """
    c0 = conv(x, 6)
    n0 = bn(c0)
    r0 = relu(n0)
    c1 = conv(x, 6, k=3)
    n1 = bn(c1)
    r1 = relu(n1)
    t = add(r0, r1)
    m = mean(t)
    s0 = conv(m, 6)
    g0 = sigmoid(s0)
    s1 = conv(m, 6, bias=1)
    g1 = sigmoid(s1)
    u0 = mul(r0, g0)
    u1 = mul(r1, g1)
    v = add(u0, u1)
    out = conv(v, 5)
"""


def test_branches_that_one_mean_weighs(training, rewritten, ops):
    """Selective kernels: one branch's sums are taken where their gradient is written, another's in its own sweeps."""
    result = rewritten(training(SELECT), "bnff")
    found = ops(result)
    assert result.report.unfused == ()
    assert "NormalizeReluGateSkipReluSkipGateAddNormalizedPointwise" in found
    assert gated_sums(result) == 1
    assert found.count("NormalizeGlobalAveragePoolGradAddGatedGradientReluGradReduce") == 1
    assert sum(name.endswith("ImageGateRelu") for name in found) == 1
    (refused,) = (entry for report in result.report.passes for entry in report.refused if report.name.endswith("-sums"))
    assert refused.reason.endswith("has no room for sums over images")
    assert "Sum" not in found


def test_a_gate_that_the_graph_expands_is_read_as_it_is(training, rewritten, ops):
    result = rewritten(training(squeeze().replace("u = mul(a1, g)", "e = expand(g, 8)\n    u = mul(a1, e)")), "bnff")
    assert result.report.unfused == ()
    assert "NormalizeReluGateConvStatistics" in ops(result)


SCALED = """
    c0 = conv(x, 6)
    n0 = bn(c0)
    r0 = relu(n0)
    c1 = conv(r0, 6, k=3)
    n1 = bn(c1)
    u = scale(n1)
    t = add(u, r0)
    c2 = conv(t, 5)
    n2 = bn(c2)
    out = relu(n2)
"""


def test_a_layer_scale_takes_its_gradient_from_the_sums_of_the_batch_norm(training, rewritten, ops):
    result = rewritten(training(SCALED), "bnff")
    assert result.report.unfused == ()
    assert gated_sums(result) == 1
    assert "BatchNormGradConvGradReduceOther" in ops(result)
    assert any(name.startswith("GateGradBatchNormGrad") for name in ops(result))
    assert not [n for n in result.model.graph if n.op_type == "Mul" and 8 in (n.outputs[0].shape or ())]


def test_a_layer_scale_behind_an_activation_has_a_gradient_of_its_own(training, rewritten):
    result = rewritten(training(SCALED.replace("u = scale(n1)", "r1 = silu(n1)\n    u = scale(r1)")), "bnff")
    assert {entry.half for entry in result.report.unfused} <= {"normalise", "gradient reductions"}


@pytest.mark.parametrize("act", ["relu", "relu6", "silu"])
def test_an_activation_behind_the_gate_and_its_mask_go_with_it(act, training, rewritten, ops):
    body = squeeze().replace("a1 = relu(n1)", "a1 = bn(c1)")
    body = body.replace("u = mul(a1, g)", f"v = mul(a1, g)\n    u = {act}(v)")
    result = rewritten(training(body.replace("    n1 = bn(c1)\n", "")), "bnff", tolerance=5e-4)
    assert result.report.unfused == ()
    kind = {"relu": "Relu", "relu6": "Clip", "silu": "QuickGelu"}[act]
    assert f"NormalizeGate{kind}ConvStatistics" in ops(result)
    assert f"BatchNormGradNormalizeGate{kind}ConvGrad{kind}GradImageGate" in ops(result)
    assert any(name.startswith("GateGradAddGradBatchNormGrad") for name in ops(result))


def test_a_gradient_behind_a_gate_that_something_else_reads_is_stored(training, rewritten, ops):
    model = training(squeeze())
    (masked,) = (node.outputs[0] for node in model.graph if node.name == "a1/grad")
    model.graph.outputs.append(masked)
    result = rewritten(model, "bnff")
    assert "NormalizeReluGateGlobalAveragePool" in ops(result)
    assert "NormalizeGlobalAveragePoolGradAddGatedGradientReluGradReduce" in ops(result)
    assert not any("ImageGate" in name for name in ops(result))


def test_sums_over_images_move_no_more_than_the_least(training):
    """Of a gate: the map is written, read by its pooling, by the convolution behind it and by the gradients of both
    convolutions; the gradient is written and read once."""
    source = training(squeeze("silu"))
    assert bnfuse.diff(source, rewrite(source).model).over_least <= 1.1  # 8x8 pixels: those of one count, too
