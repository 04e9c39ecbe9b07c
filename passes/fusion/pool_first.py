"""Pool first: an average pooling moves before the 1x1 convolution that it follows (docs/maths.md).

    c = Conv1x1(t, w)          p = AveragePool(t)
    y = AveragePool(c)    ->   y = Conv1x1(p, w)
    dc = AveragePoolGrad(dy)   dp, dw = ConvGrad(dy, p, w)
    dt, dw = ConvGrad(dc, t, w)    dt = AveragePoolGrad(dp)

Both are linear and act on different axes, so it is exact; the convolution's work falls by the pooling's window.

Refuses a strided, padded or grouped-with-dilation convolution, a convolution whose output has another reader, and a
bias under a padded pooling that counts its zeros.
"""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.opset.spec import OpSpec
from bnfuse.passes.dialect.source_ops import forward_of, read, sizes
from bnfuse.passes.rewriter import Editor, FusionResult, Op


class PoolFirst(ir.passes.InPlacePass):
    """Swap an average pooling and the 1x1 convolution before it, forward and backward."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "pool-first")
        pending = [node for node in model.graph if node.op_type == "AveragePool"]
        while pending:
            node = pending.pop(0)
            pool = read(node)
            conv = forward_of(pool.operands["x"]) if pool is not None else None
            if pool is None or conv is None or conv.steps.core != "Conv":
                continue
            if reason := why_not(pool, conv):
                editor.refuse(node, reason)
            else:
                pending.append(swap(editor, pool, conv))  # the convolution before may be 1x1 as well
        return editor.result()


def why_not(pool: Op, conv: Op) -> str | None:
    """Tell why a convolution and the pooling behind it cannot be swapped, or None."""
    attributes = conv.attributes
    if conv.steps.prologue or conv.steps.epilogue not in ((), ("Bias",)):
        return f"{conv.node.name} is fused already"
    if attributes["kernel_shape"] != (1, 1):
        return f"{conv.node.name} has a {attributes['kernel_shape']} kernel, not 1x1"
    if attributes["strides"] != (1, 1) or any(attributes["pads"]):
        return f"{conv.node.name} is strided or padded"
    c, backward = conv.results["y"], backward_of(pool, conv)
    allowed = {pool.node, *([backward[0].node] if backward is not None else [])}  # the gradient reads its shape alone
    if c.is_graph_output() or any(use.node not in allowed for use in c.uses()):
        return f"{c.name} has another reader"
    padded = any(pool.attributes["pads"]) or pool.attributes["ceil_mode"]
    if "Bias" in conv.steps.epilogue and padded and pool.attributes["count_include_pad"]:
        return f"{conv.node.name} has a bias, and the padded pooling averages zeros"
    if backward is None:
        return f"the gradients of {pool.node.name} and {conv.node.name} are not the usual pair"
    return None


def backward_of(pool: Op, conv: Op) -> tuple[Op, Op] | None:
    """Find the pooling's and the convolution's gradients: dc = AveragePoolGrad(dy), read by one ConvGrad alone."""
    for node in pool.node.graph or ():
        if node.op_type == "AveragePoolGrad" and (pool_grad := read(node)) is not None:
            dc = pool_grad.results["dx"]
            readers = [use.node for use in dc.uses()]
            conv_grad = read(readers[0]) if len(readers) == 1 and not dc.is_graph_output() else None
            if (
                conv_grad is not None
                and pool_grad.operands["x"] is pool.operands["x"]
                and isinstance(conv_grad.spec, OpSpec)
                and conv_grad.steps.core.startswith("ConvGrad")
                and conv_grad.operands["weight"] is conv.operands["weight"]
            ):
                return pool_grad, conv_grad
    return None


def swap(editor: Editor, pool: Op, conv: Op) -> ir.Node:
    """Swap the pair, forward and backward; gives the pooling where it is now."""
    backward = backward_of(pool, conv)
    assert backward is not None
    pool_grad, conv_grad = backward
    t, y = conv.operands["x"], pool.results["y"]
    both = (conv.node, pool.node)
    pooled = ir.Shape([sizes(t)[0], sizes(t)[1], *sizes(y)[2:]])

    (p,) = editor.clone(pool.node, [t], [pooled], before=pool.node, of=both)
    editor.clone(conv.node, [p, *conv.node.inputs[1:]], [y], before=pool.node, of=both)
    dy, weight = pool_grad.operands["dy"], conv_grad.operands["weight"]
    dx = conv_grad.results.get("dx")
    outputs = [pooled if name == "dx" else conv_grad.results.get(name) for name in conv_grad.spec.results]
    dp, *_ = editor.clone(conv_grad.node, [dy, p, weight], outputs, before=conv_grad.node, of=both)
    if dx is not None:
        editor.clone(pool_grad.node, [dp, t], [dx], before=conv_grad.node, of=both)
    editor.graph.remove([conv_grad.node, pool_grad.node, pool.node, conv.node], safe=True)
    editor.fused.append(pool.node.name or "AveragePool")
    moved = p.producer()
    assert moved is not None
    return moved
