"""FLOPs, sizes and feature maps of single nodes of a training graph, rewritten or not.

A multiply-add is two operations ([Iandola16], section 4.4). Counted are convolutions and matrix products without their
bias, and poolings, one operation for each element of each window, as `bnfuse models` does; what works elementwise
shows as bytes.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from bnfuse.graph.values import declared_shape
from bnfuse.opset.plain import PlainOp
from bnfuse.opset.spec import CONV_GRADS, DOMAIN, IMAGE_STEPS, RESAMPLES, SHARED, TRANSPOSED, OpSpec, find, parse

POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool")
BATCH_NORM_STEPS = {"Normalize", "AddNormalized", "PlusNormalized", "Statistics", "BatchNormGrad", "Reduce"}
BATCH_NORM_STEPS |= {*SHARED, *IMAGE_STEPS}
OF_NO_BATCH_NORM = ("SoftmaxCrossEntropyGrad", "LayerNorm", "LayerNormGrad")


def flops(node: ir.Node) -> int:
    """Count multiply-adds times two of a convolution, its gradients, a matrix product or a Resample; an operation per
    element of each window of a pooling; 0 for anything else."""
    core = core_of(node)
    if core == "Conv":
        return conv_flops(node.outputs[0], weight_of(node))
    if core in TRANSPOSED:  # it is the gradient of a convolution that makes x
        return conv_flops(operand(node, "x", 0), weight_of(node))
    if core in CONV_GRADS:
        results = results_of(node)
        return conv_flops(operand(node, "dy", 0), weight_of(node)) * results
    if core in ("MaxPool", "AveragePool"):
        return math.prod(declared_shape(node.outputs[0])) * math.prod(node.attributes["kernel_shape"].as_ints())
    if core in RESAMPLES:
        return resample_flops(node)
    if core == "GlobalAveragePool":
        return math.prod(declared_shape(operand(node, "x", 0)))
    if core == "Gemm":
        a, transposed = declared_shape(node.inputs[0]), bool(node.attributes.get_int("transA", 0))
        return 2 * math.prod(declared_shape(node.outputs[0])) * a[0 if transposed else 1]
    if core == "MatMul":
        return 2 * math.prod(declared_shape(node.outputs[0])) * declared_shape(node.inputs[0])[-1]
    return 0


def resample_flops(node: ir.Node) -> int:
    """Count those of the entries of both matrices that are not 0: pixel by pixel, or along the rows and then along the
    columns, whichever is less."""
    rows, columns = (operand(node, name, place) for place, name in enumerate(("rows", "columns"), 1))
    if rows is None or columns is None:
        return 0
    backward = core_of(node) == "ResampleGrad"
    taps, taps_across = entries(rows), entries(columns)
    height = declared_shape(rows)[1 if backward else 0]  # of the result
    width = declared_shape(columns)[0 if backward else 1]  # of what is read
    x = operand(node, "dy" if backward else "x", 0)
    n, c = declared_shape(x)[:2] if x is not None else (0, 0)
    return 2 * n * c * min(taps * taps_across, taps * width + height * taps_across)


def entries(matrix: ir.Value) -> int:
    """Count the elements of a matrix that are not 0, all of them where they are not known."""
    if matrix.const_value is None:
        return math.prod(declared_shape(matrix))
    return int(np.count_nonzero(matrix.const_value.numpy()))


def core_of(node: ir.Node) -> str:
    """Name the operator that does a node's work: Conv of a NormalizeReluConv."""
    spec = spec_of(node)
    return spec.core if spec else node.op_type


def spec_of(node: ir.Node) -> OpSpec | None:
    """Parse the name of an operator of ai.bnfuse; None for any other."""
    return parse(node.op_type) if node.domain == DOMAIN else None


def operand(node: ir.Node, name: str, position: int) -> ir.Value | None:
    """Give an input by its name in the grammar, or by its position in a source operator."""
    spec = spec_of(node)
    return node.inputs[spec.operands.index(name) if spec else position]


def weight_of(node: ir.Node) -> ir.Value | None:
    """Give the weight operand of a convolution or of its gradient."""
    return operand(node, "weight", 2 if core_of(node) in CONV_GRADS else 1)


def results_of(node: ir.Node) -> int:
    """Tell how many of input and weight gradient a convolution's gradient computes."""
    spec = spec_of(node)
    if spec:
        return len({"dx", "dweight"} & {*spec.results})
    return sum(bool(value.name) for value in node.outputs[:2])


def conv_flops(output: ir.Value | None, weight: ir.Value | None) -> int:
    """Count 2 x output elements x weight elements per output channel: the same for the forward and each gradient."""
    if output is None or weight is None:
        return 0
    w = declared_shape(weight)
    dims = declared_shape(output)
    pixels = math.prod((dims[0], *dims[2:]))
    return 2 * pixels * math.prod(w)


def batch_norm_part(node: ir.Node, touched: list[tuple[ir.Value, int]]) -> list[tuple[ir.Value, int]]:
    """Pick, of the feature maps that a node touches, those that are there for a BatchNorm alone.

    All of a node that does nothing else; of a fused one the maps that no other of its steps reads: the BN's own input
    in the prologue of a gradient (`grad_x`), that of a BN whose input gradient is added (`other_x`), and those of other
    BNs that it reduces over (`x_1`, ...).
    """
    if node.domain != DOMAIN:
        return touched if node.op_type == "BatchNormalization" else []
    op = find(node.op_type)
    if isinstance(op, PlainOp):
        return touched if op.name not in OF_NO_BATCH_NORM else []
    if op is None:
        return []
    if op.core in ("Pointwise", "PointwiseGrad") and BATCH_NORM_STEPS & {*op.prologue, *op.epilogue} and not adds(op):
        return touched
    readers: dict[bool, set[ir.Value | None]] = {True: set(), False: set()}  # whether it is a BN's own input
    for name, value in zip(op.operands, node.inputs, strict=False):
        readers[name in ("grad_x", "other_x") or name.startswith("x_")].add(value)
    return [(value, bytes_) for value, bytes_ in touched if value in readers[True] - readers[False]]


def adds(op: OpSpec) -> bool:
    """Tell whether an operator adds another map to the one that it works on."""
    additions = {"Add", "AddNormalized", "AddGradient", "AddGatedGradient", "AddBatchNormGrad", "AddSkipGradient"}
    return bool(additions & {*op.prologue, *op.epilogue})
