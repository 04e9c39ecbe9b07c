"""The benchmark: what can be asked for, quiet before timing, what it reports. No test asks how long a step takes."""

import dataclasses
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

import bnfuse
from bnfuse import api
from bnfuse.benchmarking import candidates, choices, compiling, memory, results, run
from bnfuse.benchmarking.plot import plot
from bnfuse.benchmarking.profiles import Profile, rows_of
from bnfuse.cli import main
from bnfuse.core.errors import BnfuseError
from bnfuse.core.times import Times, summarize
from bnfuse.graph.feeds import draw_feeds
from bnfuse.measuring import children, idle, limits
from bnfuse.measuring.limits import Limits
from bnfuse.passes import variants
from bnfuse.passes.variants import Variant
from bnfuse.runtime.program.program import Work
from bnfuse.runtime.session import LaunchTime

LIMITS = Limits({"numpy": 100e9, "torch": 50e9}, 10e9)
RESULT_KEYS = {
    *("name", "min_s", "median_s", "forward_min_s", "backward_min_s", "peak_bytes"),  # stable
    *("forward_median_s", "backward_median_s", "setup_peak_bytes", "rewrite_s", "compile_s", "compile_warm_s"),
    *("level", "pool_first", "sample", "steps_s", "settle_s", "reserved_bytes", "driver_bytes"),
}


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """A training file with a pooling after a 1x1 convolution, small."""
    path = tmp_path_factory.mktemp("bench") / "train.onnx"
    network = ["densenet40", "--set", "growth=4", "--set", "depth=1", "--batch", "2", "--image", "8", "--channels", "1"]
    assert main(["build", *network, "-o", str(path)]) == 0
    return path


# -- what can be asked for ------------------------------------------------------------------------------------------


def test_levels_come_as_comma_lists_or_repeated_and_count_once():
    expected = (Variant("none", False), Variant("icf", True))
    assert variants.variants(["none,icf"]) == variants.variants(["none", "icf"]) == expected
    assert variants.variants(["icf, none", "icf", "icf+pool-first"]) == expected[::-1]


def test_a_variant_is_named_by_its_level_and_by_the_option_where_it_is_not_the_levels_own():
    found = variants.variants(["none,none+pool-first,bnff+no-pool-first", "icf+no-pool-first,icf+pool-first"])
    assert [v.name for v in found] == ["none", "none+pool-first", "bnff", "icf+no-pool-first", "icf"]
    assert [v.pool_first for v in found] == [False, True, False, False, True]
    assert all(variants.variant(v.name) == v for v in found)


def test_each_level_comes_also_with_each_sampling():
    found = variants.variants(["none,icf"], ["fs:1/32", "bs:4"])
    names = ["none", "icf", "none fs:1/32", "icf fs:1/32", "none bs:4", "icf bs:4"]
    assert [v.name for v in found] == names


