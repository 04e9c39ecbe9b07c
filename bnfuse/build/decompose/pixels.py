"""Networks that turn maps to have their channels last, for a LayerNorm or a Linear layer, keep them as they were.

    Transpose(0231) -> LayerNormalization -> MatMul -> Gelu -> MatMul -> Transpose(0312)
 to LayerNorm -> Conv 1x1 -> Gelu -> Conv 1x1

A LayerNorm over the channels of pixels is our LayerNorm, and a product of each pixel's channels with a matrix a
convolution with a window of one pixel. As with other Transposes, the graph is taken as it was where no fewer elements
would be moved.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper

from bnfuse.graph.protos import attributes
from bnfuse.opset.schemas import register
from bnfuse.opset.spec import DOMAIN, VERSION

from ..forward import Constants
from ..graph import Forward
from ..transposes import Turn, Turner, cancel_transposes

WINDOW: dict[str, Any] = {
    "dilations": [1, 1], "group": 1, "kernel_shape": [1, 1], "pads": [0, 0, 0, 0], "strides": [1, 1],
}  # fmt: skip
LAYER_NORM = "LayerNorm"
STATISTICS = ("mean", "inv_std")  # its results that only its gradient reads


def keep_channels_first(forward: Forward, constants: Constants) -> None:
    """Take out the Transposes around LayerNorms and Linear layers of maps. Shapes must be known, and are afterwards."""
    turning = [node for node in forward.graph.node if node.op_type in TURNS and not node.domain]
    if turning:
        import_own(forward)
        cancel_transposes(forward, constants, more=TURNS)


def import_own(forward: Forward) -> None:
    """Let the graph have a LayerNorm of ours."""
    register([LAYER_NORM])
    if DOMAIN not in {entry.domain for entry in forward.model.opset_import}:
        forward.model.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))


def _pixels(turner: Turner, node: onnx.NodeProto) -> tuple[str, tuple[int, ...]] | None:
    """Give the map that operand 0 is with its channels last, and how it is turned; None where it is no such map."""
    found = turner.of(node)
    return found if found is not None and len(found[1]) == 4 and found[1][-1] == 1 else None


def _layer_norm(turner: Turner, node: onnx.NodeProto) -> bool:
    """Write LayerNormalization of pixels' channels as ours."""
    found, given = _pixels(turner, node), attributes(node)
    if found is None or given.get("axis", -1) % 4 != 3 or any(node.output[1:]) or len(node.input) < 2:
        return False
    (source, perm), (_, scale, *more) = found, node.input
    if len(turner.shapes.get(scale) or []) != 1:
        return False
    bias = more[0] if more and more[0] else turner.floats(f"{node.name}/bias", np.zeros(turner.shapes[scale] or []))
    own = helper.make_node(
        LAYER_NORM,
        [source, scale, bias],
        [node.output[0], *(turner.fresh(f"{node.name}/{what}") for what in STATISTICS)],
        name=node.name,
        domain=DOMAIN,
        epsilon=float(given.get("epsilon", 1e-5)),
    )
    batch, _, *rest = turner.shapes[source] or []
    turner.shapes.update({name: [batch, *rest] for name in own.output[1:]})
    turner.gives(own, 0, perm)
    turner.nodes.append(own)
    return True


def _product(turner: Turner, node: onnx.NodeProto) -> bool:
    """Write the product of pixels' channels with a matrix of the network as a convolution."""
    found, matrix = _pixels(turner, node), node.input[1]
    if found is None or matrix in turner.from_data or len(turner.shapes.get(matrix) or []) != 2:
        return False
    (source, perm), turned = found, turner.of(node, 1)
    inputs, outputs = turner.shapes[matrix] or []
    if turned is None:
        name = turner.fresh(f"{matrix}/turned")
        turner.nodes.append(helper.make_node("Transpose", [matrix], [name], name=turner.fresh(name), perm=[1, 0]))
        turner.shapes[name] = [outputs, inputs]
    else:
        name = turned[0]
    weight = turner.reshaped(name, [outputs, inputs, 1, 1])
    conv = helper.make_node("Conv", [source, weight], list(node.output), name=node.name, **WINDOW)
    turner.gives(conv, 0, perm)
    turner.nodes.append(conv)
    return True


TURNS: dict[str, Turn] = {"LayerNormalization": _layer_norm, "MatMul": _product}
