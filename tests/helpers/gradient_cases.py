"""A graph for every rule of bnfuse.autodiff: its nodes, operands, constants and outputs."""

from __future__ import annotations

import numpy as np
from differentiated import Differentiated, apart, differentiated, floats, ints, node

from bnfuse.opset.spec import DOMAIN

MAP = floats(2, 4, 6, 5)
POSITIVE = floats(2, 3, low=0.2, high=0.9)
LABELS = ints(1, 0)
WINDOW = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]}


def case(nodes, feeds, constants=None, outputs=("y",)):
    return nodes if isinstance(nodes, list) else [nodes], feeds, constants or {}, outputs


def of(op, *operands, constants=None, **attributes):
    """One node of these operands; constants follow them, or stand where they are named."""
    feeds = {f"x{i}": value for i, value in enumerate(operands)}
    names = attributes.pop("order", " ".join([*feeds, *(constants or {})]))
    return case(node(op, names, "y", **attributes), feeds, constants)


UNARY = ["Abs", "Acos", "Asin", "Asinh", "Atan", "Atanh", "Cos", "Cosh", "Erf", "Exp", "Identity", "Log", "Neg", "Relu"]
UNARY += ["Reciprocal", "Sin", "Sinh", "Softmax", "LogSoftmax", "Softsign", "Sqrt", "Tan"]
REDUCTIONS = ["L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"]
BATCH_NORM = {"mean": floats(4), "variance": floats(4, low=0.5)}

