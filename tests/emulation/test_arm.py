"""Kernels and whole steps for 64-bit Arm, under emulation: kernels against the float64 references of the tests in
tests/runtime, which are called with another target and another way to run a kernel; steps against those of the host.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from source_files import load

from bnfuse import api
from bnfuse.build import build_training_graph
from bnfuse.models import build_forward
from bnfuse.runtime import SGD, compile_step, session
from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.codegen.build import compile_kernel
from bnfuse.runtime.kernels.kernel import Kernel
from bnfuse.runtime.targets.target import CpuTarget

pytestmark = [pytest.mark.emulation, pytest.mark.usefixtures("optimized")]

HERE = pathlib.Path(__file__).resolve().parent
RUNTIME = HERE.parent / "runtime"
BATCHES = {"densenet40": 2, "mobilenetv2": 4}  # a BN over a few elements divides rounding by next to nothing
MODELS = {"cortex-a72": "cortex-a72", "neoverse-n1": "neoverse-n1", "apple-m1": "max"}  # as LLVM and as qemu calls them


emulation = load(HERE / "emulation.py")
forward, backward = load(RUNTIME / "test_conv_forward.py"), load(RUNTIME / "test_conv_backward.py")
session_tests = load(RUNTIME / "test_session.py")


class Emulators:
    """The emulators that a test started."""

    def __init__(self) -> None:
        self.started: list[Any] = []

    def function(self, kernel: Kernel) -> Any:
        """In place of `execute.compile_kernel`."""
        return self.start([kernel.name], [compile_kernel(kernel)], kernel.target.mcpu).function(0)

    def start(self, names: Any, codes: Any, mcpu: str) -> Any:
        self.started.append(emulation.Emulator(names, codes, MODELS[mcpu]))
        return self.started[-1]


@pytest.fixture
def emulators() -> Iterator[Emulators]:
    found = Emulators()
    yield found
    for emulator in found.started:
        emulator.close()
    assert sum(emulator.calls for emulator in found.started), "nothing ran under emulation"


@pytest.fixture(params=["cortex-a72", "neoverse-n1"])
def target(request: pytest.FixtureRequest, emulators: Emulators, monkeypatch: pytest.MonkeyPatch) -> CpuTarget:
    monkeypatch.setattr(execute, "compile_kernel", emulators.function)
    return resolve(f"cpu:{request.param}", threads=2)


FORWARD = [
    forward.Case(forward.FULL, 2, 6, 5, 33, 70, slots=3),
    forward.Case(forward.FULL, 1, 7, 8, 700, 40),
    forward.Case("NormalizeAddReluConvStoreInputStatistics", 2, 7, 7, 20, 17, strides=(2, 2)),
    forward.Case(forward.FULL, 2, 14, 14, 64, 32, (3, 3), pads=(1, 1, 1, 1), slots=5),
    forward.Case("ConvBiasStatistics", 2, 23, 23, 3, 64, (7, 7), (2, 2), (3, 3, 3, 3)),
    forward.Case("NormalizeClipConv", 2, 9, 9, 18, 20, (3, 3), (2, 2), (2, 1, 2, 1), (2, 3)),
    forward.Case("QuickGeluConv", 2, 6, 6, 24, 36, (3, 3), pads=(1, 1, 1, 1), group=3),
    forward.Case(forward.FULL, 2, 9, 9, 21, 21, (3, 3), pads=(1, 1, 1, 1), group=21, slots=1),
]


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_forward_convolution(target, case):
    forward.check(case, target, tolerance=5e-6)


BACKWARD = [
    backward.Case(backward.FULL, 2, 7, 7, 37, 35, slots=3),
    backward.Case(backward.FULL, 2, 10, 9, 19, 33, (3, 3), pads=(1, 1, 1, 1), slots=2),
    backward.Case("NormalizeReluConvGradReluGradReduce", 2, 9, 9, 12, 20, (3, 3), (2, 2), (1, 1, 1, 1)),
    backward.Case("ConvGradWeight", 2, 15, 15, 3, 20, (7, 7), (2, 2), (3, 3, 3, 3)),
    backward.Case("ConvGrad", 1, 6, 6, 8, 12, (3, 3), pads=(1, 1, 1, 1), group=2),
    backward.Case("NormalizeClipConvGradClipGradReduce", 2, 9, 9, 21, 21, (3, 3), pads=(1, 1, 1, 1), group=21),
]


@pytest.mark.parametrize("case", BACKWARD, ids=str)
def test_gradients_of_a_convolution(target, case):
    backward.check(case, target=target)


@pytest.mark.parametrize("algorithm", ["winograd"])
@pytest.mark.parametrize("module", ["conv_forward", "conv_backward"])
def test_every_algorithm_compiles_and_runs(target, module, algorithm):
    """Of the problems of the cases above, those that have more than one algorithm."""
    generators = importlib.import_module(f"bnfuse.runtime.kernels.cpu.{module}")
    tests, cases = (forward, FORWARD) if module == "conv_forward" else (backward, BACKWARD)
    other = functools.partial(getattr(generators, module), algorithm=algorithm)
    case = next(case for case in cases if case.kernel == (3, 3) and case.strides == (1, 1) and case.group == 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tests, module, other)
        tests.check(case, target=target, tolerance=1e-4)


@dataclasses.dataclass(frozen=True)
class Call:
    """A test of tests/runtime with its arguments."""

    file: str
    function: str
    arguments: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.file} {self.function} {self.arguments}"


def calls() -> Iterator[Call]:
    pool = load(RUNTIME / "test_pool.py")
    for case in (*pool.MAX, *pool.AVERAGE, *pool.GLOBAL, *pool.MAX_GRAD, *pool.AVERAGE_GRAD):
        yield Call("pool", "test_equals_the_reference", case)
    maps = load(RUNTIME / "test_pointwise.py")
    for case in (*maps.FORWARD, *maps.BACKWARD):
        yield Call("map", "test_equals_the_reference", case)
    yield Call("norm", "test_statistics", (2, 1e3))
    yield Call("norm", "test_finalize_serves_any_number_of_channels")
    yield Call("norm", "test_grad_reduce")
    yield Call("norm", "test_grad_terms_and_their_accumulation")
    yield Call("norm", "test_grad_finalize_of_a_range_of_channels")
    for problem in load(RUNTIME / "test_dense.py").CASES:
        yield Call("dense", "test_equals_numpy", (problem,))
    for problem in load(RUNTIME / "test_loss.py").CASES:
        yield Call("loss", "test_loss_and_gradient", (problem,))
    for kind in load(RUNTIME / "test_optim_kernels.py").PROBLEMS:
        yield Call("optim_kernels", "test_is_the_formula", (kind,))
    yield Call("layout_kernels", "test_from_slot_to_slot")
    for op in load(RUNTIME / "test_generic.py").UNARY:
        yield Call("generic", "test_unary", (op,))
    yield Call("generic", "test_softmax", (1,))


@pytest.mark.parametrize("call", list(calls()), ids=str)
def test_other_kernels(target, monkeypatch, call):
    module = load(RUNTIME / f"test_{call.file}.py")
    monkeypatch.setattr(module, "TARGET", target)
    getattr(module, call.function)(*call.arguments)


# -- whole steps ---------------------------------------------------------------------------------------------------


def emulated_step(model: Any, mcpu: str, emulators: Emulators, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A step for another CPU, each of whose launches runs under emulation."""

    class Library:
        def __init__(self, names: Any, codes: Any) -> None:
            emulator = emulators.start(names, codes, mcpu)
            self.functions = [emulator.function(i) for i in range(len(names))]

    with monkeypatch.context() as patch:
        patch.setattr(session, "Library", Library)
        patch.setattr(session, "missing_features", lambda features: ())
        return compile_step(model, target=f"cpu:{mcpu}", optimizer=SGD(0.1, momentum=0.9), threads=2)


