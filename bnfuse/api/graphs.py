"""Functions of graphs, which compile none for good: rewriting, comparing, estimating, timing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnfuse.api.opening import Source, parted, require_gpu
from bnfuse.core.files import require_apart
from bnfuse.core.progress import Progress, quiet
from bnfuse.core.ranges import check_real, check_whole
from bnfuse.graph.freezing import frozen
from bnfuse.graph.training_graph import open_graph

if TYPE_CHECKING:
    from bnfuse.benchmarking.results import Benchmark
    from bnfuse.diffing import Diff
    from bnfuse.exploring import Exploration
    from bnfuse.inspecting import Inspection
    from bnfuse.passes import Rewritten
    from bnfuse.verifying.verdict import Verification


def rewrite(
    source: Source,
    level: str = "icf",
    *,
    pool_first: bool | None = None,
    remove: str | Iterable[int] | None = None,
    keep_affine: bool = False,
    decay: float | None = None,
    sample: str | None = None,
    local_bn: int | None = None,
    sync: bool = False,
    sync_ranks: int | None = None,
    freeze: Sequence[str] = (),
    **signature: Any,
) -> Rewritten:
    """Run the passes of `level` on a graph. Gives it, and the report of what they did and why they did not do more.

    `pool_first` moves average pools in front of 1x1 convolutions; by default it does so at level icf. `remove` takes
    BatchNorms out first: numbers, or a list in words such as "1,4-6", "all-except:5,8", "paper"
    (passes/removal/placements.py); with `keep_affine` their scale and bias stay. `decay` is the weight that a batch
    has in the running statistics. `sample` says what part of the batch each BatchNorm takes its statistics from:
    "fs:1/32" (passes/sampling/spec.py). With `local_bn` each group of so many samples is normalised on its own.
    With `sync` statistics are those of all ranks of a data-parallel run, or of its first `sync_ranks`.
    `freeze` has globs of parameters that are not trained.
    """
    from bnfuse import passes

    graph = frozen(open_graph(source, **signature), freeze)
    return passes.rewrite(
        graph.model,
        level=level,
        pool_first=pool_first,
        remove=remove,
        keep_affine=keep_affine,
        decay=decay,
        sample=sample,
        local_bn=local_bn,
        sync=sync,
        sync_ranks=sync_ranks,
        signature=graph.signature,
    )


def diff(before: Source, after: Source, **signature: Any) -> Diff:
    """Compare two training graphs: nodes, edges, BatchNorms, feature-map traffic."""
    from bnfuse.diffing import diff_graphs

    return diff_graphs(open_graph(before, name="before", **signature), open_graph(after, name="after", **signature))


def verify(
    before: Source,
    after: Source,
    *,
    runtime: str = "ort",
    steps: int = 0,
    seed: int = 0,
    lr: float = 0.01,
    threads: int | None = None,
    target: str = "cpu",
    precision: str | None = None,
    batch: int | None = None,
    progress: Progress = quiet,
    **signature: Any,
) -> Verification:
    """Verify that both graphs compute the same loss, gradients and running statistics (docs/numerics.md).

    `batch` compares them at another batch than theirs. `target` and `precision` are those of `compile`, for the
    runtime tvm.
    """
    from bnfuse.verifying.verification import verify_graphs

    check_whole("steps", steps)
    check_whole("seed", seed)
    check_real("lr", lr)

    require_gpu(target, precision)
    return verify_graphs(
        open_graph(before, name="before", **signature),
        open_graph(after, name="after", **signature),
        runtime=runtime,
        steps=steps,
        seed=seed,
        lr=lr,
        threads=threads,
        target=target,
        precision=precision,
        batch=batch,
        progress=progress,
    )


def inspect(source: Source, *, zoo: dict[str, Any] | None = None, **signature: Any) -> Inspection:
    """Count sizes, parameters, FLOPs and feature-map traffic, layer by layer.

    `source` is a training graph, or the name of a network of the zoo, which is counted without making its weights:
    `zoo` has its batch, image, channels, classes and metaparameters. docs/design-space.md
    """
    from bnfuse.inspecting.source import inspect_source

    return inspect_source(source, zoo, **signature)


def estimate(source: Source, *, progress: Progress = quiet, **options: Any) -> Any:
    """Estimate time and memory traffic of a training step on hardware that need not be here.

    `source` is a training graph, or the name of a network of the zoo. `options` are those of the command line
    (`bnfuse.estimating.request.Request`): hardware, levels, cache, bandwidth, flops, sweep, workers, reuse, assume,
    plot, ...; what comes back is an Estimate, or what they ask for: a Comparison of levels, a Sweep, Reuse, Roofline,
    Scaling or Pipeline, each with to_json(), to_csv() and sections(). docs/estimate.md
    """
    from bnfuse.estimating.request import Request, answer

    opening, asked = parted(options)
    return answer(Request(source, signature=opening, **asked), progress)


def explore(network: str | None = None, vary: Iterable[str] = (), **options: Any) -> Exploration:
    """Sweep a family of networks of the zoo: sizes, work and estimated step times, before and after fusion.

    `vary` has axes in words: "growth=12:48:12", "bypass=none,simple". `options` are those of
    `bnfuse.exploring.explore`: base, preset_name, hardware, level, pareto, plot, ... docs/design-space.md
    """
    from bnfuse import exploring

    return exploring.explore(network, vary, **options)


def bench(source: Source, *, plot: str | Path | None = None, progress: Progress = quiet, **options: Any) -> Benchmark:
    """Time a step at several levels and in other runtimes, in turns, and measure the peak memory of each.

    levels        none, rcf, mvf, bnff, icf, each also with +pool-first or +no-pool-first; none and icf by default
    samples       specs of `rewrite`: each level also with each of them
    against       ort, torch, torch-cl, torch-compile; on a GPU torch's, each also with +graph
    repetitions   timed steps of each, 9 by default, behind `warm_up` others, 2 by default
    wait          seconds of patience for an idle machine, 60 by default
    profile       our steps kernel by kernel too; `estimate`: also what each kernel is predicted to take here
    compile_time  compiling with empty caches too; memory=False leaves peak memory out
    plot          the file of a picture

    tune, threads, target and precision are those of `compile`, seed is that of the data. docs/bench.md
    """
    from bnfuse.benchmarking import run as benchmark

    opening, asked = parted(options)
    plan = benchmark.plan_of(**asked)
    require_apart(source, plot)
    return benchmark.run_benchmark(open_graph(source, **opening), plan, plot=plot, progress=progress)
