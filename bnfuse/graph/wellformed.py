"""Whether a graph hangs together: what onnxruntime, or a pass, would trip over is said here, with the file's name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import onnx
from onnx import AttributeProto, TensorProto

from bnfuse.core.errors import BnfuseError, at_node
from bnfuse.core.windows import POOLS, why_not
from bnfuse.graph.node_schemas import check_nodes
from bnfuse.opset.spec import DOMAIN

COUNTS = ("strides", "dilations", "kernel_shape", "group")  # each at least 1: onnxruntime divides by some of them
SIDES = {"kernel_shape": 1, "strides": 1, "dilations": 1, "pads": 2}  # numbers for each dimension of a window
SOURCES = "bnfuse.sources"
MAX_NODES = 1 << 18  # of a graph once its functions are written out: the largest network of the zoo has a tenth
MAX_DEPTH = 100  # of functions that call one another
POOL_GRADIENTS = ("MaxPoolGrad", "AveragePoolGrad")
WINDOWED = ("Conv", "ConvGrad", "AveragePool", "AveragePoolGrad", "MaxPool", "MaxPoolGrad")


def check_wiring(model: onnx.ModelProto, file: str | None = None) -> None:
    """Check that every value is written once, before it is read; nodes are as their schemas say; windows are sane;
    initial values are what their inputs are."""
    check_functions(model, file)
    check_nodes(model, file)
    graph = model.graph
    written = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    for tensor in graph.sparse_initializer:
        name = tensor.values.name
        raise BnfuseError(f"{file or graph.name}: tensor '{name}' is sparse, which is not read: store it as a whole")
    for node in graph.node:
        for name in filter(None, node.input):
            if name not in written:
                raise at_node(
                    node.name,
                    node.op_type,
                    f"reads '{name}', which nothing before it writes: the nodes are out of order, or one is missing. "
                    "Write the file anew.",
                    file=file,
                )
        if missing := unwritten_within(node, written):
            what = f"holds a graph that reads '{missing}', which nothing before it writes. Export it anew."
            raise at_node(node.name, node.op_type, what, file=file)
        for name in filter(None, node.output):
            if name in written:
                raise at_node(
                    node.name,
                    node.op_type,
                    f"writes '{name}', which is there already: values are written once. Rename it.",
                    file=file,
                )
            written.add(name)
        if node.op_type in WINDOWED or node.domain == DOMAIN:
            _check_window(node, file)
        _check_sources(node, file)
    for value in graph.output:
        if value.name not in written:
            raise BnfuseError(f"{file or graph.name}: nothing writes the output '{value.name}': write the file anew")
    _check_initial_values(graph, file)
    if any(node.op_type in POOL_GRADIENTS for node in graph.node):
        _check_pools(graph, file)


def check_functions(model: onnx.ModelProto, file: str | None = None) -> None:
    """Check that functions read what they write, none calls itself, and written out where they are called they make no
    more than MAX_NODES nodes.

    Told from the calls alone: a file of kilobytes can call for 2^30 nodes.
    """
    for function in model.functions:
        if missing := unwritten(function.node, function.output, set(function.input)):
            what = f"function '{function.name}' reads '{missing}', which nothing before it writes: write the file anew"
            raise BnfuseError(f"{file or model.graph.name}: {what}")
    functions = {_called(function): function for function in model.functions}
    sizes: dict[tuple[str, str, str], int] = {}
    calling: list[tuple[str, str, str]] = []

    def size_of(nodes: Iterable[onnx.NodeProto]) -> int:
        return sum(1 + expanded(key) if (key := _callee(node)) in functions else 1 for node in all_nodes(nodes))

    def expanded(key: tuple[str, str, str]) -> int:
        if key in calling or len(calling) > MAX_DEPTH:
            what = "calls itself" if key in calling else f"is called {MAX_DEPTH} functions deep"
            raise BnfuseError(f"{file or model.graph.name}: function '{key[1]}' {what}: export the model without it")
        if key not in sizes:
            calling.append(key)
            sizes[key] = size_of(functions[key].node)
            calling.pop()
        return sizes[key]

    nodes = max((size_of(model.graph.node), *map(expanded, functions)))
    if nodes > MAX_NODES:
        raise BnfuseError(
            f"{file or model.graph.name}: its functions call one another until they stand for {nodes:.3g} nodes: "
            f"{MAX_NODES} are the most that are written out. Export the model without functions."
        )


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """List the nodes and those of their subgraphs."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        yield node
        for graph in inner_graphs(node):
            waiting.extend(graph.node)


