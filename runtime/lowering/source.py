"""Lowering of standard operators to the kernels of `ai.bnfuse`: what a training graph is made of beside our own.

A plain Conv with bias is `ConvBias`, a Relu `ReluPointwise`. What has no kernel here goes to generic.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir

from bnfuse.opset.sources import SOURCES
from bnfuse.opset.spec import DOMAIN
from bnfuse.opset.traffic import RESHAPES
from bnfuse.runtime.lowering import concat, dense, elementwise, sparse, transposing, windows
from bnfuse.runtime.lowering.generic import lower_scatter, lower_sum
from bnfuse.runtime.lowering.state import Lowering


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
    ("", "ConvTranspose"): windows.lower_conv_transpose,
    ("", "MaxPool"): windows.lower_max_pool,
    ("", "AveragePool"): windows.lower_average_pool,
    ("", "GlobalAveragePool"): windows.lower_global_average_pool,
    **{source: elementwise.lower_activation for source in SOURCES if source[0] != DOMAIN},
    ("", "Clip"): elementwise.lower_clip,
    ("", "Add"): elementwise.lower_add,
    ("", "Sum"): lower_sum,
    ("", "ScatterND"): lower_scatter,
    ("", "ScatterElements"): lower_scatter,
    ("", "Concat"): concat.lower_concat,
    ("", "Split"): concat.lower_split,
    **{("", name): lower_reshape for name in RESHAPES},
    ("", "Identity"): lower_identity,
    ("", "Transpose"): transposing.lower_transpose,
    ("", "Resize"): sparse.lower_resize,
    ("", "Upsample"): sparse.lower_resize,
    ("", "Pad"): sparse.lower_pad,
    ("", "Gather"): sparse.lower_gather,
    ("", "Gemm"): dense.lower_gemm,
    ("", "MatMul"): dense.lower_matmul,
    ("", "SoftmaxCrossEntropyLoss"): dense.lower_softmax_loss,
}
