"""Sampled statistics, L1BN and RBN: the definition, every level, and what is left of sweeps."""

import re
from fractions import Fraction

import numpy as np
import onnx_ir as ir
import pytest
import torch_statistics as definition
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st
from levels import by_turns

from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.sampling import Box, Points, sampling_of
from bnfuse.graph.signature import signature_of
from bnfuse.opset.schemas import check_model
from bnfuse.passes import LEVELS, rewrite
from bnfuse.passes.sampling.parts import rectangle

COMPOSITE = """
    a = conv(x, 4)
    n = bn(a)
    r = relu(n)
    b = conv(r, 6, k=3, bias=1)
    m = bn(b, eps=3)
    s = relu(m)
    out = conv(s, 4)
"""
FLAT = """
    c0 = conv(x, 4)
    n1 = bn(c0)
    r1 = relu(n1)
    y1 = conv(r1, 3, k=3)
    t2 = cat(c0, y1)
    n2 = bn(t2, eps=3)
    r2 = relu(n2)
    y2 = conv(r2, 2, k=3)
    t3 = cat(c0, y1, y2)
    n3 = bn(t3)
    r3 = relu(n3)
    z = conv(r3, 4)
    plain = conv(t2, 4, k=3)
    out = add(z, plain)
"""
NESTED = FLAT.replace("t3 = cat(c0, y1, y2)", "t3 = cat(t2, y2)")
RESIDUAL = """
    a = conv(x, 4)
    n = bn(a)
    r = relu6(n)
    p = maxpool(r, k=3)
    b = conv(p, 4, k=3)
    m = bn(b)
    s = add(m, p)
    u = silu(s)
    c = conv(u, 4, k=3, g=4)
    d = bn(c)
    e = conv(p, 4)
    f = bn(e)
    g = add(d, f)
    out = relu(g)
"""
BEFORE_ACTIVATION = """
    a = conv(x, 4)
    n = bn(a)
    r = relu(n)
    b = conv(r, 4, k=3)
    s = add(b, a)
    m = bn(s)
    t = relu(m)
    c = conv(t, 4, k=3)
    out = add(c, s)
"""
BRANCHES = """
    i = bn(x)
    a = conv(i, 4)
    na = bn(a)
    ra = relu(na)
    b = conv(i, 3, k=3)
    nb = bn(b)
    rb = relu(nb)
    t = cat(ra, rb)
    p = maxpool(t, k=3, s=1)
    c = conv(p, 4)
    d = conv(t, 4)
    out = add(c, d)
"""
BODIES = {
    "composite": COMPOSITE,
    "flat": FLAT,
    "nested": NESTED,
    "residual": RESIDUAL,
    "pre-activation": BEFORE_ACTIVATION,
    "branches": BRANCHES,
}
SPECS = ("ns:1", "bs:1", "fs:1/4", "frs:1/8", "l1bn", "rbn")
MIXED = {"flat": "fs:1/4,*1=bn,*2=frs:1/8", "nested": "bs:1,*3=bn", "residual": "frs:1/4,n=bn,f=l1bn"}
CASES = [(body, spec) for body in BODIES for spec in ("ns:1", "fs:1/4", "frs:1/8", "rbn")] + [*MIXED.items()]


def offsets(model: ir.Model, seed: int = 5) -> dict[str, np.ndarray]:
    return sampling_of(model).offsets(seed=seed, epoch=0)


