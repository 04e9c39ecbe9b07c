"""Compiled steps as workloads, and predictions beside measurements."""

from __future__ import annotations

import json

import pytest

import bnfuse
from bnfuse import api
from bnfuse.benchmarking import run
from bnfuse.benchmarking.estimates import compare, level_of, quantile
from bnfuse.benchmarking.profiles import Profile, rows_of
from bnfuse.build.named import build_model
from bnfuse.core.errors import BnfuseError
from bnfuse.estimating.hardware import MIB, Hardware
from bnfuse.estimating.launches import launch_workload, type_of
from bnfuse.estimating.training import training_workload
from bnfuse.estimating.workload import Access, Layer, Tensor, Workload
from bnfuse.graph.training_graph import open_graph
from bnfuse.measuring.limits import Limits
from bnfuse.runtime import SGD
from bnfuse.runtime.backends.execution import LaunchTime
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.compile import lower_graph
from bnfuse.runtime.program import program as p

LIMITS = Limits({"numpy": 100e9}, 10e9)
MACHINE = Hardware("machine", "", 100e9, 10e9, MIB)


@pytest.fixture(scope="module")
def model():
    settings = {"batch": 2, "image": 16, "growth": 4, "depth": 2}
    return build_model("densenet40", zoo=settings).model


def program_of(model, level: str) -> p.Program:
    graph = open_graph(bnfuse.rewrite(model, level=level))
    return lower_graph(graph, resolve("cpu", 1), SGD(lr=0.1, momentum=0.9))[0].program


@pytest.fixture(scope="module")
def programs(model):
    return {level: program_of(model, level) for level in ("none", "icf")}


@pytest.mark.parametrize("level", ["none", "icf"])
def test_every_launch_is_a_layer_that_moves_what_its_kernel_moves(programs, level):
    program = programs[level]
    workload = launch_workload(program, "step")
    launches = [launch for phase in p.PHASES for launch in program.phase(phase)]
    assert (len(workload.layers), workload.batch) == (len(launches), 2)
    for layer, launch in zip(workload.layers, launches, strict=True):
        work = program.works[launch.kernel]
        assert (layer.name, layer.phase, layer.flops) == (launch.node, launch.phase, work.flops)
        if work.kind != "coefficients":  # kernels for any length: their work is that of the first
            assert sum(a.bytes for a in layer.accesses) == pytest.approx(work.bytes, abs=len(layer.accesses))


@pytest.mark.parametrize("level", ["none", "icf"])
def test_what_is_read_is_given_or_was_written(programs, level):
    workload = launch_workload(programs[level], "step")
    there = {index for index, tensor in enumerate(workload.tensors) if tensor.given}
    for layer in workload.layers:
        assert {a.tensor for a in layer.reads} <= there
        assert all(0 < a.bytes <= workload.tensors[a.tensor].bytes for a in layer.accesses)
        there |= {a.tensor for a in layer.writes}
    kinds = {tensor.kind for tensor in workload.tensors}
    assert {"data", "weight", "map", "map_gradient", "weight_gradient", "vector"} <= kinds


def test_statistics_of_the_source_sweep_twice(programs):
    def statistics(level):
        program = programs[level]
        works = [program.works[launch.kernel] for phase in p.PHASES for launch in program.phase(phase)]
        layers = launch_workload(program, "step").layers
        return [layer for layer, work in zip(layers, works, strict=True) if work.op == "BatchNormStatistics"]

    found = statistics("none")
    assert len(found) == 9  # two in each of three blocks, two transitions, the last
    assert all(max(a.sweeps for a in layer.reads) == 2 and layer.type == "BatchNorm" for layer in found)
    assert not statistics("icf")


def test_a_map_in_a_wider_buffer_counts_with_its_own_channels(programs):
    """The second layer's convolution reads 20 of the 24 channels of the block's buffer, and writes the last 4."""
    workload = launch_workload(programs["icf"], "step")
    (conv,) = [x for x in workload.layers if x.name == "block1/layer2/conv1"]
    pixels = 2 * 16 * 16
    maps = [a.bytes for a in conv.accesses if workload.tensors[a.tensor].kind == "map"]
    assert sum(maps) == pytest.approx(4 * pixels * (20 + 4), rel=0.02)
    assert (conv.type, conv.phase) == ("Conv2D", "forward")


@pytest.mark.parametrize("level", ["none", "icf"])
def test_the_launches_move_about_what_the_graph_says(model, programs, level):
    graph = training_workload(open_graph(bnfuse.rewrite(model, level=level)), optimizer="momentum")
    launches = launch_workload(programs[level], "step")

    def moved(workload: Workload) -> int:
        return sum(a.bytes * a.sweeps for layer in workload.layers for a in layer.accesses)

    assert moved(launches) == pytest.approx(moved(graph), rel=0.15)


@pytest.mark.parametrize(
    ("kind", "op", "expected"),
    [
        ("Conv depthwise 3x3", "NormalizeReluConv", "DepthwiseConv2D"),
        ("ConvGrad grouped 3x3", "ConvGrad", "Conv2D"),
        ("Gemm", "Gemm", "Dense"),
        ("Pointwise", "NormalizeReluPointwise", "BatchNorm"),
        ("Pointwise", "ReluPointwise", "Activation"),
        ("Pointwise", "AddPointwise", "Add"),
        ("MaxPool", "NormalizeReluMaxPoolStatistics", "Pool"),
        ("BatchNorm halves", "BatchNormGradReduce", "BatchNorm"),
        ("BatchNorm halves", "Sum", "Add"),
        ("coefficients", "BatchNormGradTerms+BatchNormGradFinalize", "BatchNorm"),
        ("copy", "NchwToNhwc", "Copy"),
        ("loss", "Loss", "Loss"),
        ("generic", "Softmax", "Softmax"),
        ("generic", "Erosion", "Other"),
        ("update", "SGD", "Other"),
    ],
)
def test_types_of_launches(kind, op, expected):
    assert type_of(kind, op) == expected


