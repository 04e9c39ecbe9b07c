"""The type, the operations and the sweeps of a node of a training graph.

Convolutions, matrix products and poolings count as `bnfuse inspect` counts them. What works elementwise, and the steps
in front of and behind a fused core, count by operations for each element of the map that they work on.
"""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from bnfuse.analysis.work import flops as dense_flops
from bnfuse.estimating.operations import ELEMENTWISE, TYPES
from bnfuse.estimating.pieces import dims
from bnfuse.opset.activations import ACTIVATIONS
from bnfuse.opset.plain import WHOLE_OPS, PlainOp
from bnfuse.opset.spec import (
    ACTIVATION_GRADS,
    IMAGE_GATES,
    IMAGE_STEPS,
    MASKED_REDUCTIONS,
    OF_GRADIENT,
    RESAMPLES,
    SHARED,
    OpSpec,
)
from bnfuse.opset.traffic import RESHAPES

# operations for each element of the map that the step works on (see operations.ELEMENTWISE for BatchNorm in all)
NORMALIZE, GRADIENT_INPUT = 2, 4  # a*x + b; p*dy + q*x + w
STATISTICS = ELEMENTWISE["BatchNorm"][0] - NORMALIZE
REDUCE = ELEMENTWISE["BatchNorm"][1] - GRADIENT_INPUT
STEPS = {
    "Normalize": NORMALIZE,
    "AddNormalized": 3,
    "Gate": 1,
    "Add": 1,
    "Where": 1,
    "SkipGate": 1,
    "Plus": 1,
    "PlusNormalized": 3,
    "GateGrad": 1,
    "BatchNormGrad": GRADIENT_INPUT,
    "Bias": 1,
    "Statistics": STATISTICS,
    "BiasGrad": 1,
    "AddGradient": 1,
    "AddGatedGradient": 2,
    "AddBatchNormGrad": GRADIENT_INPUT + 1,
    "AddSkipGradient": 1,
    "Reduce": REDUCE,
    "ReduceOther": REDUCE,
    "ReduceGated": REDUCE + 1,
    "Part": 1,
    **dict.fromkeys(MASKED_REDUCTIONS, REDUCE + NORMALIZE + ELEMENTWISE["Activation"][1]),
    "ImageStatistics": STATISTICS,
    **dict.fromkeys(("ImageReduce", "ImageReduceOther"), REDUCE),
    **dict.fromkeys(IMAGE_GATES, 2 * REDUCE + NORMALIZE + sum(ELEMENTWISE["Activation"])),
    "Scale": 1,
    "Accumulate": 2,
    **dict.fromkeys((*ACTIVATIONS, *(f"Skip{kind}" for kind in ACTIVATIONS)), ELEMENTWISE["Activation"][0]),
    **dict.fromkeys(ACTIVATION_GRADS, ELEMENTWISE["Activation"][1]),
}
ADDITIONS = ("AddGradient", "AddGatedGradient", "AddBatchNormGrad", "AddSkipGradient")
ON_RESULT = (
    *("Bias", "Relu", "Where", "Statistics", *ADDITIONS, *ACTIVATION_GRADS, "Reduce", "Part", *SHARED),
    *("Scale", "Accumulate"),
    *IMAGE_STEPS,
)
BASELINE_SWEEPS = 2  # over x for mean and variance, one after the other, in a BatchNorm that no pass has touched

# standard operators whose type is not that of an operator of the zoo
OTHER_TYPES = {"Split": "Copy", **dict.fromkeys(RESHAPES, "Copy")}
COPIES = ("Concat", "Copy", "Embedding")  # they compute nothing


@dataclasses.dataclass(frozen=True)
class Costs:
    """`sweeps` is how often the inputs at the places `swept` are passed over."""

    type: str
    flops: int
    sweeps: int = 1
    swept: tuple[int, ...] = ()


def costs_of(node: ir.Node, op: OpSpec | PlainOp | None) -> Costs:
    """Give the costs of a node. `op` is its operator in ai.bnfuse, None for a source operator."""
    if isinstance(op, OpSpec):
        dense = "Conv" in op.core
        kind = conv_type(node, node.inputs[op.operands.index("weight")]) if dense else composed_type(op)
        return Costs(kind, dense_flops(node) + step_flops(node, op))
    if op in WHOLE_OPS:
        return whole_costs(node.op_type, node)
    if isinstance(op, PlainOp):
        return Costs("BatchNorm", plain_flops(node, op))
    return source_costs(node)


