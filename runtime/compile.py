"""From a training graph to a step: lower it for training and evaluation, compile what is not cached, set state."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from bnfuse.core.errors import BnfuseError
from bnfuse.core.heap import release_heap, young_garbage
from bnfuse.core.ranges import check_whole
from bnfuse.graph.batches import with_batch
from bnfuse.graph.drawing import separated
from bnfuse.graph.exchanges import exchanges, without_exchanges
from bnfuse.graph.initial_values import Bare, with_values
from bnfuse.graph.sampling import sampling_of
from bnfuse.graph.training_graph import TrainingGraph, open_graph
from bnfuse.parallel.ranks import BUCKET, ONE, WIRES, Ranks
from bnfuse.parallel.waiting import patience
from bnfuse.parallel.world import World
from bnfuse.runtime import kept
from bnfuse.runtime.backends.execution import Compiled
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.codegen import tuning
from bnfuse.runtime.codegen.build import Progress, objects
from bnfuse.runtime.codegen.cache import Cache, default_folder
from bnfuse.runtime.kept import Making
from bnfuse.runtime.lowering.graph import Lowered, lower
from bnfuse.runtime.lowering.inference import inference_graph
from bnfuse.runtime.lowering.state import Lowering
from bnfuse.runtime.lowering.update import update_phase
from bnfuse.runtime.program import program as p
from bnfuse.runtime.program.optim import Optimizer, require_optimizer
from bnfuse.runtime.session import Step
from bnfuse.runtime.sizes import Pair
from bnfuse.runtime.targets.target import Target

COMPILING = 3600.0  # seconds that ranks wait for the one that compiles


@young_garbage()
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
    batches: Sequence[int] = (),
    evaluates: bool = True,
    world: World | None = None,
    bucket: int = BUCKET,
    wire: str = WIRES[0],
) -> Step:
    """Compile the step of a training graph, rewritten or not.

    `target` is cpu, cpu:MCPU, cuda or cuda:ARCHITECTURE; for cuda `precision` is fp32, tf32, bf16 or fp16. Without an
    optimiser the step computes loss and gradients and changes only running statistics. `progress(done, total, kernel)`
    is told of each kernel that had to be compiled. `cache` may be a folder.
    `tune` measures what nothing is remembered of (tuning.py); what is remembered is used with and without it.
    `batches` are the batch sizes, the graph's own one by default. Raises BnfuseError where the graph has no other.
    With `evaluates=False` the program of evaluation is left out, and `step.evaluate` is refused.
    `world` are the ranks that run the step together, each on a batch of its own; it begins with the state of rank 0.
    Their gradients go on their way while others are computed, when `bucket` bytes of them are there;
    between GPUs with `wire="bf16"` in half of their bits (lowering/wire.py).
    """
    require_optimizer(optimizer)
    graph = open_graph(model)
    bares = [Bare(each) for each in [with_batch(graph, batch) for batch in dict.fromkeys(batches)] or [graph]]
    machine = resolve(target, threads, precision)
    ranks = Ranks(1 if world is None else world.size, bucket, wire, getattr(world, "maps", False))
    making = Making(machine, optimizer, evaluates, ranks)
    pairs = pairs_of_ranks(world, bares, making, cache, tune=tune, progress=progress)
    step = Step(
        *pairs[0],
        *pairs[1:],
        target=machine,
        optimizer=optimizer,
        model=bares[0].serialized(),
        world=world,
    )
    step._shared.bucket = bucket
    step.load_state_dict(graph.state())
    release_heap()
    step.share_state()
    return step


def pairs_of_ranks(
    world: World | None,
    bares: Sequence[Bare],
    making: Making,
    cache: bool | str | pathlib.Path,
    *,
    tune: bool,
    progress: Progress | None,
) -> list[Pair]:
    """Compile each graph, where there is a cache on one rank of each machine first: it alone tunes and tells of it."""

    def make(first: bool) -> list[Pair]:
        return compiled_pairs(bares, making, cache, tune=tune and first, progress=progress if first else None)

    return one_first(world, make) if cache is not False else make(True)


def one_first(world: World | None, make: Callable[[bool], list[Pair]]) -> list[Pair]:
    """Compile on one rank of each machine, while the others wait: they find the kernels in the cache. Raises the first
    rank's error on all of them."""
    if world is None:
        return make(True)
    pairs, error = None, ""
    if world.local_rank == 0:
        try:
            pairs = make(True)
        except BnfuseError as found:
            error = str(found)
    with patience(world, COMPILING):
        errors = [text.decode() for text in world.gather(error.encode()) if text]
    if errors:
        raise BnfuseError(errors[0])
    return make(False) if pairs is None else pairs


