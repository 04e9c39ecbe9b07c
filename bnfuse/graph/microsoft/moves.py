"""What moves elements: concatenations and their parts, slices, look-ups, and their gradients."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnfuse.graph.microsoft.source import Source
from bnfuse.graph.microsoft.windows import global_average_pool_grad


def concat(source: Source) -> None:
    """ConcatTraining(x1, x2, ...): Concat; the lengths of its operands along the axis are a constant."""
    values = [source.operand(place) for place in range(len(source.node.inputs))]
    axis = int(source.attribute("axis", 1))
    _give_lengths(source, values, axis)
    y = source.node.outputs[0]
    shape = None if y.shape is None else source.dims(y)
    source.give(0, source.node_of("Concat", values, [(shape, source.dtype(values[0]))], {"axis": axis})[0])


def _give_lengths(source: Source, values: list[ir.Value], axis: int) -> None:
    lengths = source.result(1)
    if lengths is None:
        return
    sizes = [source.dims(value)[axis] for value in values]
    if not all(isinstance(size, int) for size in sizes):
        source.give(1, _lengths_at_run_time(source, values, axis))
        return
    name = str(lengths.name)
    lengths.name = source.names.fresh(f"{name}_replaced")
    constant = source.constant(np.array(sizes, np.int64), "lengths", name=name)
    if lengths.is_graph_output():
        constant = source.op("Identity", constant)
        constant.name = name
    lengths.replace_all_uses_with(constant, replace_graph_outputs=True)


def _lengths_at_run_time(source: Source, values: list[ir.Value], axis: int) -> ir.Value:
    place, kind = source.ints([axis], "axis"), ir.DataType.INT64
    parts = []
    for value in values:
        shape = source.op("Shape", value, shape=[source.rank(value)], dtype=kind)
        parts.append(source.op("Gather", shape, place, shape=[1], dtype=kind))
    return source.op("Concat", *parts, shape=[len(parts)], dtype=kind, axis=0)


def split(source: Source) -> None:
    """SplitTraining(x, lengths): Split, whose lengths are constant where those of the concatenation are."""
    x, lengths = source.operand(0), source.operand(1)
    axis, outputs = int(source.attribute("axis", 0)), source.node.outputs
    known = source.known(lengths)
    if known is not None and known.size != len(outputs):
        what = f"gives {len(outputs)} pieces, and '{lengths.name}' has the lengths of {known.size}"
        raise source.error(f"{what}: the graph is damaged. Build it anew.")
    results = []
    for place, value in enumerate(outputs):
        shape = None if value.shape is None else source.dims(value)
        if shape is None and known is not None and x.shape is not None:
            shape = [*source.dims(x)]
            shape[axis] = int(known[place])
        results.append((shape, source.dtype(x)))
    for place, piece in enumerate(source.node_of("Split", [x, lengths], results, {"axis": axis})):
        source.give(place, piece)


def slice_grad(source: Source) -> None:
    """SliceGrad(dy, shape, starts, ends, axes, steps): dy padded with zeros where x was not read.

    Where steps are others than 1, rows of dy are added to rows of zeros, an axis after the other.
    """
    dy = source.operand(0)
    shape = [int(size) for size in source.constant_operand(1, "shape").reshape(-1)]
    starts, ends = (source.constant_operand(place, "range").reshape(-1).tolist() for place in (2, 3))
    count = len(starts)
    given = source.optional(4)
    axes = [*range(count)] if given is None else source.constant_operand(4, "axes").reshape(-1).tolist()
    steps = [1] * count if source.optional(5) is None else source.constant_operand(5, "steps").reshape(-1).tolist()
    before, after = [0] * len(shape), [0] * len(shape)
    rows: dict[int, list[int]] = {}
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis %= len(shape)
        read = range(*slice(int(start), int(end), int(step)).indices(shape[axis]))
        if step == 1:
            before[axis], after[axis] = (read.start, shape[axis] - read.stop) if len(read) else (0, shape[axis])
        else:
            rows[axis] = list(read)
    dx = dy
    if any(before) or any(after):
        padded = [size + b + a for size, b, a in zip(source.sizes(dy), before, after, strict=True)]
        dx = source.op("Pad", dy, source.ints([*before, *after], "pads"), shape=padded)
    for axis, places in rows.items():
        indices = source.constant(np.array(places, np.int64), "rows")
        wide = [*source.sizes(dx)]
        wide[axis] = shape[axis]
        dx = add_rows(source, dx, indices, wide, axis)
    source.give(0, dx if dx is not dy else source.op("Identity", dy))


def gather_grad(source: Source) -> None:
    """GatherGrad(shape, indices, dy): the rows of dy, added up where they were looked up."""
    shape = [int(size) for size in source.constant_operand(0, "shape").reshape(-1)]
    axis = int(source.attribute("axis", 0)) % len(shape)
    source.give(0, add_rows(source, source.operand(2), source.operand(1), shape, axis))


def add_rows(source: Source, dy: ir.Value, indices: ir.Value, shape: list[int], axis: int) -> ir.Value:
    """Write zeros of a shape to which rows along an axis are added, where the indices say.

    dy has the axes of the indices in the place of that axis, which is brought in front.
    """
    count = source.rank(indices)
    places = [*range(axis, axis + count)]
    order = [*places, *(i for i in range(source.rank(dy)) if i not in places)]
    rows = _transposed(source, dy, order)
    front = [axis, *(i for i in range(len(shape)) if i != axis)]
    sizes = [shape[i] for i in front]
    if source.dtype(indices) != ir.DataType.INT64:
        indices = source.op("Cast", indices, dtype=ir.DataType.INT64, to=int(ir.DataType.INT64))
    wide = [*source.dims(indices), 1]
    indices = source.op("Unsqueeze", indices, source.ints([count], "axis"), shape=wide, dtype=ir.DataType.INT64)
    zeros = zeros_of(source, sizes, source.dtype(dy))
    added = source.op("ScatterND", zeros, indices, rows, shape=sizes, reduction="add")
    return _transposed(source, added, [front.index(i) for i in range(len(shape))])


def _transposed(source: Source, value: ir.Value, order: list[int]) -> ir.Value:
    if order == sorted(order):
        return value
    dims = source.dims(value)
    return source.op("Transpose", value, shape=[dims[i] for i in order], perm=order)


def zeros_of(source: Source, sizes: list[int], dtype: ir.DataType) -> ir.Value:
    """Write zeros of a shape."""
    fill = ir.tensor(np.zeros(1, dtype.numpy()))
    return source.op("ConstantOfShape", source.ints(sizes, "shape"), shape=sizes, dtype=dtype, value=fill)


def gather_elements_grad(source: Source) -> None:
    """GatherElementsGrad(dy, shape, indices): each dy added where it was looked up."""
    dy, indices = source.operand(0), source.operand(2)
    shape = [int(size) for size in source.constant_operand(1, "shape").reshape(-1)]
    zeros, axis = zeros_of(source, shape, source.dtype(dy)), int(source.attribute("axis", 0))
    source.give(0, source.op("ScatterElements", zeros, indices, dy, shape=shape, axis=axis, reduction="add"))


def dropout_grad(source: Source) -> None:
    """DropoutGrad(dy, mask, ratio, training_mode): dy/(1 - ratio) where the mask kept x, else 0."""
    dy, mask, ratio = source.operand(0), source.operand(1), source.optional(2)
    training = source.known(source.optional(3))
    if training is not None and not training.item():
        source.give(0, source.op("Identity", dy))
        return
    if ratio is None:
        ratio = source.number(0.5, dy, "ratio")
    kept = source.calculate("Sub", source.number(1.0, ratio, "one"), ratio)
    if source.dtype(kept) != source.dtype(dy):
        kept = source.op("Cast", kept, dtype=source.dtype(dy), to=int(source.dtype(dy)))
    scaled = source.calculate("Div", dy, kept)
    scaled.shape = dy.shape
    source.give(0, source.where(mask, scaled, source.number(0.0, dy, "zero")))


def scale(source: Source) -> None:
    """Scale(x, factor): a product or a quotient."""
    if global_average_pool_grad(source):
        return
    x, factor = source.operand(0), source.operand(1)
    known = source.known(factor)
    if known is not None:
        factor = source.number(float(known.item()), x, "factor")
    elif source.dtype(factor) != source.dtype(x):
        factor = source.op("Cast", factor, dtype=source.dtype(x), to=int(source.dtype(x)))
    kind = "Div" if source.attribute("scale_down", 0) else "Mul"
    source.give(0, source.op(kind, x, factor))


CONVERSIONS = {
    "ConcatTraining": concat,
    "SplitTraining": split,
    "SliceGrad": slice_grad,
    "GatherGrad": gather_grad,
    "GatherElementsGrad": gather_elements_grad,
    "DropoutGrad": dropout_grad,
    "Scale": scale,
}
