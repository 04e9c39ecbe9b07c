"""Tuning: what is measured, what is remembered, who uses it. Times are faked; the kernels are real."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import numpy as np
import onnx
import pytest
from source_files import load

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime import compile_step
from bnfuse.runtime.backends.cpu import execute, measure
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.codegen import tuning
from bnfuse.runtime.codegen.build import objects
from bnfuse.runtime.codegen.cache import Cache
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.cpu import conv_forward
from bnfuse.runtime.kernels.kernel import Choice, Kernel, MapType, Problem
from bnfuse.runtime.kernels.registry import Kind
from bnfuse.runtime.kernels.request import Request
from bnfuse.runtime.targets import cpus

TARGET = resolve("cpu", 2)
WINDOW = (("dilations", (1, 1)), ("group", 1), ("kernel_shape", (3, 3)), ("pads", (1, 1, 1, 1)), ("strides", (1, 1)))
FLAT = (("dilations", (1, 1)), ("group", 1), ("kernel_shape", (1, 1)), ("pads", (0, 0, 0, 0)), ("strides", (1, 1)))


nets = load(pathlib.Path(__file__).with_name("test_session.py"))


class Measurer:
    """Says that the last candidate is the fastest, or (`fastest`) another, and keeps count."""

    def __init__(self, fastest: int = -1) -> None:
        self.fastest, self.calls = fastest, 0

    def __call__(self, kernels: list[Kernel], codes: list[bytes]) -> list[float]:
        self.calls += 1
        times = [1.0] * len(kernels)
        times[self.fastest] = 0.5
        return times


@pytest.fixture
def measurer(monkeypatch: pytest.MonkeyPatch) -> Measurer:
    found = Measurer()
    monkeypatch.setattr(measure, "fastest_times", found)
    return found


def tuned_net() -> onnx.ModelProto:
    """Two convolutions of 3x3 pixels: each kernel that can be tuned is compiled in all its ways, which takes long."""
    net = nets.Net()
    x = net.op("Relu", net.bn(net.conv("image", 3, 16, 3), 16))
    return net.model(net.op("Relu", net.bn(net.conv(x, 16, 8, 3), 8)), 8)


def short_net() -> onnx.ModelProto:
    """One convolution, 1x1."""
    net = nets.Net()
    return net.model(net.op("Relu", net.bn(net.conv("image", 3, 16, 1), 16)), 16)


@pytest.fixture(scope="module")
def graph():
    return nets.graph_of(tuned_net, "icf")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> pathlib.Path:
    """A cache that has the candidates' code, so that single tests compile little."""
    return tmp_path_factory.mktemp("cache")


def forget(folder: pathlib.Path) -> list[pathlib.Path]:
    """Remove what is remembered; what it was."""
    files = list(folder.glob("tuned/*"))
    for file in files:
        file.unlink()
    return files


def test_what_was_measured_is_used_and_remembered_with_and_without_the_option(graph, compiled, measurer):
    forget(compiled)
    plain = compile_step(graph, threads=2, cache=compiled)
    assert (plain.report.tuned, measurer.calls) == (0, 0)
    tuned = compile_step(graph, threads=2, cache=compiled, tune=True)
    assert measurer.calls == 2 * tuned.report.tuned > 6, "a winner wins twice"
    calls = measurer.calls
    for again in (True, False):
        later = compile_step(graph, threads=2, cache=compiled, tune=again)
        assert later.report.tuned == tuned.report.tuned
        assert later.program.kernels == tuned.program.kernels
    assert measurer.calls == calls, "what is remembered is not measured again"
    for seed in range(2):
        assert tuned(*nets.batch(seed)) == pytest.approx(plain(*nets.batch(seed)), rel=1e-4)
    for name, value in plain.gradients().items():
        np.testing.assert_allclose(tuned.gradients()[name], value, rtol=1e-3, atol=1e-4 * np.abs(value).max())


def test_what_the_rule_chose_is_remembered_too(graph, compiled, monkeypatch):
    forget(compiled)
    measurer = Measurer(fastest=0)
    monkeypatch.setattr(measure, "fastest_times", measurer)
    for _ in range(2):
        assert compile_step(graph, threads=2, cache=compiled, tune=True).report.tuned == 0
    assert measurer.calls == len(list(compiled.glob("tuned/*.json")))


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"choice": 3}',
        b'{"choice": "Choice(algorithm=\'magic\')"}',
        b"[" * 10**5,
    ],
)
def test_a_damaged_memory_is_none(compiled, damage):
    task = task_of(conv_forward.choices(forward(), TARGET), registry.CONV_FORWARD, forward())
    memory = tuning.Memory(Cache(compiled))
    memory.remember(task, task.choices[-1], [1.0] * len(task.choices))
    assert tuning.Memory(Cache(compiled)).choice(task) == task.choices[-1]
    (file,) = (f for f in compiled.glob("tuned/*.json") if f.stem == task.key)
    file.write_bytes(damage)
    assert tuning.Memory(Cache(compiled)).choice(task) is None


def test_without_a_cache_a_measurement_serves_its_own_step(measurer):
    graph = nets.graph_of(short_net, "icf")
    assert compile_step(graph, threads=2, cache=False, tune=True).report.tuned == measurer.calls // 2 > 0


def test_the_budget_ends_it_and_the_rest_keeps_the_rule(graph, compiled, measurer, monkeypatch):
    forget(compiled)
    monkeypatch.setattr(tuning, "TOGETHER", 1)
    now = iter(range(0, 10**6, 400))
    monkeypatch.setattr(tuning.time, "monotonic", lambda: next(now))
    assert compile_step(graph, threads=2, cache=compiled, tune=True).report.tuned == measurer.calls // 2 == 1


