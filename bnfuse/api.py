"""The functions that `bnfuse` offers. Each takes a model in any form: a path, ModelProto, gs.Graph, onnx_ir.Model,
or what `rewrite` returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bnfuse.io import load, save
from bnfuse.training_graph import open_graph

if TYPE_CHECKING:
    from bnfuse.diffing import Diff
    from bnfuse.inspection import Inspection
    from bnfuse.passes import Rewritten
    from bnfuse.verification import Verification

__all__ = ["bench", "compile", "diff", "inspect", "load", "open_step", "rewrite", "save", "train", "verify"]

Source = Any
Progress = Callable[[str], None]


def quiet(_: str) -> None:
    """The progress of work that nobody watches."""


def rewrite(source: Source, level: str = "icf", *, pool_first: bool | None = None, **roles: Any) -> Rewritten:
    """The graph after the passes of `level`, and the report of what they did and why they did not do more.

    `pool_first` moves average pools in front of 1x1 convolutions; by default it does so at level icf.
    """
    from bnfuse import passes

    return passes.rewrite(open_graph(source, **roles).model, level=level, pool_first=pool_first)


def diff(before: Source, after: Source) -> Diff:
    """What differs between two training graphs: nodes, edges, BatchNorms, feature-map traffic."""
    from bnfuse.diffing import diff_graphs

    return diff_graphs(open_graph(before, name="before"), open_graph(after, name="after"))


def verify(
    before: Source,
    after: Source,
    *,
    runtime: str = "ort",
    steps: int = 0,
    seed: int = 0,
    lr: float = 0.01,
    threads: int | None = None,
    progress: Progress = quiet,
) -> Verification:
    """Whether both graphs compute the same loss, gradients and running statistics (docs/numerics.md)."""
    from bnfuse.verification import verify_graphs

    return verify_graphs(
        open_graph(before, name="before"),
        open_graph(after, name="after"),
        runtime=runtime,
        steps=steps,
        seed=seed,
        lr=lr,
        threads=threads,
        progress=progress,
    )


def inspect(source: Source, **roles: Any) -> Inspection:
    """Sizes, parameters and FLOPs, layer by layer."""
    from bnfuse.inspection import inspect_graph

    return inspect_graph(open_graph(source, **roles))
