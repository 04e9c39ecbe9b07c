"""benchmarks/gpu_*.py without a GPU: packing loses nothing, the index, what is listed, verdicts on errors, curves."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from bnfuse import passes, runtime
from bnfuse.build import build_training_graph
from bnfuse.graph.training_graph import open_graph
from bnfuse.models import build_forward

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def scripts():
    """The scripts as modules, found as they find each other: beside themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        names = ("gpu_cases", "gpu_pack", "gpu_errors", "gpu_build", "gpu_check", "gpu_right", "gpu_speed")
        yield type("Scripts", (), {name[4:]: importlib.import_module(name) for name in names})


@pytest.fixture(scope="module")
def model(scripts):
    return scripts.pack.redraw(build_training_graph(build_forward("resnet20", batch=2, image=8)))


def values_of(model):
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


# -- packing -----------------------------------------------------------------------------------------------------------


def test_redrawn_parameters_keep_their_spread_and_small_ones_their_values(model, scripts):
    plain = values_of(build_training_graph(build_forward("resnet20", batch=2, image=8)))
    recipes = scripts.pack.recipes_of(model)
    found = values_of(model)
    assert recipes and all(plain[name].size >= scripts.pack.LARGE for name in recipes)
    for name, value in found.items():
        assert np.array_equal(value, plain[name]) != (name in recipes)
        if name in recipes:
            assert value.std() == pytest.approx(plain[name].std(), rel=0.1)


def test_a_packed_graph_is_small_and_whole_again_bit_for_bit(model, scripts, tmp_path):
    scripts.pack.pack_model(model, tmp_path / "resnet.train")
    found = onnx.load(scripts.pack.unpack(tmp_path / "resnet.train", tmp_path))
    assert (tmp_path / "resnet.train").stat().st_size < model.ByteSize() / 8
    assert found.SerializeToString() == model.SerializeToString()


def test_a_packed_step_runs_as_it_did(model, scripts, tmp_path):
    graph = open_graph(ir.from_proto(model), name="resnet")
    rewritten = passes.rewrite(graph.model, level="icf").model
    step = runtime.compile_step(rewritten, optimizer=runtime.SGD(0.1), threads=1)
    step.export(tmp_path / "whole.bnf")
    recipes = scripts.pack.recipes_of(model)
    scripts.pack.pack_step(tmp_path / "whole.bnf", recipes, tmp_path / "packed.step")
    again = runtime.load_step(scripts.pack.unpack(tmp_path / "packed.step", tmp_path))
    state = step.state_dict()
    assert all(np.array_equal(value, state[name]) for name, value in again.state_dict().items())
    assert again.model == step.model
    x, y = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32), np.array([1, 2])
    assert again(x, y) == step(x, y)


def test_a_step_of_other_values_is_not_packed(model, scripts, tmp_path):
    graph = open_graph(ir.from_proto(model), name="resnet")
    step = runtime.compile_step(passes.rewrite(graph.model, level="icf").model, threads=1)
    state = step.state_dict()
    name = next(iter(scripts.pack.recipes_of(model)))
    step.load_state_dict({**state, name: state[name] + 1})
    step.export(tmp_path / "whole.bnf")
    with pytest.raises(AssertionError, match="was changed"):
        scripts.pack.pack_step(tmp_path / "whole.bnf", scripts.pack.recipes_of(model), tmp_path / "packed.step")


def test_a_numpy_that_draws_other_values_is_noticed(scripts):
    crc = __import__("zlib").crc32(scripts.pack.drawn("w", (4, 4), 0.5).tobytes())
    scripts.pack.drawn("w", (4, 4), 0.5, crc)
    with pytest.raises(SystemExit, match="build the files with this version"):
        scripts.pack.drawn("w", (4, 4), 0.25, crc)


# -- what runs ---------------------------------------------------------------------------------------------------------


def entry(scripts, case="densenet121", level="icf", precision="bf16", batch=64, parts=("timing", "memory")):
    file = f"{case}-{batch}-{level}-{precision}.step"
    return scripts.cases.Entry(case, file, f"{case}-{batch}.train", case, batch, 224, level, precision, parts, {})


def test_the_index_is_added_to_and_read_back(scripts, tmp_path):
    assert scripts.cases.read_index(tmp_path) == []
    first, second = entry(scripts), entry(scripts, level="none")
    scripts.cases.write_index(tmp_path, [first])
    scripts.cases.write_index(tmp_path, [second, first])
    assert scripts.cases.read_index(tmp_path) == [first, second]


def test_entries_are_chosen_by_case_level_and_precision_and_listed_by_part(scripts, tmp_path):
    entries = [entry(scripts, precision=p, level=level) for p in ("bf16", "tf32") for level in ("none", "icf")] + [
        entry(scripts, "densenet-small", parts=("numerics",))
    ]
    args = scripts.check.arguments(["--precision", "bf16", "--case", "densenet121"])
    assert [e.name for e in scripts.check.selected(entries, args)] == ["densenet121-none-bf16", "densenet121-icf-bf16"]
    every = scripts.check.selected(entries, scripts.check.arguments([]))
    text = scripts.check.listing(every, ["timing", "numerics", "sanitizer"])
    assert text.splitlines()[1:] == ["numerics: densenet-small-icf-bf16", "sanitizer: densenet-small-icf-bf16"]
    with pytest.raises(SystemExit, match="there is no case 'vgg': there are densenet-small"):
        scripts.cases.chosen(["vgg"])


