"""MVF: each BatchNorm becomes a statistics half and a normalise half ([Jung19], section 3.2).

    y, rm', rv', mean, inv_std =        mean, variance = BatchNormStatistics(x)            one sweep
      BatchNorm(x, g, b, ...)       ->  a, b', inv_std, rm', rv' = BatchNormFinalize(...)  C-sized
                                        y = NormalizePointwise(x, a, b')

The unfused BatchNorm sweeps x once for the mean, once for the variance and once to normalise; now the two statistics
come from one sweep, and the normalise half can go where y is read.

Refuses a BatchNorm whose input is not a static float32 map of rank 4.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.opset.spec import OpSpec
from bnfuse.opset.training_ops import batch_norm_constants
from bnfuse.passes.dialect.source_ops import is_batch_norm, is_map, sizes
from bnfuse.passes.rewriter import Editor, FusionResult

NORMALIZE = OpSpec(("Normalize",), "Pointwise")


class SplitBatchNorm(ir.passes.InPlacePass):
    """Split every BatchNorm into a statistics half and a normalise half."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "mvf")
        for node in [node for node in model.graph if is_batch_norm(node)]:
            if is_map(node.inputs[0]):
                split(editor, node)
            else:
                editor.refuse(node, f"{_name(node.inputs[0])} is not a float32 map of rank 4 with a static shape")
        return editor.result()


def split(editor: Editor, node: ir.Node) -> None:
    """Put the two halves and the finalize between them in the place of a BatchNorm."""
    x = node.inputs[0]
    assert x is not None
    type_statistics(node)
    statistics = editor.emit(
        PLAIN_OPS["BatchNormStatistics"], {"x": x}, {}, named(mean=node.outputs[3]), before=node, of=[node],
        name=editor.fresh(f"{node.name}/statistics"),
    )  # fmt: skip
    n, _, h, w = sizes(x)
    finalize_and_normalize(editor, node, statistics, n * h * w)


def named(**results: ir.Value) -> dict[str, ir.Value]:
    """Give the results that have a name: the others are left out, and nothing takes them over."""
    return {name: value for name, value in results.items() if value.name}


def type_statistics(node: ir.Node) -> None:
    """Give results of a BatchNorm the shape and type of its scale, [C], where the file does not say so."""
    scale = node.inputs[1]
    assert scale is not None
    for value in node.outputs[1:]:
        value.shape = value.shape or scale.shape
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)


def finalize_and_normalize(
    editor: Editor, node: ir.Node, statistics: Mapping[str, ir.Value], elements: float
) -> dict[str, ir.Value]:
    """Put the halves that come after mean and variance, of `elements` a channel, in a BatchNorm's place. Gives the
    coefficients, [C] each."""
    x, scale, bias, running_mean, running_variance = node.inputs
    y, new_mean, new_variance, _, saved_inv_std = node.outputs
    assert x is not None and scale is not None and bias is not None
    assert running_mean is not None and running_variance is not None
    operands = {"scale": scale, "bias": bias, "mean": statistics["mean"], "variance": statistics["variance"]}
    operands |= {"running_mean": running_mean, "running_variance": running_variance}
    keep = named(inv_std=saved_inv_std, new_running_mean=new_mean, new_running_variance=new_variance)
    coefficients = editor.emit(
        PLAIN_OPS["BatchNormFinalize"], operands, batch_norm_constants(node, elements), keep, before=node, of=[node],
        name=editor.fresh(f"{node.name}/finalize"),
    )  # fmt: skip
    operands = {"x": x, "a": coefficients["a"], "b": coefficients["b"]}
    editor.emit(NORMALIZE, operands, {}, {"y": y}, before=node, of=[node], name=node.name)
    editor.graph.remove(node, safe=True)
    return coefficients


def _name(value: ir.Value | None) -> str:
    return f"'{value.name}'" if value is not None else "its input"
