"""Removal: BatchNorms leave the graph, and what stays is valid, fused and right."""

import collections
import json

import autograd
import numpy as np
import onnx_ir as ir
import pytest
from small_networks import DENSE

from bnfuse import api, passes, runtime
from bnfuse.build import build_training_graph
from bnfuse.cli import main
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.signature import signature_of
from bnfuse.models import build_forward
from bnfuse.opset.schemas import check_model
from bnfuse.passes import rewrite
from bnfuse.passes.removal.placements import batch_norm_list, select

PARAMETERS = ("scale_grad", "bias_grad")
LEVELS = ("none", "rcf", "mvf", "bnff", "icf")
CHAIN = """
    a = conv(x, 4, k=3, bias=1)
    n = bn(a)
    r = relu(n)
    c = conv(r, 4, k=3)
    m = bn(c)
    out = relu(m)
"""
RESIDUAL = """
    a = conv(x, 4)
    n1 = bn(a)
    r = relu6(n1)
    p = maxpool(r, k=3)
    b = conv(p, 4, k=3, bias=1)
    n2 = bn(b)
    s = add(n2, p)
    u = relu(s)
    c = conv(u, 4, k=3, g=2)
    n3 = bn(c)
    e = conv(p, 4)
    n4 = bn(e)
    g = add(n3, n4)
    out = relu(g)
"""


def vgg(name, batch=2, image=32):
    return ir.from_proto(build_training_graph(build_forward(name, batch=batch, image=image, classes=5, hidden=16)))


def draw(batch=2, seed=1):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((batch, 3, 8, 8)), rng.integers(0, 5, batch)


def without(names, kept_affine):
    """BatchNorms of these names do nothing, or only scale and shift."""

    def norm(name, x, p):
        if name not in names:
            return autograd.full(name, x, p)
        return (autograd.wide(p.scale) * x + autograd.wide(p.bias) if kept_affine else x), p.mean, p.variance

    return norm


@pytest.mark.parametrize("kept_affine", [False, True], ids=["gone", "affine"])
def test_the_graph_without_a_batch_norm(kept_affine, training, golden):
    golden.check(rewrite(training(CHAIN), level="none", remove="1", keep_affine=kept_affine).model)


@pytest.mark.parametrize("kept_affine", [False, True], ids=["gone", "affine"])
def test_what_stays_is_fused(kept_affine, training, golden):
    golden.check(rewrite(training(CHAIN), level="icf", remove="1", keep_affine=kept_affine).model)


@pytest.mark.torch
@pytest.mark.parametrize("kept_affine", [False, True], ids=["gone", "affine"])
@pytest.mark.parametrize(
    ("body", "names"),
    [(CHAIN, "n"), (CHAIN, "nm"), (RESIDUAL, ("n2", "n4")), (RESIDUAL, ("n1", "n3")), (DENSE, ("n1", "n3"))],
    ids=["chain", "all", "residual", "branch", "dense"],
)
def test_gradients_are_those_of_the_network_without(body, names, kept_affine, network, oracle):
    forward = network(body)
    images, labels = draw()
    expected = autograd.differentiate(oracle, forward, {"x": images}, labels, without(names, kept_affine))
    model = ir.from_proto(build_training_graph(forward))
    for level in LEVELS:
        after = ir.to_proto(rewrite(model, level=level, remove=",".join(names), keep_affine=kept_affine).model)
        check_model(after)
        found = oracle.evaluate(after, {"x": images, "labels": labels})
        lost = {f"{n}/{p}" for n in names for p in ("new_mean", "new_var", *(() if kept_affine else PARAMETERS))}
        assert {*expected} - {*found} <= lost
        assert {*found} & lost == set()
        assert autograd.worst(expected, found) < 1e-12


@pytest.mark.parametrize("kept_affine", [False, True], ids=["gone", "affine"])
@pytest.mark.parametrize("body", [RESIDUAL, DENSE], ids=["residual", "dense"])
def test_every_level_computes_the_same_in_onnxruntime(body, kept_affine, training, onnxruntime):
    """float32, and every input of the file is fed: none is left over."""
    model = training(body)
    results = []
    for level in LEVELS:
        rewritten = rewrite(model, level=level, remove="2-3", keep_affine=kept_affine)
        check_model(ir.to_proto(rewritten.model))
        results.append(onnxruntime(ir.to_proto(rewritten.model)))
    for found in results[1:]:
        assert {*found} == {*results[0]}
        assert autograd.worst(results[0], found) < 2e-4


