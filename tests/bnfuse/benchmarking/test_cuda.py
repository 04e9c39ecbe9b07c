"""The benchmark on a GPU, as far as it goes without one: what can be asked for, sums, tables, which baselines count."""

import sys
import types

import numpy as np
import onnx_ir as ir
import pytest

from bnfuse.baselines import TorchStep, cuda
from bnfuse.baselines.names import is_graph, without_graph
from bnfuse.benchmarking import choices, run
from bnfuse.benchmarking.cuda import cudnn, memory
from bnfuse.benchmarking.cuda.cudnn import Convolution, Floor
from bnfuse.benchmarking.results import Benchmark, Result
from bnfuse.build import build_training_graph
from bnfuse.cli import main
from bnfuse.core.errors import BnfuseError
from bnfuse.core.times import Times, summarize
from bnfuse.graph.training_graph import open_graph
from bnfuse.models import build_forward

EVERY = "torch,torch-cl,torch-compile,torch+graph,torch-cl+graph,torch-compile+graph"


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "train.onnx"
    network = ["densenet40", "--set", "growth=4", "--set", "depth=1", "--batch", "2", "--image", "8"]
    assert main(["build", *network, "-o", str(path)]) == 0
    return path


# -- what can be asked for -------------------------------------------------------------------------------------------


def test_baselines_on_a_gpu_come_with_and_without_a_graph():
    assert choices.baselines([EVERY], "cuda:sm_90") == tuple(EVERY.split(","))
    assert [without_graph(baseline) for baseline in EVERY.split(",") if is_graph(baseline)] == EVERY.split(",")[:3]
    with pytest.raises(BnfuseError, match=r"'ort' on a GPU.*torch-cl\+graph"):
        choices.baselines(["ort"], "cuda")
    with pytest.raises(BnfuseError, match=r"cannot measure against 'torch\+graph': there are ort"):
        choices.baselines(["torch+graph"])


def test_a_precision_is_the_targets_and_is_known():
    assert choices.precision(None, "cpu") == choices.precision(None, "cuda") == "fp32"
    assert choices.precision("bf16", "cuda:sm_80") == choices.precision("bf16", "cpu") == "bf16"
    with pytest.raises(BnfuseError, match="add --target cuda"):
        choices.precision("tf32", "cpu:haswell")
    with pytest.raises(BnfuseError, match="fp32, tf32, bf16, fp16"):
        choices.precision("int8", "cuda")


def test_the_command_passes_target_and_precision_on(train, monkeypatch):
    asked = []

    def fake(graph, plan, **_):
        asked.append(plan)
        return Benchmark(graph.name, (), {}, 1)

    monkeypatch.setattr(run, "run_benchmark", fake)
    assert main(["bench", str(train), "--target", "cuda:sm_90", "--precision", "bf16", "--json"]) == 0
    assert (asked[0].target, asked[0].precision) == ("cuda:sm_90", "bf16")


