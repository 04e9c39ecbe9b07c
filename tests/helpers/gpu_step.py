"""A step for a GPU whose device kernels are interpreted: the stand-in for the driver, and behind it lockstep."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import lockstep
import numpy as np
import pytest
from fake_cuda import FakeCuda, floats, install

from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.runtime.backends.execution import Compiled
from bnfuse.runtime.compile import compile_step, lower_graph
from bnfuse.runtime.kernels.cuda.container import Code, Stage, pack
from bnfuse.runtime.kernels.cuda.device import RAW
from bnfuse.runtime.kernels.kernel import Kernel
from bnfuse.runtime.lowering.graph import Lowered
from bnfuse.runtime.program.optim import SGD, Optimizer
from bnfuse.runtime.session import Step
from bnfuse.runtime.targets.target import CudaTarget


def interpreted_step(
    graph: TrainingGraph, target: CudaTarget, fake: FakeCuda, optimizer: Optimizer | None = None
) -> Step:
    """The step of a graph, in the memory of `fake`. Its kernels are not compiled."""
    parts = [interpreted(made, fake) for made in lower_graph(graph, target, optimizer)]
    step = Step(*parts, target=target, optimizer=optimizer)
    step.load_state_dict(graph.state())
    return step


def interpreted(made: Lowered, fake: FakeCuda) -> Compiled:
    """A program with code that `fake` runs by the interpreter."""
    kernels = [request.kernel() for request in made.requests]
    stages = [kernel.build() for kernel in kernels]
    codes = [code_of(kernel, own) for kernel, own in zip(kernels, stages, strict=True)]
    fake.serve(codes, lambda kernel, stage: call_of(kernels[kernel], stages[kernel][stage]))
    return Compiled(made.program, codes)


def code_of(kernel: Kernel, stages: Any) -> bytes:
    """What compiling it would give, with a text in the place of the cubin and every argument of every stage."""
    parameters = (
        *((param.name, "buffer") for param in kernel.params),
        *((f"{param.name}_offset", "int32") for param in kernel.params if param.is_map),
        *kernel.scalars,
    )
    parts = tuple(
        Stage(f"{stage.name}_kernel", stage.grid, stage.threads, stage.shared, tuple(names(stage))) for stage in stages
    )
    cubin = json.dumps(kernel.key).encode()
    return pack(Code(parts, parameters, kernel.target.architecture, cubin, waits=True))


def names(stage: Any) -> list[str]:
    return [str(param.name) for param in stage.function.params]


def call_of(kernel: Kernel, stage: Any) -> Callable[..., None]:
    """A stage as a function of addresses and numbers."""
    sizes = {param.name: (param.elements, RAW.get(param.dtype, param.dtype)) for param in kernel.params}
    run = lockstep.prepared(stage.function)

    def call(*values: Any) -> None:
        given = zip(names(stage), values, strict=True)
        run({name: floats(v, *sizes[name]) if name in sizes else np.asarray(v)[()] for name, v in given})

    return call


def check_both_targets(
    graph: TrainingGraph, shape: tuple[int, ...], precision: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take one step on a CPU and on an interpreted GPU, of images of this shape in 5 classes: they change the same."""
    fake = install(monkeypatch, FakeCuda(seed=5))
    optimizer = SGD(lr=0.1)
    cpu = compile_step(graph, threads=1, optimizer=optimizer)
    mine = interpreted_step(graph, CudaTarget("sm_90", 4, precision), fake, optimizer)
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal(shape).astype(np.float32), rng.integers(0, 5, shape[0])
    before = cpu.state_dict()
    assert float(mine(x, y)) == pytest.approx(float(cpu(x, y)), rel=tolerance)
    expected, found = cpu.state_dict(), mine.state_dict()
    for name, value in expected.items():
        change, own = np.asarray(value) - np.asarray(before[name]), np.asarray(found[name]) - np.asarray(before[name])
        assert np.abs(own - change).max() <= 4 * tolerance * np.abs(change).max() + 1e-6, name