def feeds(proto, seed: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = [d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim]
    return {"x": rng.standard_normal(shape), "labels": rng.integers(0, 5, shape[0])}


def define(spec: str, drawn: dict[str, np.ndarray]):
    """mean and variance of the BN `name` over x, by the words of the spec and what is drawn."""

    def statistics(name, x):
        n, _, h, w = x.shape
        own = {key.split("/")[0]: value for key, value in drawn.items()}.get(name)
        if spec.startswith("l1bn"):
            return definition.l1(x)
        if spec.startswith("rbn"):
            return definition.of_range(x)
        kind, _, amount = spec.partition(":")
        if kind == "ns":
            return definition.of_box(x, (0, 0, 0), (int(amount), h, w))
        if kind == "bs":
            return definition.of_box(x, own, (int(amount), h, w))
        if kind == "fs":
            return definition.of_box(x, own, (n, *rectangle(h, w, Fraction(amount))))
        assert kind == "frs"
        return definition.of_points(x, own)

    return statistics


def worst(expected, found, least: float = 1e-3):
    """The largest relative error; norms below `least` of the largest gradient's count as that much."""
    floor = least * max(float(np.linalg.norm(value)) for name, value in expected.items() if name.endswith("_grad"))
    return max(
        float(np.linalg.norm(found[name] - value)) / (float(np.linalg.norm(value)) + floor)
        for name, value in expected.items()
    )


@pytest.mark.torch
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("body", BODIES)
def test_a_sampled_network_is_what_autograd_makes_of_the_definition(body, spec, training, oracle):
    from torch_network import run

    source = training(BODIES[body])
    data = feeds(ir.to_proto(source))
    for level in ("none", "icf"):
        model = rewrite(source, level=level, sample=spec).model
        drawn = offsets(model)
        expected = run(ir.to_proto(source), BODIES[body], data, define(spec, drawn))
        found = oracle.evaluate(ir.to_proto(model), {**data, **drawn})
        assert worst(expected, found) <= 1e-12


@pytest.mark.torch
@settings(max_examples=14, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 3), st.integers(1, 7), st.integers(1, 7), st.sampled_from(SPECS), st.sampled_from(["none", "icf"])
)
def test_of_odd_shapes(training, oracle, batch, h, w, spec, level):
    """Batches of one, maps and samples of one row, whose variance may be small: epsilon is large, for otherwise each
    such layer multiplies rounding by 1/sqrt(epsilon)."""
    from torch_network import run

    assume(batch * h * w > 1)  # the build refuses a BN over one element
    body = re.sub(r"bn\((\w+)[^)]*\)", r"bn(\1, eps=1)", FLAT)
    source = training(body, shape=(batch, 3, h, w))
    data = feeds(ir.to_proto(source))
    try:
        model = rewrite(source, level=level, sample=spec).model
    except BnfuseError as error:
        assert "one value per channel in its sample" in str(error)
        assert min(batch, h, w) == 1
        reject()
    drawn = offsets(model)
    expected = run(ir.to_proto(source), body, data, define(spec, drawn))
    found = oracle.evaluate(ir.to_proto(model), {**data, **drawn})
    assert worst(expected, found) <= 1e-12


@pytest.mark.torch
@pytest.mark.parametrize("body, spec", [*MIXED.items(), ("pre-activation", "fs:1/4"), ("branches", "frs:1/8")])
def test_every_level_computes_the_same_in_float64(body, spec, training, oracle):
    source = training(BODIES[body])
    found = {}
    for level in LEVELS:
        model = rewrite(source, level=level, sample=spec).model
        found[level] = oracle.evaluate(ir.to_proto(model), {**feeds(ir.to_proto(source)), **offsets(model)})
    assert all(worst(found["none"], values) <= 1e-11 for values in found.values())


@pytest.fixture
def sampled(training):
    """A network sampled at a level, and what holds of every rewrite: valid, a fixed point, the same in onnxruntime."""

    def check(body: str, spec: str, level: str = "icf"):
        source = training(body)
        before = ir.to_proto(source)
        result = rewrite(source, level=level, sample=spec)
        assert ir.to_proto(source) == before
        check_model(ir.to_proto(result.model))
        again = rewrite(result.model, level=level)
        assert [entry.name for entry in again.report.passes if entry.changed] == []
        signature = signature_of(result.model)
        assert signature.offsets == tuple(sampling_of(result.model).places)
        return result

    return check


def kinds(result) -> list[str]:
    return sorted(node.op_type for node in result.model.graph)


