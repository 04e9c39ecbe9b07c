"""Drop bias: a convolution whose output only BatchNorms read needs no bias, for they subtract the mean it shifts.

    y = Conv(x, w, b)                               y' = Conv(x, w)                          y' = y - b
    z, rm', rv', mean, inv_std =           ->       z, r, rv', mean', inv_std =
      BatchNorm(y, ..., rm, rv)                       BatchNorm(y', ..., rm - b, rv)
                                                    rm' = r + b
    dx, dw, db = ConvGrad(dz, x, w)                 dx, dw = ConvGrad(dz, x, w);  db = 0

and a ConvTranspose alike. Where db is a ReduceSum of dz (no gradient of the weight is wanted), that is 0 too.

The running mean stays that of y, so a saved network means the same: with rm - b in place of the batch's mean,
evaluation needs no bias either. db is the sum of a gradient that has the mean 0 in every channel; the source graph
computes its rounding errors.

Refuses a convolution whose output has a reader that is no training BatchNorm, and one whose batch mean is read by
anything but the BatchNorm's gradient, or is a graph output.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnfuse.opset.spec import CONVS, OpSpec
from bnfuse.passes.dialect.source_ops import (
    constant_of,
    forward_of,
    is_batch_norm,
    is_batch_norm_grad,
    is_map,
    read,
    sizes,
)
from bnfuse.passes.rewriter import Editor, FusionResult, Op

X, MEAN = 1, 3  # its inputs that are the BatchNorm's x and the mean of the batch


class DropBias(ir.passes.InPlacePass):
    """Drop the biases of convolutions that only training BatchNorms read."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "drop-bias")
        for y in dict.fromkeys(node.inputs[0] for node in model.graph if is_batch_norm(node)):
            conv = forward_of(y)
            if y is None or conv is None or conv.steps.core not in CONVS or "Bias" not in conv.steps.epilogue:
                continue
            if "Relu" in conv.steps.epilogue:
                continue
            if reason := why_not(y):
                editor.refuse(conv.node, reason)
            else:
                drop(editor, conv)
        return editor.result()


def why_not(y: ir.Value) -> str | None:
    """Tell why a convolution keeps its bias, or None. `y` is its result."""
    for use in y.uses():
        of_norm = (is_batch_norm(use.node) and use.idx == 0) or (is_batch_norm_grad(use.node) and use.idx == X)
        if not of_norm:
            return f"its bias stays: {use.node.op_type} '{use.node.name}' reads '{y.name}' as well"
    if y.is_graph_output():
        return f"its bias stays: '{y.name}' is a graph output"
    return next(filter(None, (mean_is_seen(norm) for norm in batch_norms_of(y))), None)


def batch_norms_of(y: ir.Value) -> list[ir.Node]:
    """List the BatchNorms that read a map."""
    return [use.node for use in y.uses() if is_batch_norm(use.node)]


def mean_is_seen(norm: ir.Node) -> str | None:
    """Tell why the batch's mean, which moves with the bias, cannot: something other than the gradient sees it."""
    x, mean = norm.inputs[0], norm.outputs[3]
    if mean.is_graph_output():
        return f"its bias stays: '{mean.name}', the mean of its output, is a graph output"
    for use in mean.uses():
        node = use.node
        if not is_batch_norm_grad(node) or use.idx != MEAN or node.inputs[X] is not x:
            return f"its bias stays: {node.op_type} '{node.name}' reads '{mean.name}', the mean of its output"
    return None


def drop(editor: Editor, conv: Op) -> None:
    """Take the bias out of a convolution and its gradient; the running means of the BatchNorms stay what they were."""
    y, bias = conv.results["y"], conv.operands["bias"]
    gradient = gradient_with_bias(conv)
    for norm in batch_norms_of(y):
        shift_running_mean(editor, norm, bias, conv.node)
    if gradient is not None:
        without_bias_gradient(editor, gradient, conv.node)
    else:
        without_sums(editor, y, conv.node)
    editor.replace(conv, without(conv.steps, "Bias"))