def compare(model: Any, mcpu: str, emulators: Emulators, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Losses, gradients and logits of some steps here and there.

    Two correct implementations differ by more than rounding where a ReLU or a small variance makes much of it
    (docs/numerics.md), so gradients of the last step may differ by what rounding of the images alone does to them.
    """
    here, shaken = (compile_step(model, optimizer=SGD(0.1, momentum=0.9), threads=2) for _ in range(2))
    there = emulated_step(model, mcpu, emulators, monkeypatch)
    rng = np.random.default_rng(0)
    data, labels = (here.program.inputs[here.program.signature[role][0]] for role in ("data", "labels"))
    for _ in range(steps):
        images = rng.standard_normal(data.shape).astype(np.float32)
        classes = rng.integers(0, 5, labels.shape)
        assert there(images, classes) == pytest.approx(here(images, classes), rel=1e-4)
        shaken((images * (1 + rng.choice([-1, 1], images.shape) * 2.0**-22)).astype(np.float32), classes)
    errors, spread = (differences(other.gradients(), here.gradients()) for other in (there, shaken))
    assert max(spread.values()) < 0.1, "a network that says nothing"
    for name, error in errors.items():
        assert error < 1e-4 + 4 * max(spread.values()), (name, error, spread[name])
    np.testing.assert_allclose(there.evaluate(images), here.evaluate(images), rtol=1e-2, atol=1e-2)


def differences(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> dict[str, float]:
    """Relative to each norm, or to a thousandth of the largest: the gradient of a bias before a BN is noise."""
    floor = 1e-3 * max(np.linalg.norm(value) for value in wanted.values())
    return {n: float(np.linalg.norm(found[n] - v) / max(np.linalg.norm(v), floor)) for n, v in wanted.items()}


@pytest.mark.parametrize("level", ["none", "icf"])
@pytest.mark.parametrize("net", ["dense", "residual"])
def test_a_step_of_a_small_network(net, level, emulators, monkeypatch):
    compare(session_tests.graph_of(session_tests.NETS[net], level), "cortex-a72", emulators, monkeypatch, steps=3)


@pytest.mark.parametrize(
    ("name", "image", "level", "mcpu"),
    [
        ("densenet40", 16, "none", "cortex-a72"),
        ("densenet40", 16, "icf", "neoverse-n1"),
        ("densenet40", 16, "icf", "apple-m1"),
        ("mobilenetv2", 64, "none", "apple-m1"),
        ("mobilenetv2", 64, "icf", "cortex-a72"),
    ],
)
def test_the_first_step_of_a_network_of_the_zoo(name, image, level, mcpu, emulators, monkeypatch):
    model = build_training_graph(build_forward(name, batch=BATCHES[name], image=image, classes=10))
    compare(api.rewrite(model, level), mcpu, emulators, monkeypatch, steps=1)
