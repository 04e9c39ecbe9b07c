"""BNFF for GroupNorms: each becomes halves like those of a BatchNorm, whose coefficients each sample has of its own.

    y, mean, inv_std =                  m, v = GroupNormStatistics(x)                     one sweep, [N, C] each
      GroupNorm(x, g, b)          ->    a, b', mean, inv_std = GroupNormFinalize(g, b, m, v)
                                        y = NormalizePointwise(x, a, b')

    dx, dg, db =                        sb, sg = GroupNormGradReduce(dy, x, mean, inv_std)
      GroupNormGrad(dy, x, g, ..) ->    q, w, dg, db = GroupNormGradFinalize(sb, sg, g, mean, inv_std)
                                        dx = BatchNormGradPointwiseGrad(dy, x, a, q, w)

The normalise half and the input gradient are steps, and move into the operators around them as those of a BatchNorm
do: y and dx are not stored where what reads them is a convolution, and the activation's gradient is recomputed from x.
What is left of a GroupNorm are two sweeps for its sums, of which it had as many before. InstanceNormalization is one
whose groups have a channel each.

Refuses a GroupNorm whose input is not a static float32 map of rank 4, and a gradient whose GroupNorm was not split.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.opset.spec import DOMAIN
from bnfuse.passes.dialect.source_ops import is_map, sizes
from bnfuse.passes.fission.batch_norm import NORMALIZE, named
from bnfuse.passes.fission.batch_norm_grad import INPUT_HALF
from bnfuse.passes.rewriter import Editor, FusionResult, is_unused, own_op

GROUP_NORM, GROUP_NORM_GRAD = "GroupNorm", "GroupNormGrad"


class SplitGroupNorm(ir.passes.InPlacePass):
    """Split every GroupNorm and its gradient into halves."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "bnff")
        for node in [node for node in model.graph if node.domain == DOMAIN and node.op_type == GROUP_NORM]:
            if is_map(node.inputs[0]):
                split(editor, node)
            else:
                editor.refuse(node, "its input is not a float32 map of rank 4 with a static shape")
        for node in [node for node in model.graph if node.domain == DOMAIN and node.op_type == GROUP_NORM_GRAD]:
            if not split_gradient(editor, node):
                editor.refuse(node, "its GroupNorm was not split into halves")
        return editor.result()


def split(editor: Editor, node: ir.Node) -> None:
    """Put statistics, coefficients and a normalise half in the place of a GroupNorm."""
    x, scale, bias = node.inputs
    y, mean, inv_std = node.outputs
    assert x is not None and scale is not None and bias is not None
    of = [node]
    statistics = editor.emit(
        PLAIN_OPS["GroupNormStatistics"], {"x": x}, {}, {}, before=node, of=of,
        name=editor.fresh(f"{node.name}/statistics"),
    )  # fmt: skip
    coefficients = editor.emit(
        PLAIN_OPS["GroupNormFinalize"],
        {"scale": scale, "bias": bias, **statistics},
        {name: node.attributes[name].value for name in ("epsilon", "groups")},
        named(group_mean=mean, inv_std=inv_std),
        before=node,
        of=of,
        name=editor.fresh(f"{node.name}/finalize"),
    )
    operands = {"x": x, "a": coefficients["a"], "b": coefficients["b"]}
    editor.emit(NORMALIZE, operands, {}, {"y": y}, before=node, of=of, name=node.name)
    editor.graph.remove(node, safe=True)


def split_gradient(editor: Editor, node: ir.Node) -> bool:
    """Put sums, coefficients and an input half in the place of a GroupNorm's gradient; False where that was not split.

    The input half is there only where its dx is read.
    """
    dy, x, scale, mean, inv_std = node.inputs
    assert dy is not None and x is not None and scale is not None and mean is not None and inv_std is not None
    producer = inv_std.producer()
    finalize = own_op(producer) if producer is not None else None
    if finalize is None or finalize.spec.name != "GroupNormFinalize" or not (is_map(dy) and is_map(x)):
        return False
    of = [finalize.node, node]
    reduced = editor.emit(
        PLAIN_OPS["GroupNormGradReduce"], {"dz": dy, "x": x, "mean": mean, "inv_std": inv_std}, {}, {},
        before=node, of=of, name=editor.fresh(f"{node.name}/reduce"),
    )  # fmt: skip
    groups = node.attributes["groups"].as_int()
    coefficients = editor.emit(
        PLAIN_OPS["GroupNormGradFinalize"],
        {**reduced, "scale": scale, "mean": mean, "inv_std": inv_std},
        {"count": math.prod(sizes(x)[1:]) // groups, "groups": groups},
        named(dscale=node.outputs[1], dbias=node.outputs[2]),
        before=node,
        of=of,
        name=editor.fresh(f"{node.name}/finalize"),
    )
    dx = node.outputs[0]
    if dx.name and not is_unused(dx):
        operands = {"dy": dy, "grad_x": x, "grad_p": finalize.results["a"]}
        operands |= {"grad_q": coefficients["q"], "grad_w": coefficients["w"]}
        editor.emit(INPUT_HALF, operands, {}, {"dx": dx}, before=node, of=of, name=node.name)
    editor.graph.remove(node, safe=True)
    return True
