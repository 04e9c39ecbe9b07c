"""From an ONNX training graph to a program: one launch an operator (or few), every tensor in its place.

    fold shapes  ->  order the phases  ->  slots for concatenations  ->  a launch per node  ->  lifetimes and arena

The operators live in their own files: `dialect.py` and `steps.py` (`ai.bnfuse`), `source.py` (source graphs),
`generic.py` (everything else).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from bnfuse.analysis.ancestors import ancestors
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.constants import evaluate
from bnfuse.graph.drawing import draws
from bnfuse.graph.labels import classes_of
from bnfuse.graph.sampling import NOTHING, Sampling
from bnfuse.graph.signature import GraphSignature
from bnfuse.graph.values import static_shape
from bnfuse.opset.spec import DOMAIN
from bnfuse.opset.traffic import RESHAPES
from bnfuse.parallel.ranks import ONE, Ranks
from bnfuse.runtime.kernels.common.generic_ops import SUPPORTED
from bnfuse.runtime.kernels.request import Request
from bnfuse.runtime.lowering.chains import join_chains
from bnfuse.runtime.lowering.dense import biased_product, exchanges_last_axes
from bnfuse.runtime.lowering.dialect import lower_bnfuse
from bnfuse.runtime.lowering.early import gradients_early
from bnfuse.runtime.lowering.exchanges import by_gradient, exchange_gradients, mean_results, require_loss
from bnfuse.runtime.lowering.generic import SHAPE_ALONE, lower_generic
from bnfuse.runtime.lowering.grouping import group_coefficients
from bnfuse.runtime.lowering.layout import assign_guards, assign_slots, assign_vector_slots
from bnfuse.runtime.lowering.sampled import drawn
from bnfuse.runtime.lowering.scaling import enter_seed
from bnfuse.runtime.lowering.source import SOURCE_OPS
from bnfuse.runtime.lowering.state import Lowering
from bnfuse.runtime.lowering.tails import join_tails
from bnfuse.runtime.lowering.values import FOLDED_ELEMENTS, FOLDED_RESULT, Form, check_elements
from bnfuse.runtime.lowering.weights import pack_parameters
from bnfuse.runtime.lowering.wire import halve_gradients, require_wire
from bnfuse.runtime.lowering.work import work_of
from bnfuse.runtime.program import plan
from bnfuse.runtime.program import program as p
from bnfuse.runtime.targets.target import Target


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A program and, for each of its kernels, the request that makes it."""

    program: p.Program
    requests: list[Request]


def lower(
    graph: ir.Graph,
    signature: GraphSignature,
    target: Target,
    *,
    opset: int,
    file: str | None = None,
    sampling: Sampling = NOTHING,
    finish: Callable[[Lowering], None] | None = None,
    ranks: Ranks = ONE,
) -> Lowered:
    """Lower a training graph to a program.

    `sampling` is what the file says of inputs that are drawn; `finish` adds the launches of the update phase. `ranks`
    run it together. `file` begins the message of whatever is refused (BnfuseError).
    """
    try:
        return _lower(Lowering(graph, signature, target, opset, ranks), sampling, finish)
    except BnfuseError as error:
        raise BnfuseError(f"{file}: {error}" if file else str(error)) from None


def _lower(low: Lowering, sampling: Sampling, finish: Callable[[Lowering], None] | None) -> Lowered:
    graph, signature = low.graph, low.signature
    nodes = ordered(graph, signature)
    require_loss(low)
    require_wire(low)
    enter(low, by_gradient(nodes, graph, signature) if low.ranks.size > 1 else signature.trainable)
    nodes = joined(low, nodes)
    low.order = {node: index for index, node in enumerate(nodes)}
    infer_missing_shapes(low, nodes)
    low.slots, low.vector_slots = assign_slots(nodes), assign_vector_slots(nodes)
    low.guards = assign_guards(nodes, low.slots)
    set_destinations(low)
    copy_early(low)
    forward = forward_nodes(graph, signature)
    of_forward = [value for value in graph.outputs if value.producer() in forward]
    for node in nodes:
        if low.phase == "forward" and node not in forward:
            write_outputs(low, of_forward)
            low.phase = "backward"
        lower_node(low, node)
    write_outputs(low, graph.outputs if low.phase == "forward" else [v for v in graph.outputs if v not in of_forward])
    if finish is not None:
        low.phase, low.node = "update", "optimizer"
        finish(low)
    pack_parameters(low)
    join_chains(low)
    join_tails(low)
    group_coefficients(low)
    gradients_early(low)
    mean_results(low)
    exchange_gradients(low)
    halve_gradients(low)
    return assemble(low, drawn(low, sampling))


