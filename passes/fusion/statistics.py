"""BNFF forward: the statistics half moves into the operator that writes the map ([Jung19], section 3.2, sub-BN1).

    y = Conv(x, w)                          y, mean, variance = ConvStatistics(x, w)
    mean, variance = BatchNormStatistics(y)   ->

The map is summed up while it is on chip: no sweep is left for the statistics. Several BNs over one map share them.

Refuses a map that is a graph input, or is written by an operator with no epilogue or with other sums there.
"""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.opset.spec import EPILOGUE_RESULTS
from bnfuse.passes.dialect.source_ops import forward_of, read
from bnfuse.passes.dialect.steps import try_spec
from bnfuse.passes.rewriter import Editor, FusionResult, Op


class StatisticsFusion(ir.passes.InPlacePass):
    """Move statistics into the operators that write the maps they are of."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "bnff")
        for node in [node for node in model.graph if node.op_type == "BatchNormStatistics"]:
            op = read(node)
            assert op is not None
            fuse(editor, op)
        return editor.result()


def fuse(editor: Editor, statistics: Op, step: str = "Statistics") -> None:
    """Move statistics into what writes their map, as this step; where that computes them already, read those."""
    y = statistics.operands["x"]
    producer = forward_of(y)
    if producer is None:
        editor.refuse(statistics.node, f"'{y.name}' is {_origin(y)}, which has no epilogue to compute statistics in")
        return
    names = dict(zip(("mean", "variance"), EPILOGUE_RESULTS[step], strict=True))
    results = {names[name]: value for name, value in statistics.results.items()}
    if step in producer.steps.epilogue:
        for name, value in results.items():
            value.replace_all_uses_with(producer.results[name])
        editor.fused.append(statistics.node.name or "")
        editor.remove_dead([statistics.node])
        return
    spec = try_spec(producer.steps.prologue, producer.steps.core, (*producer.steps.epilogue, step))
    if spec is None:
        editor.refuse(statistics.node, f"{producer.node.op_type} '{producer.node.name}' has no room for {step}")
        return
    editor.replace(producer, spec, [statistics.node], results=results)


def _origin(value: ir.Value) -> str:
    producer = value.producer()
    return f"written by {producer.op_type} '{producer.name}'" if producer is not None else "a graph input"
