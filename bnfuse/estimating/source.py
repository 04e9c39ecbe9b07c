"""What is estimated: a network of the zoo by its name, or a training graph, each also at levels of fusion."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from bnfuse.analysis.executed import require_fixed_shapes
from bnfuse.build.zoo import network_named
from bnfuse.core.progress import Progress, quiet
from bnfuse.estimating.assumptions import Assumptions
from bnfuse.estimating.hardware import HOST, Hardware, profile
from bnfuse.estimating.hardware import in_precision as at_precision
from bnfuse.estimating.layerwise import Passes, forward_workload
from bnfuse.estimating.order import Order
from bnfuse.estimating.training import Optimizer, training_workload
from bnfuse.estimating.workload import Workload, in_precision
from bnfuse.graph.training_graph import TrainingGraph, open_graph

DEFAULT = "h100"


def workloads(
    source: Any,
    *,
    levels: Sequence[str] = (),
    zoo: dict[str, Any] | None = None,
    order: Order = "file",
    passes: Passes | None = None,
    views: bool = False,
    optimizer: Optimizer = "none",
    precision: str = "fp32",
    **signature: Any,
) -> tuple[Workload, ...]:
    """Make one workload, or one for each level, with the level's name; of a single level with the graph's before it.

    A network of the zoo has the layers and the backward pass of [Tsai21]; with `levels` its training graph is built,
    as everything else that is a graph is one already. `passes` concerns the former alone, `views` and `optimizer` the
    latter. `precision` is what maps are stored in.
    """
    network = network_named(source, zoo)
    if network is not None and not levels:
        return (in_precision(forward_workload(network, order=order, passes=passes), precision),)
    graph = built(source, zoo or {}) if network is not None else open_graph(source, **signature)
    require_fixed_shapes(graph)
    graphs = rewritten(graph, levels) if levels else {graph.name: graph}
    if levels and len(graphs) == 1:
        graphs = {f"{graph.name} {level}": each for level, each in graphs.items()}
    found = (training_workload(each, order=order, views=views, optimizer=optimizer) for each in graphs.values())
    return tuple(
        dataclasses.replace(in_precision(each, precision), name=name) for name, each in zip(graphs, found, strict=True)
    )


def built(name: str, zoo: dict[str, Any]) -> TrainingGraph:
    """Give the training graph of a network of the zoo, in memory."""
    from bnfuse.build.named import build_model

    return open_graph(build_model(name, zoo=zoo).model, name=name)


def rewritten(graph: TrainingGraph, levels: Sequence[str]) -> dict[str, TrainingGraph]:
    """Rewrite at levels with their options, as `bnfuse bench --level` takes them. Gives the graphs by these names."""
    from bnfuse.passes.variants import rewrite_variant, variants

    return {each.name: open_graph(rewrite_variant(graph, each), name=each.name) for each in variants(levels)}


def hardware_of(
    name: str | None = None,
    *,
    cache: float | None = None,
    bandwidth: float | None = None,
    flops: float | None = None,
    precision: str = "fp32",
    fresh: bool = False,
    progress: Progress = quiet,
) -> Hardware:
    """Give a profile by name ("host": this machine, as measured) at a precision's rate of products, with what is given
    in its place: bytes, bytes/s, FLOP/s.

    Without a name: hardware of one's own where all three are given, else the default profile.
    """
    if name == HOST:
        from bnfuse.estimating.probe import host

        chosen = host(fresh=fresh, progress=progress)
    else:
        chosen = profile(DEFAULT if name is None else name)
    chosen = at_precision(chosen, precision)
    given: dict[str, Any] = {
        key: value for key, value in (("cache", cache), ("bandwidth", bandwidth), ("flops", flops)) if value is not None
    }
    if not given:
        return chosen
    own = name is None and len(given) == 3
    label = "own" if own else f"{chosen.name} with another {' and '.join(given)}"
    return dataclasses.replace(chosen, name=label, about="" if own else chosen.about, **given)


def behaviour_of(name: object) -> Assumptions:
    """Tell what is assumed of hardware by its name: a processor's own caches are no software-managed ones."""
    if name != HOST:
        return Assumptions()
    from bnfuse.estimating.probe import ASSUMPTIONS

    return ASSUMPTIONS