@pytest.mark.parametrize("text", ["full", "icf+", "icf+pools", "none,what", "+pool-first"])
def test_an_unknown_level_is_one_line(train, capsys, text):
    assert main(["bench", str(train), "--level", text]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "none, rcf, mvf, bnff, icf" in line and "+pool-first" in line


def test_baselines_come_as_comma_lists_or_repeated_and_an_unknown_one_is_one_line(train, capsys):
    assert choices.baselines(["ort,torch", "torch-cl", "ort"]) == ("ort", "torch", "torch-cl")
    assert choices.baselines(["torch-compile"]) == ("torch-compile",)
    assert main(["bench", str(train), "--against", "ort,jax"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "'jax'" in line and "ort, torch, torch-cl, torch-compile" in line


def test_torch_that_is_not_there_is_one_line_before_anything_is_compiled(train, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(run, "compile_variant", lambda *_: pytest.fail("compiled first"))
    assert main(["bench", str(train), "--level", "icf", "--against", "torch"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "torch is not installed" in line and "pip install" in line


def test_the_two_pool_first_settings_of_a_level_give_different_graphs(train):
    graph = bnfuse.graph.training_graph.open_graph(train)
    poolings = [
        variants.rewrite_variant(graph, variants.variant(name)).report.to_json()["passes"][0]["name"]
        for name in ("none+pool-first", "icf", "icf+no-pool-first")
    ]
    assert poolings[:2] == ["pool-first"] * 2 and poolings[2] != "pool-first"


# -- quiet -----------------------------------------------------------------------------------------------------------

STAT = """cpu  1000 0 0 0 0 0 0 0 0 0
cpu0 100 10 20 5000 300 1 2 3 50 5
cpu1 200 0 0 5000 300 0 0 0 0 0
cpu2 999 0 0 0 0 0 0 0 0 0
intr 12345
"""


def test_busy_time_is_that_of_our_processors_without_idle_iowait_and_guests_twice():
    assert idle.busy_seconds(STAT, frozenset({0, 1}), 100) == pytest.approx((100 + 10 + 20 + 1 + 2 + 3 + 200) / 100)
    assert idle.busy_seconds(STAT, frozenset({1}), 100) == 2.0


def test_what_others_use_leaves_out_our_own():
    before, after = idle.Sample(0, 10, 4), idle.Sample(2, 13, 6)
    assert idle.others_between(before, after) == 0.5
    assert idle.others_between(before, idle.Sample(2, 11, 6)) == 0  # hundredths are rounded: never less than nothing
    assert idle.others_between(None, after) is None


def fake_samples(*others):
    """A clock that goes by a second a sample; others use so many cores in each."""
    busy = itertools.accumulate((0, *others))
    return iter([idle.Sample(second, total + 2 * second, 2 * second) for second, total in enumerate(busy)])


def test_waiting_ends_with_the_first_quiet_second():
    samples = fake_samples(1.5, 0.8, 0.05, 0.0)
    slept = []
    found = idle.wait_for_idle(60, sample=lambda: next(samples), sleep=slept.append)
    assert found.is_idle and found.waited == 3 and found.others == pytest.approx(0.05)
    assert len(slept) == 3


def test_waiting_ends_with_patience_and_says_so():
    samples, said = fake_samples(*[1.2] * 10), []
    found = idle.wait_for_idle(3, said.append, sample=lambda: next(samples), sleep=lambda _: None)
    assert not found.is_idle and found.waited == 3
    assert said == ["the machine is not idle: others use 1.2 cores; measuring all the same"]


def test_a_system_that_does_not_tell_is_not_waited_for():
    found = idle.wait_for_idle(60, sample=lambda: None, sleep=lambda _: None)
    assert found.is_idle and found.others is None


def test_the_machine_can_be_sampled_here():
    before = idle.take_sample()
    sum(range(10**6))
    after = idle.take_sample()
    assert after.clock > before.clock and after.own > before.own and after.busy >= before.busy > 0


def test_settling_waits_until_own_threads_sleep():
    clock, spent = itertools.count(0, 0.02), iter([0.0, 0.02, 0.02, 0.04, 0.04, 0.0401])
    waits = []
    idle.settle(1.0, 0.02, spent=lambda: next(spent), clock=lambda: next(clock), sleep=waits.append)
    assert len(waits) == 3
    clock, busy = itertools.count(0, 0.3), itertools.count()
    assert idle.settle(1.0, 0.02, spent=lambda: next(busy), clock=lambda: next(clock), sleep=waits.append) > 1.0


# -- sums ------------------------------------------------------------------------------------------------------------


def test_a_summary_has_minima_and_medians_of_the_whole_and_of_both_parts():
    found = summarize([Times(5, 2), Times(4, 1.5), Times(9, 3)])
    assert (found.min_s, found.median_s) == (4, 5)
    assert (found.forward_min_s, found.forward_median_s) == (1.5, 2)
    assert (found.backward_min_s, found.backward_median_s) == (2.5, 3)
    assert dataclasses.astuple(summarize([Times(5, 2), Times(4, 3)], apart=True))[4:] == (2, 2.0)
    lost = summarize([Times(1, 2), Times(2, 2.5)], apart=True)  # forward took as long as the whole step
    assert (lost.forward_min_s, lost.backward_min_s, lost.backward_median_s) == (2, None, None)


def test_a_floor_is_the_longer_of_computing_and_moving():
    assert LIMITS.library == "numpy"
    assert LIMITS.floor(int(100e9), 10) == 1 and LIMITS.floor(100, int(20e9)) == 2


def launch(phase, seconds, op="Conv", flops=0, moved=0):
    return LaunchTime(phase, "node", "kernel", seconds, Work(f"{op} 1x1", op, "1x2x3x4", flops, moved))


def test_a_profile_adds_the_shortest_times_of_like_launches():
    first = [launch("forward", 3.0, flops=int(100e9)), launch("forward", 2.0, flops=int(100e9)), launch("update", 1.0)]
    second = [launch("forward", 4.0, flops=int(100e9)), launch("forward", 1.5, flops=int(100e9)), launch("update", 0.5)]
    rows = rows_of([first, second], LIMITS)
    assert [(r.phase, r.launches, r.seconds) for r in rows] == [("forward", 2, 4.5), ("update", 1, 0.5)]
    assert rows[0].flops_per_s == pytest.approx(200e9 / 4.5) and rows[0].floor_s == 2
    profile = Profile("icf", rows, 0.5, LIMITS)
    assert profile.total.seconds == 5 and [row.phase for row in profile.phases] == ["forward", "update"]
    found = profile.to_json()
    assert [row["share"] for row in found["rows"]] == [0.9, 0.1] and found["floor_s"] == 2
    text = "\n".join(map(str, profile.sections()))
    assert "outside them 500.00 ms (9.1 %)" in text and "2.50 times as long" in text


def test_a_long_profile_is_summed_up_at_its_end():
    rows = rows_of([[launch("forward", 1.0, op=f"Op{i}", moved=1000) for i in range(100)]], LIMITS)
    lines = str(Profile("icf", rows, 0.0, LIMITS).sections()[1]).splitlines()
    assert len(lines) < 50 and "60 more" in lines[-1] and "100.0 %" in lines[-1]


def test_a_step_without_work_in_it_says_what_to_do():
    with pytest.raises(BnfuseError, match="compile the model again"):
        rows_of([[LaunchTime("forward", "node", "kernel", 1.0)]], LIMITS)


# -- the whole -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(train):
    """A benchmark of everything that is quick."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "measured_limits", lambda _: LIMITS)
        return api.bench(
            train, levels=["none,icf+no-pool-first"], against=["ort"], repetitions=2, wait=0, profile=True, threads=1
        )


def test_bench_has_all_candidates_in_order_with_all_keys(found):
    data = found.to_json()
    assert [r["name"] for r in data["results"]] == ["none", "icf+no-pool-first", "ort"]
    for result in data["results"]:
        assert result.keys() == RESULT_KEYS
        assert 0 < result["min_s"] <= result["median_s"] and len(result["steps_s"]) == 2
        assert 0 < result["forward_min_s"] < result["min_s"] or result["name"] == "ort"
        assert 0 < result["peak_bytes"] <= result["setup_peak_bytes"]
        assert result["compile_s"] is None
    assert [(r["level"], r["pool_first"]) for r in data["results"]] == [("none", False), ("icf", False), (None, None)]


def test_ratios_are_those_of_ours_to_everything_else(found):
    a, b, ort = found.results
    pairs = [(r.name, r.against) for r in found.ratios]
    assert pairs == [(a.name, b.name), (a.name, "ort"), (b.name, a.name), (b.name, "ort")]
    assert found.ratios[1].median == ort.times.median_s / a.times.median_s
    assert found.ratios[3].peak == ort.peak_bytes / b.peak_bytes
    assert found.best in (a, b)


def test_the_machine_is_described(found):
    machine = found.machine
    assert machine["threads"] == 1 and machine["cores"] >= 1 and machine["cpu"] and machine["cpu_model"]
    assert {"bnfuse", "tvm", "onnx", "onnxruntime", "numpy"} <= machine["versions"].keys()
    assert machine["spinning"].keys() == {"bnfuse", "ort"}
    assert machine["spinning"]["ort"]["session.force_spinning_stop"] == "1"
    assert machine["others_cpu_before"] >= 0 and machine["others_cpu_during"] >= 0


def test_a_profile_of_each_of_ours_has_every_launch(found):
    none, icf = found.to_json()["profile"]
    assert (none["name"], icf["name"]) == ("none", "icf+no-pool-first")
    for profile in (none, icf):
        assert sum(row["launches"] for row in profile["rows"]) == profile["launches"]
        assert sum(row["share"] for row in profile["rows"]) == pytest.approx(1)
        assert sum(row["flops"] for row in profile["kinds"]) == profile["flops"] > 0
        assert [row["phase"] for row in profile["phases"]] == ["forward", "backward", "update"]
        seconds = [row["seconds"] for row in profile["rows"]]
        assert seconds == sorted(seconds, reverse=True)
        assert profile["limits"]["flops_per_s"] == 100e9 and profile["outside_s"] > 0
        assert profile["others_cpu_during"] >= 0
    assert icf["launches"] < none["launches"] and icf["bytes"] < none["bytes"]
    assert icf["flops"] == none["flops"]  # without pool-first the convolutions are the same


def test_text_and_json_say_the_same(found):
    text = str(found)
    for part in ("is so many times as fast", "Profile of none", "Kinds", "Phases", "Machine", "icf+no-pool-first"):
        assert part in text
    json.dumps(found.to_json(), allow_nan=True)


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_plot_is_written(found, tmp_path, kind):
    plot(found, tmp_path / f"bench.{kind}")
    data = (tmp_path / f"bench.{kind}").read_bytes()
    assert data.startswith(b"\x89PNG") if kind == "png" else b"<svg" in data


def test_a_plot_of_no_known_kind_or_without_matplotlib_is_one_line_before_any_work(
    train, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(run, "measure", lambda *_: pytest.fail("worked first"))
    assert main(["bench", str(train), "--plot", str(tmp_path / "bench.txt")]) == 2
    assert "a plot ends in .png, .svg, .pdf" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["bench", str(train), "--plot", str(tmp_path / "bench.png")]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "pip install 'bnfuse[plot]'" in line


def test_the_command_passes_everything_on(train, capsys, monkeypatch):
    asked = []

    def fake(graph, plan, **_):
        asked.append(plan)
        return results.Benchmark(graph.name, (), {}, 1)

    monkeypatch.setattr(run, "run_benchmark", fake)
    options = ["--level", "icf,none", "--against", "ort", "--against", "torch", "--wait", "5", "--profile", "--json"]
    assert main(["bench", str(train), *options, "--compile-time", "--threads", "1", "--repetitions", "3"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data.keys() == {"model", "repetitions", "results", "ratios", "machine", "profile"}
    (plan,) = asked
    assert ([v.name for v in plan.variants], plan.baselines) == (["icf", "none"], ("ort", "torch"))
    assert (plan.wait, plan.profile, plan.compile_time, plan.repetitions, plan.threads) == (5, True, True, 3, 1)


def test_nothing_to_measure_is_refused(train):
    with pytest.raises(BnfuseError, match="name a level or a baseline"):
        api.bench(train, levels=[])


def test_steps_that_are_timed_do_not_learn_the_batch_by_heart(train):
    """Else a small network's gradients become subnormal, and the later steps many times as slow."""
    graph = bnfuse.graph.training_graph.open_graph(train)
    feeds = draw_feeds(graph, np.random.default_rng(0))
    step = candidates.compile_variant(graph, Variant("icf", True), 1)
    before = step.state_dict()
    for _ in range(3):
        candidates.CompiledCandidate("icf", step, feeds).run()
    after = step.state_dict()
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert moved == set(graph.signature.running)


@pytest.mark.torch
def test_torchs_baselines_do_not_learn_either(train):
    graph = bnfuse.graph.training_graph.open_graph(train)
    step = candidates.make_baseline(graph, "torch", draw_feeds(graph, np.random.default_rng(0)), 1)
    before = [parameter.detach().clone() for parameter in step.module.parameters()]
    step.run()
    step.run()
    assert all((old == new).all() for old, new in zip(before, step.module.parameters(), strict=True))


@pytest.mark.torch
def test_torchs_baselines_are_measured_in_the_same_way(train):
    found = api.bench(train, levels=[], against=["torch-cl,torch"], repetitions=1, warm_up=1, wait=0, threads=1)
    assert [r.name for r in found.results] == ["torch-cl", "torch"]
    for result in found.results:
        assert 0 < result.times.forward_min_s < result.times.min_s and result.peak_bytes > 0
    assert found.machine["spinning"].keys() == {"bnfuse", "torch"}
    assert found.best in found.results and found.ratios == []


# -- processes of their own ------------------------------------------------------------------------------------------


def test_what_goes_wrong_in_another_process_is_one_line_here(tmp_path):
    with pytest.raises(BnfuseError, match=r"missing\.onnx") as error:
        memory.measured_peak(tmp_path / "missing.onnx", "ort", 0, 1)
    assert "\n" not in str(error.value) and "process of its own" not in str(error.value)
    with pytest.raises(BnfuseError, match=r"memory failed in a process of its own: .*KeyError"):
        children.ask("bnfuse.benchmarking.memory", {})


def test_compiling_is_measured_twice_with_one_empty_cache_folder(train, monkeypatch):
    asked = []

    def fake(module, request, environment):
        asked.append((module, request, dict(environment)))
        return {"rewrite_s": 1.0, "compile_s": 20.0 if len(asked) == 1 else 2.0}

    monkeypatch.setattr(compiling, "ask", fake)
    found = compiling.measured_compile(train, Variant("icf", True), 1)
    assert found == compiling.CompileTimes(1.0, 20.0, 2.0)
    assert asked[0] == asked[1]
    assert asked[0][2].keys() == {"BNFUSE_CACHE", "TORCHINDUCTOR_CACHE_DIR"}
    assert asked[0][1]["variant"] == ("icf", True, "")


def test_a_compilation_is_measured_after_rewriting(train):
    found = compiling.measure({"file": str(train), "threads": 1, "variant": ["icf", False]})
    assert found["rewrite_s"] > 0 and found["compile_s"] > 0


def test_peak_memory_above_the_baseline_grows_with_what_a_step_holds(monkeypatch, tmp_path):
    size = 64 << 20

    class Holder:
        name = "holder"

        def run(self):
            self.held = np.ones(size, np.uint8)
            return Times(0, 0)

    monkeypatch.setattr(memory, "prepare_own", lambda *_: Holder)
    found = memory.measure({"file": "step.bnf", "name": "icf", "seed": 0, "threads": 1})
    assert size <= found["peak_bytes"] <= 3 * size and found["peak_bytes"] <= found["setup_peak_bytes"]


def test_limits_are_rates(monkeypatch):
    from bnfuse.runtime.codegen.limits import copy_rate

    monkeypatch.setattr(limits, "SIDE", 128)
    assert limits.numpy_rate() > 1e6
    assert copy_rate(1, 1 << 16) > 1e6


def test_the_libraries_of_a_step_are_loaded_before_its_memory_counts():
    """As torch is before that of torch's."""
    script = """
import pathlib, sys
import numpy as np
from bnfuse.benchmarking import memory
assert "tvm" not in sys.modules
memory.prepare_own(pathlib.Path("no.bnf"), "icf", np.random.default_rng(0), 1)
assert "tvm" in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
