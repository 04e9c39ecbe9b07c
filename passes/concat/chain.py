"""Several passes at once, node by node: what one moves past a node, the next finds at the node behind it.

Halves that sink through Concats, Splits and channel shuffles meet these in any order (ShuffleNet: a Concat, a shuffle,
a Split, of which one piece goes into the next Concat). Passes that sweep the graph one after the other would need a
round for each block, and would take for raw what is only not sunk yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from bnfuse.passes.rewriter import Editor, FusionResult, sort

Visit = Callable[[Editor, ir.Node], None]


def visit_all(model: ir.Model, visits: Sequence[Visit], *, backwards: bool = False) -> FusionResult:
    """Visit every node in the graph's order, or against it; gives what was fused and what was refused, by node names.

    A visit rewrites what is around a node, refuses, or does nothing. Nodes that it makes are not visited.
    """
    editor = Editor(model, "icf")
    nodes = list(model.graph)
    for node in reversed(nodes) if backwards else nodes:
        for visit in visits:
            if node.graph is not None:
                visit(editor, node)
    sort(model.graph)
    return editor.result()