# -- predicted and measured ------------------------------------------------------------------------------------------


def test_a_quantile_counts_by_weight():
    values = [(3.0, 1.0), (1.0, 8.0), (2.0, 1.0)]
    assert [quantile(values, share) for share in (0.1, 0.5, 0.85, 0.95)] == [1.0, 1.0, 2.0, 3.0]


def launch(op: str, seconds: float) -> LaunchTime:
    return LaunchTime("forward", "node", "kernel", seconds, p.Work(op, op, "1", 10, 100))


def profile(name: str, *rows: tuple[str, float, float]) -> Profile:
    """Rows (operator, measured, predicted)."""
    launches = [launch(op, seconds) for op, seconds, _ in rows]
    return Profile(name, rows_of([launches], LIMITS, [predicted for *_, predicted in rows]), 0.0, LIMITS)


def workload(flops: float) -> Workload:
    layer = Layer("conv", "Conv2D", "forward", int(flops), (Access(0, 100),), ())
    return Workload("graph", 1, (Tensor("x", 100, "data", given=True),), (layer,))


def test_rows_add_predictions_and_show_them():
    found = profile("none", ("A", 2.0, 1.0), ("A", 2.0, 1.5), ("B", 1.0, 3.0))
    assert [(row.op, row.seconds, row.predicted_s) for row in found.rows] == [("A", 4.0, 2.5), ("B", 1.0, 3.0)]
    assert found.total.predicted_s == 5.5
    text = str(found.sections()[1])
    assert "predicted" in text and "0.62x" in text and "3.00x" in text
    assert [row["predicted_s"] for row in found.to_json()["rows"]] == [2.5, 3.0]


def test_without_an_estimate_nothing_is_predicted():
    plain = Profile("icf", rows_of([[launch("A", 1.0)]], LIMITS), 0.0, LIMITS)
    assert "predicted" not in str(plain.sections()[1]) and "predicted_s" not in plain.to_json()["rows"][0]


def test_a_level_is_compared_in_all_and_row_by_row():
    found = level_of(profile("none", ("A", 8.0, 4.0), ("B", 1.0, 2.0), ("C", 1.0, 3.0)), 11.0, workload(1e12), MACHINE)
    assert (found.step_s, found.kernels_s, found.launches_s) == (11.0, 10.0, 9.0)
    assert (found.median, found.low, found.high) == (0.5, 0.5, 2.0)
    assert found.graph_s == pytest.approx(10.0)  # 1e12 FLOP at 100 GFLOP/s


def test_levels_are_compared_with_the_first():
    profiles = [profile("none", ("A", 8.0, 6.0)), profile("icf", ("A", 4.0, 4.0))]
    steps, graphs = {"none": 10.0, "icf": 5.0}, {"none": workload(1e12), "icf": workload(4e11)}
    found = compare(profiles, steps, graphs, MACHINE)
    speedups = found.speedups(found.levels[1])
    assert speedups == pytest.approx({"step_s": 2.0, "launches_s": 1.5, "graph_s": 2.5})
    text = "\n".join(map(str, found.sections()))
    assert "-25.0 %" in text and "+25.0 %" in text and "0.75x" in text
    data = json.loads(json.dumps(found.to_json()))
    assert data["levels"][1]["speedups"]["launches_s"] == 1.5 and data["hardware"]["flops"] == 100e9


def test_a_benchmark_with_an_estimate_has_it_for_every_launch_and_level(monkeypatch, tmp_path):
    def measured_limits(threads, working_sets=()):
        return Limits({"numpy": 100e9}, 10e9, tuple((size, 40e9 if size < 8 * MIB else 10e9) for size in working_sets))

    monkeypatch.setattr(run, "measured_limits", measured_limits)
    settings = {
        "batch": 2,
        "image": 8,
        "growth": 4,
        "depth": 1,
        "channels": 1,
    }  # kernels of benchmarking/test_bench.py
    small = build_model("densenet40", zoo=settings).model
    found = api.bench(
        small, levels=["none", "icf"], repetitions=1, warm_up=0, wait=0, estimate=True, memory=False, threads=1
    )
    data = found.to_json()
    assert [level["name"] for level in data["estimates"]["levels"]] == ["none", "icf"]
    assert data["estimates"]["hardware"]["cache"] == 4 * MIB
    for level, entry in zip(data["estimates"]["levels"], data["profile"], strict=True):
        predicted = [row["predicted_s"] for row in entry["rows"]]
        assert all(seconds > 0 for seconds in predicted)
        assert sum(predicted) == pytest.approx(level["launches_s"])
        assert level["kernels_s"] == pytest.approx(entry["kernels_s"]) and level["graph_s"] > 0
    none, icf = data["estimates"]["levels"]
    assert none["launches_s"] > icf["launches_s"] and none["graph_s"] > icf["graph_s"]
    assert "So many times as fast as none" in str(found)


def test_an_estimate_is_of_this_machines_processor():
    small = build_model("densenet40", zoo={"batch": 1, "image": 8, "growth": 4, "depth": 1}).model
    with pytest.raises(BnfuseError, match="leave --target out"):
        api.bench(small, levels=["none"], estimate=True, target="cuda")
