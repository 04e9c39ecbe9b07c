"""What every pass works with: nodes read as operators of steps, and an editor that replaces them.

A pass reads a node as an `Op` (a source node such as Conv or ReluGrad reads as the operator of the same meaning, see
`source_ops`), adds a step, and lets the `Editor` put the new operator where the old node stood. The editor allocates
names against the whole graph, hands the old results' names, shapes, uses and graph outputs on to the new ones, and
notes on every new node which source nodes it stands for and which pass made it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from bnfuse.graph.names import Names
from bnfuse.opset.plain import PLAIN_OPS, PlainOp
from bnfuse.opset.shapes import result_shapes
from bnfuse.opset.spec import DOMAIN, OpSpec, parse

SOURCES = "bnfuse.sources"
PASS = "bnfuse.pass"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A place where a pass could have worked and did not."""

    node: str
    reason: str


@dataclasses.dataclass
class FusionResult(ir.passes.PassResult):
    """What a pass did: the nodes it changed and the places that it refused, by name."""

    fused: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()


@dataclasses.dataclass
class Op:
    """A node read as an operator. Results that the node does not have are absent from `results`."""

    spec: OpSpec | PlainOp
    operands: dict[str, ir.Value]
    results: dict[str, ir.Value]
    attributes: dict[str, Any]
    node: ir.Node

    @property
    def steps(self) -> OpSpec:
        """Give the operator as one of steps; an assertion fails for a plain operator."""
        assert isinstance(self.spec, OpSpec)
        return self.spec


def own_op(node: ir.Node) -> Op | None:
    """Read a node of our domain as an operator; None for any other node."""
    if node.domain != DOMAIN:
        return None
    spec = PLAIN_OPS.get(node.op_type) or parse(node.op_type)
    if spec is None:
        return None
    operands = {name: value for name, value in zip(spec.operands, node.inputs, strict=True) if value is not None}
    results = {name: value for name, value in zip(spec.results, node.outputs, strict=True) if value.name}
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    return Op(spec, operands, results, attributes, node)


def sources(node: ir.Node) -> tuple[str, ...]:
    """Name the source nodes that a node stands for: its own, if no pass made it."""
    if SOURCES in node.metadata_props:
        return tuple(json.loads(node.metadata_props[SOURCES]))
    return (node.name or node.op_type,)


def is_only_read_by(value: ir.Value, node: ir.Node) -> bool:
    """Tell whether the node is the one reader of the value, once."""
    uses = list(value.uses())
    return not value.is_graph_output() and len(uses) == 1 and uses[0].node is node


def is_unused(value: ir.Value) -> bool:
    """Tell whether nothing reads the value and it is no output of the graph."""
    return not value.is_graph_output() and not value.uses()


def sort(graph: ir.Graph) -> None:
    """Put the nodes in an order that runs, where they are not in one."""
    seen: set[ir.Node] = set()
    for node in graph:
        if any(v is not None and (p := v.producer()) is not None and p not in seen for v in node.inputs):
            graph.sort()
            return
        seen.add(node)


