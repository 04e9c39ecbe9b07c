"""Whatever `build` takes has kernels on every target."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from pooling_cases import lower_everywhere

from bnfuse.autodiff import differentiable, rules
from bnfuse.build import build
from bnfuse.build.decompose import DECOMPOSITIONS

Case = tuple[list[onnx.NodeProto], dict[str, np.ndarray]]
ZERO = np.array(0, np.float32)


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def node(op: str, inputs: str = "c", output: str = "y", **attrs) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), output.split(), name=f"{op}_{output.split()[0]}", **attrs)


def one(op: str, values: dict[str, np.ndarray] | None = None, **attrs) -> Case:
    return [node(op, " ".join(("c", *(values or {}))), **attrs)], values or {}


def mask(*more: onnx.NodeProto) -> Case:
    return [node("Greater", "c k", "g"), *more], {"k": ZERO}


FLAT = node("Flatten", "c", "f")
ALONE = (
    "Abs Acos Acosh Asin Asinh Atan Atanh Celu Cos Cosh Dropout Elu Erf Exp Flatten Gelu "
    "GlobalAveragePool GlobalMaxPool HardSigmoid HardSwish Identity LeakyRelu Log LogSoftmax Mish Neg "
    "ReduceMax ReduceMean ReduceSum Relu Selu Sigmoid Sin Softmax Softplus Softsign Sqrt Squeeze Tanh "
    "Transpose"
)
CASES: dict[str, Case] = {
    **{op: one(op) for op in ALONE.split()},
    **{op: one(op, {"k": floats(4, 1, 1)}) for op in ("Add", "Div", "Max", "Min", "Mul", "PRelu", "Sub", "Sum")},
    **{op: one(op, kernel_shape=[2, 2]) for op in ("AveragePool", "LpPool", "MaxPool")},
    **{op: one(op) for op in ("GlobalLpPool", "LpNormalization", "MeanVarianceNormalization", "ReduceL1", "ReduceL2")},
    **{op: one(op) for op in ("ReduceLogSum", "ReduceLogSumExp", "ReduceMin", "ReduceProd", "ReduceSumSquare")},
    **{op: one(op) for op in ("Reciprocal", "Shrink", "Sinh", "Tan", "Trilu")},
    **{op: one(op, {name: floats(4) for name in "sb"}) for op in ("InstanceNormalization",)},
    **{op: one(op, {"k": floats(4, 1, 1)}) for op in ("Mean",)},
    **{
        op: (
            [
                node("Reshape", "c three", "r"),
                node(op, "r k l", hidden_size=2),
            ],
            {"three": ints(6, 2, 24), "k": floats(1, gates * 2, 24), "l": floats(1, gates * 2, 2)},
        )
        for op, gates in (("GRU", 3), ("LSTM", 4), ("RNN", 1))
    },
    "CenterCropPad": one("CenterCropPad", {"k": ints(4, 8)}, axes=[2, 3]),
    "ConvTranspose": one("ConvTranspose", {"k": floats(4, 3, 2, 2)}, strides=[2, 2]),
    "CumSum": one("CumSum", {"k": np.array(1, np.int64)}),
    "DepthToSpace": one("DepthToSpace", blocksize=2),
    "Einsum": ([node("Einsum", "c c", equation="nchw,nkhw->nck")], {}),
    "GatherElements": one("GatherElements", {"k": np.zeros((2, 4, 6, 3), np.int64)}, axis=3),
    "GatherND": one("GatherND", {"k": np.array([[0, 1], [1, 3]], np.int64)}),
    "GroupNormalization": one("GroupNormalization", {"s": floats(2), "b": floats(2)}, num_groups=2),
    "LRN": one("LRN", size=3),
    "Mod": one("Mod", {"k": ZERO + 3}, fmod=1),
    "Resize": (
        [helper.make_node("Resize", ["c", "", "k"], ["y"], "Resize_y", mode="linear")],
        {"k": np.array([1, 1, 2, 2], np.float32)},
    ),
    "ScatterElements": one("ScatterElements", {"k": np.zeros((2, 4, 6, 1), np.int64), "u": floats(2, 4, 6, 1)}, axis=3),
    "ScatterND": one("ScatterND", {"k": np.array([[0, 1], [1, 3]], np.int64), "u": floats(2, 6, 6)}),
    "ReverseSequence": one("ReverseSequence", {"k": ints(4, 3)}, batch_axis=0, time_axis=1),
    "ThresholdedRelu": one("ThresholdedRelu"),
    "SpaceToDepth": one("SpaceToDepth", blocksize=2),
    "Tile": one("Tile", {"k": ints(1, 2, 1, 1)}),
    "TopK": ([node("TopK", "c k", "y i")], {"k": ints(2)}),
    "And": mask(node("And", "g g", "g2"), node("Where", "g2 c k")),
    "BatchNormalization": (
        [node("BatchNormalization", "c s b m v", "y nm nv", training_mode=1)],
        {name: np.ones(4, np.float32) + np.arange(4, dtype=np.float32) for name in "sbmv"},
    ),
    "Cast": mask(node("Cast", "g", "h", to=1), node("Mul", "c h")),
    "Clip": one("Clip", {"low": ZERO, "high": ZERO + 6}),
    "Concat": ([node("Concat", "c c", axis=1)], {}),
    "Concat of rows": ([node("Concat", "c c", axis=2)], {}),
    "Col2Im": (
        [node("Reshape", "c cut", "r"), node("Col2Im", "r image block")],
        {"cut": ints(2, 16, 9), "image": ints(4, 4), "block": ints(2, 2)},
    ),
    "Conv": one("Conv", {"k": floats(5, 4, 3, 3)}),
    "DeformConv": one("DeformConv", {"k": floats(5, 4, 3, 3), "o": floats(2, 18, 4, 4)}),
    "Equal": ([node("Equal", "c k", "g"), node("Where", "g c k")], {"k": ZERO}),
    "Expand": ([node("ReduceMean", "c", "m", axes=[2, 3]), node("Expand", "m k")], {"k": ints(2, 4, 6, 6)}),
    "Gather": one("Gather", {"k": ints(0, 2)}, axis=1),
    "Gemm": ([FLAT, node("Gemm", "f k")], {"k": floats(144, 3)}),
    "GridSample": one("GridSample", {"k": floats(2, 3, 5, 2)}),
    "LayerNormalization": one("LayerNormalization", {"s": floats(6), "b": floats(6)}),
    "MatMul": ([FLAT, node("MatMul", "f k")], {"k": floats(144, 3)}),
    "MatMul of maps": one("MatMul", {"k": floats(6, 3)}),
    "Pad": one("Pad", {"k": ints(0, 0, 1, 1, 0, 0, 1, 1)}),
    "Pow": one("Pow", {"k": ZERO + 2}),
    "Reshape": one("Reshape", {"k": ints(2, 8, 18)}),
    "Slice": one("Slice", {"from": ints(1), "to": ints(3), "axes": ints(1)}),
    "Split": ([node("Split", "c", "y z", axis=1)], {}),
    "Sum of three": ([node("Sum", "c c k")], {"k": floats(4, 1, 1)}),
    "Unsqueeze": one("Unsqueeze", {"k": ints(1)}),
    "Where": mask(node("Where", "g c k")),
}
OPSETS = {
    "CenterCropPad": 18,
    "Col2Im": 18,
    "DeformConv": 19,
    "Gelu": 20,
    "GroupNormalization": 18,
    "Mish": 18,
}  # others: 17


ELSEWHERE = {  # tests of their own: without a map in front, of newer opsets, or drawing
    *("AffineGrid", "Attention", "Bernoulli", "BlackmanWindow", "CastLike", "CausalConvWithState", "CumProd"),
    *(
        "HammingWindow",
        "HannWindow",
        "LinearAttention",
        "NegativeLogLikelihoodLoss",
        "RMSNormalization",
        "RotaryEmbedding",
    ),
    *("SoftmaxCrossEntropyLoss", "SwiGLU", "Swish", "Upsample"),
}


def test_every_operator_that_build_takes_has_a_case():
    taken = {*differentiable(), *DECOMPOSITIONS} - rules.FLAT - ELSEWHERE
    assert sorted(taken - {name.split(" ")[0] for name in CASES}) == []
    assert not ELSEWHERE & {*CASES}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_that_build_takes_has_kernels(name, after_conv):
    nodes, values = CASES[name]
    lower_everywhere(build(after_conv(nodes, values, opset=OPSETS.get(name, 17)), loss="mse").model)


def test_convolutions_of_one_dimension_have_kernels():
    graph = helper.make_graph(
        [node("Conv", "x w")],
        "g",
        [helper.make_tensor_value_info("x", 1, [2, 3, 8])],
        [helper.make_tensor_value_info("y", 1, None)],
        [onnx.numpy_helper.from_array(floats(4, 3, 3), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    lower_everywhere(build(model, loss="mse").model)


def test_places_of_maxima_are_the_same_of_flattened_maps(forward):
    nodes = [node("MaxPool", "x", "p i", kernel_shape=[2]), node("Cast", "i", "f", to=1), node("Mul", "p f", "m")]
    model = forward([*nodes, node("Mul", "m w")], {"w": floats(3, 1)}, x=(2, 3, 8))
    lower_everywhere(build(model, loss="mse").model)
