"""Canonical form: a BatchNorm of rows is one of maps of a single pixel, and a product with a matrix a 1x1 convolution.

    u = MatMul(x, w)                         x' = Reshape(x, [M, C, 1, 1]);  w' = Reshape(w, [K, C, 1, 1])
    y = BatchNorm(Reshape(u, [M, K]))   ->   u' = Conv(x', w')
    z = Relu(y)                              z' = Relu(BatchNorm(u'))
    v = Gemm(z, t, bias)                     v' = Conv(z', t', bias);        v = Reshape(v')

Rows are tensors [.., C], M of them: those of rank 2 that a BatchNorm takes, what a Reshape, Flatten or Squeeze makes of
them without moving an element, and what is pointwise beside them. The gradients follow: the two products and the sum
that a Linear layer's gradient is are one ConvGrad. Reshapes to [M, C, 1, 1] and back cancel, or are views.

Leaves alone what no BatchNorm of rows is next to, and whatever is not pointwise or a product with a matrix: there the
rows are given back in the shape that it reads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from bnfuse.opset.spec import OpSpec
from bnfuse.opset.traffic import RESHAPES
from bnfuse.passes.dialect.source_ops import constant_of, is_batch_norm, is_batch_norm_grad, is_pointwise, sizes
from bnfuse.passes.rewriter import Editor, FusionResult, is_unused, sort

CONVOLUTION: dict[str, Any] = {
    "dilations": (1, 1), "group": 1, "kernel_shape": (1, 1), "pads": (0, 0, 0, 0), "strides": (1, 1),
}  # fmt: skip


@dataclasses.dataclass
class Product:
    """A product of rows with a matrix [K, C] (or, where `turned`, [C, K]), and what its gradient consists of.

    `rows` and `result` are rows; of the gradient, `dy` are rows, the nodes are absent where nothing waits for them.
    """

    node: ir.Node
    rows: ir.Value
    matrix: ir.Value
    turned: bool
    bias: ir.Value | None
    dy: ir.Value | None = None
    input_gradient: ir.Node | None = None
    weight_gradient: ir.Node | None = None
    bias_gradient: ir.Node | None = None

    @property
    def gradients(self) -> list[ir.Node]:
        """List the nodes of its gradient."""
        return [n for n in (self.input_gradient, self.weight_gradient, self.bias_gradient) if n is not None]


class RowsAsMaps(ir.passes.InPlacePass):
    """Write BatchNorms of rank 2 with the products and activations around them as those of maps of one pixel."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "mvf")
        region = Region(list(model.graph))
        if region.grow():
            Writer(editor, region).write()
            sort(model.graph)
        return editor.result()


def rows_of(value: ir.Value | None) -> tuple[int, int] | None:
    """Count the rows and channels of a value that can be seen as rows: [.., C] of rank 2 or 3, or [M, C, 1, 1]."""
    if value is None or value.dtype != ir.DataType.FLOAT or value.shape is None:
        return None
    shape = [size for size in value.shape if isinstance(size, int) and size > 0]
    if len(shape) != len(value.shape):
        return None
    if len(shape) in (2, 3):
        return math.prod(shape[:-1]), shape[-1]
    return (shape[0], shape[1]) if len(shape) == 4 and shape[2:] == [1, 1] else None


def origin(value: ir.Value) -> ir.Value:
    """Follow rows back through the nodes that give them another shape alone."""
    while (node := value.producer()) is not None and is_view(node):
        source = node.inputs[0]
        assert source is not None
        value = source
    return value


def is_view(node: ir.Node) -> bool:
    """Tell whether a node gives rows another shape, and they stay the same rows."""
    if node.domain or node.op_type not in RESHAPES:
        return False
    before = rows_of(node.inputs[0])
    return before is not None and before == rows_of(node.outputs[0])