class Editor:
    """Change one graph on behalf of one pass, and remember what was done."""

    def __init__(self, model: ir.Model, pass_name: str) -> None:
        self.model = model
        self.graph = model.graph
        self.pass_name = pass_name
        self.fused: list[str] = []
        self.refused: list[Refusal] = []

    @functools.cached_property
    def _names(self) -> Names:
        return Names(self.graph)  # of all of a graph: most passes that run change nothing

    def result(self) -> FusionResult:
        """Give what was fused and refused so far."""
        return FusionResult(self.model, bool(self.fused), tuple(self.fused), tuple(self.refused))

    def refuse(self, node: ir.Node, reason: str) -> None:
        """Note why a node stays as it is."""
        self.refused.append(Refusal(node.name or node.op_type, reason))

    def fresh(self, base: str) -> str:
        """Make a name that nothing in the graph has."""
        return self._names.fresh(base)

    def emit(
        self,
        spec: OpSpec | PlainOp,
        operands: Mapping[str, ir.Value],
        attributes: Mapping[str, Any],
        keep: Mapping[str, ir.Value],
        *,
        before: ir.Node,
        of: Iterable[ir.Node],
        name: str | None = None,
    ) -> dict[str, ir.Value]:
        """Insert an operator before a node. `keep` maps results to old values that they take over (name, shape, uses).

        Other results are new values named after the node. Returns all results by name.
        """
        of = list(of)
        node_name = name or self.fresh(of[0].name or of[0].op_type)
        known: dict[str, Any] = {name: value.shape for name, value in operands.items() if value.shape is not None}
        shapes = result_shapes(spec, {name: tuple(shape) for name, shape in known.items()}, attributes)
        values = [self._value(node_name, result, keep.get(result), shapes[result] or ()) for result in spec.results]
        node = ir.Node(
            DOMAIN,
            spec.name,
            [operands[operand] for operand in spec.operands],
            [attribute(key, attributes[key]) for key in written(spec, attributes)],
            outputs=values,
            name=node_name,
            metadata_props=self._metadata(of),
        )
        self.graph.insert_before(before, node)
        for result, value in zip(spec.results, values, strict=True):
            if old := keep.get(result):
                old.replace_all_uses_with(value, replace_graph_outputs=True)
        if DOMAIN not in self.graph.opset_imports:
            self.graph.opset_imports[DOMAIN] = 1
        self.fused.append(node_name)
        return dict(zip(spec.results, values, strict=True))

    def replace(self, op: Op, spec: OpSpec, more: Iterable[ir.Node] = (), **changes: Any) -> Op:
        """Put an operator with other steps in a node's place; it keeps the node's name and the results both have.

        `more` are the other nodes that it stands for; those that nothing reads any more are removed. Changes: operands,
        attributes, and results that it takes over from other nodes.
        """
        more = list(more)
        operands = {**op.operands, **changes.get("operands", {})}
        attributes = {**op.attributes, **changes.get("attributes", {})}
        keep = {**{k: v for k, v in op.results.items() if k in spec.results}, **changes.get("results", {})}
        values = self.emit(spec, operands, attributes, keep, before=op.node, of=[op.node, *more], name=op.node.name)
        self.remove_dead([op.node, *more])
        assert op.node.graph is None, f"{op.node.name} is still read"
        first = next(iter(values.values())).producer()
        assert first is not None
        return Op(spec, {name: operands[name] for name in spec.operands}, values, attributes, first)

    def standard(
        self,
        op_type: str,
        inputs: Iterable[ir.Value | None],
        outputs: int,
        *,
        before: ir.Node,
        of: Iterable[ir.Node],
        domain: str = "",
        **attributes: Any,
    ) -> list[ir.Value]:
        """Insert a standard ONNX node; its results get fresh names and no shapes."""
        of = list(of)
        name = self.fresh(f"{of[0].name}/{op_type}")
        values = [ir.Value(name=self.fresh(f"{name}_{i}" if i else f"{name}_out")) for i in range(outputs)]
        node = ir.node(op_type, list(inputs), attributes, domain=domain, outputs=values, name=name)
        node.metadata_props.update(self._metadata(of))
        self.graph.insert_before(before, node)
        return values

    def clone(
        self,
        node: ir.Node,
        inputs: Iterable[ir.Value | None],
        outputs: Iterable[ir.Value | ir.Shape | None],
        *,
        before: ir.Node,
        of: Iterable[ir.Node],
    ) -> list[ir.Value]:
        """Insert a source node like `node`, under its name, with other inputs.

        Each output takes over an old value, is a new float map of the given shape, or is absent (None).
        """
        values = []
        for output in outputs:
            if isinstance(output, ir.Value):
                values.append(self._heir(output))
            elif output is None:
                values.append(ir.Value(name=""))
            else:
                name = self.fresh(f"{node.name}/{self.pass_name}")
                values.append(ir.Value(name=name, shape=output, type=ir.TensorType(ir.DataType.FLOAT)))
        new = ir.Node(node.domain, node.op_type, list(inputs), node.attributes.values(), outputs=values, name=node.name)
        new.metadata_props.update(self._metadata(of))
        self.graph.insert_before(before, new)
        for output, value in zip(outputs, values, strict=True):
            if isinstance(output, ir.Value):
                output.replace_all_uses_with(value, replace_graph_outputs=True)
        return values

    def constant(self, base: str, array: Any) -> ir.Value:
        """Register an initializer that is no graph input."""
        value = ir.Value(name=self.fresh(base), const_value=ir.tensor(array))
        value.const_value.name = value.name  # type: ignore[union-attr]
        value.dtype = value.const_value.dtype  # type: ignore[union-attr]
        value.shape = ir.Shape(array.shape)
        self.graph.register_initializer(value)
        return value

    def take_over(self, old: ir.Value, new: ir.Value) -> None:
        """Let all readers of `old` read `new`, which gets the name too: a graph output stays what it was."""
        new.shape, new.type, name = old.shape, old.type, old.name
        old.name = self.fresh(f"{name}_replaced")
        new.name = name
        old.replace_all_uses_with(new, replace_graph_outputs=True)

    def remove_dead(self, nodes: Iterable[ir.Node]) -> None:
        """Remove those of the nodes that nothing reads, and then what only they read among the nodes, and so on."""
        pending = [node for node in nodes if node.graph is not None]
        while dead := [node for node in pending if all(is_unused(value) for value in node.outputs)]:
            self.graph.remove(dead, safe=True)
            pending = [node for node in pending if node not in dead]

    def _value(self, node_name: str, result: str, old: ir.Value | None, shape: Sequence[Any]) -> ir.Value:
        if old is None:
            name = self.fresh(f"{node_name}/{result}")
            kind = ir.DataType.INT64 if result == "indices" else ir.DataType.FLOAT
            return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind))
        return self._heir(old)

    def _heir(self, old: ir.Value) -> ir.Value:
        """Make a value with the name, shape and type of an old one, which gives its name up."""
        heir = ir.Value(name=old.name, shape=old.shape, type=old.type)
        old.name = self.fresh(f"{old.name}_replaced")
        return heir

    def _metadata(self, of: Iterable[ir.Node]) -> dict[str, str]:
        names = list(dict.fromkeys(source for node in of for source in sources(node)))
        return {SOURCES: json.dumps(names), PASS: self.pass_name}


def written(spec: OpSpec | PlainOp, attributes: Mapping[str, Any]) -> list[str]:
    """List the attributes that a node of the operator is written with: those that may be left out where they say
    something."""
    defaults = spec.defaults if isinstance(spec, PlainOp) else {}
    return [*spec.attributes, *(name for name, value in defaults.items() if attributes.get(name, value) != value)]


def attribute(name: str, value: Any) -> ir.Attr:
    """Make an attribute of a number, a text, or several of them.

    onnx_ir asks whether a list is a tensor, a graph or a type before it looks at what is in it: before Python 3.12 a
    quarter of the time of rewriting.
    """
    if isinstance(value, (list, tuple)) and value and all(isinstance(each, int) for each in value):
        return ir.AttrInt64s(name, list(value))
    return ir.convenience.convert_attribute(name, list(value) if isinstance(value, tuple) else value)
