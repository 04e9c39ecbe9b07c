"""What values are computed from."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir


def ancestors(values: Iterable[ir.Value], stop: Iterable[ir.Value] = ()) -> set[ir.Node]:
    """List the nodes that the values need, not looking beyond `stop`."""
    stop = set(stop)
    found: set[ir.Node] = set()
    pending = [value for value in values if value not in stop]
    while pending:
        node = pending.pop().producer()
        if node is not None and node not in found:
            found.add(node)
            pending += [value for value in node.inputs if value is not None and value not in stop]
    return found
