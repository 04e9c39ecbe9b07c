"""ICF forward: normalise halves and activations sink through Concats, Splits and channel shuffles.

    y1 = NormalizeReluPointwise(x1, a1, b1)         t = Concat(x1, x2)
    y2 = NormalizeReluPointwise(x2, a2, b2)    ->   u, v = Split(t)
    y  = Concat(y1, y2)                             p = NormalizeReluPointwise(u, ..); q = NormalizeReluPointwise(v, ..)
    p, q = Split(y)

All three are places in memory or copies, coefficients are per channel: what is behind them has room for the steps
(concat/sink.py, concat/split.py and concat/shuffle.py say what each moves past, and when it refuses). They are met in
the order of the graph, so that what one lets through the next finds.

Refuses what the three refuse.
"""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.passes.concat import shuffle, sink, split
from bnfuse.passes.concat.chain import visit_all
from bnfuse.passes.rewriter import FusionResult


class SinkForward(ir.passes.InPlacePass):
    """Move normalise halves and activations past what places and copies channels."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        return visit_all(model, [sink.sink_forward, split.sink_forward, shuffle.sink_forward])