def test_another_processor_cannot_be_tuned_for(graph):
    foreign = "haswell" if cpus.is_arm(cpus.host_cpu()) else "neoverse-n1"
    with pytest.raises(BnfuseError, match=f"cannot tune for {foreign}: this CPU lacks") as caught:
        compile_step(graph, target=f"cpu:{foreign}", cache=False, tune=True)
    assert "\n" not in str(caught.value)


def test_who_wins_once_only_does_not():
    rule, other = choices = Choice("direct"), Choice("winograd")
    answers = iter([[1.0, 0.5], [1.0, 1.1], [1.0, 0.5], [1.0, 0.5]])
    results = [tuning.winner(choices, ["a", "b"], [b"", b""], lambda kernels, codes: next(answers)) for _ in range(2)]
    assert [choice for choice, _ in results] == [rule, other]


def test_a_small_gain_is_noise():
    rule, other = Choice("direct"), Choice("winograd")
    assert tuning.best((rule, other), (1.0, 0.99)) == rule
    assert tuning.best((rule, other), (1.0, 0.9)) == other


SCRIPT = """
import sys
sys.path[:0] = {tests!r}
import test_tuning as t
step = t.tuned_step({folder!r}, fastest={fastest})
print(step.report.tuned)
"""


def tuned_step(folder: str, fastest: int):
    measure.fastest_times = Measurer(fastest)
    return compile_step(nets.graph_of(tuned_net, "icf"), threads=2, cache=folder, tune=True)


def test_processes_share_what_they_remember(graph, compiled):
    forget(compiled)
    here = pathlib.Path(__file__).resolve().parent
    tests = [str(here), str(here.parent / "helpers")]
    scripts = [SCRIPT.format(tests=tests, folder=str(compiled), fastest=fastest) for fastest in (-1, 0)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    for process in [subprocess.Popen([sys.executable, "-c", script], **pipes) for script in scripts]:
        printed, errors = process.communicate(timeout=300)
        assert process.returncode == 0 and printed.strip().isdigit(), errors
    files = list(compiled.glob("tuned/*"))
    assert files and all(file.suffix == ".json" and json.loads(file.read_bytes())["choice"] for file in files)


# -- candidates ----------------------------------------------------------------------------------------------------


def forward(attributes=WINDOW) -> Problem:
    x, y = MapType(3, 14, 14, 40, 40), MapType(3, 14, 14, 70, 70)
    side = dict(attributes)["kernel_shape"]
    return Problem("NormalizeReluConvStatistics", (("x", x), ("y", y)), attributes, (70, 40, *side))


def backward(attributes=WINDOW) -> Problem:
    x, y = MapType(3, 14, 14, 40, 40), MapType(3, 14, 14, 70, 70)
    side = dict(attributes)["kernel_shape"]
    maps = (("dy", y), ("grad_x", y), ("x", x), ("dx", x))
    return Problem("BatchNormGradNormalizeReluConvGradReluGradReduce", maps, attributes, (70, 40, *side))


def task_of(choices: tuple[Choice, ...], kind: Kind, problem: Problem) -> tuning.Task:
    return tuning.Task(Request(kind, (problem, TARGET)), choices, 1, 1)


CASES = [
    pytest.param(registry.CONV_FORWARD, forward(), id="forward 3x3"),
    pytest.param(registry.CONV_FORWARD, forward(FLAT), id="forward 1x1"),
    pytest.param(registry.CONV_BACKWARD, backward(), id="backward 3x3"),
    pytest.param(registry.CONV_BACKWARD, backward(FLAT), id="backward 1x1"),
]


@pytest.mark.parametrize(("kind", "problem"), CASES)
def test_all_candidates_compute_the_same(kind, problem):
    """The rule's own kernels are compared with the reference by the tests of each generator."""
    choices = Request(kind, (problem, TARGET)).choices()
    assert len(choices) > 2 and len({repr(choice) for choice in choices}) == len(choices)
    task = task_of(choices, kind, problem)
    kernels = [task.candidate(choice).kernel() for choice in choices]
    assert len({kernel.key for kernel in kernels}) == len(kernels)
    assert {kernel.params for kernel in kernels} == {kernels[0].params}
    rng = np.random.default_rng(0)
    arrays = {
        param.name: rng.standard_normal(param.elements, np.float32)
        for param in kernels[0].params
        if param.access != "out"
    }
    first, *others = (execute.call(kernel, arrays) for kernel in kernels)
    for other in others:
        for name, value in first.items():
            error = np.linalg.norm(other[name] - value) / np.linalg.norm(value)
            assert error < 2e-5, (name, error)


def test_real_measurements_are_seconds_of_every_candidate(compiled):
    task = task_of(conv_forward.choices(forward(), TARGET), registry.CONV_FORWARD, forward())
    requests = [task.candidate(choice) for choice in task.choices]
    codes = objects(requests, Cache(compiled))
    seconds = measure.fastest_times([request.kernel() for request in requests], codes)
    assert len(seconds) == len(task.choices) and all(0 < s < 1 for s in seconds)


def test_kernels_with_one_way_only_have_no_choices():
    kind = MapType(1, 2, 2, 4, 4)
    relu = Request(registry.POINTWISE_FORWARD, (Problem("ReluPointwise", (("x", kind), ("y", kind))), TARGET))
    assert relu.choices() == ()