@pytest.mark.parametrize("level", LEVELS)
def test_vgg_without_batch_norms_is_the_plain_network(level):
    """The same operators, at every level, as in the network that was built without."""
    plain, removed = rewrite(vgg("vgg11-plain"), level=level), rewrite(vgg("vgg11"), level=level, remove="all")
    counts = [collections.Counter(node.op_type for node in r.model.graph) for r in (plain, removed)]
    assert counts[0] == counts[1]
    assert len(removed.report.removed) == 8


@pytest.mark.parametrize("kept_affine", [False, True], ids=["gone", "affine"])
def test_vgg_with_the_published_placement_leaves_nothing_unfused(kept_affine):
    result = rewrite(vgg("vgg11"), remove="paper", keep_affine=kept_affine)
    assert [entry.index for entry in result.report.removed] == [1, 2, 3, 4, 6, 8]
    assert result.report.unfused == ()
    counts = collections.Counter(node.op_type for node in result.model.graph)
    assert counts["BatchNormFinalize"] == 2
    assert counts["NormalizeReluMaxPool"] == (5 if kept_affine else 0)
    assert counts["NormalizeReluConvBias" if kept_affine else "NormalizeReluConvBiasRelu"] == (3 if kept_affine else 2)


def test_roles_follow(training):
    model = training(CHAIN)
    for kept_affine in (False, True):
        signature = signature_of(rewrite(model, remove="2", keep_affine=kept_affine).model)
        assert {*signature.running} == {"n/mean", "n/var"}
        assert ({"m/scale", "m/bias"} <= {*signature.trainable}) is kept_affine
        assert {*signature.gradients} == {*signature.trainable}


def test_a_bias_before_a_removed_batch_norm_stays(training):
    model = training(CHAIN)
    kept, dropped = rewrite(model, remove="1").model, rewrite(model, remove="2").model
    biased = [[len(node.inputs) > 2 for node in m.graph if node.name == "a"] for m in (kept, dropped)]
    assert biased == [[True], [False]]


def test_a_rewrite_of_the_rest_is_a_fixed_point(training):
    once = rewrite(training(RESIDUAL), remove="1,4", keep_affine=True).model
    assert [entry.name for entry in rewrite(once).report.passes if entry.changed] == []


def test_a_batch_norm_whose_result_is_an_output_leaves_a_copy(training, onnxruntime):
    model = training(CHAIN)
    model.graph.outputs.append(next(node for node in model.graph if node.name == "n").outputs[0])
    found = onnxruntime(ir.to_proto(rewrite(model, remove="1").model))
    assert found["n"].shape == (2, 4, 8, 8)


def test_it_trains_compiled(training):
    images, labels = (array.astype(kind) for array, kind in zip(draw(), (np.float32, np.int64), strict=True))
    losses = []
    for level in ("none", "icf"):
        after = passes.rewrite(training(DENSE), level=level, remove="1,3", keep_affine=True).model
        step = runtime.compile_step(after, optimizer=runtime.SGD(lr=0.05), threads=1)
        losses.append([step(images, labels) for _ in range(3)])
        evaluated = step.evaluate(images)
        assert np.isfinite(evaluated).all()
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_the_list_of_batch_norms(training):
    norms = batch_norm_list(training(DENSE))
    assert [(n.index, n.node, n.channels, n.elements) for n in norms] == [
        (1, "n1", 4, 2 * 4 * 64),
        (2, "n2", 7, 2 * 7 * 64),
        (3, "n3", 9, 2 * 9 * 64),
    ]
    assert norms[0].bytes == 2048


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("1,4", [1, 4]),
        ("2-3", [2, 3]),
        ("n[12],4", [1, 2, 4]),
        ("all", [1, 2, 3, 4]),
        ("all-except:1,3-4", [2]),
        ("all-except:n*", []),
        ([4, 1], [1, 4]),
        ([], []),
    ],
)
def test_lists(text, chosen, training):
    assert [norm.index for norm in select(training(RESIDUAL), text)] == chosen


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5", "there is no BatchNorm 5: the graph has 4, numbered from 1"),
        ("0", "there is no BatchNorm 0: the graph has 4, numbered from 1"),
        ("2-9", "there is no BatchNorm 9: the graph has 4, numbered from 1"),
        ("3-2", "the range 3-2 of BatchNorms runs backwards: write it as 2-3"),
        ("1,,2", "the list of BatchNorms has an empty entry"),
        ("", "the list of BatchNorms has an empty entry"),
        ("1" * 5000, "no BatchNorm is named '1"),
        ("layer*", "no BatchNorm is named 'layer*' (the first is 'n1')"),
        ("paper", "of 4 BatchNorms and 2 residual Adds, is none of them: list the ones to remove by number"),
    ],
)
def test_wrong_lists(text, message, training):
    with pytest.raises(BnfuseError) as caught:
        rewrite(training(RESIDUAL), remove=text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "keep"), [("vgg11", [5, 7]), ("vgg16", [5, 7, 8, 13]), ("vgg19", [5, 8, 11, 16])])