def joined(low: Lowering, nodes: list[ir.Node]) -> list[ir.Node]:
    """Leave out the nodes that become one launch together with a later one."""
    absorbed: set[ir.Node] = set()
    for node in nodes:
        if exchanges_last_axes(node):
            low.exchanged[node.outputs[0]] = low.operand(node, 0)
            absorbed.add(node)
        elif product := biased_product(low, node):
            low.products[node] = product
            absorbed.add(product)
    return [node for node in nodes if node not in absorbed]


def lower_node(low: Lowering, node: ir.Node) -> None:
    """Lower one node, or fold it, and bring its results where else they are wanted."""
    low.node = node.name or node.op_type
    if not fold(low, node):
        lower_op(low, node)
    for value in node.outputs:
        check_shape(low, node, value)
        copy_to_slots(low, value)


def check_shape(low: Lowering, node: ir.Node, value: ir.Value) -> None:
    """Raise BnfuseError where the file says another shape of a result than its operator gives: readers rely on both."""
    said = static_shape(value)
    if said is not None and value in low.forms and low.shape(value) != said:
        found = list(low.shape(value))
        raise low.error(node, f"gives '{value.name}' the shape {found}, the file says {list(said)}: correct the file")


def copy_to_slots(low: Lowering, value: ir.Value) -> None:
    """Copy what has just been produced to the second places that concatenations want it in.

    To the first place too where it is not there: a constant, or what a generic kernel wrote in the layout of the file.
    """
    own, places = low.slots.of.get(value), low.slots.copies.get(value, ())
    for slot in places if own is None else (own, *places):
        held, wanted = low.map(value), low.root(slot.root).channels(slot.start, slot.start + low.shape(value)[1])
        if held != wanted:
            low.copy_map(held, wanted)
    own, places = low.vector_slots.of.get(value), low.vector_slots.copies.get(value, ())
    if (own is not None or places) and low.form(value).dtype != "float32":
        return  # the file did not say so: no vector of statistics
    if own is not None and low.constant(value) is not None:
        places = (own, *places)
    for slot in places:
        low.copy_dense(low.dense(value), low.vector_part(slot, low.shape(value)[0]))


def lower_op(low: Lowering, node: ir.Node) -> None:
    """Lower one node by its operator: ours, one that the source graph spells, or a generic one."""
    if node.domain == DOMAIN:
        lower_bnfuse(low, node)
    elif special := SOURCE_OPS.get((node.domain, node.op_type)):
        special(low, node)
    else:
        lower_generic(low, node)


# -- the steps of lowering, in order ------------------------------------------------------------------------------


def ordered(graph: ir.Graph, signature: GraphSignature) -> list[ir.Node]:
    """List the nodes that outputs need, in the order of the file, all of the forward phase first."""
    needed = ancestors(list(graph.outputs))
    forward = forward_nodes(graph, signature)
    nodes = [node for node in graph if node in needed]
    return [n for n in nodes if n in forward] + [n for n in nodes if n not in forward]


def forward_nodes(graph: ir.Graph, signature: GraphSignature) -> set[ir.Node]:
    """Find what outputs other than gradients need."""
    return ancestors([v for v in graph.outputs if v.name not in signature.backward_results])


def enter(low: Lowering, trainable: Sequence[str]) -> None:
    """Forms of graph inputs and initializers. Parameters that are trained lie in the order given."""
    signature = low.signature
    inputs = {value.name or "": value for value in low.graph.inputs}
    for name in (*trainable, *signature.frozen):
        _enter_one(low, inputs, name, p.PARAMETERS)
    for name in signature.running:
        _enter_one(low, inputs, name, p.RUNNING)
    for name, value in inputs.items():
        if value not in low.forms:
            _enter_one(low, inputs, name, p.INPUTS)
    enter_seed(low)
    for value in low.graph.initializers.values():
        if value not in low.forms:
            if value.const_value is None:
                raise BnfuseError(f"initializer '{value.name}' has no value: write the file anew")
            low.set_constant(value, value.const_value.numpy())