@pytest.mark.parametrize("body, spec", CASES)
def test_every_level_computes_the_same_in_onnxruntime(body, spec, sampled, ort):
    found = {}
    for level in LEVELS if spec in MIXED.values() else by_turns(CASES.index((body, spec))):
        result = sampled(BODIES[body], spec, level)
        assert_no_sweep(result, BODIES[body].count("bn("), full="bn" in spec)  # bn, l1bn, rbn
        found[level] = ort(result.model, offsets(result.model))
    assert all(worst(found["none"], values, 1e-2) <= 2e-4 for values in found.values())


def assert_no_sweep(result, count: int, *, full: bool) -> None:
    """No full sweep is left for statistics."""
    found = kinds(result)
    statistics = [kind for kind in found if "Statistics" in kind]
    if not full:
        assert statistics == ["PointStatistics"] * count or statistics == ["SampledStatistics"] * count
        assert len(result.report.sampled) == count
        assert not {"BatchNorm", "BatchNormGrad"} & {*found}


def test_a_sample_that_moves_is_an_input_and_one_that_stays_is_none(sampled):
    assert signature_of(sampled(COMPOSITE, "ns:1").model).offsets == ()
    model = sampled(COMPOSITE, "fs:1/4").model
    assert sampling_of(model).places == {"n/offset": Box((0, 0, 0), (0, 4, 4)), "m/offset": Box((0, 0, 0), (0, 4, 4))}
    model = sampled(COMPOSITE, "frs:1/8,n=bs:1").model
    assert sampling_of(model).places == {"n/offset": Box((0, 0, 0), (1, 0, 0)), "m/points": Points(16, 0, 128)}
    values = {value.name: value for value in model.graph.inputs}
    assert (values["m/points"].dtype, tuple(values["m/points"].shape)) == (ir.DataType.INT64, (16,))


def test_names_of_offsets_are_made_unique(training):
    source = training(COMPOSITE)
    source.graph.inputs[0].name = "n/offset"
    signature = signature_of(source, data_input="n/offset")
    source.metadata_props["bnfuse.roles"] = signature.to_json()
    assert [*sampling_of(rewrite(source, sample="fs:1/4").model).places] == ["n/offset_1", "m/offset"]


def test_another_offset_gives_another_loss_and_the_same_one_the_same(sampled, ort):
    model = sampled(COMPOSITE, "bs:1").model
    losses = [
        ort(model, {name: np.array([n, 0, 0]) for name in signature_of(model).offsets})["loss"] for n in (0, 1, 0)
    ]
    assert losses[0] == losses[2] != losses[1]


@pytest.mark.parametrize("level", ["none", "bnff"])
def test_a_composite_layer(level, sampled, golden):
    golden.check(sampled(COMPOSITE, "fs:1/4,m=frs:1/8", level).model)


@pytest.mark.parametrize("body", ["flat", "nested"])
def test_a_dense_block_accumulates_scaled_gradients_and_adds_in_the_samples(body, sampled, golden):
    result = sampled(BODIES[body], "fs:1/4")
    assert result.report.unfused == ()
    left = {"Split", "Sum", "PointwiseGradScale", "PointwiseGradAccumulate"} & {*kinds(result)}
    assert left == ({"Split"} if body == "nested" else set())
    golden.check(result.model)


@pytest.mark.parametrize("kind", ["l1bn", "rbn"])
def test_other_estimates(kind, sampled, golden):
    result = sampled(COMPOSITE, kind)
    assert {entry.half for entry in result.report.unfused} == {"statistics", "gradient input"}
    golden.check(result.model)


def test_before_the_activation_the_skips_gradient_is_what_the_sample_is_added_to(sampled):
    """Sum(skip, AddSampled(p*dz)) is AddSampled(skip + p*dz): no Sum is left."""
    result = sampled(BEFORE_ACTIVATION, "fs:1/4", "bnff")
    assert "Sum" not in kinds(result)
    assert result.report.unfused == ()


def test_the_scale_stays_where_the_gradient_serves_a_skip_too(sampled):
    result = sampled(RESIDUAL, "fs:1/4")
    found = {(entry.node, entry.half): entry.reason for entry in result.report.unfused}
    for node in ("d", "f"):
        assert found[node, "gradient input"] == "out/grad/dx has other readers"


