"""Measuring candidates on a GPU: what runs, on what, what counts, what is left; tuning with it. Times are faked."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuda.bindings.driver import CUresult
from fake_cuda import FakeCuda, FakeKernel, floats, install

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.backends.cuda import measure
from bnfuse.runtime.backends.cuda.backend import CudaBackend
from bnfuse.runtime.backends.cuda.driver import Driver
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.backends.turns import HOPELESS, ROUNDS, shortest_times
from bnfuse.runtime.codegen import tuning
from bnfuse.runtime.codegen.cache import Cache
from bnfuse.runtime.kernels.cuda import conv_backward
from bnfuse.runtime.kernels.cuda.coefficients import coefficients
from bnfuse.runtime.kernels.cuda.container import Code, Stage, pack
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Param, Problem
from bnfuse.runtime.kernels.registry import CONV_BACKWARD
from bnfuse.runtime.kernels.request import Request
from bnfuse.runtime.program.program import HEADER, STOP

TARGET = resolve("cuda:sm_90", precision="bf16")


class Clock(FakeCuda):
    """Events remember when they were recorded, and kernels take their `seconds`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.now, self.at = 0.0, dict[int, float]()

    def add(self, symbol: str, types: tuple[str, ...], seconds: float, call: Any = lambda *values: None) -> None:
        def run(*values: Any) -> None:
            self.now += seconds
            call(*values)

        self.kernels[symbol] = FakeKernel(types, run)

    def cuEventRecord(self, event: int, stream: int) -> Any:
        self.at[event] = self.now
        return super().cuEventRecord(event, stream)

    def cuEventElapsedTime(self, start: int, end: int) -> Any:
        return CUresult.CUDA_SUCCESS, 1000 * (self.at[end] - self.at[start])


PARAMS = (
    Param("x", "in", 100_000, "bfloat16", is_map=True),
    Param("mean", "in", 3),
    Param("dx", "inout", 70, "float16", is_map=True),
    Param("indices", "in", 9, "int32", is_map=True),
    Param("y", "out", 50),
)


def code_of(name: str, params: tuple[Param, ...], stages: int) -> Code:
    """Stages that take everything: buffers, then offsets."""
    parameters = [(p.name, "buffer") for p in params] + [(f"{p.name}_offset", "int32") for p in params if p.is_map]
    names = tuple(name for name, _ in parameters)
    parts = tuple(Stage(f"{name}_{i}", (4, 1, 1), 128, 60 << 10, names) for i in range(stages))
    return Code(parts, tuple(parameters), "sm_90", name.encode())


def serve(fake: Clock, code: Code, seconds: tuple[float, ...], call: Any = lambda *values: None) -> None:
    kinds = dict(code.parameters)
    for stage, duration in zip(code.stages, seconds, strict=True):
        fake.add(stage.symbol, tuple(kinds[name] for name in stage.arguments), duration, call)


