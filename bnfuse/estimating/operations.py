"""What layers are: their type, and their floating-point operations.

Convolutions, matrix products and poolings are counted as the zoo counts them (models/count.py: a multiply-add is two
operations); what works element by element is counted here, by operations for each element.
"""

from __future__ import annotations

import math

import onnx_graphsurgeon as gs

from bnfuse.estimating.workload import DENSE_TYPES
from bnfuse.models.count import node_flops
from bnfuse.opset.activations import ACTIVATIONS

TYPES = {
    "Gemm": "Dense",
    "MatMul": "MatMul",
    "Einsum": "MatMul",
    "BatchNormalization": "BatchNorm",
    "LayerNormalization": "LayerNorm",
    "LayerNorm": "LayerNorm",
    **dict.fromkeys(ACTIVATIONS, "Activation"),
    "Sigmoid": "Activation",
    "Tanh": "Activation",
    "Gelu": "Activation",
    "Erf": "Activation",
    "LeakyRelu": "Activation",
    "PRelu": "Activation",
    "Elu": "Activation",
    "HardSwish": "Activation",
    "HardSigmoid": "Activation",
    "Dropout": "Dropout",
    "Add": "Add",
    "Sub": "Add",
    "Sum": "Add",
    "Mul": "Mul",
    "Div": "Mul",
    "Concat": "Concat",
    "MaxPool": "Pool",
    "AveragePool": "Pool",
    "GlobalAveragePool": "Pool",
    "Softmax": "Softmax",
    "LogSoftmax": "Softmax",
    "SoftmaxCrossEntropyLoss": "Loss",
    "NegativeLogLikelihoodLoss": "Loss",
    "Gather": "Embedding",
    "Transpose": "Copy",
    "Split": "Copy",
    "Slice": "Copy",
    "Pad": "Copy",
    "Expand": "Copy",
}

# Operations for each element: forward for each output, backward for each incoming gradient. BN forward: the sum, the
# squared difference and its sum, the scaled and shifted value; backward: two sums of products, then p*dz + q*x + w.
ELEMENTWISE = {
    "BatchNorm": (6, 10),
    "LayerNorm": (6, 10),
    "Activation": (1, 1),
    "Dropout": (1, 1),
    "Add": (1, 0),
    "Mul": (1, 2),
    "Softmax": (4, 3),
    "Loss": (5, 1),
    "Embedding": (0, 1),
}


def layer_type(node: gs.Node) -> str:
    """Name the type that a node's time is summed by."""
    if node.op == "Conv":
        return "DepthwiseConv2D" if is_depthwise(node) else "Conv2D"
    return TYPES.get(node.op, "Other")


def is_depthwise(node: gs.Node) -> bool:
    """Tell whether a convolution has a group for each channel."""
    return 1 < node.attrs.get("group", 1) == node.inputs[0].shape[1]


def forward_flops(node: gs.Node) -> int:
    """Count the operations of a node, elementwise ones too."""
    return node_flops(node) or ELEMENTWISE.get(layer_type(node), (0, 0))[0] * elements(node.outputs[0])


def backward_flops(node: gs.Node, gradients: int) -> int:
    """Count the operations of `gradients` operands' gradients: each costs a dense layer as much as its forward pass.

    Poolings hand every gradient to where it came from: as much as forward for averages, one operation a window for
    maxima.
    """
    if layer_type(node) in DENSE_TYPES:
        return gradients * node_flops(node)
    if node.op == "MaxPool":
        return elements(node.outputs[0])
    if node.op in ("AveragePool", "GlobalAveragePool"):
        return node_flops(node)
    return ELEMENTWISE.get(layer_type(node), (0, 0))[1] * elements(node.outputs[0])


def elements(tensor: gs.Tensor) -> int:
    """Count elements; a scalar has one."""
    return math.prod(tensor.shape or ())
