"""What `bnfuse estimate` answers: one question of several kinds, from options as people write them.

a stack of ReRAM and GPU layers     the pipeline of [Joardar22]
workers                             data-parallel steps, simulated or by the formulas of [Iandola16]
a sweep                             an estimate for each value
reuse                               the scopes in which bytes are reused
roofline                            how often layers reuse data, and what they attain at that
levels                              estimates beside one another
none of these                       one estimate
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bnfuse.analysis.executed import require_fixed_shapes
from bnfuse.build.zoo import is_network, network_named
from bnfuse.core.errors import BnfuseError
from bnfuse.core.figures import require_plotting, save_figure
from bnfuse.core.files import require_apart, require_writable
from bnfuse.core.progress import Progress, bar_of, quiet
from bnfuse.estimating import figures, plots
from bnfuse.estimating.assumptions import Assumptions, check_choice
from bnfuse.estimating.compare import Comparison
from bnfuse.estimating.estimate import estimate
from bnfuse.estimating.hardware import MIB, Hardware
from bnfuse.estimating.layerwise import Passes
from bnfuse.estimating.options import Request
from bnfuse.estimating.parallel import plot as parallel_plot
from bnfuse.estimating.parallel.scaling import MESSAGES, Scaling, network, scale
from bnfuse.estimating.parallel.simulation import scale_schedule
from bnfuse.estimating.quantities import parse_bandwidth, parse_bytes, parse_count, parse_flops
from bnfuse.estimating.reram import plot as reram_plot
from bnfuse.estimating.reram.assumptions import ReramAssumptions, is_stack
from bnfuse.estimating.reram.pipeline import Pipeline, pipeline
from bnfuse.estimating.result import Estimate
from bnfuse.estimating.reuse import reuse
from bnfuse.estimating.roofline import Roofline, roofline
from bnfuse.estimating.settings import settle
from bnfuse.estimating.source import behaviour_of, hardware_of, workloads
from bnfuse.estimating.sweep import Sweep, parse_sweep, sweep
from bnfuse.estimating.unread import refuse_unread
from bnfuse.estimating.workload import Workload
from bnfuse.graph.training_graph import open_graph
from bnfuse.models import entry_of
from bnfuse.parallel.ranks import BUCKET
from bnfuse.runtime.targets.arch import PRECISIONS

CACHES = tuple(MIB << k for k in range(3, 11))  # of which reuse is told: 8 MB to 1 GB


def answer(request: Request, progress: Progress = quiet) -> Any:
    """Answer with an Estimate, Comparison, Sweep, Reuse, Roofline, Scaling or Pipeline, drawn where a picture is asked
    for."""
    if len(request.kinds) > 1:
        raise BnfuseError(f"--{' and --'.join(request.kinds)} ask for different things: give one of them")
    refuse_unread(request)
    check_choice("precision", request.precision, PRECISIONS)
    if request.plot is not None:
        require_plotting(request.plot)
        require_apart(request.source, request.plot)
        require_writable(request.plot)
    found = question_of(request)(request, progress)
    if request.plot is not None:
        draw(found, request.plot)
    return found


def question_of(request: Request) -> Callable[[Request, Progress], Any]:
    """Find what answers a request."""
    if request.hardware is not None and is_stack(request.hardware):
        return pipelined
    if request.remove is not None:
        raise BnfuseError("--remove is for a ReRAM/GPU stack here: rewrite the graph with --remove first")
    return next((QUESTIONS[kind] for kind in request.kinds), estimated)


def estimated(request: Request, progress: Progress) -> Estimate | Comparison:
    """Estimate the workload, or each of its levels."""
    machine, assumptions, passes = machine_of(request, progress)
    found = tuple(estimate(each, machine, assumptions) for each in workloads_of(request, passes))
    return Comparison(str(request.source), found) if len(found) > 1 else found[0]


def swept(request: Request, progress: Progress) -> Sweep:
    """Estimate over the values of an axis."""
    asked = parse_sweep(str(request.sweep))
    machine, assumptions, passes = machine_of(request, progress)

    bar = bar_of(progress)

    def told(done: int, total: int) -> None:
        if bar is not None:
            bar(done, total, asked.axis)

    source = of_batch(request, passes) if asked.axis == "batch" else one(request, passes)
    return sweep(source, machine, asked.axis, asked.values, assumptions=assumptions, progress=told)


def reused(request: Request, progress: Progress) -> Any:
    """Tell where bytes are reused."""

    machine, _, passes = machine_of(request, progress)
    return reuse(one(request, passes), sorted({*CACHES, machine.cache}))


def roofs(request: Request, progress: Progress) -> Any:
    """Tell what the layers attain under the roof."""

    machine, assumptions, passes = machine_of(request, progress)
    return roofline(one(request, passes), machine, assumptions)


def scaled(request: Request, progress: Progress) -> Any:
    """Estimate data-parallel steps: by simulation, or by the paper's formulas."""
    counts = [parse_count(part) for part in str(request.workers).split(",")]
    between = network(str(request.network), request.latency * 1e-6)
    bucket = BUCKET if request.bucket is None else parse_bytes(str(request.bucket))
    machine, assumptions, passes = machine_of(request, progress)
    by_name = is_network(request.source)
    source = of_batch(request, passes) if by_name else one(request, passes)
    batch = request.zoo.get("batch") or entry_of(request.source).batch if by_name else None
    about: dict[str, Any] = {"batch": batch, "assumptions": assumptions}
    if request.reduce in MESSAGES:
        how = (request.reduce, request.scaling)
        return scale(source, machine, counts, between, *how, overlap=request.overlap, **about)
    return scale_schedule(
        source,
        machine,
        counts,
        between,
        request.reduce,
        request.scaling,
        bucket_bytes=bucket,
        jitter=request.jitter,
        sharded=request.sharded,
        **about,
    )


