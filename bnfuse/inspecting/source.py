"""What is inspected: a network of the zoo by its name, or a training graph in any form."""

from __future__ import annotations

from typing import Any

from bnfuse.build.zoo import network_named
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.training_graph import open_graph
from bnfuse.inspecting.network import inspect_network
from bnfuse.inspecting.result import Inspection
from bnfuse.inspecting.training import inspect_graph


def inspect_source(source: Any, zoo: dict[str, Any] | None = None, **signature: Any) -> Inspection:
    """Count a graph or a network. `zoo`: batch, image, channels, classes and metaparameters of a network of the zoo;
    None where not given."""
    network = network_named(source, zoo)
    if network is None:
        return inspect_graph(open_graph(source, **signature))
    if given := [f"--{key.replace('_', '-')}" for key, value in signature.items() if value]:
        raise BnfuseError(f"{', '.join(given)}: about training graphs that others wrote, not about {source} of the zoo")
    return inspect_network(network)
