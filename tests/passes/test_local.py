"""Local statistics: each group of samples is normalised on its own."""

import autograd
import numpy as np
import onnx_ir as ir
import pytest
from small_networks import DENSE, RESIDUAL

from bnfuse import runtime
from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.opset.schemas import check_model
from bnfuse.passes import rewrite

LEVELS = ("none", "rcf", "mvf", "bnff", "icf")
CHAIN = """
    a = conv(x, 4, k=3, bias=1)
    n = bn(a)
    out = relu(n)
"""
REASON = "each group of samples has its own coefficients, which no fused operator takes"


def of_groups(groups, virtual=0, weight=None, whole=()):
    """Statistics of each group: of its real rows, of its virtual rows (weight 1), or of both."""

    def norm(name, x, p):
        import torch

        ys, means, variances = [], [], []
        for part in x.chunk(groups):
            rows = [part[:virtual], part[virtual:]]
            w = 0.0 if weight is None or name in whole else weight
            shares = [(share, part) for share, part in zip((w, 1 - w), rows, strict=True) if share]
            mean = sum(share * part.mean((0, 2, 3)) for share, part in shares)
            variance = sum(share * part.var((0, 2, 3), correction=0) for share, part in shares)
            ys.append(autograd.normalised(part, mean, variance, p)[0])
            means.append(mean)
            variances.append(variance)
        m, mean, variance = p.momentum, sum(means) / groups, sum(variances) / groups
        return torch.cat(ys), m * p.mean + (1 - m) * mean, m * p.variance + (1 - m) * variance

    return norm


def draw(virtual=0, groups=2):
    """What a graph is fed; the rows and labels that the network sees."""
    rng = np.random.default_rng(1)
    noise, images, labels = (
        rng.standard_normal((groups * virtual, 3, 8, 8)),
        rng.standard_normal((2, 3, 8, 8)),
        rng.integers(0, 5, 2),
    )
    marks = np.split(np.full(groups * virtual, autograd.IGNORED), groups)
    rows = [part for pair in zip(np.split(noise, groups), np.split(images, groups), strict=True) for part in pair]
    seen = [part for pair in zip(marks, np.split(labels, groups), strict=True) for part in pair]
    feeds = {"x": images, "labels": labels, **({"virtual": noise} if virtual else {})}
    return feeds, np.concatenate(rows), np.concatenate(seen)


@pytest.mark.parametrize("level", ["none", "bnff"])
def test_the_graph(level, training, golden):
    golden.check(rewrite(training(CHAIN), level=level, local_bn=1).model)


def test_the_graph_with_virtual_samples(training, golden):
    golden.check(rewrite(training(CHAIN), level="none", local_bn=1, sample="bn+vdn:2@0.25").model)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("spec", "virtual", "weight"),
    [(None, 0, None), ("bn", 0, None), ("vdn:2", 2, 1.0), ("bn+vdn:2@0.25", 2, 0.25), ("vdn:2,n1=bn", 2, 1.0)],
    ids=["local", "bn", "vdn", "mixture", "by layer"],
)
@pytest.mark.parametrize("body", [CHAIN, RESIDUAL, DENSE], ids=["chain", "residual", "dense"])
def test_gradients_are_those_of_normalising_each_group(body, spec, virtual, weight, network, oracle):
    if spec == "vdn:2,n1=bn" and body == CHAIN:
        spec = "vdn:2,n=bn"
    forward = network(body)
    feeds, rows, seen = draw(virtual)
    whole = ("n1", "n") if spec and "=" in spec else ()
    norm = of_groups(2, virtual, weight, whole)
    expected = autograd.differentiate(oracle, forward, {"x": rows}, seen, norm)
    expected["logits"] = expected["logits"][seen != autograd.IGNORED]
    model = ir.from_proto(build_training_graph(forward))
    for level in LEVELS:
        after = ir.to_proto(rewrite(model, level=level, local_bn=1, sample=spec).model)
        check_model(after)
        found = oracle.evaluate(after, feeds)
        assert {*expected} <= {*found}
        if level in ("bnff", "icf"):  # the rounding errors of the bias's gradient, of which the level makes 0
            expected = {
                name: value for name, value in expected.items() if not name.endswith(("a/bias_grad", "b/bias_grad"))
            }
        assert autograd.worst(expected, found) < 1e-12, level