def test_branches_sink_through_their_concat(sampled):
    result = sampled(BRANCHES, "fs:1/4")
    assert "NormalizeReluMaxPool" in kinds(result)
    assert kinds(result).count("SlicePointwiseGradScale") == 2


def test_the_report_says_what_was_reached(sampled):
    report = sampled(COMPOSITE, "fs:1/3,m=bs:1").report.to_json()
    assert report["sampled"] == [
        {"node": "n", "spec": "fs:1/3", "ratio": 40 / 128, "elements": 40},
        {"node": "m", "spec": "bs:1", "ratio": 0.5, "elements": 64},
    ]
    assert sampled(COMPOSITE, "rbn").report.to_json()["sampled"][0]["ratio"] == 1.0


def test_a_layer_that_is_left_alone_keeps_its_fused_statistics(sampled):
    result = sampled(COMPOSITE, "fs:1/4,m=bn")
    assert [entry.node for entry in result.report.sampled] == ["n"]
    assert "NormalizeReluConvStatistics" in kinds(result)


def test_a_batch_norm_over_the_input_has_no_gradient_to_add_to(training, ort):
    result = rewrite(training("n = bn(x)\nr = relu(n)\nout = conv(r, 4)"), sample="fs:1/4")
    assert "AddSampled" not in kinds(result)
    assert kinds(result).count("SampledStatistics") == 1
    assert np.isfinite(ort(result.model, offsets(result.model))["loss"])


def test_a_forward_graph_without_gradients_of_a_batch_norm(training, ort):
    """Only the classifier is trained: the BN has no gradient node."""
    source = training(COMPOSITE, train=["fc/*"])
    result = rewrite(source, sample="fs:1/4")
    assert kinds(result).count("SampledStatistics") == 2
    assert "SampledGradFinalize" not in kinds(result)
    assert np.isfinite(ort(result.model, offsets(result.model))["loss"])


def test_a_batch_norm_over_a_matrix_keeps_full_statistics_and_says_why(training):
    source = training(COMPOSITE)
    a = next(value for node in source.graph for value in node.outputs if value.name == "a")
    a.shape = ir.Shape(["N", 4, 8, 8])
    result = rewrite(source, level="none", sample="fs:1/4")
    refused = next(entry for entry in result.report.passes if entry.name == "sample").refused
    assert [(refusal.node, "stay full" in refusal.reason) for refusal in refused] == [("n", True)]
    assert [entry.node for entry in result.report.sampled] == ["m"]


@pytest.mark.parametrize(
    "spec, message",
    [
        ("bs:3", "the batch has 2 samples: take at most 2"),
        ("frs:1/9999", r"node 'n' \(BatchNorm\) has one value per channel in its sample frs:1/9999"),
        ("fs:1/4,stem*=bn", r"no BatchNorm's name matches 'stem\*': they are n, m"),
    ],
)
def test_a_spec_that_does_not_fit_the_graph(spec, message, training):
    with pytest.raises(BnfuseError, match=message) as raised:
        rewrite(training(COMPOSITE), sample=spec)
    assert "\n" not in str(raised.value)


def test_removing_every_batch_norm_leaves_none_to_sample(training):
    with pytest.raises(BnfuseError, match="every BatchNorm is removed, so none is left to sample"):
        rewrite(training(COMPOSITE), remove="all", sample="vdn:1")


def test_the_zoo_without_a_spec_is_left_alone(training):
    assert "sample" not in {entry.name for entry in rewrite(training(COMPOSITE)).report.passes}


def test_resnet_and_densenet_of_the_zoo(ort):
    from bnfuse.models import build_forward

    for name, count in (("resnet20", 21), ("densenet40", 39)):
        proto = build_training_graph(build_forward(name, batch=2, image=16, classes=5))
        report = rewrite(ir.from_proto(proto), sample="fs:1/32").report
        assert len(report.sampled) == count
        halves = {entry.half for entry in report.unfused}
        assert halves <= {"gradient input", "normalise", "gradient reductions"}, report.unfused
