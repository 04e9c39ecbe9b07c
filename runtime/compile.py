"""From a training graph to a step: lower it for training and evaluation, compile what is not cached, set state."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.drawing import separated
from bnfuse.graph.sampling import sampling_of
from bnfuse.graph.training_graph import TrainingGraph, open_graph
from bnfuse.runtime.backends.execution import Compiled
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.codegen import tuning
from bnfuse.runtime.codegen.build import Progress, objects
from bnfuse.runtime.codegen.cache import Cache, default_folder
from bnfuse.runtime.lowering.graph import Lowered, lower
from bnfuse.runtime.lowering.inference import inference_graph
from bnfuse.runtime.lowering.state import Lowering
from bnfuse.runtime.lowering.update import update_phase
from bnfuse.runtime.program import program as p
from bnfuse.runtime.program.optim import Optimizer, require_optimizer
from bnfuse.runtime.session import Step
from bnfuse.runtime.targets.target import Target


def compile_step(
    model: Any,
    *,
    target: str | Target = "cpu",
    optimizer: Optimizer | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    cache: bool | str | pathlib.Path = True,
    tune: bool = False,
    precision: str | None = None,
) -> Step:
    """Compile the step of a training graph, rewritten or not.

    `target` is cpu, cpu:MCPU, cuda or cuda:ARCHITECTURE; for cuda `precision` is fp32, tf32, bf16 or fp16. Without an
    optimiser the step computes loss and gradients and changes only running statistics. `progress(done, total, kernel)`
    is told of each kernel that had to be compiled. `cache` may be a folder.
    `tune` measures what nothing is remembered of (tuning.py); what is remembered is used with and without it.
    """
    require_optimizer(optimizer)
    graph = open_graph(model)
    machine = resolve(target, threads, precision)
    training, evaluation = lower_graph(graph, machine, optimizer)
    kept = _cache(cache)
    memory = tuning.Memory(kept)
    if tune:
        tuning.tune(training, memory, kept, machine, progress=progress)
    for part in (training, evaluation):
        tuning.choose(part, memory)
    codes = objects([*training.requests, *evaluation.requests], kept, progress=progress)
    count = len(training.requests)
    step = Step(
        Compiled(training.program, codes[:count]),
        Compiled(evaluation.program, codes[count:]),
        target=machine,
        optimizer=optimizer,
        model=ir.to_proto(graph.model).SerializeToString(),
    )
    step.load_state_dict(graph.state())
    return step


def lower_graph(graph: TrainingGraph, target: Target, optimizer: Optimizer | None) -> tuple[Lowered, Lowered]:
    """Lower the programs of training and of evaluation, the latter without launches where the graph has none."""
    opset = graph.model.opset_imports.get("")
    if opset is None:
        raise BnfuseError(f"{graph.name}: imports no standard operators")
    finish: Callable[[Lowering], None] | None = None
    if optimizer is not None:
        chosen = optimizer

        def finish(low: Lowering) -> None:
            update_phase(low, chosen)

    model, random = separated(graph.model, graph.name)
    sampling = dataclasses.replace(sampling_of(graph.model), random=random)
    training = lower(
        model.graph, graph.signature, target, opset=opset, file=graph.name, sampling=sampling, finish=finish
    )
    try:
        cut, signature = inference_graph(graph.model, graph.signature, graph.name)
    except BnfuseError as error:  # a step that cannot be evaluated can be trained
        return training, Lowered(p.refusal(str(error)), [])
    return training, lower(cut, signature, target, opset=opset, file=graph.name)


def _cache(choice: bool | str | pathlib.Path) -> Cache:
    if isinstance(choice, bool):
        return Cache(default_folder() if choice else None)
    return Cache(pathlib.Path(choice))