def test_all_stages_of_a_launch_count_in_their_order():
    fake = Clock()
    one, two = code_of("one", PARAMS, 1), code_of("two", PARAMS, 3)
    serve(fake, one, (0.004,))
    serve(fake, two, (0.001, 0.0005, 0.0005))
    assert measure.times_of([PARAMS, PARAMS], [one, two], Driver(fake)) == pytest.approx([0.004, 0.002])
    ran = [symbol for symbol in fake.launched if symbol.startswith("two")]
    assert ran == ["two_0", "two_1", "two_2"] * (len(ran) // 3)
    assert fake.shared == dict.fromkeys(("one_0", "two_0", "two_1", "two_2"), 60 << 10)


def test_operands_are_random_and_everything_else_is_zero():
    fake, seen = Clock(), []
    code = code_of("one", PARAMS, 1)

    def look(x: int, mean: int, dx: int, indices: int, y: int, *offsets: int) -> None:
        if seen:
            return
        dtypes = {p.name: "uint16" if p.dtype in ("bfloat16", "float16") else p.dtype for p in PARAMS}
        values = zip(PARAMS, (x, mean, dx, indices, y), strict=True)
        seen.append({p.name: floats(address, p.elements, dtypes[p.name]).copy() for p, address in values})
        seen.append(offsets)

    serve(fake, code, (0.001,), look)
    measure.times_of([PARAMS], [code], Driver(fake))
    found, offsets = seen
    assert offsets == (0, 0, 0)
    x = found["x"].view(ml_dtypes.bfloat16).astype(np.float32)
    for values in (x, found["mean"], found["dx"].view(np.float16).astype(np.float32)):
        assert np.isfinite(values).all() and np.unique(values).size > 2
    assert 0.98 < x.std() < 1.02 and (x[: len(x) - measure.BLOCK] == x[measure.BLOCK :]).all()
    assert not found["indices"].any() and not found["y"].any()


def test_a_kernel_that_exchanges_waits_for_nobody_where_it_is_measured():
    params = coefficients((("all_moments", (5, 2, 2, True)),), TARGET).params
    fake, code, stops = Clock(), code_of("exchange", params, 1), []
    place = next(index for index, param in enumerate(params) if param.name == "header")
    serve(fake, code, (0.001,), lambda *values: stops.append(floats(values[place], HEADER, "uint64")[STOP]))
    measure.times_of([params], [code], Driver(fake))
    assert set(stops) == {1}


def test_candidates_share_buffers_that_fit_all_and_nothing_is_left():
    fake, addresses = Clock(), set()
    small, large = (*PARAMS, Param("partials", "out", 10)), (*PARAMS, Param("partials", "out", 4000))
    codes = [code_of("small", small, 1), code_of("large", large, 2)]
    for code in codes:
        serve(fake, code, (0.001,) * len(code.stages), lambda *values: addresses.add(values[:6]))
    gpu = Driver(fake)
    peak: list[int] = []
    fake.kernels["large_1"] = FakeKernel(fake.kernels["large_1"].types, lambda *values: peak.append(fake.used))
    measure.times_of([small, large], codes, gpu)
    assert len(addresses) == 1
    assert peak[0] == 200_000 + 12 + 140 + 36 + 200 + 16_000
    assert not (fake.blocks or fake.events or fake.graphs or fake.executables or fake.contexts)
    assert fake.count("cuModuleUnload") == fake.count("cuModuleLoadData") == 2


@pytest.mark.parametrize("call", ["cuGraphLaunch", "cuGraphAddKernelNode", "cuEventSynchronize"])
def test_a_failure_is_one_line_and_leaves_nothing(call):
    fake = Clock()
    code = code_of("one", PARAMS, 1)
    serve(fake, code, (0.001,))
    fake.fail[call] = CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(BnfuseError, match=f"fails in {call}: CUDA_ERROR_LAUNCH_FAILED"):
        measure.times_of([PARAMS], [code], Driver(fake))
    assert not (fake.blocks or fake.graphs or fake.executables or fake.contexts)


def test_what_does_not_fit_is_named():
    fake = Clock(memory=1000)
    with pytest.raises(BnfuseError, match=r"x of a kernel to be measured takes .*: use a smaller batch"):
        measure.times_of([PARAMS], [code_of("one", PARAMS, 1)], Driver(fake))
    assert not fake.blocks


def test_turns_drop_what_is_hopeless_and_keep_the_shortest():
    counts = [0, 0, 0]

    def run(index: int, seconds: float):
        def call() -> float:
            counts[index] += 1
            return seconds / counts[index] if index == 1 else seconds

        return call

    times = shortest_times([run(0, 1.0), run(1, 2.0), run(2, 9.0)])
    assert counts == [ROUNDS[0], ROUNDS[1], ROUNDS[0]]
    assert times == [1.0, 2.0 / ROUNDS[1], 9.0]
    assert HOPELESS * times[1] < times[0]


# -- tuning --------------------------------------------------------------------------------------------------------


def backward() -> Problem:
    x, y = MapType(2, 14, 14, 32, 32, "bfloat16", 8), MapType(2, 14, 14, 64, 64, "bfloat16", 8)
    window = {"dilations": (1, 1), "group": 1, "kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "strides": (1, 1)}
    maps = (("dy", y), ("grad_x", y), ("x", x), ("dx", x))
    return Problem("BatchNormGradNormalizeReluConvGradReluGradReduce", maps, tuple(window.items()), (64, 32, 3, 3))


def test_the_fastest_plan_of_each_gradient_is_found(monkeypatch):
    """Of a convolution's gradients, whose candidates differ in the plan of one stage each: both gains are taken."""
    fake = install(monkeypatch, Clock())
    choices = conv_backward.choices(backward(), TARGET)
    task = tuning.Task(Request(CONV_BACKWARD, (backward(), TARGET)), choices, 1, 1)
    kernels = [task.candidate(choice).kernel() for choice in choices]
    codes = [code_of(f"k{i}", kernel.params, 2) for i, kernel in enumerate(kernels)]
    (source, weight) = choices[-1].plan[0], choices[2].plan[1]
    for choice, code in zip(choices, codes, strict=True):
        serve(fake, code, (0.0015 if choice.plan[0] == source else 0.002, 0.001 if choice.plan[1] == weight else 0.002))
    found, seconds = tuning.winner(choices, kernels, [pack(code) for code in codes], CudaBackend().measure(TARGET))
    assert found.plan == (source, weight) and found not in choices
    assert (seconds[0], seconds[2], seconds[-1]) == pytest.approx((0.004, 0.003, 0.0035))
    memory = tuning.Memory(Cache(None))
    memory.remember(task, found, seconds)
    assert memory.choice(task) == found


def test_each_gain_has_to_come_twice():
    choices = conv_backward.choices(backward(), TARGET)
    names = [str(i) for i in range(len(choices))]
    times = [[1.0] * len(choices), [1.0, 0.9, 1.1]]
    times[0][2] = times[0][-1] = 0.8
    answers = iter(times)
    found, _ = tuning.winner(choices, names, [b""] * len(choices), lambda kernels, codes: next(answers))
    assert found == choices[2]


def test_tuning_measures_on_the_gpu_and_remembers(monkeypatch, tmp_path):
    fake = install(monkeypatch, Clock())
    choices = conv_backward.choices(backward(), TARGET)
    request = Request(CONV_BACKWARD, (backward(), TARGET))
    task = tuning.Task(request, choices, 1, 1)
    monkeypatch.setattr(tuning, "tasks_of", lambda lowered: {0: task})
    made: list[Kernel] = []

    def compiled(requests: list[Request], *_: Any, **__: Any) -> list[bytes]:
        made.extend(request.kernel() for request in requests)
        codes = [code_of(f"k{i}", kernel.params, 1) for i, kernel in enumerate(made)]
        for index, code in enumerate(codes):
            serve(fake, code, (0.001 if index == len(codes) - 1 else 0.002,))
        return [pack(code) for code in codes]

    monkeypatch.setattr(tuning, "objects", compiled)
    cache = Cache(tmp_path)
    tuning.tune(None, tuning.Memory(cache), cache, TARGET)  # type: ignore[arg-type]
    assert len(made) == len(choices)
    assert tuning.Memory(cache).choice(task) == choices[-1]


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (Clock(arch="sm_80"), "cannot tune for sm_90: the GPU here .Fake GPU. is sm_80: tune on one of those"),
        (None, "cannot tune for sm_90: there is no NVIDIA GPU here"),
    ],
)
def test_where_the_kernels_do_not_run_is_one_line(monkeypatch, fake, message):
    given = fake or FakeCuda()
    if fake is None:
        given.fail["cuInit"] = CUresult.CUDA_ERROR_NO_DEVICE
    install(monkeypatch, given)
    with pytest.raises(BnfuseError, match=message) as caught:
        CudaBackend().measure(TARGET)
    assert "\n" not in str(caught.value)


def test_measuring_needs_no_tvm():
    script = "import sys; sys.modules['tvm'] = None; import bnfuse.runtime.backends.cuda.measure"
    root = pathlib.Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
