"""ICF for BN -> activation -> Concat (Inception, VoVNet, GhostNet, CSP, U-Net): the halves sink through the Concat.

    y1 = NormalizeReluPointwise(x1, a1, b1)         t = Concat(x1, x2, x3)
    y2 = NormalizeReluPointwise(x2, a2, b2)    ->   y = NormalizeReluPointwise(t, Concat(a1, a2, 1), Concat(b1, b2, 0))
    y  = Concat(y1, y2, x3)

One map instead of many, written where the Concat wants it: what reads y has room for the steps. What else reads y1 has
taken its steps already. An operand that is not normalised has a = 1 and b = 0; if it must not be activated either, the
activation is one of some channels (Where). A Relu leaves what another Relu made, or a pooling of that, as it is.

What is masked on the way back is the business of concat/mask.py.

Refuses operands with different activations, and a reader without room for the steps: then y must be stored, which is
no loss only where every operand was stored for this Concat alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnfuse.analysis.provenance import channels, is_channel_concat, is_channel_split
from bnfuse.opset.activations import ACTIVATIONS
from bnfuse.opset.spec import OpSpec
from bnfuse.passes.concat.ranges import joined
from bnfuse.passes.dialect.shuffle import permutation_of
from bnfuse.passes.dialect.source_ops import constant_of, forward_of, is_map, sizes
from bnfuse.passes.fusion.pointwise import has_room_for
from bnfuse.passes.rewriter import Editor, Op, is_only_read_by

POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool")


@dataclasses.dataclass(frozen=True)
class Branch:
    """One operand of a Concat: what it is made of by steps, or (None) a map that is read as it is."""

    value: ir.Value
    source: Op | None

    @property
    def x(self) -> ir.Value:
        """The map before the steps."""
        return self.source.operands["x"] if self.source is not None else self.value

    @property
    def activation(self) -> str | None:
        """The activation, which may be of some channels alone."""
        last = self.source.steps.prologue[-1] if self.source is not None else ""
        return last if last in ACTIVATIONS else None

    def active(self) -> np.ndarray | None:
        """Where it is activated: 1 or 0 for each channel; None where that is not known."""
        count = channels(self.value)
        if self.source is None or self.activation is None:
            return np.zeros(count, np.float32)
        if "active" in self.source.operands:
            return constant_of(self.source.operands["active"])
        return np.ones(count, np.float32)

    def needs_choice(self, activation: str) -> bool:
        """Tell whether an activation of all channels would change it."""
        if self.activation is not None:
            return "Where" in self.source.steps.prologue if self.source is not None else False
        return activation != "Relu" or self.source is not None or not is_non_negative(self.value)


def is_non_negative(value: ir.Value | None) -> bool:
    """Tell whether a map comes from a Relu, through poolings, Concats and Splits at most: another Relu leaves it."""
    writer = value.producer() if value is not None else None
    if is_channel_concat(writer):
        return all(is_non_negative(operand) for operand in writer.inputs)
    if is_channel_split(writer):
        return is_non_negative(writer.inputs[0])
    op = forward_of(value)
    if op is None or op.steps.core not in ("Pointwise", *POOLS) or "Bias" in op.steps.epilogue:
        return False
    if op.steps.prologue:
        return op.steps.prologue[-1] == "Relu" and "Where" not in op.steps.prologue[-2:-1]
    return op.steps.core in POOLS and is_non_negative(op.operands["x"])


def sink_forward(editor: Editor, node: ir.Node) -> None:
    """Move the steps of a Concat's operands behind it, or refuse."""
    if not is_channel_concat(node):
        return
    branches = branches_of(node)
    if not any(branch.source is not None for branch in branches):
        return
    steps = steps_of(branches)
    reason = steps if isinstance(steps, str) else why_not(node, branches, steps)
    if reason:
        for branch in branches:
            if branch.source is not None:
                editor.refuse(branch.source.node, f"Concat '{node.name}' keeps it: {reason}")
    elif not isinstance(steps, str):
        sink(editor, node, branches, steps)


def is_normalized(op: Op) -> bool:
    """Tell whether an operator stores a normalised map, activated or not, and does nothing else."""
    if not isinstance(op.spec, OpSpec) or op.spec.core != "Pointwise" or op.spec.epilogue:
        return False
    first, *rest = op.spec.prologue
    return first == "Normalize" and (not rest or (rest[-1] in ACTIVATIONS and rest[:-1] in ([], ["Where"])))


def branches_of(concat: ir.Node) -> list[Branch]:
    """List the operands of a Concat; one that must be stored normalised anyway is read as that."""
    found = []
    for value in concat.inputs:
        assert value is not None
        op = forward_of(value)
        if op is not None and is_normalized(op) and not value.is_graph_output():
            moved = all(lets_through(use.node) or has_room_for(op, use.node) for use in value.uses())
            found.append(Branch(value, op if moved else None))
        else:
            found.append(Branch(value, None))
    return found


def lets_through(node: ir.Node) -> bool:
    """Tell whether a reader takes no steps itself but lets them move on."""
    return is_channel_concat(node) or is_channel_split(node) or permutation_of(node) is not None