def without_sums(editor: Editor, y: ir.Value, conv: ir.Node) -> None:
    """Let the sums of y's gradient over all axes but the channels' be zeros, where they are nodes of their own."""
    gradients = [use.node.outputs[0] for use in y.uses() if is_batch_norm_grad(use.node)]
    gradients += [
        use.node.outputs[0] for dy in gradients for use in dy.uses() if is_gradient_of(use.node.outputs[0], y)
    ]
    for total in [use.node for dy in dict.fromkeys(gradients) for use in dy.uses() if is_channel_sum(use.node)]:
        put_zeros(editor, total, total.outputs[0], conv)
        editor.remove_dead([total])


def is_channel_sum(node: ir.Node) -> bool:
    """Tell whether a node sums a map over all axes but the channels'."""
    if (node.domain, node.op_type) != ("", "ReduceSum") or len(node.inputs) < 2 or not is_map(node.inputs[0]):
        return False
    axes = constant_of(node.inputs[1])
    return axes is not None and {int(axis) % 4 for axis in axes.reshape(-1)} == {0, 2, 3}


def without(spec: OpSpec, step: str) -> OpSpec:
    """Give the operator without a step of its epilogue."""
    return OpSpec(spec.prologue, spec.core, tuple(other for other in spec.epilogue if other != step))


def gradient_with_bias(conv: Op) -> Op | None:
    """Find the convolution's gradient, if it computes one of the bias."""
    for use in conv.operands["weight"].uses():
        op = read(use.node)
        if op is None or not isinstance(op.spec, OpSpec) or not op.spec.is_gradient or "dbias" not in op.results:
            continue
        if op.operands["x"] is conv.operands["x"] and is_gradient_of(op.operands["dy"], conv.results["y"]):
            return op
    return None


def is_gradient_of(dy: ir.Value, y: ir.Value) -> bool:
    """Tell whether dy comes from the BatchNorms over y alone: from one of them, or from a sum over several."""
    producer = dy.producer()
    if producer is None:
        return False
    if is_batch_norm_grad(producer):
        return producer.inputs[X] is y
    return producer.op_type in ("Sum", "Add") and all(v is not None and is_gradient_of(v, y) for v in producer.inputs)


def shift_running_mean(editor: Editor, norm: ir.Node, bias: ir.Value, conv: ir.Node) -> None:
    """Let a BatchNorm average y - bias, and its successor of the running mean, [C], be that of y again."""
    running = norm.inputs[3]
    new = norm.outputs[1]
    of = [norm, conv]
    (shifted,) = editor.standard("Sub", [running, bias], 1, before=norm, of=of)
    shifted.shape, shifted.type = bias.shape, bias.type
    norm.replace_input_with(3, shifted)
    if not new.name:
        return
    following = list(norm.graph or ())
    after = following[following.index(norm) + 1]
    (restored,) = editor.standard("Add", [None, bias], 1, before=after, of=of)
    editor.take_over(new, restored)
    restored.producer().replace_input_with(0, new)  # type: ignore[union-attr]


def without_bias_gradient(editor: Editor, gradient: Op, conv: ir.Node) -> None:
    """Let a convolution's gradient give none of the bias, and zeros be that."""
    put_zeros(editor, gradient.node, gradient.results["dbias"], conv)
    editor.replace(gradient, without(gradient.steps, "BiasGrad"))


def put_zeros(editor: Editor, node: ir.Node, dbias: ir.Value, conv: ir.Node) -> None:
    """Let a bias's gradient, [C], be zeros instead of sums that are zero but for rounding."""
    zeros = editor.constant(f"{dbias.name}/zeros", np.zeros(sizes(dbias), np.float32))
    (new,) = editor.standard("Identity", [zeros], 1, before=node, of=[node, conv])
    editor.take_over(dbias, new)
