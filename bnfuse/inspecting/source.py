"""What is inspected: a network of the zoo by its name, or a training graph in any form."""

from __future__ import annotations

from typing import Any

from bnfuse.building import looks_like_file
from bnfuse.errors import BnfuseError
from bnfuse.inspecting.network import inspect_network
from bnfuse.inspecting.result import Inspection
from bnfuse.inspecting.training import inspect_graph
from bnfuse.models import MODELS, build_graph, entry_of
from bnfuse.training_graph import open_graph


def inspect_source(source: Any, zoo: dict[str, Any] | None = None, **roles: Any) -> Inspection:
    """`zoo`: batch, image, channels, classes and metaparameters of a network of the zoo; None where not given."""
    given = {key: value for key, value in (zoo or {}).items() if value is not None}
    if isinstance(source, str) and source in MODELS:
        return inspect_network(build_graph(source, **given))
    if isinstance(source, str) and not looks_like_file(source):
        entry_of(source)  # raises, with the names there are
    if given:
        what = ", ".join(sorted(given))
        raise BnfuseError(f"{source}: {what} can be chosen for networks of the zoo only, not for a training graph")
    return inspect_graph(open_graph(source, **roles))
