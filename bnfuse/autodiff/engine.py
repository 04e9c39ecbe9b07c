"""The sweep from the outputs back to the inputs: what needs a gradient, in which order, and how contributions add up.

    needs      a value of float type on a path from a wanted input to a seeded output
    order      nodes in reverse: all readers of a value come before the node that gives it
    sums       of one contribution that one; of several one Sum, made when the last is known; a Concat of those of
               slices that lie side by side

The graph is in static single assignment and without control flow, so one sweep is enough (Griewank and Walther,
Evaluating Derivatives, SIAM 2008, section 3.2).
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from bnfuse.autodiff.emitter import Emitter, Gradient
from bnfuse.autodiff.rules import is_flat, key_of, rule_of
from bnfuse.core.errors import BnfuseError, at_node
from bnfuse.graph.values import static_shape

FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
OLDEST_OPSET = 18  # reductions and Pad have their axes as operands from here on, ScatterElements adds


def differentiate(
    model: ir.Model,
    wanted: Sequence[str],
    seeds: Mapping[str, ir.Value | None],
    *,
    file: str | None = None,
) -> dict[str, ir.Value]:
    """Append the gradients of the values named `wanted` to the model's graph, in place; gives them by those names.

    `seeds` maps outputs to the gradients at them: values of the output's shape, or None for 1 (a loss, of shape []).
    Where several outputs are seeded the gradients are those of the sum of their products with the seeds. Shapes and
    types of all forward values must be known and static; the opset must be 18 or later. A wanted value that no seeded
    output depends on has a gradient of zeros. The gradient of `t` is named `t_grad`, nodes made for a node `n` begin
    with `n/grad`.

    Raises BnfuseError, naming the file and the node, for an operator without a gradient on the way.
    """
    return _Sweep(model, wanted, seeds, file).run()


class _Sweep:
    """One differentiation: contributions to the gradient of each value, until they are summed up."""

    def __init__(
        self, model: ir.Model, wanted: Sequence[str], seeds: Mapping[str, ir.Value | None], file: str | None
    ) -> None:
        self.file, self.graph = file, model.graph
        opset = model.opset_imports.get("", 1)
        if opset < OLDEST_OPSET:
            raise BnfuseError(f"{file or model.graph.name}: gradients need opset {OLDEST_OPSET}, this is {opset}")
        self.values = _values_by_name(model.graph)
        self.wanted = [self._value(name) for name in wanted]
        self.emitter = Emitter(model, self.wanted)
        self.seeds = {self._value(name): seed for name, seed in seeds.items()}
        self.forward = list(model.graph)
        self.active = active_values(self.forward, self.wanted, list(self.seeds))
        self.contributions: dict[ir.Value, list[ir.Value]] = {}
        self.finals: set[ir.Value] = set()

    def _value(self, name: str) -> ir.Value:
        if name not in self.values:
            raise BnfuseError(f"{self.file or self.graph.name}: has no value '{name}' to differentiate")
        return self.values[name]

    def run(self) -> dict[str, ir.Value]:
        """Sweep the nodes in reverse; gives the gradients of what is wanted."""
        for value, seed in self.seeds.items():
            self.contributions[value] = [self._one(value) if seed is None else seed]
        for node in reversed(self.forward):
            if any(value in self.active and value in self.contributions for value in node.outputs):
                self.backward(node)
        found = {str(value.name): self._final(value) for value in self.wanted}
        self.emitter.remove_unused(found.values())
        return found

    def backward(self, node: ir.Node) -> None:
        """Turn the gradients at a node's results into contributions to those at its operands."""
        if not any(value in self.active for value in node.inputs if value is not None):
            return
        rule = rule_of(node)
        if rule is None:
            remedy = "Freeze the parameters in front of it (--freeze), or write it by other operators."
            raise at_node(node.name or "?", key_of(node), f"has no gradient. {remedy}", file=self.file)
        given = [self._summed(value) if value in self.contributions else None for value in node.outputs]
        wanted = [value is not None and value in self.active for value in node.inputs]
        made = rule(Gradient(self.emitter, node, given, wanted, self.file))
        for value, contribution, is_wanted in zip(node.inputs, made, wanted, strict=False):
            if value is not None and is_wanted and contribution is not None:
                like(contribution, value)
                self.contributions.setdefault(value, []).append(contribution)

    def _summed(self, value: ir.Value) -> ir.Value:
        parts = self._joined(value, self.contributions[value])
        if len(parts) > 1:
            narrow, shape = self.emitter.narrowed(parts)
            if shape is None and len(value.shape or ()) != 4:  # maps of one shape are summed in one sweep
                parts = [part for part in narrow if part is not None]
            name = self.emitter.fresh(f"{value.name}_grad")
            total = self.emitter.node("Sum", parts, {}, name=name, outputs=[ir.Value(name=name)])[0]
            like(total, value)
            parts = [total]
        self.contributions[value] = parts
        return parts[0]

    def _joined(self, value: ir.Value, parts: list[ir.Value]) -> list[ir.Value]:
        """Concatenate pieces that lie side by side along an axis, instead of adding up what is zeros for the most part.

        That are the gradients of slices of the value.
        """
        size = static_shape(value)
        pieces = {part: piece for part in parts if (piece := self.emitter.pieces.get(part)) is not None}
        if size is None or len(pieces) < 2:
            return parts
        axis = collections.Counter(piece.axis for piece in pieces.values()).most_common(1)[0][0]
        beside = sorted((part for part in pieces if pieces[part].axis == axis), key=lambda part: pieces[part].before)
        taken: list[ir.Value] = []
        pasted: list[ir.Value] = []
        end = 0
        for part in beside:
            piece = pieces[part]
            if piece.before >= end:
                pasted += [*self._gap(value, axis, piece.before - end), piece.value]
                taken.append(part)
                end = size[axis] - piece.after
        if len(taken) < 2:
            return parts
        pasted += self._gap(value, axis, size[axis] - end)
        name = self.emitter.fresh(f"{value.name}_grad/concat")
        joined = self.emitter.node("Concat", pasted, {"axis": axis}, name=name, outputs=[ir.Value(name=name)])[0]
        like(joined, value)
        return [*(part for part in parts if part not in taken), joined]

    def _gap(self, value: ir.Value, axis: int, length: int) -> list[ir.Value]:
        """Give the zeros between two pieces, if there are any."""
        shape = static_shape(value) or ()
        sizes = (*shape[:axis], length, *shape[axis + 1 :])
        dtype = value.dtype or ir.DataType.FLOAT
        return [self.emitter.zeros(sizes, dtype, f"{value.name}_grad/zeros")] if length else []

    def _final(self, value: ir.Value) -> ir.Value:
        """Give the gradient of a wanted value a name of its own: it may be another's too, or a value of the file."""
        if value not in self.contributions:
            shape, dtype = static_shape(value) or (), value.dtype or ir.DataType.FLOAT
            return self.emitter.zeros(shape, dtype, f"{value.name}_grad")
        gradient = self._summed(value)
        if not self.emitter.made(gradient) or gradient in self.finals:
            name = self.emitter.fresh(f"{value.name}_grad")
            gradient = self.emitter.node("Identity", [gradient], {}, name=name, outputs=[ir.Value(name=name)])[0]
            like(gradient, value)
        elif gradient.name != f"{value.name}_grad":
            self.emitter.rename(gradient, f"{value.name}_grad")
        self.finals.add(gradient)
        return gradient

    def _one(self, value: ir.Value) -> ir.Value:
        dtype = value.dtype or ir.DataType.FLOAT
        shape = static_shape(value)
        if shape != ():
            what = f"{list(shape) if shape is not None else 'of unknown size'}"
            raise BnfuseError(f"{self.file or self.graph.name}: '{value.name}' is {what}: a loss is a single number")
        return self.emitter.seed(dtype, f"{value.name}_grad")


def active_values(nodes: Sequence[ir.Node], wanted: Sequence[ir.Value], seeded: Sequence[ir.Value]) -> set[ir.Value]:
    """Find the float values on a path from a wanted value to a seeded one, through operators that have a slope."""
    reached = set(wanted)
    for node in nodes:
        if not is_flat(node) and any(value in reached for value in node.inputs if value is not None):
            reached.update(value for value in node.outputs if value.name and value.dtype in (*FLOATS, None))
    needed = set(seeded)
    for node in reversed(nodes):
        if not is_flat(node) and any(value in needed for value in node.outputs):
            needed.update(value for value in node.inputs if value is not None)
    return reached & needed


def like(gradient: ir.Value, value: ir.Value) -> None:
    """Give a gradient the shape and type of its value, where it has none yet."""
    if gradient.shape is None:
        gradient.shape = value.shape
    if gradient.type is None:
        gradient.type = value.type


def _values_by_name(graph: ir.Graph) -> dict[str, ir.Value]:
    values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    return {str(value.name): value for value in values if value.name}
