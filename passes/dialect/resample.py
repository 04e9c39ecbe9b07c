"""Canonical form: a Resize, and a Pad that repeats or reflects what is there, is a linear map along rows and columns.

    y = Resize(x, scales)
    y = MatMul(MatMul(rows, x), columns^T) ->    y  = Resample(x, rows, columns)            rows x columns^T
    t = MatMul(rows^T, dy)                       dx = ResampleGrad(dy, x, rows, columns)    rows^T dy columns
    dx = MatMul(t, columns)

As an operator of steps it has a way in and a way out: a BatchNorm and its activation go into its own reading, the mask
and the reductions into what its gradient writes, and the map that is resampled is never stored normalised.

A product with constant matrices is one where its map is made as one, by a convolution, say: so adaptive poolings are
written whose windows overlap.

Refuses what changes samples or channels, what is computed at run time, and matrices of more than four million elements,
which the file would hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from bnfuse.analysis.owners import forward_name
from bnfuse.analysis.provenance import is_channel_concat
from bnfuse.core.errors import BnfuseError
from bnfuse.opset.resampling import PAD_MODES, Matrices, pad_matrices, resize_matrices
from bnfuse.opset.spec import OpSpec
from bnfuse.passes.dialect.source_ops import constant_of, is_batch_norm, is_map, read, sizes
from bnfuse.passes.rewriter import Editor, FusionResult, is_only_read_by

MOST_ELEMENTS = 1 << 22
FORWARD, BACKWARD = OpSpec((), "Resample"), OpSpec((), "ResampleGrad")
Matrix = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Made:
    """A Resample: its operands, and the matrices as arrays."""

    node: str
    operands: Mapping[str, ir.Value]
    rows: Matrix
    columns: Matrix


@dataclasses.dataclass(frozen=True)
class Products:
    """Products of a map with a matrix [H, OH] from the left and one [OW, W] from the right: what a gradient is.

    A matrix is None where there is no such product.
    """

    nodes: tuple[ir.Node, ...]
    dy: ir.Value
    left: Matrix | None
    right: Matrix | None


class ResizeAsResample(ir.passes.InPlacePass):
    """Write Resizes and Pads, and their gradients, as operators of steps."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "canonical")
        known: dict[bytes, ir.Value] = {}
        made = []
        for node in [n for n in model.graph if n.op_type in ("Resize", "Upsample", "Pad") and not n.domain]:
            found = matrices_of(node)
            if found is None:
                continue
            if isinstance(found, str):
                editor.refuse(node, found)
            else:
                made.append(write(editor, node, *found, known))
        for node in [n for n in model.graph if n.op_type == "MatMul" and not n.domain]:
            if node.graph is not None and (products := products_at(node)) is not None:
                if forward_name(node.name or "") == (node.name or ""):
                    if is_made_as_map(products.dy):
                        made.append(write(editor, products.nodes[-1], *as_forward(products), known, products))
                else:
                    write_gradient(editor, products, made)
        return editor.result()


def matrices_of(node: ir.Node) -> tuple[Matrix, Matrix] | str | None:
    """Give the matrices [OH, H] and [OW, W] of a node, None where it is no such map, or the reason why it stays."""
    x, y = node.inputs[0], node.outputs[0]
    if not is_map(x) or not is_map(y):
        return None
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    try:
        found = _pad(node, attributes, x) if node.op_type == "Pad" else _resize(node, attributes, x)
    except BnfuseError as error:
        return f"it {error}"
    if found is None or not found:
        return None
    if {*found} - {2, 3}:
        return "it changes samples or channels"
    (h, w), (oh, ow) = sizes(x)[2:], sizes(y)[2:]
    if h * oh + w * ow > MOST_ELEMENTS:
        return f"its matrices have {h * oh + w * ow} elements"
    rows, columns = found.get(2, np.eye(h, dtype=np.float32)), found.get(3, np.eye(w, dtype=np.float32))
    return (rows, columns) if (len(rows), len(columns)) == (oh, ow) else None


def _resize(node: ir.Node, attributes: Mapping[str, Any], x: ir.Value) -> Matrices | None:
    names = ("scales",) if node.op_type == "Upsample" else ("roi", "scales", "sizes")
    given = {}
    for name, value in zip(names, node.inputs[1:], strict=False):
        if value is None or not value.name or (value.shape is not None and tuple(value.shape) == (0,)):
            continue
        constant = constant_of(value)
        if constant is None:
            return None
        if constant.size:
            given[name] = constant
    return resize_matrices(node.op_type, attributes, sizes(x), **given)


