"""A step as one of two ranks on GPUs, its kernels interpreted and NCCL stood in for, beside the CPU's of one rank."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import onnx
import onnx.helper as h
import pytest
from fake_cuda import FakeCuda
from fake_nccl import FakeNccl
from gpu_step import interpreted
from thread_ranks import ThreadWorld, together

from bnfuse.build import build_training_graph
from bnfuse.core import nvidia
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.training_graph import TrainingGraph, open_graph
from bnfuse.parallel.nccl import NcclWorld
from bnfuse.parallel.ranks import Ranks
from bnfuse.runtime import SGD, Step, compile_step
from bnfuse.runtime.backends.cuda import driver as own
from bnfuse.runtime.backends.cuda.driver import Driver
from bnfuse.runtime.compile import lower_graph
from bnfuse.runtime.lowering.graph import Lowered
from bnfuse.runtime.program import program as p
from bnfuse.runtime.targets.target import CpuTarget, CudaTarget

TARGET = CudaTarget("sm_90", 4)
OPTIMIZER = SGD(lr=0.1, momentum=0.9)
ROWS, FEATURES, HIDDEN, CLASSES = 2, 6, 20, 3  # of each rank
SHAPES = {"w1": (HIDDEN, FEATURES), "b1": (HIDDEN,), "w2": (CLASSES, HIDDEN), "b2": (CLASSES,)}
BUCKET = 200  # bytes: w2 and b2 are one bucket, w1 and b1 another
STEPS = 2


@functools.cache
def graph(layers: int = 2) -> TrainingGraph:
    """Products: nothing of a sample depends on the others. With one layer `w2` and `b2` are left out."""
    rng = np.random.default_rng(0)
    nodes = [
        h.make_node("Gemm", ["x", "w1", "b1"], ["a"], "first", transB=1),
        h.make_node("Relu", ["a"], ["r"], "relu"),
        h.make_node("Gemm", ["r", "w2", "b2"], ["logits"], "second", transB=1),
    ]
    out = CLASSES if layers == 2 else HIDDEN
    if layers == 1:
        nodes = [h.make_node("Gemm", ["x", "w1", "b1"], ["logits"], "first", transB=1)]
    weights = [
        onnx.numpy_helper.from_array(rng.normal(0, 0.4, shape).astype(np.float32), name)
        for name, shape in list(SHAPES.items())[: 2 * layers]
    ]
    x, y = (h.make_tensor_value_info(n, 1, [ROWS, c]) for n, c in (("x", FEATURES), ("logits", out)))
    model = h.make_model(h.make_graph(nodes, "plain", [x], [y], weights), opset_imports=[h.make_opsetid("", 17)])
    model.ir_version = 8
    return open_graph(build_training_graph(model))


def batch(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Of both ranks."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2 * ROWS, FEATURES)).astype(np.float32), rng.integers(0, HIDDEN, 2 * ROWS)


class Gpus:
    """A GPU for each of two ranks, whose kernels are interpreted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, made: tuple[Lowered, Lowered], *, maps: bool = False) -> None:
        self.fakes = [FakeCuda(seed=rank) for rank in range(2)]
        drivers = [Driver(fake, ordinal) for ordinal, fake in enumerate(self.fakes)]
        monkeypatch.setattr(own, "_driver", lambda ordinal: drivers[ordinal])
        self.made, self.maps = made, maps
        mine = threading.local()
        monkeypatch.setattr(nvidia, "bindings", lambda: self.fakes[mine.rank])
        self._mine = mine

    def step(self, world: ThreadWorld) -> tuple[Step, FakeNccl]:
        fake, self._mine.rank = self.fakes[world.rank], world.rank
        nccl = FakeNccl(world, fake)
        gpus = NcclWorld(world, nccl, "communicator", world.rank, maps=self.maps)
        parts = (interpreted(part, fake) for part in self.made)
        return Step(*parts, target=TARGET, optimizer=OPTIMIZER, world=gpus), nccl


