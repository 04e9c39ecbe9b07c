"""Whether a training graph agrees with itself: shapes with what operators give, gradients with their forward nodes.

Passes and kernels believe a declared shape, and take of a BatchNorm's gradient that it is that of the BatchNorm whose
statistics it reads. In a damaged file either can be false, and then what comes out is another network without a word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import onnx

from bnfuse.core.errors import BnfuseError, at_node
from bnfuse.core.windows import axes_of
from bnfuse.graph.protos import attributes, shapes_of, static_shape
from bnfuse.opset.schemas import register_for, without_state
from bnfuse.opset.spec import DOMAIN

Shapes = Mapping[str, Sequence[int]]  # of values whose shape is static

DIFFERS = re.compile(
    r"\(op_type:(?P<op>[^,)]*), node name: (?P<name>.*?)\): (?:\[\w+\] )?(?P<what>[^\n]*\bdiffers?\b[^\n]*)"
)
BATCH_NORMS = ("BatchNorm", "BatchNormInternal")
OPERANDS = {1: "the map", 2: "the scale", 3: "the mean"}  # of the gradient of a BatchNorm


def check_agreement(model: onnx.ModelProto, file: str | None = None) -> dict[str, list[int]]:
    """Give the static shapes that onnx infers of the outputs of a training step; none of another graph.

    Raises BnfuseError, with the node, where the graph of a training step contradicts itself.
    """
    makers = {name: node for node in model.graph.node for name in node.output if name}
    if not any(node.op_type in TRAINING_CHECKS or node.domain == DOMAIN for node in model.graph.node):
        return {}
    inferred = check_declared(model, file)
    shapes = static_shapes(model.graph)
    for node in model.graph.node:
        check = CHECKS.get(node.op_type) if node.input and node.output else None
        reason = check(node, makers, shapes) if check is not None else None
        if reason is not None:
            raise at_node(node.name, node.op_type, f"{reason}: the graph is damaged. Build it anew.", file=file)
    outputs = () if inferred is None else inferred.graph.output
    return {value.name: shape for value in outputs if (shape := static_shape(value)) is not None}


def check_declared(model: onnx.ModelProto, file: str | None) -> onnx.ModelProto | None:
    """Check that the shapes and element types that the file declares are those that onnx infers, as far as it does.

    Gives the model with what was inferred, without the values of its inputs.
    """
    try:
        register_for(model)
        bare = without_state(model)
        return onnx.shape_inference.infer_shapes(bare, check_type=True, strict_mode=True, data_prop=True)
    except (BnfuseError, onnx.checker.ValidationError):
        pass  # of an operator that is not known: whoever runs it says so
    except onnx.shape_inference.InferenceError as error:
        if found := DIFFERS.search(str(error)):
            what = found["what"].strip().rstrip(".")
            raise at_node(
                found["name"],
                found["op"],
                f"gives another result than the file declares ({what[0].lower()}{what[1:]}): the graph is damaged. "
                "Build it anew.",
                file=file,
            ) from None
    except (ArithmeticError, ValueError, TypeError, IndexError, AssertionError):
        pass  # of an attribute that no shape follows from
    return None


def static_shapes(graph: onnx.GraphProto) -> dict[str, list[int]]:
    """List the shapes of all values of which every dimension is known."""
    return {name: shape for name, shape in shapes_of(graph).items() if shape is not None}


def _batch_norm_grad(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto], shapes: Shapes) -> str | None:
    """Its operands are those of the BatchNorm that gave it mean or inv_std."""
    norm = _batch_norm(makers, node.input[3:5])
    if norm is None or min(len(node.input), len(norm.input), len(norm.output)) < 5:
        return None
    expected = (norm.input[0], norm.input[1], norm.output[3])
    for place, theirs in enumerate(expected, 1):
        if node.input[place] != theirs:
            return f"reads '{node.input[place]}' as {OPERANDS[place]}, and its BatchNorm '{norm.name}' has '{theirs}'"
    if node.input[4] != norm.output[4]:
        return f"reads '{node.input[4]}' as inv_std, and its BatchNorm '{norm.name}' gives '{norm.output[4]}'"
    return None


def _batch_norm(makers: Mapping[str, onnx.NodeProto], names: Sequence[str]) -> onnx.NodeProto | None:
    found = (makers.get(name) for name in reversed(names))
    return next((node for node in found if node is not None and node.op_type in BATCH_NORMS), None)


def _batch_norm_forward(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto], shapes: Shapes) -> str | None:
    """Its last four operands have one value a channel."""
    x = shapes.get(node.input[0])
    if x is None or len(x) < 2:
        return None
    wrong = next((name for name in node.input[1:] if shapes.get(name, [x[1]]) != [x[1]]), None)
    return wrong and f"reads '{wrong}' of the shape {list(shapes[wrong])}, and has {x[1]} channels"


def _conv_grad(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto], shapes: Shapes) -> str | None:
    """Its window makes of x a map of dy's shape."""
    given = attributes(node)
    dy, x, weight = (shapes.get(name) for name in node.input[:3])
    if dy is None or x is None or weight is None or given.get("auto_pad", b"NOTSET") not in (b"NOTSET", b""):
        return None
    rank = len(x) - 2
    if rank < 1 or not len(dy) == len(x) == len(weight):
        return f"reads maps of the shapes {dy} and {x} and a weight of {weight}"
    group, kernel = given.get("group", 1), list(given.get("kernel_shape") or weight[2:])
    defaults = {"strides": [1] * rank, "dilations": [1] * rank, "pads": [0] * 2 * rank}
    window = {"kernel_shape": kernel} | {name: list(given.get(name) or value) for name, value in defaults.items()}
    if kernel != list(weight[2:]):
        return f"has kernel_shape={kernel}, and its weight is {list(weight)}"
    if any(len(window[name]) != len(value) for name, value in defaults.items()):
        return f"has the window {window}, and a map of {rank} axes"
    if group < 1 or x[1] != weight[1] * group or weight[0] % group:
        return f"reads {x[1]} channels, and its weight is {list(weight)} in {group} groups"
    whole = [x[0], weight[0], *(axis.count(ceil=False) for axis in axes_of(window, x[2:]))]
    return None if list(dy) == whole else f"has a window that makes {whole} of its map, and dy is {list(dy)}"