@pytest.mark.torch
def test_one_group_is_the_whole_batch(network, oracle):
    forward = network(RESIDUAL)
    feeds, rows, seen = draw()
    expected = autograd.differentiate(oracle, forward, {"x": rows}, seen, autograd.full)
    after = rewrite(ir.from_proto(build_training_graph(forward)), local_bn=2).model
    assert autograd.worst(expected, oracle.evaluate(ir.to_proto(after), feeds)) < 1e-12


@pytest.mark.parametrize("spec", ["bn", "bn+vdn:1"])
@pytest.mark.parametrize("body", [RESIDUAL, DENSE], ids=["residual", "dense"])
def test_every_level_computes_the_same_in_onnxruntime(body, spec, training, onnxruntime):
    model = training(body)
    more = {"virtual": np.random.default_rng(4).standard_normal((2, 3, 8, 8)).astype(np.float32)} if "+" in spec else {}
    results = []
    for level in LEVELS:
        after = ir.to_proto(rewrite(model, level=level, local_bn=1, sample=spec).model)
        check_model(after)
        results.append(onnxruntime(after, **more))
    for found in results[1:]:
        assert autograd.worst(results[0], found) < 2e-4


def test_halves_stay_and_what_is_around_them_is_fused(training):
    result = rewrite(training(DENSE), local_bn=1)
    assert {(entry.half, entry.reason) for entry in result.report.unfused} == {
        ("statistics", REASON),
        ("normalise", REASON),
        ("gradient reductions", REASON),
        ("gradient input", REASON),
    }
    kinds = [node.op_type for node in result.model.graph]
    assert "ReluConv" in kinds
    assert sum("ReluGrad" in kind for kind in kinds) == 3


def test_a_rewrite_of_the_result_is_a_fixed_point(training):
    once = rewrite(training(DENSE), local_bn=1).model
    assert [entry.name for entry in rewrite(once).report.passes if entry.changed] == []


def test_the_report_says_what_each_group_takes(training):
    model = training(CHAIN)
    (plain,) = rewrite(model, local_bn=1).report.sampled
    assert (plain.node, plain.spec, plain.ratio, plain.elements) == ("n", "bn", 1.0, 64)
    (mixed,) = rewrite(model, local_bn=1, sample="bn+vdn:2").report.sampled
    assert (mixed.ratio, mixed.elements) == (3.0, 192)


@pytest.mark.parametrize(
    ("samples", "spec", "message"),
    [
        (3, None, "local-bn 3: groups of 3 do not divide the batch of 2: take 1, 2"),
        (4, None, "local-bn 4: groups of 4 do not divide the batch of 2: take 1, 2"),
        (0, None, "local-bn 0: groups of 0 do not divide the batch of 2: take 1, 2"),
        (1, "fs:1/4", "local-bn goes with sample specs bn, vdn:N and bn+vdn:N@W, not with 'fs:1/4'"),
        (1, "bn,n=l1bn", "local-bn goes with sample specs bn, vdn:N and bn+vdn:N@W, not with 'l1bn'"),
    ],
)
def test_what_does_not_go_together(samples, spec, message, training):
    with pytest.raises(BnfuseError) as caught:
        rewrite(training(CHAIN), local_bn=samples, sample=spec)
    assert str(caught.value) == message


def test_a_group_of_one_value_a_channel_has_no_variance(training):
    body = "a = conv(x, 4)\np = avgpool(a, k=8, s=8)\nn = bn(p)\nout = relu(n)"
    with pytest.raises(BnfuseError, match=r"node 'n' .* has one value per channel in each group"):
        rewrite(training(body), local_bn=1)


def test_statistics_of_the_batch_that_are_read_elsewhere_are_named(training):
    model = training(CHAIN)
    (norm,) = (node for node in model.graph if node.op_type == "BatchNorm")
    model.graph.outputs.append(norm.outputs[3])
    with pytest.raises(BnfuseError, match=r"node 'n' .* of the whole batch, is read elsewhere. Leave local-bn out"):
        rewrite(model, local_bn=1)


@pytest.mark.parametrize(("level", "spec"), [("none", "bn+vdn:1"), ("icf", "bn")])
def test_it_trains_compiled(level, spec, training):
    rng = np.random.default_rng(0)
    images, labels = rng.standard_normal((2, 3, 8, 8)).astype(np.float32), rng.integers(0, 5, 2)
    model = rewrite(training(RESIDUAL), level=level, sample=spec, local_bn=1).model
    step = runtime.compile_step(model, optimizer=runtime.SGD(lr=0.02), threads=1)
    losses = [step(images, labels) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert step.evaluate(images).shape == (2, 5)