class Region:
    """The rows around BatchNorms of rank 2, each by its origin, and the nodes between them."""

    def __init__(self, nodes: list[ir.Node]) -> None:
        self.nodes = nodes
        self.order = {node: index for index, node in enumerate(nodes)}
        self.origins: set[ir.Value] = set()
        self.pointwise: set[ir.Node] = set()
        self.products: list[Product] = []
        self.claimed: set[ir.Node] = set()  # gradients of a product already: two that read the same rows share none
        self._near: dict[ir.Value, list[ir.Node]] = {}
        for node in nodes:
            for value in dict.fromkeys(self._rows_at(node)):
                self._near.setdefault(value, []).append(node)

    def grow(self) -> bool:
        """Find the region; False where there is no BatchNorm of rows."""
        pending = [v for n in self.nodes if starts(n) for v in self._rows_at(n)]
        found = bool(pending)
        while pending:
            value = pending.pop()
            if value in self.origins:
                continue
            self.origins.add(value)
            for node in self._near.get(value, ()):
                if keeps_rows(node):
                    self.pointwise.add(node)
                    pending += self._rows_at(node)
        for node in self.nodes:
            if (product := self._product(node)) is not None:
                self.products.append(product)
                self.claimed |= {*product.gradients}
        return found

    def _rows_at(self, node: ir.Node) -> list[ir.Value]:
        return [origin(v) for v in (*node.inputs, *node.outputs) if v is not None and v.name and rows_of(v) is not None]

    def _product(self, node: ir.Node) -> Product | None:
        """Read a node as a product that touches the region, with its gradient."""
        if node.domain or node.op_type not in ("MatMul", "Gemm") or node in self.claimed:
            return None
        rows, matrix, *more = node.inputs
        bias = more[0] if more else None
        shape = rows_of(rows)
        if rows is None or matrix is None or shape is None or matrix.shape is None or len(matrix.shape) != 2:
            return None
        if rows_of(node.outputs[0]) is None or len(rows.shape or ()) == 4 or not is_plain(node, bias):
            return None
        product = Product(node, origin(rows), matrix, not flag(node, "transB"), bias)
        self._find_gradient(product)
        touched = [product.rows, origin(node.outputs[0]), *([product.dy] if product.dy is not None else [])]
        if product.input_gradient is not None:
            touched.append(product.input_gradient.outputs[0])
        return product if any(value in self.origins for value in touched) else None

    def _find_gradient(self, product: Product) -> None:
        """Find the products that are the gradient of one, and the sum that is that of its bias."""
        rows, columns = rows_of(product.node.outputs[0]) or (0, 0)
        for use in product.matrix.uses():
            node = use.node
            if node.op_type != "Gemm" or use.idx != 1 or not is_plain(node, (*node.inputs, None)[2]):
                continue
            if (
                node is product.node
                or node in self.claimed
                or flag(node, "transB") == (not product.turned)
                or node.inputs[0] is None
            ):
                continue
            if rows_of(node.inputs[0]) == (rows, columns):
                product.input_gradient, product.dy = node, origin(node.inputs[0])
        for node in self._near.get(product.rows, ()):
            if node.op_type != "Gemm" or node.domain or not flag(node, "transA") or flag(node, "transB"):
                continue
            if node in self.claimed:
                continue
            pair = node.inputs[:2] if product.turned else node.inputs[1::-1]
            if len(node.inputs) > 2 or any(value is None for value in pair) or number(node, "alpha") != 1:
                continue
            x, dy = (origin(value) for value in pair if value is not None)
            if x is product.rows and rows_of(dy) == (rows, columns) and product.dy in (None, dy):
                product.weight_gradient, product.dy = node, dy
        if product.bias is None or product.dy is None or product.weight_gradient is None:
            return
        for node in self._near.get(product.dy, ()):
            axes = constant_of(node.inputs[1]) if node.op_type == "ReduceSum" and len(node.inputs) > 1 else None
            rank = len(node.inputs[0].shape or ())  # type: ignore[union-attr]
            if axes is not None and axes.tolist() == [0] and rank == 2 and not flag(node, "keepdims", 1):
                product.bias_gradient = node


def starts(node: ir.Node) -> bool:
    """Tell whether a node is a BatchNorm of rows, or one of maps of a pixel that are read as rows."""
    if not is_batch_norm(node) and not is_batch_norm_grad(node):
        return False
    x = node.inputs[0]
    if x is None or rows_of(x) is None or len(x.shape or ()) == 3:
        return False
    return len(x.shape or ()) == 2 or (is_batch_norm(node) and any(True for _ in views_behind(node.outputs[0])))


def views_behind(value: ir.Value) -> Iterator[ir.Node]:
    """Find the views of rows that read a map of one pixel, or what is pointwise of it."""
    for use in value.uses():
        if is_view(use.node):
            yield use.node
        elif is_pointwise(use.node):
            yield from views_behind(use.node.outputs[0])