def test_without_a_gpu_a_benchmark_on_one_is_refused_in_one_line_before_any_work(train, capsys, monkeypatch):
    monkeypatch.setattr(run, "compile_variant", lambda *_, **__: pytest.fail("compiled first"))

    def nothing():
        raise BnfuseError("there is no NVIDIA GPU here")

    monkeypatch.setattr("bnfuse.benchmarking.cuda.bench.open_driver", nothing)
    assert main(["bench", str(train), "--target", "cuda"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "no NVIDIA GPU" in line


def test_torch_baselines_of_a_gpu_are_refused_on_a_cpu(train):
    graph = open_graph(train)
    with pytest.raises(BnfuseError, match=r"no torch baseline 'torch\+graph': there is torch, torch-cl, torch-compile"):
        TorchStep(graph, "torch+graph", {})
    with pytest.raises(BnfuseError, match="on a CPU torch's step is fp32 or bf16, not tf32"):
        TorchStep(graph, "torch", {}, precision="tf32")


# -- torch's switches and captures, on a stand-in ----------------------------------------------------------------------


def switches(available=True):
    """As much of torch as setting the precision touches."""
    said = {}
    return types.SimpleNamespace(
        said=said,
        set_float32_matmul_precision=lambda value: said.update(matmul=value),
        cuda=types.SimpleNamespace(is_available=lambda: available),
        backends=types.SimpleNamespace(
            cuda=types.SimpleNamespace(matmul=types.SimpleNamespace(allow_tf32=None)),
            cudnn=types.SimpleNamespace(allow_tf32=None, benchmark=None),
        ),
    )


@pytest.mark.parametrize(("precision", "tf32"), [("fp32", False), ("tf32", True), ("bf16", True)])
def test_every_switch_of_float32_arithmetic_is_set_outright(precision, tf32):
    torch = switches()
    cuda.set_precision(torch, precision)
    assert torch.said["matmul"] == ("high" if tf32 else "highest")
    assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is tf32
    assert torch.backends.cudnn.benchmark is True


def test_a_torch_without_a_gpu_and_an_unknown_precision_are_one_line():
    with pytest.raises(BnfuseError, match="reaches no GPU"):
        cuda.set_precision(switches(available=False), "bf16")
    with pytest.raises(BnfuseError, match="no precision 'fp8'"):
        cuda.set_precision(switches(), "fp8")


@pytest.mark.torch
def test_steps_before_a_capture_leave_no_trace():
    import torch

    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    before = [parameter.detach().clone() for parameter in layer.parameters()]

    def step():
        optimizer.zero_grad(set_to_none=True)
        layer(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    with cuda.unchanged(torch, layer.parameters(), optimizer):
        step()
        assert not torch.equal(before[0], layer.weight)
    assert all(torch.equal(old, new) for old, new in zip(before, layer.parameters(), strict=True))
    assert all((state["momentum_buffer"] == 0).all() for state in optimizer.state.values())


@pytest.mark.torch
def test_another_batch_goes_into_the_tensors_that_steps_read(train):
    graph = open_graph(train)
    data, labels = graph.signature.data[0], graph.signature.labels[0]
    rng = np.random.default_rng(0)
    one, two = (
        {data: rng.standard_normal(graph.shape_of(data)).astype(np.float32), labels: np.array([i, 1])} for i in (0, 1)
    )
    step, other = (TorchStep(graph, "torch-cl", feeds, lr=0.0, threads=1) for feeds in (one, two))
    held = step.data[0].data_ptr()
    step.feed(two)
    assert step.data[0].data_ptr() == held
    assert float(step.step()) == float(other.step())


# -- sums and tables -------------------------------------------------------------------------------------------------


def result(name, seconds, peak, ours=False):
    level, pool = ("icf", True) if ours else (None, None)
    return Result(name, level, pool, "", summarize([Times(seconds, None)] * 2), (seconds,) * 2, 0.0, peak, None)


def test_steps_in_one_piece_have_no_forward_time():
    found = summarize([Times(3, None), Times(2, None)])
    assert (found.min_s, found.median_s, found.forward_min_s, found.backward_median_s) == (2, 2.5, None, None)


def test_on_a_gpu_ratios_are_against_graphs_alone():
    results = (result("icf", 0.012, 100, True), result("torch-cl", 0.09, 300), result("torch-cl+graph", 0.024, 400))
    on_gpu = Benchmark("m", results, {}, 2, target="cuda:sm_90")
    assert [(r.against, r.min, r.peak, r.forward) for r in on_gpu.ratios] == [("torch-cl+graph", 2.0, 4.0, None)]
    table, against = on_gpu.sections()[:2]
    assert table.rows[1][-1] == "-" and table.rows[2][-1] == "0.50x" and table.rows[0][1] == "12.00 ms"
    assert [row[0] for row in against.rows] == ["torch-cl+graph"]
    assert len(Benchmark("m", results, {}, 2).ratios) == 2


def test_convolutions_are_those_of_the_forward_part_alike_ones_once():
    graph = open_graph(ir.from_proto(build_training_graph(build_forward("resnet20", batch=2, image=32))), name="r")
    found = cudnn.convolutions(graph)
    assert sum(found.values()) == 19 + 2  # and two projections
    (stem,) = (layer for layer in found if not layer.needs_dx)
    assert (stem.shape, stem.kind, found[stem]) == ("2x32x32x3 -> 16", "3x3", 1)
    assert max(found.values()) == 6
    assert any("stride 2" in layer.shape for layer in found)


def test_depthwise_and_grouped_layers_are_called_as_profiles_call_them():
    layer = Convolution((2, 8, 4, 4), (8, 1, 3, 3), (1, 1), (1, 1), (1, 1), 8, True)
    assert layer.kind == "depthwise 3x3"
    assert Convolution((2, 8, 4, 4), (8, 2, 3, 3), (1, 1), (1, 1), (1, 1), 4, True).kind == "grouped 3x3"


def test_our_launches_stand_beside_cudnns_by_kind_and_shape():
    layer = Convolution((2, 8, 4, 4), (6, 8, 3, 3), (1, 1), (1, 1), (1, 1), 1, True)
    ours = [
        {"kind": "Conv 3x3", "shape": "2x4x4x8 -> 6", "phase": "forward", "seconds": 0.003},
        {"kind": "ConvGrad 3x3", "shape": "2x4x4x8 -> 6", "phase": "backward", "seconds": 0.004},
        {"kind": "ConvGradInput 3x3", "shape": "2x4x4x8 -> 6", "phase": "backward", "seconds": 0.001},
        {"kind": "Conv 1x1", "shape": "2x4x4x8 -> 6", "phase": "forward", "seconds": 9.0},
    ]
    (row,) = cudnn.beside([Floor(layer, 2, 0.001, 0.0005, 0.0015)], ours)
    assert (row["our_forward"], row["our_backward"], row["total"]) == (0.003, 0.005, 0.006)
    (alone,) = cudnn.beside([Floor(layer, 2, 0.001, 0.0005, 0.0015)], [])
    assert alone["our_forward"] is None
    table = cudnn.section([row])
    assert "6.000 ms" in table.title
    assert table.rows[0] == ("3x3 2x4x4x8 -> 6", "2", "2.000", "3.000", "4.000", "5.000", "6.000")


def test_other_batches_repeat_the_images():
    feeds = {"x": np.arange(6.0).reshape(3, 2), "y": np.array([0, 1, 2])}
    assert memory.of_batch(feeds, None) is feeds
    larger = memory.of_batch(feeds, 5)
    assert larger["x"].shape == (5, 2) and larger["y"].tolist() == [0, 1, 2, 0, 1]


def test_what_a_benchmark_on_a_gpu_needs_is_imported_without_tvm_and_onnxruntime():
    """On a GPU machine there are neither: a fresh interpreter that refuses them."""
    import subprocess

    from bnfuse.core.interpreter import import_root

    absent = ("tvm", "tvm_ffi", "onnxruntime", "onnx_graphsurgeon", "typer", "matplotlib", "sklearn", "PIL")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent}))\n" + "\n".join(
        f"import bnfuse.{name}"
        for name in (
            "baselines",
            "graph.feeds",
            "runtime.artifact",
            "benchmarking.profiles",
            "benchmarking.cuda.memory",
        )
    )
    code += "\nfrom bnfuse.runtime import load_step\nfrom bnfuse.benchmarking.cuda import card, cudnn, limits, step\n"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=import_root())