def test_another_batch_is_for_memory_alone(scripts):
    args = scripts.build.arguments(["--case", "densenet121", "--batch", "512", "--precision", "bf16"])
    (case,) = [scripts.build.narrowed(case, args) for case in scripts.cases.chosen(args.case)]
    assert (case.batch, case.parts, case.precisions, case.levels) == (512, ("memory",), ("bf16",), ("none", "icf"))
    small, large = entry(scripts), entry(scripts, batch=512)
    assert scripts.speed.is_first_of([small, large], small) and not scripts.speed.is_first_of([small, large], large)


def test_help_and_lists_need_neither_files_nor_a_gpu(tmp_path):
    def said(script, *options):
        command = [sys.executable, str(BENCHMARKS / script), *options]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout

    assert "compute-sanitizer" in said("gpu_check.py", "--help")
    assert said("gpu_check.py", "--list").splitlines()[0] == "card: the machine"
    assert "densenet121: batch 64, none, icf; bf16, tf32, fp32" in said("gpu_build.py", "--list")
    assert not list(tmp_path.iterdir())


def test_a_part_that_fails_or_has_no_time_is_a_line_and_the_next_one_starts(scripts, tmp_path, monkeypatch, capsys):
    def fails(entries, args, place, log):
        raise ValueError("no such thing")

    def slow(entries, args, place, log):
        log.check(1e9)

    monkeypatch.setattr(scripts.right, "card", fails)
    monkeypatch.setattr(scripts.right, "numerics", slow)
    monkeypatch.setattr(scripts.speed, "timing", lambda entries, args, place, log: True)
    log = scripts.check.Log(tmp_path / "check.jsonl")
    args = scripts.check.arguments(["--limit", "5"])
    found = [scripts.check.run_part(part, [], args, tmp_path, log) for part in ("card", "numerics", "timing")]
    lines = [json.loads(line) for line in (tmp_path / "check.jsonl").read_text().splitlines()]
    assert found == [False, False, True]
    assert [(line["part"], line["what"]) for line in lines] == [
        ("card", "failed"),
        ("card", "done"),
        ("numerics", "out of time"),
        ("numerics", "done"),
        ("timing", "done"),
    ]
    capsys.readouterr()


# -- verdicts ----------------------------------------------------------------------------------------------------------


def verdict(scripts, ours, torch, precision="bf16"):
    expected = {"": np.float64(2.0), "a": np.array([3.0, 4.0]), "b": np.array([0.0, 1e-9])}

    def found(error):
        return {"": np.float64(2.0 + error), "a": np.array([3.0 + 5 * error, 4.0]), "b": np.array([0.0, 1e-9])}

    return scripts.errors.compared(None, expected, found(ours), found(torch), precision)


def test_errors_are_relative_and_tiny_gradients_do_not_count_by_themselves(scripts):
    found = verdict(scripts, 0.02, 0.01)
    assert found.ours == pytest.approx(0.02) and found.torch == pytest.approx(0.01)
    assert found.loss == (pytest.approx(0.01), pytest.approx(0.005))
    assert found.tensors["a"] == (pytest.approx(0.02), pytest.approx(0.01)) and found.worst == "a"
    assert found.tensors["b"] == (0.0, 0.0)
    json.dumps(found.to_json())


@pytest.mark.parametrize(
    ("ours", "torch", "precision", "ok"),
    [
        (0.019, 0.01, "bf16", True),
        (0.05, 0.01, "bf16", False),
        (0.009, 1e-5, "bf16", True),
        (1e-4, 1e-6, "fp32", False),
        (float("nan"), 0.01, "bf16", False),
    ],
)
def test_ours_may_have_twice_torchs_error_or_what_is_enough(scripts, ours, torch, precision, ok):
    assert verdict(scripts, ours, torch, precision).ok is ok


@pytest.mark.torch
def test_the_reference_is_float64(scripts, model):
    graph = open_graph(ir.from_proto(model), name="resnet")
    from bnfuse.graph.feeds import draw_feeds

    feeds = draw_feeds(graph, np.random.default_rng(0))
    expected = scripts.errors.reference_gradients(graph, feeds)
    assert expected.keys() == {"", *graph.signature.gradients}
    assert all(value.dtype == np.float64 for value in expected.values())
    rewritten = passes.rewrite(open_graph(ir.from_proto(model), name="resnet").model, level="icf").model
    step = runtime.compile_step(rewritten, threads=1)
    ours = scripts.right.our_gradients(step, feeds)
    found = scripts.errors.compared(graph, expected, ours, ours, "fp32")
    assert found.ok and found.ours < 1e-5 and found.loss[0] < 1e-6


def test_curves_are_compared_step_by_step(scripts):
    expected = np.linspace(2, 1, 100)
    found = scripts.right.apart(expected + np.where(np.arange(100) == 50, 0.25, 0.01), expected)
    assert found["largest_gap"] == pytest.approx(0.25) and found["gap_first_10"] == pytest.approx(0.01)
    assert "largest gap 2.50e-01" in scripts.right.gap_text(found)


def test_runs_with_one_seed_are_told_apart_by_any_bit_of_losses_or_state(scripts, model):
    graph = open_graph(ir.from_proto(model), name="resnet")
    rewritten = passes.rewrite(graph.model, level="icf").model
    step = runtime.compile_step(rewritten, optimizer=runtime.SGD(0.1, 0.9), threads=1)
    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((2, 2, 3, 8, 8)).astype(np.float32), "y": rng.integers(0, 10, (2, 2))}
    runs = [scripts.right.our_losses(step, data, {"lr": lr}) for lr in (0.1, 0.1, 0.2)]
    assert runs[0][1] == runs[1][1] != runs[2][1] and len(runs[0][0]) == 2