def test_steps_of_two_ranks_are_those_of_one_at_the_whole_batch(monkeypatch):
    one = compile_step(graph(1), threads=1, optimizer=OPTIMIZER, batches=(2 * ROWS,), evaluates=False)
    losses = [float(one(*batch(seed))) for seed in range(STEPS)]
    gpus = Gpus(monkeypatch, lower_graph(graph(1), TARGET, OPTIMIZER, evaluates=False, ranks=Ranks(2, 50)))

    def work(world: ThreadWorld) -> tuple[Any, ...]:
        step, nccl = gpus.step(world)
        step.load_state_dict(graph(1).state())
        step.share_state()
        mine = slice(world.rank * ROWS, (world.rank + 1) * ROWS)
        found = [float(step(*(array[mine] for array in batch(seed)))) for seed in range(STEPS)]
        step.same_everywhere()
        return found, step.state_dict(), nccl.log

    for found, state, log in together(2, work):
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        for name, value in one.state_dict().items():
            np.testing.assert_allclose(state[name], value, rtol=1e-5, atol=1e-6)
        assert log == [[("sum", 1)], [("sum", HIDDEN)], [("sum", HIDDEN * FEATURES)]]  # captured once for all steps


def test_gradients_may_go_as_bfloat16(monkeypatch):
    gpus = Gpus(monkeypatch, lower_graph(graph(), TARGET, OPTIMIZER, evaluates=False, ranks=Ranks(2, BUCKET, "bf16")))
    program = gpus.made[0].program
    backward = program.phase("backward")
    (first, last) = (place for place, launch in enumerate(backward) if launch.exchanges)
    held = [program.storages[program.gradients[name].storage] for name in SHAPES]
    given = [
        [np.random.default_rng((rank, n)).standard_normal(s.elements) for n, s in enumerate(held)] for rank in (0, 1)
    ]

    def work(world: ThreadWorld) -> list[np.ndarray]:
        step, nccl = gpus.step(world)
        runner = step._train
        runner.device  # noqa: B018  # gradients are no state: they are where the step is
        for storage, values in zip(held, given[world.rank], strict=True):
            runner.memory.store(storage, values.astype(np.float32))
        runner.run([p.Part("backward", place - 1, place + 2) for place in (first, last)], {})
        assert nccl.log == [[("sum", 80)], [("sum", 160)]]  # in rows of sixteen
        assert step.ranks.wire == "bf16"
        return [runner.memory.load(storage) for storage in held]

    ours, others = together(2, work)
    for index in range(len(held)):
        np.testing.assert_array_equal(ours[index], others[index])
        a, b = given[0][index], given[1][index]
        error = np.abs(ours[index] - (a + b))
        assert (error <= 2.0**-8 * (np.abs(a) + np.abs(b) + 1.01 * np.abs(a + b)) + 1e-7).all()
        assert error.max() > 1e-5, "it was on its way as float32"


def test_exchanges_stand_behind_what_finishes_their_gradients():
    program = lower_graph(graph(), TARGET, OPTIMIZER, evaluates=False, ranks=Ranks(2, BUCKET))[0].program
    launches, storages = program.launches, program.storages
    sums = [index for index, launch in enumerate(launches) if launch.kernel == p.SUM and launch.phase == "backward"]
    assert len(sums) == 2
    held = {name: storages[tensor.storage] for name, tensor in program.gradients.items()}
    sent = {}
    for index in sums:
        for buffer in launches[index].buffers:
            s = storages[buffer.storage]
            sent |= {
                n: index for n, g in held.items() if s.offset <= g.offset and g.offset + g.bytes <= s.offset + s.bytes
            }
    assert sent.keys() == held.keys()
    assert sent["w2"] == sent["b2"] < sent["w1"] == sent["b1"]
    for name, at in sent.items():
        writers = [
            index
            for index, launch in enumerate(launches)
            for buffer in launch.buffers
            if index not in sums and buffer.access != "in" and storages[buffer.storage] == held[name]
        ]
        assert writers and max(writers) < at
    between = range(sent["w2"] + 1, sent["w1"])
    assert any(launches[index].phase == "backward" for index in between), "backward goes on while the first are sent"


def test_half_of_the_bits_is_for_gpus_alone():
    with pytest.raises(BnfuseError, match="wire='bf16' is for ranks on GPUs"):
        lower_graph(graph(), CpuTarget("skylake", 8, 1), OPTIMIZER, ranks=Ranks(2, BUCKET, "bf16"))
    with pytest.raises(BnfuseError, match="wire 'fp8' is unknown: gradients go as one of fp32, bf16"):
        Ranks(2, BUCKET, "fp8")