def keeps_rows(node: ir.Node) -> bool:
    """Tell whether a node works on each row's channels alike and can work on maps as well."""
    if is_batch_norm(node) or is_batch_norm_grad(node):
        return rows_of(node.inputs[0]) is not None and len(node.inputs[0].shape or ()) != 3  # type: ignore[union-attr]
    shapes = {tuple(v.shape or ()) for v in (*node.inputs[:2], *node.outputs) if v is not None and v.name}
    if node.op_type in ("Add", "Sum") and not node.domain:
        shapes = {tuple(v.shape or ()) for v in (*node.inputs, *node.outputs) if v is not None}
        return len(shapes) == 1 and rows_of(node.outputs[0]) is not None
    return is_pointwise(node) and len(shapes) == 1 and rows_of(node.outputs[0]) is not None


def is_plain(node: ir.Node, bias: ir.Value | None) -> bool:
    """Tell whether a MatMul or Gemm is x*w or x*w + bias and nothing more."""
    if flag(node, "transA") or number(node, "alpha") != 1 or (bias is not None and number(node, "beta") != 1):
        return False
    columns = (node.outputs[0].shape or ir.Shape((0,)))[-1]
    return bias is None or (bias.shape is not None and tuple(bias.shape) == (columns,))


def flag(node: ir.Node, name: str, default: int = 0) -> bool:
    """Read an attribute that is 0 or 1."""
    return bool(node.attributes[name].as_int() if name in node.attributes else default)


def number(node: ir.Node, name: str) -> float:
    """Read an attribute that is 1 where it is left out."""
    return node.attributes[name].as_float() if name in node.attributes else 1.0


