"""Whether a training graph agrees with itself: shapes with what operators give, gradients with their forward nodes.

Passes and kernels believe a declared shape, and take of a BatchNorm's gradient that it is that of the BatchNorm whose
statistics it reads. In a damaged file either can be false, and then what comes out is another network without a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import onnx
from onnx import TensorProto

from bnfuse.core.errors import BnfuseError, at_node
from bnfuse.core.windows import axes_of
from bnfuse.graph.protos import attributes, shapes_of, static_shape
from bnfuse.opset.schemas import register_for, without_state
from bnfuse.opset.spec import CONV_GRADS, DOMAIN, OpSpec, find

Shapes = Mapping[str, Sequence[int]]  # of values whose shape is static
Check = Callable[[onnx.NodeProto, Mapping[str, onnx.NodeProto], Shapes], str | None]

DIFFERS = re.compile(
    r"\(op_type:(?P<op>[^,)]*), node name: (?P<name>.*?)\): (?:\[\w+\] )?(?P<what>[^\n]*\bdiffers?\b[^\n]*)"
)
OPERANDS = {1: "the map", 2: "the scale", 3: "the mean"}  # of the gradient of a BatchNorm


def check_agreement(model: onnx.ModelProto, file: str | None = None) -> dict[str, list[int]]:
    """Give the static shapes that onnx infers of the outputs of a training step; none of another graph.

    Raises BnfuseError, with the node, where the graph of a training step contradicts itself.
    """
    makers = {name: node for node in model.graph.node for name in node.output if name}
    lengths = lengths_of_splits(model.graph)
    if not any(node.domain == DOMAIN for node in model.graph.node):
        return {}
    inferred = check_declared(model, file)
    shapes = static_shapes(model.graph)
    for node in model.graph.node:
        check = check_of(node) if node.input and node.output else None
        reason = check(node, makers, shapes) if check is not None else None
        if reason is None and node.op_type == "Split" and not node.domain:
            reason = _lengths(node, lengths, shapes)
        if reason is not None:
            raise at_node(node.name, node.op_type, f"{reason}: the graph is damaged. Build it anew.", file=file)
    outputs = () if inferred is None else inferred.graph.output
    return {value.name: shape for value in outputs if (shape := static_shape(value)) is not None}


def check_of(node: onnx.NodeProto) -> Check | None:
    """Find what is checked of a node, by its operator."""
    if node.domain != DOMAIN:
        return STANDARD_CHECKS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    op = find(node.op_type)
    if isinstance(op, OpSpec):
        core = "ConvTransposeGrad" if op.is_transposed else "ConvGrad" if op.core in CONV_GRADS else op.core
        return CORE_CHECKS.get(core) if op.is_gradient and "Slice" not in op.prologue else None
    return PLAIN_CHECKS.get(node.op_type)


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
    return next((node for node in found if node is not None and node.op_type == "BatchNorm"), None)


def _batch_norm_forward(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto], shapes: Shapes) -> str | None:
    """Its last four operands have one value a channel."""
    x = shapes.get(node.input[0])
    if x is None or len(x) < 2:
        return None
    wrong = next((name for name in node.input[1:] if shapes.get(name, [x[1]]) != [x[1]]), None)
    return wrong and f"reads '{wrong}' of the shape {list(shapes[wrong])}, and has {x[1]} channels"


def _operands(node: onnx.NodeProto, shapes: Shapes, *names: str) -> list[Sequence[int] | None]:
    """Give the shapes of operands of an operator of ours, by their names."""
    op = find(node.op_type)
    assert op is not None
    given = dict(zip(op.operands, node.input, strict=False))
    return [shapes.get(given.get(name, "")) for name in names]


def _conv_grad(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto], shapes: Shapes) -> str | None:
    """Its window makes of x a map of dy's shape."""
    return _window_between(node, shapes, "dy", "x")


def _conv_transpose_grad(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto], shapes: Shapes) -> str | None:
    """Its window makes of dy a map of x's shape."""
    return _window_between(node, shapes, "x", "dy", padded=True)