def _pad(node: ir.Node, attributes: Mapping[str, Any], x: ir.Value) -> Matrices | None:
    mode = attributes.get("mode", "constant")
    pads, axes = (constant_of(value) for value in [*node.inputs[1:2], None, None, *node.inputs[3:4], None][:4:3])
    if mode not in PAD_MODES or pads is None or (axes is None and len(node.inputs) > 3 and node.inputs[3] is not None):
        return None
    return pad_matrices(mode, [int(n) for n in pads], None if axes is None else [int(n) for n in axes], sizes(x))


def write(
    editor: Editor,
    node: ir.Node,
    rows: Matrix,
    columns: Matrix,
    known: dict[bytes, ir.Value],
    products: Products | None = None,
) -> Made:
    """Put a Resample in the place of a node, or of the products that end in it."""
    x = products.dy if products is not None else node.inputs[0]
    nodes = products.nodes if products is not None else (node,)
    assert x is not None

    def constant(matrix: Matrix) -> ir.Value:
        key = np.array(matrix.shape).tobytes() + matrix.tobytes()
        if key not in known:
            known[key] = editor.constant(f"matrix_{matrix.shape[0]}_{matrix.shape[1]}", np.ascontiguousarray(matrix))
        return known[key]

    name = node.name or node.op_type
    operands = {"x": x, "rows": constant(rows), "columns": constant(columns)}
    editor.emit(FORWARD, operands, {}, {"y": node.outputs[0]}, before=node, of=nodes, name=name)
    editor.remove_dead(nodes)
    return Made(name, operands, rows, columns)


def products_at(node: ir.Node) -> Products | None:
    """Read a product of a map with a constant matrix, and the one behind it that multiplies from the other side."""
    first = _side(node)
    if first is None:
        return None
    dy, matrix, is_left = first
    result = node.outputs[0]
    uses = list(result.uses())
    second = _side(uses[0].node) if len(uses) == 1 and is_only_read_by(result, uses[0].node) else None
    if second is None or second[0] is not result or second[2] == is_left:
        return Products((node,), dy, matrix if is_left else None, None if is_left else matrix)
    left, right = (matrix, second[1]) if is_left else (second[1], matrix)
    return Products((node, uses[0].node), dy, left, right)


def is_made_as_map(value: ir.Value) -> bool:
    """Tell whether what writes a value makes feature maps, and not matrices side by side as attention has them."""
    writer = value.producer()
    return writer is not None and (read(writer) is not None or is_batch_norm(writer) or is_channel_concat(writer))


def as_forward(products: Products) -> tuple[Matrix, Matrix]:
    """Give the matrices [OH, H] and [OW, W] of products that are a forward map; ones of a side without a product."""
    height, width = sizes(products.dy)[2:]
    rows = products.left if products.left is not None else np.eye(height, dtype=np.float32)
    columns = products.right.T if products.right is not None else np.eye(width, dtype=np.float32)
    return rows, columns


def _side(node: ir.Node) -> tuple[ir.Value, Matrix, bool] | None:
    """Give the map of a product, its constant matrix, and whether that stands on the left."""
    if node.op_type != "MatMul" or node.domain or not is_map(node.outputs[0]):
        return None
    for place in (0, 1):
        matrix, value = constant_of(node.inputs[place]), node.inputs[1 - place]
        if matrix is not None and matrix.ndim == 2 and matrix.dtype == np.float32 and is_map(value):
            return value, matrix, place == 0
    return None


def write_gradient(editor: Editor, products: Products, made: list[Made]) -> None:
    """Put a ResampleGrad in the place of products that are the gradient of a Resample."""
    dx = products.nodes[-1].outputs[0]
    fitting = [
        each
        for each in made
        if sizes(each.operands["x"]) == sizes(dx)
        and _same(products.left, each.rows.T)
        and _same(products.right, each.columns)
    ]
    if not fitting:
        return
    owner = forward_name(products.nodes[0].name or "")
    resample = next((each for each in fitting if each.node == owner), fitting[0])
    editor.emit(
        BACKWARD, {"dy": products.dy, **resample.operands}, {}, {"dx": dx},
        before=products.nodes[0], of=products.nodes, name=editor.fresh(f"{resample.node}/grad"),
    )  # fmt: skip
    editor.remove_dead(products.nodes)


def _same(found: Matrix | None, wanted: Matrix) -> bool:
    """Tell whether a product's matrix is that of a gradient; where there is no product, it is none that changes."""
    expected = found if found is not None else np.eye(*wanted.shape, dtype=np.float32)
    return expected.shape == wanted.shape and bool((expected == wanted).all())