def _enter_one(low: Lowering, inputs: Mapping[str, ir.Value], name: str, region: str) -> None:
    if name not in inputs:
        raise BnfuseError(f"the roles of the graph name an input '{name}' that it has not: rebuild the training graph")
    value = inputs[name]
    shape, dtype = low.type_of(value)
    if region in (p.PARAMETERS, p.RUNNING) and dtype != "float32":
        raise BnfuseError(f"parameter '{name}' is {dtype}: only float32 parameters can be trained")
    index = low.storage(check_elements(name, shape), dtype, region)
    low.forms[value] = Form(shape, dtype, dense=index)


def infer_missing_shapes(low: Lowering, nodes: Iterable[ir.Node]) -> None:
    """Channel provenance needs the shapes of maps: those that a concatenation lacks are summed up from its operands."""
    for node in nodes:
        if node.op_type == "Concat" and node.outputs[0].shape is None:
            shapes = [static_shape(v) for v in node.inputs if v is not None]
            axis = node.attributes["axis"].as_int()
            if all(shape is not None and len(shape) == 4 for shape in shapes):
                full = list(shapes[0] or ())
                full[axis] = sum(shape[axis] for shape in shapes if shape is not None)
                node.outputs[0].shape = ir.Shape(full)


def set_destinations(low: Lowering) -> None:
    """Storages for the outputs, and for what becomes an output by being renamed or reshaped."""
    gradients = {output: name for name, output in low.signature.gradients.items()}
    running = {output: name for name, output in low.signature.running.items()}
    inputs = {value.name: value for value in low.graph.inputs}
    for value in low.graph.outputs:
        owner = inputs.get(gradients.get(value.name or "") or running.get(value.name or ""))
        if owner is not None:
            region = p.GRADIENTS if value.name in gradients else p.NEW_RUNNING
            twin = low.storages[low.dense(owner)]
            index = low.storage(twin.elements, twin.dtype, region, twin.offset)
        else:
            shape, dtype = low.type_of(value)
            index = low.storage(check_elements(value.name or "", shape), dtype, p.OUTPUTS)
        for origin in renamed_from(value):
            low.destinations.setdefault(origin, index)


def renamed_from(value: ir.Value) -> Iterable[ir.Value]:
    """List the value, and those that it is but for its name and shape, up to the one that a kernel writes."""
    while True:
        yield value
        node = value.producer()
        if node is None or node.op_type not in RESHAPES or node.domain:
            return
        source = node.inputs[0]
        if source is None or source.producer() is None or source.is_graph_output():
            return
        value = source


def copy_early(low: Lowering) -> None:
    """Graph inputs and initializers that a concatenation wants in its buffer."""
    for value in (*low.slots.copies, *low.vector_slots.copies):
        if value.producer() is None:
            copy_to_slots(low, value)


def fold(low: Lowering, node: ir.Node) -> bool:
    """Evaluate a node whose results follow from static shapes and constants alone, and are the same in each run."""
    if node.domain or draws(node):
        return False
    if node.op_type in ("Shape", "Size"):
        dims = np.array(low.shape(low.operand(node, 0)), np.int64)
        if node.op_type == "Size":
            low.set_constant(node.outputs[0], np.array(dims.prod(dtype=np.int64), np.int64))
        else:
            start, end = (node.attributes[k].as_int() if k in node.attributes else None for k in ("start", "end"))
            low.set_constant(node.outputs[0], dims[start:end])
        return True
    if node.op_type in SHAPE_ALONE:
        form = low.form(low.operand(node, 0))
        operands: list[np.ndarray | None] = [np.zeros(form.shape, form.dtype)]
    else:
        operands = [low.constant(value) for value in node.inputs]
    if any(value is not None and o is None for value, o in zip(node.inputs, operands, strict=True)):
        return False
    if sum(o.size for o in operands if o is not None) > FOLDED_ELEMENTS:
        return False
    sizes = [static_shape(value) for value in node.outputs]
    if node.op_type in SUPPORTED and any(math.prod(shape) > FOLDED_RESULT for shape in sizes if shape is not None):
        return False  # a kernel makes it in each step: it would lie in the file, and in memory all the time
    named = [value for value in node.outputs if value.name]
    for value, result in zip(named, evaluate(node, operands, low.opset), strict=True):
        low.set_constant(value, result)
    return True


