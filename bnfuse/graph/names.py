"""Names in a graph: who adds to it asks for ones that nothing has."""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.graph.protos import fresh


class Names:
    """The names of a graph's values and nodes: new ones are made against them."""

    def __init__(self, graph: ir.Graph) -> None:
        self.taken = {node.name for node in graph if node.name}
        self.taken |= {value.name for node in graph for value in node.outputs if value.name}
        self.taken |= {value.name for value in (*graph.inputs, *graph.initializers.values()) if value.name}

    def fresh(self, base: str) -> str:
        """Make a name that nothing in the graph has: `base`, or `base_1`, `base_2`, ..."""
        name = fresh(base, self.taken)
        self.taken.add(name)
        return name
