"""Lowering of source graphs' operators to the kernels of `ai.bnfuse`: what a training graph is made of before any pass.

A plain Conv with bias is `ConvBias`, a Relu `ReluPointwise`, a ReluGrad `PointwiseGradReluGrad`; BatchNormInternal is
the two sweeps of its statistics, the C-sized finalize and `NormalizePointwise`. What has no kernel here goes to
generic.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir

from bnfuse.opset.activations import ACTIVATIONS, GRADIENTS
from bnfuse.opset.traffic import RESHAPES
from bnfuse.runtime.lowering import concat, dense, elementwise, norm, sparse, transposing, windows
from bnfuse.runtime.lowering.generic import lower_sum
from bnfuse.runtime.lowering.state import Lowering

MICROSOFT = "com.microsoft"


def lower_reshape(low: Lowering, node: ir.Node) -> None:
    """Lower a change of shape: the same elements in the same storage."""
    ((shape, _),) = low.output_types(node)
    source = low.operand(node, 0)
    if math.prod(shape) != math.prod(low.shape(source)):
        raise low.error(
            node, f"makes {list(shape)} of {list(low.shape(source))}, which has other elements: build it anew"
        )
    low.alias(node.outputs[0], source, shape)


def lower_identity(low: Lowering, node: ir.Node) -> None:
    """Lower an Identity: the result is its operand."""
    low.alias(node.outputs[0], low.operand(node, 0))


Lower = Callable[[Lowering, ir.Node], None]

SOURCE_OPS: dict[tuple[str, str], Lower] = {
    ("", "Conv"): windows.lower_conv,
    (MICROSOFT, "ConvGrad"): windows.lower_conv_grad,
    ("", "ConvTranspose"): windows.lower_conv_transpose,
    ("", "MaxPool"): windows.lower_max_pool,
    ("", "MaxPoolGrad"): windows.lower_max_pool_grad,
    ("", "AveragePool"): windows.lower_average_pool,
    ("", "AveragePoolGrad"): windows.lower_average_pool_grad,
    ("", "GlobalAveragePool"): windows.lower_global_average_pool,
    **{(activation.domain, name): elementwise.lower_activation for name, activation in ACTIVATIONS.items()},
    **{(MICROSOFT, step): elementwise.lower_activation_grad for step in GRADIENTS},
    ("", "Clip"): elementwise.lower_clip,
    ("", "Add"): elementwise.lower_add,
    ("", "Mul"): elementwise.lower_mul,
    ("", "Sum"): lower_sum,
    ("", "Concat"): concat.lower_concat,
    (MICROSOFT, "ConcatTraining"): concat.lower_concat,
    ("", "Split"): concat.lower_split,
    (MICROSOFT, "SplitTraining"): concat.lower_split,
    **{("", name): lower_reshape for name in RESHAPES},
    ("", "Identity"): lower_identity,
    ("", "Transpose"): transposing.lower_transpose,
    (MICROSOFT, "BatchNormInternal"): norm.batch_norm_source,
    (MICROSOFT, "BatchNormalizationGrad"): norm.batch_norm_grad_source,
    ("", "Resize"): sparse.lower_resize,
    ("", "Upsample"): sparse.lower_resize,
    ("", "Pad"): sparse.lower_pad,
    ("", "Gemm"): dense.lower_gemm,
    ("", "MatMul"): dense.lower_matmul,
    ("", "SoftmaxCrossEntropyLoss"): dense.lower_softmax_loss,
    (MICROSOFT, "SoftmaxCrossEntropyLossGrad"): dense.lower_softmax_loss_grad,
}
