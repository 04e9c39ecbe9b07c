"""A difference, or what a rewrite did, as one HTML file that needs nothing else (docs/diff.md)."""

from __future__ import annotations

import os
from typing import Any

from bnfuse.diffing.page.document import render
from bnfuse.diffing.page.gather import gather
from bnfuse.graph.training_graph import open_graph

HARDWARE = ("h100", "rtx2080ti")  # estimates are for these

__all__ = ["HARDWARE", "diff_page", "rewrite_page"]


def diff_page(before: Any, after: Any, *, hardware: tuple[str, ...] = HARDWARE, **signature: Any) -> str:
    """Write the page of two training graphs: paths, or models in any form that `bnfuse.diff` takes."""

    first, second = open_graph(before, name="before", **signature), open_graph(after, name="after", **signature)
    return render(gather(first, second, hardware=hardware))


def rewrite_page(
    source: Any,
    rewritten: Any,
    *,
    output: str | os.PathLike[str] = "after",
    hardware: tuple[str, ...] = HARDWARE,
    **signature: Any,
) -> str:
    """Write the same for what `bnfuse.rewrite` returned for `source`, with its report: refusals and their reasons.

    `output` is the file that the rewritten graph has gone to.
    """

    first = open_graph(source, name="before", **signature)
    second = open_graph(rewritten, name=os.fspath(output))
    return render(gather(first, second, hardware=hardware, report=rewritten.report.to_json()))