def _split(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto], shapes: Shapes) -> str | None:
    """Check that the pieces are those of the concatenation whose lengths it reads, along the same axis."""
    whole, axis = shapes.get(node.input[0]), attributes(node).get("axis", 0)
    if whole is None:
        return None
    if not -len(whole) <= axis < len(whole):
        return f"has axis={axis}, and a map of {len(whole)} axes"
    pieces = [shapes.get(name) for name in node.output]
    concat = makers.get(node.input[1]) if len(node.input) > 1 else None
    if concat is not None and concat.op_type == "ConcatTraining":
        theirs = attributes(concat).get("axis", 1) % len(whole)
        if theirs != axis % len(whole):
            return f"splits along axis {axis}, and the lengths are those of '{concat.name}', along axis {theirs}"
        if len(concat.input) != len(node.output):
            return (
                f"gives {len(node.output)} pieces, and the lengths are those of '{concat.name}', of {len(concat.input)}"
            )
        lengths: list[int | None] = [shape[theirs] if (shape := shapes.get(n)) else None for n in concat.input]
    else:
        lengths = [None] * len(pieces)
    for name, piece, length in zip(node.output, pieces, lengths, strict=True):
        if not name or piece is None:
            continue
        expected = list(whole)
        expected[axis] = piece[axis] if length is None and len(piece) == len(whole) else length or 0
        if list(piece) != expected:
            return f"gives '{name}', declared as {list(piece)}, where its lengths make {expected}"
    known = [piece[axis] for piece in pieces if piece is not None]
    if len(known) == len(pieces) and sum(known) != whole[axis]:
        return f"gives pieces of {known}, and splits {list(whole)} along axis {axis}"
    return None


def _like_operand(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto], shapes: Shapes) -> str | None:
    """Check an activation's gradient: dy and the map of the mask have one shape."""
    dy, x = (shapes.get(name) for name in node.input[:2])
    return f"reads maps of the shapes {dy} and {x}" if dy is not None and x is not None and dy != x else None


def _pool_grad(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto], shapes: Shapes) -> str | None:
    """Check the size of dx, which onnxruntime takes from its declared shape, and where it writes, which the indices
    say."""
    dx = shapes.get(node.output[0])
    if dx is None:
        return None
    dy = shapes.get(node.input[0])
    indices = makers.get(node.input[1]) if node.op_type == "MaxPoolGrad" and len(node.input) > 1 else None
    if indices is not None and not indices.op_type.endswith("MaxPool"):
        return f"reads '{node.input[1]}' as indices, which '{indices.name}' ({indices.op_type}) gives"
    if indices is not None and indices.op_type == "MaxPool":
        x, y = shapes.get(indices.input[0]), shapes.get(indices.output[0])
        if (x is not None and list(x) != list(dx)) or (y is not None and dy is not None and list(y) != list(dy)):
            return f"makes {list(dx)} of {dy}, and its indices are of '{indices.name}', which makes {y} of {x}"
    return None


def _matrix_product(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto], shapes: Shapes) -> str | None:
    """Check that the inner sizes of two matrices are one; onnx compares those of MatMul alone."""
    a, b = (shapes.get(name) for name in node.input[:2])
    if a is None or b is None or len(a) != 2 or len(b) != 2:
        return None
    given = attributes(node)
    ours, theirs = a[0 if given.get("transA") else 1], b[1 if given.get("transB") else 0]
    return None if ours == theirs else f"multiplies {list(a)} and {list(b)}, whose inner sizes are {ours} and {theirs}"


TRAINING_CHECKS = {
    **dict.fromkeys(BATCH_NORMS, _batch_norm_forward),
    **dict.fromkeys(("BatchNormGrad", "BatchNormalizationGrad"), _batch_norm_grad),
    "ConvGrad": _conv_grad,
    "SplitTraining": _split,
    "ReluGrad": _like_operand,
    "QuickGeluGrad": _like_operand,
    "MaxPoolGrad": _pool_grad,
    "AveragePoolGrad": _pool_grad,
}
CHECKS = TRAINING_CHECKS | {"Gemm": _matrix_product, "MatMul": _matrix_product}