def inner_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Go through the graphs that a node's attributes hold."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def _called(function: onnx.FunctionProto) -> tuple[str, str, str]:
    return function.domain, function.name, function.overload


def _callee(node: onnx.NodeProto) -> tuple[str, str, str]:
    return node.domain, node.op_type, node.overload


def unwritten(nodes: Iterable[onnx.NodeProto], outputs: Iterable[str], known: set[str]) -> str | None:
    """Give the first name that a function's or an inner graph's nodes read, or it gives, and nothing before writes."""
    written = set(known)
    for node in nodes:
        missing = next((name for name in node.input if name and name not in written), None)
        if missing or (missing := unwritten_within(node, written)):
            return missing
        written.update(node.output)
    return next((name for name in outputs if name not in written), None)


def unwritten_within(node: onnx.NodeProto, known: set[str]) -> str | None:
    """Do the same for the graphs that a node holds: they see what was written around them."""
    for graph in inner_graphs(node):
        own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        if missing := unwritten(graph.node, (value.name for value in graph.output), known | own):
            return missing
    return None


def _check_window(node: onnx.NodeProto, file: str | None) -> None:
    for attr in node.attribute:
        least = 1 if attr.name in COUNTS else 0 if attr.name == "pads" else None
        numbers = list(attr.ints) or ([attr.i] if attr.type == onnx.AttributeProto.INT else [])
        if least is not None and any(number < least for number in numbers):
            shown = numbers if attr.ints else numbers[0]
            raise at_node(
                node.name,
                node.op_type,
                f"has {attr.name}={shown}: it must be at least {least}. Export it anew.",
                file=file,
            )
    given = {attr.name: list(attr.ints) for attr in node.attribute if attr.name in SIDES}
    dims = next((len(numbers) // SIDES[name] for name, numbers in given.items() if numbers), 0)
    for name, numbers in given.items():
        if dims and len(numbers) != dims * SIDES[name]:
            what = (
                f"has {name}={numbers}, for {dims} dimensions: it must be {dims * SIDES[name]} numbers. Export it anew."
            )
            raise at_node(node.name, node.op_type, what, file=file)


def _check_pools(graph: onnx.GraphProto, file: str | None) -> None:
    """Of a training graph; a forward graph may hold what building it mends."""
    maps = {value.name: value.type.tensor_type.shape.dim for value in (*graph.input, *graph.value_info)}
    for node in graph.node:
        if node.op_type not in POOLS or node.domain not in ("", "ai.onnx"):
            continue
        given = {attr.name: onnx.helper.get_attribute_value(attr) for attr in node.attribute}
        sizes = [dim.dim_value for dim in maps.get(node.input[0], ())][2:]
        is_known = sizes and min(sizes) > 0 and len(given.get("kernel_shape", ())) == len(sizes)
        if not is_known or given.get("auto_pad", b"NOTSET") != b"NOTSET":
            continue
        if reason := why_not(given, sizes):
            raise at_node(node.name, node.op_type, reason, file=file)


def _check_sources(node: onnx.NodeProto, file: str | None) -> None:
    """Check that what a pass made a node of is a list of names, as JSON in its metadata."""
    for text in (entry.value for entry in node.metadata_props if entry.key == SOURCES):
        try:
            names = json.loads(text)
        except (ValueError, RecursionError):
            names = None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise at_node(
                node.name,
                node.op_type,
                f"has metadata '{SOURCES}' that is no JSON list of names: remove it, or rewrite the graph anew.",
                file=file,
            )


def _check_initial_values(graph: onnx.GraphProto, file: str | None) -> None:
    shapes = {value.name: value.type.tensor_type for value in graph.input}
    for tensor in graph.initializer:
        if tensor.name not in shapes or not shapes[tensor.name].HasField("shape"):
            continue
        dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in shapes[tensor.name].shape.dim]
        fits = len(dims) == len(tensor.dims) and all(
            dim in (None, size) for dim, size in zip(dims, tensor.dims, strict=True)
        )
        if not fits:
            raise BnfuseError(
                f"{file or graph.name}: input '{tensor.name}' is {dims}, its initial value {list(tensor.dims)}: "
                "build the graph anew"
            )
        if tensor.data_type != shapes[tensor.name].elem_type:
            kinds = [TensorProto.DataType.Name(kind) for kind in (shapes[tensor.name].elem_type, tensor.data_type)]
            raise BnfuseError(
                f"{file or graph.name}: input '{tensor.name}' is {kinds[0]}, its initial value {kinds[1]}: "
                "build the graph anew"
            )