def _window_between(node: onnx.NodeProto, shapes: Shapes, made: str, read: str, *, padded: bool = False) -> str | None:
    """Check that a convolution with the node's window and weight makes of the map `read` one of the shape of `made`.

    Where `read` may be padded by output_padding, up to a dilation, it has windows behind those of `made`.
    """
    given = attributes(node)
    dy, x, weight = _operands(node, shapes, made, read, "weight")
    if dy is None or x is None or weight is None:
        return None
    if not len(dy) == len(x) == len(weight) == 4:
        return f"reads maps of the shapes {dy} and {x} and a weight of {weight}"
    window = {key: list(given.get(key, ())) for key in ("kernel_shape", "strides", "dilations", "pads")}
    group, kernel = given.get("group", 1), window["kernel_shape"]
    if kernel != list(weight[2:]):
        return f"has kernel_shape={kernel}, and its weight is {list(weight)}"
    if any(len(window[key]) != size for key, size in (("strides", 2), ("dilations", 2), ("pads", 4))):
        return f"has the window {window}, and a map of 2 axes"
    if group < 1 or x[1] != weight[1] * group or weight[0] % group:
        return f"reads {x[1]} channels, and its weight is {list(weight)} in {group} groups"
    whole = [x[0], weight[0], *(axis.count(ceil=False) for axis in axes_of(window, x[2:]))]
    steps = zip(window["strides"], window["dilations"], strict=True)
    spare = [0, 0, *((max(stride, dilation) - 1) // stride if padded else 0 for stride, dilation in steps)]
    if all(0 <= most - have <= more for have, most, more in zip(dy, whole, spare, strict=True)):
        return None
    return f"has a window that makes {whole} of its map, and {made} is {list(dy)}"


def _split(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto], shapes: Shapes) -> str | None:
    """Check that the pieces are as long as what they are split off, along the axis."""
    whole, axis = shapes.get(node.input[0]), attributes(node).get("axis", 0)
    if whole is None:
        return None
    if not -len(whole) <= axis < len(whole):
        return f"has axis={axis}, and a map of {len(whole)} axes"
    known: list[int] = []
    for name in node.output:
        piece = shapes.get(name)
        if piece is None:
            return None
        expected = list(whole)
        expected[axis] = piece[axis] if len(piece) == len(whole) else 0
        if list(piece) != expected:
            return f"gives '{name}', declared as {list(piece)}, where its lengths make {expected}"
        known.append(piece[axis])
    return None if sum(known) == whole[axis] else f"gives pieces of {known}, and splits {list(whole)} along axis {axis}"


def lengths_of_splits(graph: onnx.GraphProto) -> dict[str, list[int]]:
    """Read the constants that say how long the pieces of Splits are, by their names."""
    read = {node.input[1] for node in graph.node if node.op_type == "Split" and len(node.input) > 1}
    found = (tensor for tensor in graph.initializer if tensor.name in read and tensor.data_type == TensorProto.INT64)
    return {tensor.name: onnx.numpy_helper.to_array(tensor).reshape(-1).tolist() for tensor in found}


def _lengths(node: onnx.NodeProto, lengths: Mapping[str, Sequence[int]], shapes: Shapes) -> str | None:
    """Check the pieces of a Split against the lengths that it reads."""
    given, axis = lengths.get(node.input[1] if len(node.input) > 1 else ""), attributes(node).get("axis", 0)
    if given is None:
        return None
    if len(given) != len(node.output):
        return f"gives {len(node.output)} pieces, and '{node.input[1]}' has {len(given)} lengths"
    pairs = ((name, size, shapes.get(name)) for name, size in zip(node.output, given, strict=True))
    wrong = next((name for name, size, piece in pairs if piece is not None and piece[axis] != size), None)
    return wrong and f"gives '{wrong}', declared as {list(shapes[wrong])}, and its lengths are {list(given)}"


def _like_operand(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto], shapes: Shapes) -> str | None:
    """Check an activation's gradient: dy and the map of the mask have one shape."""
    dy, x = _operands(node, shapes, "dy", "x")
    return f"reads maps of the shapes {dy} and {x}" if dy is not None and x is not None and dy != x else None


def _is_max_pool(node: onnx.NodeProto) -> bool:
    op = find(node.op_type)
    return node.op_type == "MaxPool" or (isinstance(op, OpSpec) and op.core == "MaxPool")


def _pool_grad(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto], shapes: Shapes) -> str | None:
    """Check the size of dy, which its window makes of x, and where it adds to dx, which the indices say."""
    given = attributes(node)
    dy, x = _operands(node, shapes, "dy", "x")
    if dy is not None and x is not None and len(x) == 4 and len(given.get("kernel_shape", ())) == 2:
        whole = [*x[:2], *(axis.count(ceil=bool(given.get("ceil_mode"))) for axis in axes_of(given, x[2:]))]
        if list(dy) != whole:
            return f"has a window that makes {whole} of its map, and dy is {list(dy)}"
    op = find(node.op_type)
    if not isinstance(op, OpSpec) or op.core != "MaxPoolGrad":
        return None
    indices = makers.get(node.input[op.operands.index("indices")])
    if indices is not None and not _is_max_pool(indices):
        name = node.input[op.operands.index("indices")]
        return f"reads '{name}' as indices, which '{indices.name}' ({indices.op_type}) gives"
    if indices is not None and (given_x := shapes.get(indices.input[0])) is not None and x is not None:
        y = shapes.get(indices.output[0])
        if list(given_x) != list(x) or (y is not None and dy is not None and list(y) != list(dy)):
            return f"makes {list(x)} of {dy}, and its indices are of '{indices.name}', which makes {y} of {given_x}"
    return None


def _matrix_product(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto], shapes: Shapes) -> str | None:
    """Check that the inner sizes of two matrices are one; onnx compares those of MatMul alone."""
    a, b = (shapes.get(name) for name in node.input[:2])
    if a is None or b is None or len(a) != 2 or len(b) != 2:
        return None
    given = attributes(node)
    ours, theirs = a[0 if given.get("transA") else 1], b[1 if given.get("transB") else 0]
    return None if ours == theirs else f"multiplies {list(a)} and {list(b)}, whose inner sizes are {ours} and {theirs}"


CORE_CHECKS: dict[str, Check] = {
    "ConvGrad": _conv_grad,
    "ConvTransposeGrad": _conv_transpose_grad,
    "MaxPoolGrad": _pool_grad,
    "AveragePoolGrad": _pool_grad,
    "PointwiseGrad": _like_operand,
}
PLAIN_CHECKS: dict[str, Check] = {"BatchNorm": _batch_norm_forward, "BatchNormGrad": _batch_norm_grad}
STANDARD_CHECKS: dict[str, Check] = {"Split": _split, "Gemm": _matrix_product, "MatMul": _matrix_product}
