"""Adaptive average poolings that exporters write out, pixel by pixel, read as a linear map of rows and columns.

    Transpose(x)  GatherND(.., windows)  [Where(inside, .., 0)]  ReduceMean or Adds and a Div    ->    rows x columns^T

Where no length divides the other (14 rows to 4), the windows overlap and have different lengths, which AveragePool has
not. What lies between x and the result is taken for a pooling where it does what one does: the matrices are read off
from single rows and columns, each of whose windows must be a mean, and then must give what the nodes give.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from bnfuse.core.text import some
from bnfuse.graph.protos import attributes, fresh

from .forward import infer_shapes
from .graph import Forward

LINEAR = ("Add", "Div", "Gather", "GatherND", "Identity", "Mul", "ReduceMean", "ReduceSum", "Transpose", "Where")
MOST_NODES = 512  # of one pooling
CLOSE = 1e-5

Matrix = npt.NDArray[np.float32]
Constants = Mapping[str, onnx.TensorProto]


@dataclasses.dataclass(frozen=True)
class Pool:
    """A pooling that was found: the nodes between the map x [N, C, H, W] and what they make of it, and its matrices."""

    nodes: tuple[onnx.NodeProto, ...]
    x: str
    y: str
    rows: Matrix
    columns: Matrix


def join_written_pools(forward: Forward, variables: Collection[str]) -> set[str]:
    """Read them in place. Shapes must be known, and are afterwards. `variables` are initializers that are no constants;
    gives the matrices, which are."""
    names, matrices = [], set[str]()
    constants = {name: tensor for name, tensor in forward.initializers().items() if name not in variables}
    for gathered in [node.output[0] for node in forward.graph.node if node.op_type == "GatherND"]:
        pool = pool_at(forward, forward.producers()[gathered], constants)
        if pool is not None:
            matrices |= write(forward, pool)
            names.append(pool.y)
    if names:
        forward.remove_dead_nodes()
        infer_shapes(forward)
        forward.note(
            f"{len(names)} adaptive poolings written out by the exporter are products with matrices ({some(names)})"
        )
    return matrices


def pool_at(forward: Forward, gather: onnx.NodeProto, constants: Constants) -> Pool | None:
    """Read the pooling that begins with a GatherND behind a Transpose; None where it is none."""
    shapes, turned = forward.shapes(), forward.producers().get(gather.input[0])
    if turned is None or turned.op_type != "Transpose" or attributes(turned).get("perm") != [2, 3, 0, 1]:
        return None
    x = turned.input[0]
    size = shapes.get(x)
    if size is None or len(size) != 4:
        return None
    for nodes in linear_nodes(forward, turned.output[0], gather, size, constants):
        y = nodes[-1].output[0]
        found = matrices_of(forward, (turned, *nodes), x, size, y, shapes[y] or [])
        if found is not None:
            return Pool((turned, *nodes), x, y, *found)
    return None


def linear_nodes(
    forward: Forward, turned: str, gather: onnx.NodeProto, size: Sequence[int], constants: Constants
) -> Iterator[list[onnx.NodeProto]]:
    """Give the nodes from a GatherND on that make linear maps of what it gathers, up to each one where all of them have
    met again in a map of the samples and channels of `size`."""
    readers, shapes = forward.consumers(), forward.shapes()
    outputs, nodes = forward.output_names(), list[onnx.NodeProto]()
    unread: dict[str, int] = {}  # what is made, and how many readers of it are still to come
    for node in forward.graph.node:
        sources = [name for name in node.input if name in unread]
        if not sources and node.output[0] != gather.output[0]:
            continue
        known = all(name in unread or name in constants or name == turned for name in node.input)
        if node.op_type not in LINEAR or not known or len(nodes) == MOST_NODES or outputs & {*node.output}:
            return
        nodes.append(node)
        for name in sources:
            unread[name] -= 1
        y = node.output[0]
        unread[y] = len(readers.get(y, ()))
        made = shapes.get(y)
        open_ends = [name for name, count in unread.items() if count]
        if open_ends == [y] and made is not None and len(made) == 4 and made[:2] == list(size[:2]):
            yield list(nodes)


def matrices_of(
    forward: Forward, nodes: Sequence[onnx.NodeProto], x: str, size: Sequence[int], y: str, pooled: Sequence[int]
) -> tuple[Matrix, Matrix] | None:
    """Read the matrices [OH, H] and [OW, W] off what the nodes make of single rows and columns; None where they are no
    means, or do not give what the nodes give."""
    n, c, h, w = size
    evaluate = evaluator(forward, nodes, x, size, y)
    probes = np.zeros((-(-(h + w) // (n * c)) * n * c, h, w), np.float32)
    probes[np.arange(h), np.arange(h)] = 1
    probes[h + np.arange(w), :, np.arange(w)] = 1
    try:
        made = np.concatenate([evaluate(part) for part in probes.reshape(-1, n, c, h, w)])
        drawn = np.random.default_rng(0).standard_normal(size).astype(np.float32)
        expected = evaluate(drawn)
    except Exception:  # nodes whose constants are of these very samples or channels are no pooling
        return None
    made = made.reshape(-1, *pooled[2:])
    rows, columns = means(made[:h, :, 0].T), means(made[h : h + w, 0, :].T)
    if rows is None or columns is None or not np.allclose(rows @ drawn @ columns.T, expected, atol=CLOSE):
        return None
    return rows, columns


def means(matrix: npt.NDArray[np.float32]) -> Matrix | None:
    """Give a matrix of means exactly, each row 1/count in its window; None where a row is anything else."""
    window = matrix > CLOSE
    counts = window.sum(1, keepdims=True)
    if not counts.all():
        return None
    exact = (window / counts).astype(np.float32)
    return exact if np.allclose(exact, matrix, atol=CLOSE) else None


def evaluator(
    forward: Forward, nodes: Sequence[onnx.NodeProto], x: str, size: Sequence[int], y: str
) -> Callable[[Matrix], Matrix]:
    """Make the function that computes what the nodes make of a map of these sizes."""
    constants = forward.initializers()
    read = dict.fromkeys(name for node in nodes for name in node.input if name in constants)
    graph = helper.make_graph(
        list(nodes),
        "pooling",
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, list(size))],
        [helper.make_tensor_value_info(y, TensorProto.FLOAT, None)],
        [constants[name] for name in read],
    )
    session = ReferenceEvaluator(helper.make_model(graph, opset_imports=forward.model.opset_import, ir_version=8))

    def made_of(value: Matrix) -> Matrix:
        (result,) = session.run(None, {x: value})  # type: ignore[misc]
        return np.asarray(result)

    return made_of


def write(forward: Forward, pool: Pool) -> set[str]:
    """Put two products in the place of a pooling's nodes; gives the names of their matrices."""
    taken, last = forward.names(), pool.nodes[-1]
    rows, columns, between, first = (
        fresh(f"{last.name}/{part}", taken) for part in ("rows", "columns", "of_rows", "first")
    )
    forward.set_initializer(rows, pool.rows)
    forward.set_initializer(columns, np.ascontiguousarray(pool.columns.T))
    made = [
        helper.make_node("MatMul", [rows, pool.x], [between], name=first),
        helper.make_node("MatMul", [between, columns], [pool.y], name=last.name),
    ]
    place = list(forward.graph.node).index(last)
    nodes = list(forward.graph.node)
    nodes[place : place + 1] = made
    del forward.graph.node[:]
    forward.graph.node.extend(nodes)
    return {rows, columns}