def steps_of(branches: Sequence[Branch]) -> tuple[str, ...] | str:
    """Find the steps that hold of all operands together, or give the reason why there are none."""
    if not all(is_map(branch.x) for branch in branches):
        return "its operands are not all float32 maps of rank 4"
    activated = [branch for branch in branches if branch.activation is not None]
    if not activated:
        return ("Normalize",)
    first = activated[0]
    for branch in activated[1:]:
        if branch.activation != first.activation or _attributes(branch) != _attributes(first):
            return "its operands have different activations"
    assert first.activation is not None
    if not any(branch.needs_choice(first.activation) for branch in branches):
        return "Normalize", first.activation
    if any(branch.active() is None for branch in branches):
        return "it is not known which channels of an operand are activated"
    return "Normalize", "Where", first.activation


def _attributes(branch: Branch) -> dict[str, Any]:
    return branch.source.attributes if branch.source is not None else {}


def why_not(concat: ir.Node, branches: Sequence[Branch], steps: tuple[str, ...]) -> str | None:
    """Tell why the steps do not move behind a Concat, or None."""
    y = concat.outputs[0]
    readers = list(dict.fromkeys(use.node for use in y.uses()))
    source = _behind(y, branches, steps, concat)
    without = [node for node in readers if not takes(source, node, set())]
    if y.is_graph_output() or without:
        alone = all(branch.source is not None and is_only_read_by(branch.value, concat) for branch in branches)
        if not alone:
            who = f"{without[0].op_type} '{without[0].name}' reads it and has no room" if without else "it is an output"
            return f"{y.name} would have to be stored normalised, with operands that are not: {who}"
    return None


def _behind(y: ir.Value, branches: Sequence[Branch], steps: tuple[str, ...], node: ir.Node) -> Op:
    """Describe the operator that would stand behind the Concat; of its operands only what they are called is right."""
    attributes = next((_attributes(branch) for branch in branches if branch.activation is not None), {})
    return Op(OpSpec(steps, "Pointwise"), dict.fromkeys(("x", "a", "b", "active"), y), {"y": y}, attributes, node)


def takes(source: Op, node: ir.Node, seen: set[ir.Node]) -> bool:
    """Tell whether a reader has room for the steps, or all that reads what it makes of the map has.

    `seen` are the Concats, Splits and shuffles that are asked about already.
    """
    if node in seen or has_room_for(source, node):
        return True
    if not lets_through(node):
        return False
    seen.add(node)
    for value in node.outputs:
        behind = dataclasses.replace(source, results={"y": value})
        if value.is_graph_output() or not all(takes(behind, use.node, seen) for use in value.uses()):
            return False
    return True


def sink(editor: Editor, concat: ir.Node, branches: Sequence[Branch], steps: tuple[str, ...]) -> None:
    """Put the raw maps together, and one operator with the steps of all behind them."""
    nodes = [concat, *dict.fromkeys(branch.source.node for branch in branches if branch.source is not None)]

    samples = of_samples(branches)

    def coefficient(branch: Branch, name: str, other: float) -> ir.Value:
        if branch.source is not None:
            value = branch.source.operands[name]
        else:
            array = np.full(channels(branch.value), other, np.float32)
            value = editor.constant(f"{branch.value.name}/{name}", array)
        return value if not samples or len(sizes(value)) == 2 else repeated(editor, value, samples, concat, nodes)

    y = concat.outputs[0]
    t = joined(editor, [branch.x for branch in branches], concat, nodes)
    operands = {"x": t}
    for name, other in (("a", 1.0), ("b", 0.0)):
        parts = [coefficient(branch, name, other) for branch in branches]
        operands[name] = joined(editor, parts, concat, nodes)
    if "Where" in steps:
        active = [known for branch in branches if (known := branch.active()) is not None]
        operands["active"] = editor.constant(f"{y.name}/active", np.concatenate(active))
    attributes = _behind(y, branches, steps, concat).attributes
    name = editor.fresh(f"{concat.name}/normalize")
    editor.emit(OpSpec(steps, "Pointwise"), operands, attributes, {"y": y}, before=concat, of=nodes, name=name)
    editor.remove_dead(nodes)


def of_samples(branches: Sequence[Branch]) -> int:
    """Count the samples where one of the operands has coefficients of each, as of a GroupNorm; 0 where none has."""
    shapes = [sizes(branch.source.operands["a"]) for branch in branches if branch.source is not None]
    return next((shape[0] for shape in shapes if len(shape) == 2), 0)


def repeated(editor: Editor, value: ir.Value, samples: int, before: ir.Node, nodes: Sequence[ir.Node]) -> ir.Value:
    """Give each sample the coefficients [C] of all."""
    shape = (samples, *sizes(value))
    target = editor.constant(f"{value.name}/samples", np.array(shape, np.int64))
    (made,) = editor.standard("Expand", [value, target], 1, before=before, of=nodes)
    made.shape, made.type = ir.Shape(shape), value.type
    return made