CASES = {
    **{op: of(op, POSITIVE) for op in UNARY},
    **{f"Reduce{kind}": of(f"Reduce{kind}", POSITIVE, constants={"axes": ints(1)}, keepdims=0) for kind in REDUCTIONS},
    **{op: of(op, POSITIVE, floats(3, low=0.3, seed=1)) for op in ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min")},
    **{op: of(op, POSITIVE, floats(3, seed=1), floats(2, 1, seed=2)) for op in ("Sum", "Mean")},
    "Acosh": of("Acosh", POSITIVE + 1),
    "AveragePool": of("AveragePool", MAP, ceil_mode=0, **WINDOW),
    "AveragePool of dilated windows": of("AveragePool", MAP, dilations=[2, 1], **WINDOW),
    "BatchNormalization": of("BatchNormalization", MAP, floats(4, seed=1), floats(4, seed=2), constants=BATCH_NORM),
    "Cast": case([node("Cast", "x", "h", to=11), node("Cast", "h", "y", name="back", to=1)], {"x": POSITIVE}),
    "CastLike": of("CastLike", POSITIVE, POSITIVE),
    "Clip": of("Clip", MAP, constants={"low": np.array(-1.0), "high": np.array(1.0)}),
    "Clip by computed bounds": of("Clip", MAP, np.array(-1.0), np.array(1.0)),
    "Concat": of("Concat", MAP, floats(2, 3, 6, 5), axis=1),
    "Conv": of("Conv", MAP, floats(6, 2, 3, 3), floats(6), group=2, strides=[2, 1]),
    "ConvTranspose": of("ConvTranspose", MAP, floats(4, 3, 3, 3), floats(6), group=2, strides=[2, 1]),
    "CumSum": of("CumSum", MAP, constants={"axis": np.array(2)}, exclusive=1),
    "DepthToSpace": of("DepthToSpace", MAP, blocksize=2),
    "Dropout": of("Dropout", MAP, constants={"ratio": np.array(0.0), "training": np.array(True)}),
    "Expand": of("Expand", floats(3, 1), constants={"shape": ints(2, 3, 4)}),
    "Flatten": of("Flatten", MAP),
    "Gather": of("Gather", MAP, np.array([[0, -1], [2, 0]], np.int32), axis=1),
    "Gather of constant indices": of("Gather", MAP, constants={"i": ints(3, 0)}, axis=1),
    "GatherElements": of("GatherElements", floats(3, 2), np.array([[0, -1], [2, 0]]), axis=0),
    "GatherND": of("GatherND", floats(2, 3, 4), np.array([[[0], [2]], [[1], [1]]]), batch_dims=1),
    "Gemm": of("Gemm", floats(4, 3), floats(5, 4), floats(5), alpha=0.5, beta=2.0, transA=1, transB=1),
    "GlobalAveragePool": of("GlobalAveragePool", MAP),
    "MatMul": of("MatMul", floats(2, 1, 3, 4), floats(5, 4, 2)),
    "MatMul of a vector": of("MatMul", floats(4), floats(5, 4, 2)),
    "MaxPool": of("MaxPool", apart(2, 4, 6, 5), dilations=[1, 2], **WINDOW),
    "MaxPool of one dimension": of("MaxPool", apart(2, 4, 6), kernel_shape=[2]),
    "Mod": of("Mod", POSITIVE * 5, POSITIVE, fmod=1),
    "NegativeLogLikelihoodLoss": of("NegativeLogLikelihoodLoss", POSITIVE, LABELS, constants={"w": floats(3)}),
    "PRelu": of("PRelu", MAP, floats(4, 1, 1)),
    "Pad": of("Pad", MAP, constants={"pads": ints(0, 1, 2, 0, 1, 0, 0, 3)}),
    "Pad that reflects": of("Pad", MAP, constants={"pads": ints(0, 0, 2, 0, 0, 0, 0, 3)}, mode="reflect"),
    "Reshape": of("Reshape", MAP, constants={"shape": ints(2, -1)}),
    "Resize": of("Resize", MAP, constants={"sizes": ints(2, 4, 9, 5)}, mode="linear", order="x0 - - sizes"),
    "ReverseSequence": of("ReverseSequence", MAP, constants={"lengths": ints(1, 4)}, batch_axis=0, time_axis=1),
    "ScatterElements": of("ScatterElements", floats(3, 2), np.array([[0, -1]]), floats(1, 2), reduction="add"),
    "ScatterElements that replaces": of("ScatterElements", floats(3, 2), np.array([[0, -1]]), floats(1, 2)),
    "ScatterND": of("ScatterND", floats(3, 2), np.array([[0], [2]]), floats(2, 2), reduction="add"),
    "ScatterND that replaces": of("ScatterND", floats(3, 2), np.array([[0], [2]]), floats(2, 2)),
    "Slice": of("Slice", MAP, constants={"s": ints(-1, 1), "e": ints(-9, 5), "a": ints(2, 3), "d": ints(-2, 2)}),
    "SoftmaxCrossEntropyLoss": of(
        "SoftmaxCrossEntropyLoss", POSITIVE, LABELS, constants={"w": floats(3)}, ignore_index=0
    ),
    "SpaceToDepth": of("SpaceToDepth", floats(1, 2, 4, 6), blocksize=2),
    "Split": case(node("Split", "x", "a b c", axis=3, num_outputs=3), {"x": MAP}, outputs=("a", "c")),
    "Squeeze": of("Squeeze", floats(1, 3, 1), constants={"axes": ints(0)}),
    "Tile": of("Tile", MAP, constants={"repeats": ints(1, 2, 1, 3)}),
    "TopK": case(node("TopK", "x k", "y i"), {"x": apart(3, 4)}, {"k": ints(2)}),
    "Transpose": of("Transpose", MAP, perm=[2, 0, 3, 1]),
    "Trilu": of("Trilu", MAP, upper=0),
    "Unsqueeze": of("Unsqueeze", MAP, constants={"axes": ints(0, -1)}),
    "Where": of("Where", POSITIVE > 0.5, POSITIVE, floats(3, seed=1)),
    f"{DOMAIN}::BatchNorm": case(
        node("BatchNorm", "x s b mean variance", "y p q m i", domain=DOMAIN, epsilon=1e-3, momentum=0.9),
        {"x": MAP, "s": floats(4, seed=1), "b": floats(4, seed=2)},
        BATCH_NORM,
    ),
    f"{DOMAIN}::LayerNorm": case(
        node("LayerNorm", "x s b", "y mean inverse", domain=DOMAIN, epsilon=1e-3),
        {"x": MAP, "s": floats(4, seed=1), "b": floats(4, seed=2)},
    ),
    f"{DOMAIN}::GroupNorm": case(
        node("GroupNorm", "x s b", "y mean inverse", domain=DOMAIN, epsilon=1e-3, groups=2),
        {"x": MAP, "s": floats(4, seed=1), "b": floats(4, seed=2)},
    ),
    f"{DOMAIN}::NormalizePointwise": case(
        node("NormalizePointwise", "x a b", "y", domain=DOMAIN), {"x": MAP, "a": floats(4), "b": floats(4, seed=2)}
    ),
}


def single(values):
    """Floats in float32."""
    return {name: v.astype(np.float32) if v.dtype == np.float64 else v for name, v in values.items()}


def with_gradient(name: str) -> Differentiated:
    """The graph of a case with its gradient, in float32."""
    nodes, feeds, constants, outputs = CASES[name]
    return differentiated(nodes, single(feeds), constants=single(constants), outputs=outputs)