QUESTIONS: dict[str, Callable[[Request, Progress], Any]] = {
    "sweep": swept,
    "reuse": reused,
    "roofline": roofs,
    "workers": scaled,
}


def pipelined(request: Request, progress: Progress) -> Any:
    """Estimate the pipeline of a ReRAM/GPU stack."""

    (assumptions,) = settle(request.assume, ReramAssumptions())
    graph: Any = network_named(request.source, dict(request.zoo))
    if graph is None:
        graph = open_graph(request.source, **request.signature)
        require_fixed_shapes(graph)
    return pipeline(graph, str(request.hardware), assumptions, remove=request.remove)


def machine_of(request: Request, progress: Progress) -> tuple[Hardware, Assumptions, Passes]:
    """Give the hardware, and how it and the passes behave."""
    assumptions, passes = settle(request.assume, behaviour_of(request.hardware), Passes())
    machine = hardware_of(
        request.hardware,
        cache=read(parse_bytes, request.cache),
        bandwidth=read(parse_bandwidth, request.bandwidth),
        flops=read(parse_flops, request.flops),
        precision=request.precision,
        fresh=request.measure,
        progress=progress,
    )
    return machine, assumptions, passes


def read(parse: Callable[[str], float], value: str | float | None) -> Any:
    """Read a quantity; None stays None."""
    return None if value is None else parse(str(value))


def workloads_of(request: Request, passes: Passes) -> tuple[Workload, ...]:
    """Make the workload that is asked about, or one for each level."""
    return workloads(
        request.source,
        levels=request.levels,
        zoo=dict(request.zoo),
        order=request.order,
        passes=passes,
        views=request.views,
        optimizer=request.optimizer,
        precision=request.precision,
        **request.signature,
    )


def one(request: Request, passes: Passes) -> Workload:
    """Make the workload. Raises BnfuseError where several levels are named."""
    found = workloads_of(request, passes)
    if len(found) > 1:
        raise BnfuseError(f"--{request.kinds[0]} is about one graph: give one level")
    return found[0]


def of_batch(request: Request, passes: Passes) -> Callable[[int], Workload]:
    """Make what gives the workload by its batch; of a network of the zoo, as a graph has one batch."""
    return lambda batch: one(dataclasses.replace(request, zoo={**request.zoo, "batch": batch}), passes)


def draw(found: Any, path: Path) -> None:
    """Write the picture of an answer."""

    if isinstance(found, Estimate):
        plots.plot_estimate(found, path)
    elif isinstance(found, Sweep):
        plots.plot_sweep(found, path)
    elif isinstance(found, Comparison):
        plots.plot_comparison(found, path)
    elif isinstance(found, Scaling):
        parallel_plot.plot([found], path)
    elif isinstance(found, Pipeline):
        reram_plot.plot(found, path)
    elif isinstance(found, Roofline):
        save_figure(figures.roofline_figure([found]), path)
    else:
        save_figure(figures.reuse_figure([found]), path)