def test_published_placements_of_vgg(name, keep):
    model = vgg(name)
    assert [n.index for n in select(model, "paper")] == [n.index for n in batch_norm_list(model) if n.index not in keep]


def test_the_published_placement_of_resnet18_counts_the_main_path():
    model = ir.from_proto(build_training_graph(build_forward("resnet18", batch=2, image=32, classes=5)))
    gone = [norm.node for norm in select(model, "paper")]
    assert len(gone) == 8
    stem = ["stem/norm", "stage1/block1/norm1", "stage1/block2/norm1", "stage1/block2/norm2", "stage2/block2/norm1"]
    assert {*stem} <= {*gone}
    assert sum("shortcut" in name for name in gone) == 3


def test_a_rewritten_graph_has_none_to_remove(training):
    with pytest.raises(BnfuseError, match="there is no BatchNorm to remove"):
        rewrite(rewrite(training(CHAIN)).model, remove="1")


def test_keep_affine_alone_is_refused(training):
    with pytest.raises(BnfuseError, match="say with remove which they are"):
        rewrite(training(CHAIN), keep_affine=True)


def test_parameters_that_others_read_are_named(training):
    model = training(CHAIN)
    first, second = (node for node in model.graph if node.op_type == "BatchNorm")
    second.replace_input_with(1, first.inputs[1])
    with pytest.raises(BnfuseError, match=r"node 'n' .* reads 'n/scale' too"):
        rewrite(model, remove="1")


def test_decay_is_the_weight_of_a_batch(training, onnxruntime):
    model = training(CHAIN)
    for level in ("none", "icf"):
        before, after = (onnxruntime(ir.to_proto(rewrite(model, level=level, decay=a).model)) for a in (0.5, 1.0))
        np.testing.assert_allclose(before["n/new_mean"], after["n/new_mean"] / 2, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(before["n/new_var"], 0.5 + after["n/new_var"] / 2, rtol=1e-5)


@pytest.mark.parametrize("value", [0, -0.1, 1.5, float("nan")])
def test_decay_out_of_range(value, training):
    with pytest.raises(BnfuseError, match="give a number above 0 and at most 1"):
        rewrite(training(CHAIN), decay=value)


def test_the_command_line(training, tmp_path, capsys):
    source, result = str(tmp_path / "train.onnx"), str(tmp_path / "fused.onnx")
    api.save(training(RESIDUAL), source)
    options = ["--remove", "all-except:2", "--keep-affine", "--decay", "0.25"]
    assert main(["rewrite", source, "-o", result, *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [entry["index"] for entry in report["removed"]] == [1, 3, 4]
    assert all(entry["kept_affine"] for entry in report["removed"])
    (finalize,) = (node for node in api.load(result).graph if node.op_type == "BatchNormFinalize")
    assert finalize.attributes["momentum"].as_float() == 0.75
    assert main(["rewrite", source, "-o", result, *options]) == 0
    assert "scale and bias" in capsys.readouterr().out
    assert main(["rewrite", source, "-o", result, "--remove", "9"]) == 2
    assert capsys.readouterr().err == "bnfuse: there is no BatchNorm 9: the graph has 4, numbered from 1\n"


def test_a_graph_of_others_keeps_what_it_was_told(training):
    """GraphSignature that only the call states are those of the result."""
    model = training(CHAIN)
    del model.metadata_props["bnfuse.roles"]
    assert "m/scale" not in signature_of(api.rewrite(model, remove=[2], data_input="x").model).trainable