def write_outputs(low: Lowering, outputs: Iterable[ir.Value]) -> None:
    """Each output lies where the session looks for it; those of the forward phase when that ends."""
    for value in outputs:
        low.node = value.name or "output"
        wanted, form = low.destinations[value], low.form(value)
        if form.constant is not None:
            low.initial[wanted] = np.ascontiguousarray(form.constant).reshape(-1)
        elif form.map is not None and form.dense is None:
            low.dense(value)
        elif low.dense(value) != wanted:
            low.copy_dense(low.dense(value), wanted)


# -- assembling ------------------------------------------------------------------------------------------------


def assemble(low: Lowering, sampling: Sampling) -> Lowered:
    """Plan the arena and put everything into a program."""
    sizes = {i: s.bytes for i, s in enumerate(low.storages) if s.region == p.ARENA and i not in low.parts}
    intervals = plan.lifetimes(low.launches, sizes, {i: base for i, (base, _) in low.parts.items()})
    placement = plan.place(intervals)

    def placed(index: int, storage: p.Storage) -> p.Storage:
        base, inside = low.parts.get(index, (index, 0))
        return p.Storage(storage.region, placement.offsets.get(base, 0) + inside, storage.elements, storage.dtype)

    storages = [placed(i, s) if s.region == p.ARENA else s for i, s in enumerate(low.storages)]
    regions = {**low.regions, p.ARENA: placement.bytes}
    tensors = {value.name or "": value for value in (*low.graph.inputs, *low.graph.outputs)}
    signature = low.signature

    def entered(names: Iterable[str]) -> dict[str, p.Tensor]:
        return {name: _tensor(low, tensors[name], low.dense(tensors[name])) for name in names}

    def left(pairs: Mapping[str, str]) -> dict[str, p.Tensor]:
        present = {name: tensors[output] for name, output in pairs.items() if output in tensors}
        return {name: _tensor(low, value, low.destinations[value]) for name, value in present.items()}

    lengths = [[param.length for param in low.made[request].params] for request in low.requests]
    takes = {x.kernel: p.taken(x, storages, lengths[x.kernel]) for x in low.launches if not x.exchanges}
    program = p.Program(
        regions=regions,
        storages=storages,
        kernels=[low.made[request].name for request in low.requests],
        launches=low.launches,
        inputs=entered(v.name or "" for v in low.graph.inputs if low.storages[low.dense(v)].region == p.INPUTS),
        outputs={v.name or "": _tensor(low, v, low.destinations[v]) for v in low.graph.outputs},
        parameters=entered((*signature.trainable, *signature.frozen)),
        gradients=left(signature.gradients),
        running=entered(signature.running),
        new_running=left(signature.running),
        signature=dataclasses.asdict(signature),
        report=_report(low, intervals, placement.bytes),
        classes={name: dataclasses.asdict(c) for name, c in classes_of(low.graph, signature.labels).items()},
        initial=low.initial,
        works=[work_of(low.made[request]) for request in low.requests],
        takes=[takes[index] for index in range(len(low.requests))],
        finite=low.finite,
        norm=low.norm,
        seed=low.seed,
        ranks=low.ranks.size,
        mean_loss=low.mean_loss,
        counts=low.counts,
        counted_ranks=low.counted_ranks,
        sampling=sampling.to_json(),
    )
    return Lowered(program, low.requests)


def _tensor(low: Lowering, value: ir.Value, index: int) -> p.Tensor:
    shape, dtype = low.type_of(value)
    return p.Tensor(index, shape, dtype)


def _report(low: Lowering, intervals: list[plan.Interval], arena: int) -> p.Report:
    forward = sum(launch.phase == "forward" for launch in low.launches)
    maps = [i for i in intervals if i.storage in low.map_storages]
    return p.Report(
        arena_bytes=arena,
        feature_map_bytes=sum(i.bytes for i in maps),
        stashed_bytes=sum(i.bytes for i in maps if i.first < forward <= i.last),
        parameter_bytes=low.regions.get(p.PARAMETERS, 0),
        launches={
            phase: sum(launch.phase == phase for launch in low.launches)
            for phase in (p.ALL_PHASES if p.ACCUMULATED in low.regions else p.PHASES)
        },
        copies=low.copies,
        kernels=len(low.kernels),
    )
