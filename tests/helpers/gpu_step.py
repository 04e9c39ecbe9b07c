"""A step for a GPU whose device kernels are interpreted: the stand-in for the driver, and behind it lockstep."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import lockstep
import numpy as np
from fake_cuda import FakeCuda, floats

from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.runtime.backends.execution import Compiled
from bnfuse.runtime.compile import lower_graph
from bnfuse.runtime.kernels.cuda.container import Code, Stage, pack
from bnfuse.runtime.kernels.cuda.device import RAW
from bnfuse.runtime.kernels.kernel import Kernel
from bnfuse.runtime.lowering.graph import Lowered
from bnfuse.runtime.program.optim import Optimizer
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
    return pack(Code(parts, parameters, kernel.target.architecture, json.dumps(kernel.key).encode()))


def names(stage: Any) -> list[str]:
    return [str(param.name) for param in stage.function.params]


def call_of(kernel: Kernel, stage: Any) -> Callable[..., None]:
    """A stage as a function of addresses and numbers."""
    sizes = {param.name: (param.elements, RAW.get(param.dtype, param.dtype)) for param in kernel.params}

    def call(*values: Any) -> None:
        given = zip(names(stage), values, strict=True)
        lockstep.run(
            stage.function, {name: floats(v, *sizes[name]) if name in sizes else np.asarray(v)[()] for name, v in given}
        )

    return call
