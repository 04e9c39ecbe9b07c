"""Candidates: our compiled step and onnxruntime on one batch. Those of torch are made by `bnfuse.baselines`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from bnfuse.analysis.ancestors import ancestors
from bnfuse.benchmarking.choices import is_gpu
from bnfuse.core.times import Candidate, Times
from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.measuring.machine import ORT_SPINNING
from bnfuse.ort.library import onnxruntime, open_session
from bnfuse.ort.oracle import Arrays, OrtGraph, serialized, without_state
from bnfuse.passes.variants import Variant, rewrite_variant

if TYPE_CHECKING:
    from bnfuse.passes import Rewritten

# the update is computed and changes nothing: a small network that learns its one batch by heart has subnormal gradients
# in the end, and arithmetic on those takes 25 times as long
LR, MOMENTUM = 0.0, 0.9


class CompiledCandidate:
    """A compiled step on one batch, its update included."""

    def __init__(self, name: str, step: Any, feeds: Arrays) -> None:
        self.name, self.step = name, step
        self.feeds = [feeds[key] for key in step.inputs]

    def run(self) -> Times:
        """Run one step, and time it and its forward phase."""
        start = time.perf_counter()
        self.step(*self.feeds)
        return Times(time.perf_counter() - start, self.step.times["forward"])


class OrtCandidate:
    """onnxruntime on the file as it is: its forward part alone, then the whole graph, which ends with the gradients.

    It is timed in this process, as the others are, after it has run in one of its own. The parts are two sessions,
    because onnxruntime runs every node, whatever outputs are asked for. The new running statistics are among the
    outputs, so it leaves those it is fed as they are.
    """

    forward_apart = True

    def __init__(self, graph: TrainingGraph, feeds: Arrays, threads: int, *, timed: bool = True) -> None:
        self.name = "ort"
        self.turns = 0
        self.feeds = {**graph.state(), **feeds}
        signature = graph.signature
        outputs = [graph.loss, *signature.running.values()]
        self.outputs = [*outputs, *signature.gradients.values()]
        options: dict[str, Any] = {"threads": threads, "optimize": True, "config": ORT_SPINNING}
        if timed:  # what crashes does so there
            OrtGraph(graph.model, name=graph.name, **options).run(self.feeds, self.outputs)

        def session(model: ir.Model) -> Any:
            data = serialized(without_state(ir.to_proto(model)), graph.name).tobytes()
            return open_session(onnxruntime(), data, **options)

        self.forward = session(forward_part(graph.model, outputs)) if timed else None
        self.whole = session(graph.model)
        needed = [value.name for value in self.forward.get_inputs()] if self.forward else []
        self.forward_feeds = {name: self.feeds[name] for name in needed}

    def run(self) -> Times:
        """Give the two in turns first and second: whichever comes first finds its threads asleep."""
        parts: list[tuple[str, Any, list[str] | None, Arrays]] = [("step", self.whole, self.outputs, self.feeds)]
        if self.forward is not None:
            parts.insert(self.turns % 2, ("forward", self.forward, None, self.forward_feeds))
        self.turns += 1
        seconds = {"forward": 0.0}
        for name, session, outputs, feeds in parts:
            start = time.perf_counter()
            session.run(outputs, feeds)
            seconds[name] = time.perf_counter() - start
        return Times(**seconds)


def forward_part(model: ir.Model, outputs: Sequence[str]) -> ir.Model:
    """Give a copy of the graph with these outputs alone and what they need."""
    part = model.clone()
    part.graph.outputs[:] = [value for value in part.graph.outputs if value.name in outputs]
    needed = ancestors(part.graph.outputs)
    part.graph.remove([node for node in part.graph if node not in needed], safe=True)
    return part


def make_baseline(
    graph: TrainingGraph,
    baseline: str,
    feeds: Arrays,
    threads: int,
    *,
    timed: bool = True,
    device: str = "cpu",
    precision: str = "fp32",
) -> Candidate:
    """Make the step of another runtime; `device` and `precision` are torch's. `timed=False`, in a process for this
    alone, spares onnxruntime its first run in another one and the session of the forward part."""
    if baseline == "ort":
        return OrtCandidate(graph, feeds, threads, timed=timed)
    from bnfuse.baselines import TorchStep

    own = {"threads": threads} if device == "cpu" else {}
    return TorchStep(graph, baseline, feeds, lr=LR, momentum=MOMENTUM, device=device, precision=precision, **own)


def compile_variant(
    graph: TrainingGraph,
    variant: Variant,
    threads: int,
    bar: Callable[[int, int, str], None] | None = None,
    *,
    tune: bool = False,
    **options: Any,
) -> Any:
    """Rewrite and compile a graph, with SGD and momentum (of rate 0) in the step."""
    return compile_rewritten(rewrite_variant(graph, variant), threads, progress=bar, tune=tune, **options)


def compile_rewritten(rewritten: Rewritten, threads: int | None, **options: Any) -> Any:
    """Compile what was rewritten. `options` are further ones of `compile_step`. Threads are a CPU's."""
    from bnfuse import runtime

    optimizer = runtime.SGD(lr=LR, momentum=MOMENTUM)
    if is_gpu(options.get("target", "cpu")):
        threads = None
    return runtime.compile_step(rewritten.model, optimizer=optimizer, threads=threads, **options)
