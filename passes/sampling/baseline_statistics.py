"""L1BN and RBN: cheaper estimates of the variance, from all elements ([Chen18], section 2, table 3; docs/maths.md).

    L1BN    mean, variance, sign_mean = L1Statistics(x)          variance = pi/2 * (mean of |x - mean|)^2
    RBN     mean, variance, low, high, ... = RangeStatistics(x)  variance from high - low

    dx, dg, db =                        db, dg = BatchNormGradReduce(dz, x, mean, inv_std)
      BatchNormGrad(dz, x,          ->  q, w   = L1GradFinalize(BatchNormGradTerms(...), ...)
        g, mean, inv_std)               dx     = L1GradInput(dz, x, mean, a, q, w)

The rest of the BatchNorm is as ever: BatchNormFinalize, and a normalise half that goes where it is read. Statistics and
input gradient sweep the map: these are what sampled statistics are compared with.

Refuses a BatchNorm whose input is not a static float32 map of rank 4.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.passes.dialect.source_ops import is_batch_norm, is_map, sizes
from bnfuse.passes.fission.batch_norm import finalize_and_normalize, type_statistics
from bnfuse.passes.fission.batch_norm_grad import emit_terms, gradients_of, has_input_gradient
from bnfuse.passes.rewriter import Editor, FusionResult
from bnfuse.passes.sampling.sample import Sampled
from bnfuse.passes.sampling.spec import SamplePlan

OPERATORS = {"l1bn": "L1", "rbn": "Range"}


class BaselineStatistics(ir.passes.InPlacePass):
    """Estimate the variances of BatchNorms as L1BN or RBN does. `sampled` says afterwards which ones."""

    def __init__(self, plan: SamplePlan) -> None:
        super().__init__()
        self.plan = plan
        self.sampled: list[Sampled] = []

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "baseline")
        for node in [node for node in model.graph if is_batch_norm(node)]:
            spec = self.plan.of(node.name or "")
            if spec.kind not in OPERATORS:
                continue
            x = node.inputs[0]
            if not is_map(x):
                editor.refuse(node, "its statistics stay full: its input is not a float32 map of rank 4, static")
                continue
            n, _, h, w = sizes(x)
            self.sampled.append(Sampled(node.name or "", spec.text, 1.0, n * h * w))
            estimate(editor, node, OPERATORS[spec.kind])
        return editor.result()


def estimate(editor: Editor, node: ir.Node, kind: str) -> None:
    """Put a BatchNorm and its gradients in terms of an estimate; `kind` is L1 or Range."""
    x = node.inputs[0]
    assert x is not None
    gradients = gradients_of(node)
    type_statistics(node)
    found = editor.emit(
        PLAIN_OPS[f"{kind}Statistics"], {"x": x}, {}, {"mean": node.outputs[3]}, before=node, of=[node],
        name=editor.fresh(f"{node.name}/statistics"),
    )  # fmt: skip
    n, _, h, w = sizes(x)
    coefficients = finalize_and_normalize(editor, node, found, n * h * w if kind == "L1" else 0)
    for gradient in gradients:
        estimate_gradient(editor, node, gradient, coefficients["a"], kind, found)


def estimate_gradient(
    editor: Editor, norm: ir.Node, node: ir.Node, a: ir.Value, kind: str, found: dict[str, ir.Value]
) -> None:
    """Put the halves of an estimated BatchNorm's gradient in the place of `node`; `a` is scale/std, [C]."""
    of = [norm, node]
    terms = emit_terms(editor, node, a, of)
    if has_input_gradient(node):
        dz, x = node.inputs[:2]
        assert dz is not None and x is not None
        n, _, h, w = sizes(x)
        operands = {**found, **terms}
        made = editor.emit(
            PLAIN_OPS[f"{kind}GradFinalize"], operands, {"count": math.prod((n, h, w))}, {},
            before=node, of=of, name=editor.fresh(f"{node.name}/finalize"),
        )  # fmt: skip
        operands = {**found, **made, "dz": dz, "x": x, "p": a}
        editor.emit(
            PLAIN_OPS[f"{kind}GradInput"], operands, {}, {"dx": node.outputs[0]}, before=node, of=of, name=node.name
        )
    editor.graph.remove(node, safe=True)
