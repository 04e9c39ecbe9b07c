"""Results of nodes that torch's exporter named as it named a parameter or buffer: they get names of their own.

It names results by the function (`mean`, `mul`), parameters as the module does. In memory they are different values; in
a file, which knows them by name alone, a buffer `mean` and the result of `mean` would be one.
"""

from __future__ import annotations

from typing import Any

import onnx

from bnfuse.core.errors import BnfuseError


def written(program: Any, name: str) -> onnx.ModelProto:
    """Give what torch.onnx.export made as a model with each name once. Raises BnfuseError where an input of the module
    has the name of a parameter or buffer."""
    graph = program.model.graph
    outer = {*graph.initializers}
    if double := sorted(outer & {str(value.name) for value in graph.inputs}):
        raise BnfuseError(f"{name}: '{double[0]}' is an argument of its forward and a tensor of its own: rename one")
    results = [value for node in graph.all_nodes() for value in node.outputs]
    taken = outer | {str(value.name) for value in (*graph.inputs, *results)}
    for value in results:
        if value.name in outer:
            value.name = next(
                name for i in range(len(taken) + 1) if (name := f"{value.name}_result{i or ''}") not in taken
            )
            taken.add(value.name)
    model: onnx.ModelProto = program.model_proto
    return model
