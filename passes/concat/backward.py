"""ICF backward: masks and reductions move before Splits, Concats and channel shuffles of gradients.

    dt      = ConvGrad(..)                               dt, db, dg = ConvGradReluGradReduce(..)
    d1, d2  = Split(dt)                             ->   dz1, dz2   = Split(dt)
    dz1, .. = PointwiseGradReluGradReduce(d1, ..)        db1, db2   = Split(db); ...
    dz2, .. = PointwiseGradReluGradReduce(d2, ..)

What writes a gradient has room for its mask and its reductions (concat/mask.py, concat/split.py, concat/shuffle.py and
concat/sums.py say what each moves, and when it refuses). They are met against the order of the graph, so that what one
lets through the next finds.

Refuses what the four refuse.
"""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.passes.concat import mask, shuffle, split, sums
from bnfuse.passes.concat.chain import visit_all
from bnfuse.passes.rewriter import FusionResult


class SinkBackward(ir.passes.InPlacePass):
    """Move masks and reductions before what cuts, joins and permutes the channels of gradients."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        visits = [sums.sink_backward, mask.sink_backward, split.sink_backward, shuffle.sink_backward]
        return visit_all(model, visits, backwards=True)
