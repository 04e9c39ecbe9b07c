"""A step as a part of somebody's framework, on a GPU: the stand-in for the driver runs the CPU's kernels."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import numpy as np
import pytest
from fake_cuda import FakeCuda, floats, install
from source_files import load

from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.training_graph import open_graph
from bnfuse.passes import rewrite
from bnfuse.runtime import SGD, Step, compile_step
from bnfuse.runtime.backends.cuda import dlpack

steps = load(pathlib.Path(__file__).parent / "test_step.py")
nets, OnDevice = steps.nets, steps.OnDevice

STREAM, SIDE = 4242, 77  # the caller's


@pytest.fixture(scope="module")
def made() -> Step:
    model = rewrite(open_graph(build_training_graph(nets.dense_net(), loss="none")).model, level="icf")
    return compile_step(model, threads=1)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch, FakeCuda(seed=3))


@pytest.fixture
def cpu(made):
    state = made.state_dict()
    yield made
    made.load_state_dict(state)


def images(seed: int = 0) -> np.ndarray:
    return nets.batch(seed)[0]


def output_gradient(step: Step, seed: int = 7) -> np.ndarray:
    (name,) = step.program.signature["output_gradients"].values()
    return np.random.default_rng(seed).standard_normal(step.program.inputs[name].shape).astype(np.float32)


def both(cpu: Step, seed: int = 0) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    logits = cpu.forward(images(seed))
    cpu.commit_statistics()
    cpu.backward(output_gradient(cpu, seed))
    return logits, cpu.gradients()


def seen(view: object) -> np.ndarray:
    """What torch.from_dlpack would share."""
    found = dlpack.from_capsule(view.__dlpack__(stream=-1))
    return floats(found.address, int(np.prod(found.shape))).reshape(found.shape)


def same_gradients(gpu: Step, expected: dict[str, np.ndarray]) -> None:
    gradients = gpu.gradient_views()
    for name, value in gradients.of(seen(gradients.flat)).items():
        np.testing.assert_array_equal(value, expected[name])
    assert gradients.slices.keys() == expected.keys()


def test_backward_reads_the_images_where_forward_was_given_them(fake, cpu):
    gpu = steps.on_gpu(cpu, fake)
    gpu.forward(images(5))  # what lies in the region of inputs
    logits, expected = both(cpu)
    given, dy = OnDevice(images()), OnDevice(output_gradient(cpu, 0))
    copies = fake.count("cuMemcpyHtoDAsync")
    np.testing.assert_array_equal(gpu.forward(given).numpy(), logits)
    gpu.backward(dy)
    with pytest.raises(BnfuseError, match="a step on a GPU has no further memory for gradients: copy"):
        gpu.another_gradients()
    assert fake.count("cuMemcpyHtoDAsync") == copies
    same_gradients(gpu, expected)


def test_views_are_the_step_s_memory_and_nothing_waits(fake, cpu):
    gpu = steps.on_gpu(cpu, fake)
    gpu.stream = STREAM
    for name, view in gpu.state_views().items():
        np.testing.assert_array_equal(seen(view), cpu.state_dict()[name])
        seen(view)[...] *= 2
        np.testing.assert_array_equal(gpu.state_dict()[name], 2 * cpu.state_dict()[name])
    cpu.load_state_dict(gpu.state_dict())
    gpu.run_forward(OnDevice(images(9)))  # makes the graphs
    for piece in gpu.pieces(3):
        gpu.backward_piece(piece, *([] if piece.index else [OnDevice(output_gradient(cpu))]))
    gpu.commit_statistics()
    cpu.forward(images(9)), cpu.commit_statistics()
    before, waits = len(fake.log), len(fake.waits)
    logits, expected = both(cpu)
    ticket = gpu.run_forward(OnDevice(images()), commit_statistics=True)
    (output,) = gpu.program.signature["output_gradients"]
    np.testing.assert_array_equal(seen(gpu.output_views()[output]), logits)
    for piece in gpu.pieces(3):
        gpu.backward_piece(piece, *([] if piece.index else [OnDevice(output_gradient(cpu, 0))]), ticket=ticket)
    same_gradients(gpu, expected)
    waiting = {"cuStreamSynchronize", "cuMemAlloc", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"}
    assert not waiting & set(fake.log[before:]) and len(fake.waits) == waits
    for name, value in cpu.state_dict().items():
        np.testing.assert_array_equal(gpu.state_dict()[name], value)


@pytest.mark.parametrize("seed", range(3))
def test_a_captured_step_is_replayed_in_any_order_that_its_edges_allow(monkeypatch, cpu, seed):
    fake = install(monkeypatch, FakeCuda(seed=seed))
    gpu = steps.on_gpu(cpu, fake)
    given, dy = OnDevice(images(8)), OnDevice(output_gradient(cpu))
    gpu.stream = STREAM
    gpu.run_forward(given), gpu.backward_piece(gpu.pieces(1)[0], dy)
    (output,) = gpu.program.signature["output_gradients"]
    views = gpu.output_views(), gpu.gradient_views()
    before = gpu.state_dict()
    fake.begin_capture(SIDE)
    gpu.stream = SIDE
    ticket = gpu.run_forward(given, commit_statistics=True)
    for piece in gpu.pieces(3):
        gpu.backward_piece(piece, *([] if piece.index else [dy]), ticket=ticket)
    replay = fake.end_capture(SIDE)
    gpu.stream = STREAM
    for name, value in gpu.state_dict().items():
        np.testing.assert_array_equal(value, before[name])  # nothing has run
    for i in range(3):
        given.array[...], dy.array[...] = images(i), output_gradient(cpu, i)
        logits, expected = both(cpu, i)
        with fake_context(fake):
            replay()
        np.testing.assert_array_equal(seen(views[0][output]), logits)
        same_gradients(gpu, expected)
    for name, value in cpu.state_dict().items():
        np.testing.assert_array_equal(gpu.state_dict()[name], value)
    np.testing.assert_array_equal(gpu.forward(given).numpy(), cpu.forward(images(2)))  # and by itself again


class fake_context:
    """The caller's thread has the context."""

    def __init__(self, fake: FakeCuda) -> None:
        self.fake = fake

    def __enter__(self) -> None:
        self.fake.cuCtxPushCurrent(7)

    def __exit__(self, *_: object) -> None:
        self.fake.cuCtxPopCurrent()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda gpu: gpu.run_forward(images()), "input 'image' lies on the host, and a CUDA graph is being captured"),
        (
            lambda gpu: gpu.run_forward(OnDevice(images(), start=4)),
            "contiguous, and begin at a multiple",
        ),
        (lambda gpu: gpu.forward(OnDevice(images())), "call run_forward, and copy from output_views"),
        (lambda gpu: gpu.state_dict(), "is nothing for a stream that is captured into a CUDA graph"),
    ],
)
def test_what_cannot_be_captured_says_so(fake, cpu, call: Callable[[Step], None], message):
    gpu = steps.on_gpu(cpu, fake)
    gpu.forward(OnDevice(images()))
    fake.begin_capture(SIDE)
    gpu.stream = SIDE
    with pytest.raises(BnfuseError, match=message):
        call(gpu)


def test_an_update_is_not_captured_for_its_learning_rate_would_stay(fake):
    cpu = steps.on_cpu(SGD(0.1))
    gpu = steps.on_gpu(cpu, fake)
    batch = [OnDevice(array) for array in nets.batch()]
    gpu(*batch)
    fake.begin_capture(SIDE)
    gpu.stream = SIDE
    gpu.run_forward(*batch)
    gpu.backward()
    with pytest.raises(BnfuseError, match="'lr' is another number in each step, and a CUDA graph"):
        gpu.update()
