"""Commands on sampled graphs: rewrite, verify, diff."""

import json
from pathlib import Path

import numpy as np
import pytest

import bnfuse
from bnfuse.build.named import build_model
from bnfuse.cli import main
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.feeds import draw_feeds
from bnfuse.graph.sampling import sampling_of
from bnfuse.graph.training_graph import open_graph


@pytest.fixture(scope="module")
def source():
    return build_model("densenet40", zoo={"batch": 2, "image": 16, "growth": 4, "depth": 2}).model


@pytest.fixture(scope="module")
def plain(source):
    return bnfuse.rewrite(source, level="none", sample="fs:1/8")


@pytest.fixture(scope="module")
def fused(source):
    return bnfuse.rewrite(source, sample="fs:1/8")


@pytest.mark.parametrize("runtime, steps", [("ort", 2), ("tvm", 0)])
def test_verify_says_yes_to_two_levels(runtime, steps, plain, fused):
    found = bnfuse.verify(plain, fused, runtime=runtime, steps=steps, threads=1)
    assert found.equal, found


def test_verify_says_no_to_another_sample(source, plain):
    other = bnfuse.rewrite(source, sample="fs:1/16")
    assert not bnfuse.verify(plain, other).equal


def test_verify_does_not_compare_with_full_statistics(source, fused):
    with pytest.raises(BnfuseError, match=r"has no input '.*/offset', which after draws: rewrite both with one"):
        bnfuse.verify(source, fused)


def test_a_graph_without_bounds_of_its_offsets_is_refused(fused):
    model = fused.model.clone()
    del model.metadata_props["bnfuse.sampling"]
    with pytest.raises(BnfuseError, match=r"where input '.*/offset' may lie is not said: rewrite the graph anew"):
        draw_feeds(open_graph(model), np.random.default_rng(0))


@pytest.mark.parametrize(
    "kind, place, message",
    [
        ("boxes", [0, 0, 0, 10**30, 0, 0], "is in no map"),
        ("boxes", [0, 2, 0, 0, 1, 0], "is in no map"),
        ("boxes", [0, 0, 0], "no list of 6 integers"),
        ("points", [8, 0, 1 << 62], "is in no map"),
        ("points", [8, 0, 4], "is in no map"),
        ("points", [8, 0, 16], "not what is drawn"),
    ],
)
def test_damaged_bounds_are_refused(kind, place, message, fused):
    model = fused.model.clone()
    said = json.loads(model.metadata_props["bnfuse.sampling"])
    name = said["order"][0]
    del said["boxes"][name]
    said[kind][name] = place
    model.metadata_props["bnfuse.sampling"] = json.dumps(said)
    with pytest.raises(BnfuseError, match=message):
        draw_feeds(open_graph(model), np.random.default_rng(0))


def test_feeds_lie_within_their_bounds(fused):
    graph = open_graph(fused)
    drawn = sampling_of(graph.model)
    for seed in range(5):
        feeds = draw_feeds(graph, np.random.default_rng(seed))
        for name in graph.signature.offsets:
            drawn.check(name, feeds[name])


def test_diff_tells_samples_from_sweeps(source, fused):
    found = bnfuse.diff(source, fused)
    for fate in found.batch_norms:
        assert {place.where for place in fate.statistics} == {"sample"}, fate.name
        assert {place.where for place in fate.gradient_input} == {"sample", "epilogue"}, fate.name
        assert fate.fused


def test_diff_counts_the_bytes_of_samples_only(source, fused):
    """As much as without samples, but the input halves: they are read and written on an eighth of each map."""
    full = bnfuse.diff(source, bnfuse.rewrite(source)).traffic_after.total.bytes
    sampled = bnfuse.diff(source, fused).traffic_after
    assert 0.9 * full < sampled.total.bytes < 1.1 * full


def test_inspect_counts_what_virtual_rows_take(source):
    found = bnfuse.inspect(bnfuse.rewrite(source, sample="vdn:3"))
    shapes = {layer.op: layer.output_shape for layer in found.layers}
    assert shapes["Gemm"] == (5, 10)
    assert shapes["SoftmaxCrossEntropyLoss"] == (5, 10)


def test_estimates_are_sweeps_of_their_own(source):
    found = bnfuse.diff(source, bnfuse.rewrite(source, sample="rbn"))
    assert all({place.where for place in fate.statistics} == {"own"} for fate in found.batch_norms)
    assert all({place.where for place in fate.gradient_input} == {"own"} for fate in found.batch_norms)


def test_the_command(tmp_path, capsys):
    train, out, report = (str(tmp_path / name) for name in ("train.onnx", "sampled.onnx", "report.json"))
    assert main(["build", "resnet20", "--batch", "2", "--image", "8", "-o", train]) == 0
    assert main(["rewrite", train, "-o", out, "--sample", "fs:1/4,*1=bn", "--report", report]) == 0
    assert "elements a channel" in capsys.readouterr().out
    entries = json.loads(Path(report).read_text(encoding="utf-8"))["sampled"]
    assert entries and {*entries[0]} == {"node", "spec", "ratio", "elements"}
    assert open_graph(out).signature.offsets
    assert main(["rewrite", train, "-o", out, "--sample", "fs:1/4,nothing*=bn"]) == 2
    assert main(["rewrite", train, "-o", out, "--sample", "every:3"]) == 2
    assert "'every:3' is none: a spec is ns:4" in capsys.readouterr().err