def composed_type(op: OpSpec) -> str:
    """Name the type of a core that is no convolution."""
    if "Pool" in op.core:
        return "Pool"
    if op.core in RESAMPLES:
        return "Other"
    steps = {*op.prologue, *op.epilogue}
    if steps & {
        "Normalize",
        "BatchNormGrad",
        "AddNormalized",
        "PlusNormalized",
        "AddBatchNormGrad",
        "Reduce",
        "Statistics",
        *SHARED,
    }:
        return "BatchNorm"
    return "Activation" if steps & {*ACTIVATIONS, *ACTIVATION_GRADS} else "Add" if steps else "Copy"


def conv_type(node: ir.Node, weight: ir.Value | None) -> str:
    """Name the type of a convolution: depthwise where every group has one input channel."""
    group = node.attributes["group"].as_int() if "group" in node.attributes else 1
    return "DepthwiseConv2D" if group > 1 and weight is not None and dims(weight)[1] == 1 else "Conv2D"


def step_flops(node: ir.Node, op: OpSpec) -> int:
    """Count the operations of the steps on the way in, on x (on dy those that have to do with it), and of those on the
    way out."""
    named = dict(zip((*op.operands, *op.results), (*node.inputs, *node.outputs), strict=False))

    def elements(*names: str) -> int:
        return next((math.prod(dims(v)) for name in names if (v := named.get(name)) is not None), 0)

    result = elements("dx", "x") if op.is_gradient else elements("y")
    gradient = elements("grad_x", "dy")
    total = 0
    for step in op.prologue:
        total += STEPS.get(step, 0) * (gradient if step in OF_GRADIENT else elements("x", "dx"))
    for step in op.epilogue:
        total += STEPS.get(step, 0) * (result if step in ON_RESULT else gradient)
    if op.core == "MaxPoolGrad":
        total += elements("dy")
    elif op.core.endswith("PoolGrad"):
        total += result
    return total


def whole_costs(kind: str, node: ir.Node) -> Costs:
    """Give the costs of a whole BatchNorm, a LayerNorm, their gradients, and the gradient of the cross-entropy."""
    forward, backward = ELEMENTWISE["BatchNorm"]
    if kind == "BatchNorm":
        return Costs("BatchNorm", forward * elements_of(node.inputs[0]), BASELINE_SWEEPS + 1, (0,))
    if kind == "BatchNormGrad":
        return Costs("BatchNorm", backward * elements_of(node.inputs[0]), 2, (0, 1))
    if kind in ("LayerNorm", "LayerNormGrad"):  # a pixel's channels stay in a cache: one sweep
        place = kind == "LayerNormGrad"
        return Costs("LayerNorm", ELEMENTWISE["LayerNorm"][place] * elements_of(node.inputs[0]))
    if kind == "GroupNorm":
        return Costs("BatchNorm", forward * elements_of(node.inputs[0]), 2, (0,))
    if kind == "GroupNormGrad":
        return Costs("BatchNorm", backward * elements_of(node.inputs[0]), 2, (0, 1))
    return Costs("Loss", ELEMENTWISE["Loss"][1] * elements_of(node.inputs[1]))


def plain_flops(node: ir.Node, op: PlainOp) -> int:
    """Count operations by the map that is read, or by the entries of the coefficients."""
    maps = [v for v in node.inputs if v is not None and len(dims(v)) >= 4]
    size = math.prod(dims(maps[0] if maps else node.outputs[0]))
    if "Statistics" in op.name:
        return STATISTICS * size
    if "GradReduce" in op.name:
        return REDUCE * size
    return (GRADIENT_INPUT if "x" in op.operands else NORMALIZE) * size


def source_costs(node: ir.Node) -> Costs:
    """Give the costs of an operator that others wrote."""
    kind = node.op_type
    if kind in ("Conv", "ConvTranspose"):
        return Costs(conv_type(node, node.inputs[1]), dense_flops(node))
    type_ = TYPES.get(kind) or OTHER_TYPES.get(kind, "Other")
    if dense := dense_flops(node):
        return Costs(type_, dense)
    size = math.prod(dims(node.outputs[0])) if node.outputs[0].name else 0
    if type_ in COPIES:
        return Costs(type_, 0)
    if type_ == "Pool":
        return Costs(type_, elements_of(node.outputs[0]))
    forward = ELEMENTWISE.get(type_, (1, 1))[0]
    operands = sum(v is not None and dims(v) == dims(node.outputs[0]) for v in node.inputs)
    if type_ == "Add":
        return Costs(type_, max(operands - 1, 1) * size)
    return Costs(type_, forward * size)


def elements_of(value: ir.Value | None) -> int:
    """Count elements; 0 where there is no value."""
    return math.prod(dims(value)) if value is not None else 0