class Writer:
    """Puts nodes of maps in the place of those of a region."""

    def __init__(self, editor: Editor, region: Region) -> None:
        self.editor, self.region = editor, region
        self.maps: dict[ir.Value, ir.Value] = {}  # of the origin of each row, as [M, C, 1, 1]
        self.matrices: dict[tuple[ir.Value, bool], ir.Value] = {}  # weights, by matrix and whether it is turned
        self.gone: list[ir.Node] = []

    def write(self) -> None:
        """Write all nodes anew, in the graph's order."""
        forward = {product.node: product for product in self.region.products}
        backward = {
            min(product.gradients, key=lambda node: self.region.order[node]): product
            for product in self.region.products
            if product.gradients
        }
        for node in self.region.nodes:
            if node in self.region.pointwise:
                self.pointwise(node)
            if node in forward:
                self.product(forward[node])
            if node in backward:
                self.gradient(backward[node], node)
        self.remove()

    def map(self, rows: ir.Value, before: ir.Node) -> ir.Value:
        """Give rows as a map of one pixel a sample."""
        rows = origin(rows)
        if rows not in self.maps:
            m, c = rows_of(rows) or (0, 0)
            self.maps[rows] = rows if len(rows.shape or ()) == 4 else self.reshape(rows, (m, c, 1, 1), before)
        return self.maps[rows]

    def reshape(self, value: ir.Value, shape: Iterable[int], before: ir.Node, *, rows: bool = True) -> ir.Value:
        """Insert a Reshape; of rows it leaves open how many there are."""
        shape = list(shape)
        written = [-1, *shape[1:]] if rows else shape
        sizes_value = self.editor.constant("shape_" + "_".join(map(str, written)), np.array(written, np.int64))
        (made,) = self.editor.standard("Reshape", [value, sizes_value], 1, before=before, of=[before])
        made.shape, made.type = ir.Shape(shape), value.type
        return made

    def give(self, old: ir.Value, made: ir.Value, before: ir.Node, *, rows: bool = True) -> None:
        """Let what reads rows (or a matrix) read a map's, in the old shape, from here on."""
        back = self.reshape(made, sizes(old), before, rows=rows)
        self.maps[old] = made
        self.editor.take_over(old, back)

    def pointwise(self, node: ir.Node) -> None:
        """Write a BatchNorm, its gradient, an activation or a sum of maps; what is one already reads the maps."""
        if all(len(value.shape or ()) in (1, 4) for value in node.outputs if value.name):
            for index, value in enumerate(node.inputs):
                if value is not None and rows_of(value) is not None and (made := self.map(value, node)) is not value:
                    node.replace_input_with(index, made)
            return
        inputs = [self.map(v, node) if v is not None and rows_of(v) is not None else v for v in node.inputs]
        outputs: list[ir.Value | ir.Shape | None] = []
        for value in node.outputs:
            shape = rows_of(value) if value.name else None
            outputs.append(ir.Shape((*shape, 1, 1)) if shape is not None else value if value.name else None)
        old_outputs = list(node.outputs)
        made_outputs = self.editor.clone(node, inputs, outputs, before=node, of=[node])
        for old, new, kind in zip(old_outputs, made_outputs, outputs, strict=True):
            if isinstance(kind, ir.Shape):
                self.give(old, new, node)
        self.editor.fused.append(node.name or node.op_type)
        self.gone.append(node)

    def weight(self, product: Product, before: ir.Node) -> ir.Value:
        """Give the matrix of a product as the weight [K, C, 1, 1]."""
        key = (product.matrix, product.turned)
        if key not in self.matrices:
            matrix, turned = product.matrix, product.turned
            producer = matrix.producer()
            if turned and producer is not None and is_turn(producer):
                matrix, turned = producer.inputs[0], False  # type: ignore[assignment]
            if turned:
                k, c = sizes(matrix)[::-1]
                (flat,) = self.editor.standard("Transpose", [matrix], 1, before=before, of=[product.node], perm=[1, 0])
                flat.shape, flat.type = ir.Shape((k, c)), matrix.type
                matrix = flat
            self.matrices[key] = self.reshape(matrix, (*sizes(matrix), 1, 1), before, rows=False)
        return self.matrices[key]

    def product(self, product: Product) -> None:
        """Write a product as a convolution."""
        node, weight = product.node, self.weight(product, product.node)
        m, k = rows_of(node.outputs[0]) or (0, 0)
        inputs = [self.map(product.rows, node), weight, *([product.bias] if product.bias is not None else [])]
        (made,) = self.editor.standard("Conv", inputs, 1, before=node, of=[node], **CONVOLUTION)
        made.shape, made.type = ir.Shape((m, k, 1, 1)), node.outputs[0].type
        self.give(node.outputs[0], made, node)
        self.editor.fused.append(node.name or node.op_type)
        self.gone.append(node)

    def gradient(self, product: Product, before: ir.Node) -> None:
        """Write the gradient of a product as that of a convolution."""
        assert product.dy is not None
        dx, dw, db = product.input_gradient, product.weight_gradient, product.bias_gradient
        core = "ConvGrad" if dx is not None and dw is not None else "ConvGradInput" if dw is None else "ConvGradWeight"
        spec = OpSpec((), core, ("BiasGrad",) if db is not None else ())
        operands = {"dy": self.map(product.dy, before), "x": self.map(product.rows, before)}
        operands["weight"] = self.weight(product, before)
        name = self.editor.fresh(f"{product.node.name}/grad")
        keep = {} if db is None else {"dbias": db.outputs[0]}
        results = self.editor.emit(spec, operands, CONVOLUTION, keep, before=before, of=product.gradients, name=name)
        if dx is not None:
            self.give(dx.outputs[0], results["dx"], before)
        if dw is not None:
            self.give_matrix(dw.outputs[0], results["dweight"], product.turned, before)
        self.gone += product.gradients

    def give_matrix(self, old: ir.Value, made: ir.Value, turned: bool, before: ir.Node) -> None:
        """Let what reads the gradient of a matrix read that of a weight [K, C, 1, 1]."""
        readers = [use.node for use in old.uses()]
        if turned and not old.is_graph_output() and readers and all(is_turn(node) for node in readers):
            for node in readers:
                self.give(node.outputs[0], made, before, rows=False)
            self.gone += readers
        elif turned:
            flat = self.reshape(made, sizes(old)[::-1], before, rows=False)
            (back,) = self.editor.standard("Transpose", [flat], 1, before=before, of=[before], perm=[1, 0])
            self.editor.take_over(old, back)
        else:
            self.give(old, made, before, rows=False)

    def remove(self) -> None:
        """Remove what was written anew, and the views that nothing reads any more."""
        self.editor.remove_dead(self.gone)
        while dead := [n for n in self.editor.graph if n.op_type in (*RESHAPES, "Transpose") and is_dead(n)]:
            self.editor.remove_dead(dead)


def is_dead(node: ir.Node) -> bool:
    """Tell whether nothing reads any result of a node."""
    return not node.domain and all(is_unused(value) for value in node.outputs)


def is_turn(node: ir.Node) -> bool:
    """Tell whether a node is the Transpose of a matrix."""
    return node.op_type == "Transpose" and not node.domain and tuple(node.attributes["perm"].as_ints()) == (1, 0)