@young_garbage()
def add_batch(
    step: Step,
    batch: int,
    *,
    progress: Progress | None = None,
    cache: bool | str | pathlib.Path = True,
    tune: bool = False,
) -> None:
    """Compile a step for another batch size too. Calls with so many samples run it, on the same state."""
    check_whole("batch", batch, 1)
    if batch in step.batches:
        return
    if not step.model:
        raise BnfuseError("the step was made without its model: compile the training graph with all its batches")
    more = with_batch(with_values(step.model, step.state_dict()), batch)
    making = Making(step.target, step.optimizer, step.evaluates, step.ranks)
    (pair,) = pairs_of_ranks(step.world, [Bare(more)], making, cache, tune=tune, progress=progress)
    step.add(*pair)


def compiled_pairs(
    bares: Sequence[Bare],
    making: Making,
    cache: bool | str | pathlib.Path,
    *,
    tune: bool,
    progress: Progress | None,
) -> list[Pair]:
    """Compile the programs of training and of evaluation of each graph, or read those that were kept."""
    place = _cache(cache)
    memory = tuning.Memory(place)
    if place.folder is None or tune or not memory.is_empty or not kept.runs_here(making.target):
        return new_pairs([bare.graph for bare in bares], making, place, memory, tune=tune, progress=progress)
    keys = [kept.key_of(bare, making) for bare in bares]
    pairs = {key: pair for key in keys if (pair := kept.read(place.folder, key)) is not None}
    missing = {key: bare.graph for key, bare in zip(keys, bares, strict=True) if key not in pairs}
    # by the rules alone, whatever another process may remember meanwhile
    made = new_pairs([*missing.values()], making, place, tuning.Memory(Cache(None)), tune=False, progress=progress)
    for key, pair in zip(missing, made, strict=True):
        pairs[key] = pair
        kept.write(place.folder, key, pair, making)
    return [pairs[key] for key in keys]


def new_pairs(
    graphs: Sequence[TrainingGraph],
    making: Making,
    cache: Cache,
    memory: tuning.Memory,
    *,
    tune: bool,
    progress: Progress | None,
) -> list[Pair]:
    """Lower and compile the programs of training and of evaluation of each graph."""
    lowered = [
        lower_graph(graph, making.target, making.optimizer, evaluates=making.evaluates, ranks=making.ranks)
        for graph in graphs
    ]
    for training, evaluation in lowered:
        if tune:
            tuning.tune(training, memory, cache, making.target, progress=progress)
        for part in (training, evaluation):
            tuning.choose(part, memory)
    parts = [part for pair in lowered for part in pair]
    codes = iter(objects([request for part in parts for request in part.requests], cache, progress=progress))
    compiled = [Compiled(part.program, list(itertools.islice(codes, len(part.requests)))) for part in parts]
    return list(zip(compiled[::2], compiled[1::2], strict=True))


def lower_graph(
    graph: TrainingGraph,
    target: Target,
    optimizer: Optimizer | None,
    *,
    evaluates: bool = True,
    ranks: Ranks = ONE,
) -> tuple[Lowered, Lowered]:
    """Lower the programs of training and of evaluation, the latter without launches where the graph has none, or where
    it is not asked for. `ranks` run the training together."""
    opset = graph.model.opset_imports.get("")
    if opset is None:
        raise BnfuseError(f"{graph.name}: imports no standard operators")
    finish: Callable[[Lowering], None] | None = None
    if optimizer is not None:
        chosen = optimizer

        def finish(low: Lowering) -> None:
            update_phase(low, chosen)

    model, random = separated(graph.model, graph.name)
    if ranks.size == 1 and next(exchanges(model.graph), None) is not None:
        model = model.clone()
        without_exchanges(model.graph)
    sampling = dataclasses.replace(sampling_of(graph.model), random=random)
    training = lower(
        model.graph,
        graph.signature,
        target,
        opset=opset,
        file=graph.name,
        sampling=sampling,
        finish=finish,
        ranks=ranks,
    )
    if not evaluates:
        return training, Lowered(p.refusal("the step was compiled without its evaluation"), [])
    try:
        cut, signature = inference_graph(graph.model, graph.signature, graph.name)
    except BnfuseError as error:  # a step that cannot be evaluated can be trained
        return training, Lowered(p.refusal(str(error)), [])
    signature = dataclasses.replace(signature, trainable=tuple(as_they_lie(training.program)))
    return training, lower(cut, signature, target, opset=opset, file=graph.name)


def as_they_lie(program: p.Program) -> list[str]:
    """List the trained parameters in the order of their memory, which evaluation has in common with training; where
    there are ranks it is that in which their gradients are finished."""
    trained = program.signature["trainable"]
    return sorted(trained, key=lambda name: program.storages[program.parameters[name].storage].offset)


def _cache(choice: bool | str | pathlib.Path) -> Cache:
    if isinstance(choice, bool):
        return Cache(default_folder() if choice else None)
    return Cache(pathlib.Path(choice))
