"""`ai.bnfuse` operators of an inference graph as standard nodes.

    NormalizeReluConvBias(x, w, a, b, bias)      ->      z = BatchNormalization(x, scale, bias, running mean, variance)
                                                         y = Conv(Relu(z), w, bias)

What follows from parameters alone is computed here and becomes an initializer: coefficients of several BatchNorms over
a Concat, and the running mean less the bias that the drop-bias pass took out of a convolution. Steps that several
operators have in common on their way in (a map with several readers) are written once. What passes took across Concats,
Splits and shuffles goes back (placed.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from bnfuse.analysis.ancestors import ancestors
from bnfuse.analysis.provenance import channels
from bnfuse.core.errors import BnfuseError, at_node
from bnfuse.exporting import groups
from bnfuse.exporting.placed import Entry, is_placed, parts_of, shuffled, whole_of
from bnfuse.graph.constants import evaluate
from bnfuse.graph.protos import fresh
from bnfuse.opset import reference
from bnfuse.opset.activations import ACTIVATIONS, Activation
from bnfuse.opset.body import OPERATORS
from bnfuse.opset.expressions import Expression, interpret
from bnfuse.opset.plain import PLAIN_OPS, PlainOp
from bnfuse.opset.sources import standard_node
from bnfuse.opset.spec import (
    CONV_TRANSPOSE_ATTRIBUTES,
    CONVS,
    DOMAIN,
    FORWARD_CORES,
    PLUS,
    OpSpec,
    applied,
    find,
    further_terms,
    of_skip,
    skip_activation,
)


@dataclasses.dataclass(frozen=True)
class Norm:
    """One BatchNorm by running statistics: y = scale*(x - mean)/sqrt(variance + epsilon) + bias, and who it was."""

    name: str
    operands: tuple[ir.Value, ...]  # scale, bias, mean, variance
    epsilon: float


class Expansion:
    """The nodes of the new graph, made by `run`. Values are known by the names that the training graph has for them."""

    def __init__(self, graph: ir.Graph, state: Mapping[str, np.ndarray], *, opset: int, file: str) -> None:
        self.graph, self.opset, self.file = graph, opset, file
        self.nodes: list[onnx.NodeProto] = []
        self.names: dict[ir.Value, str] = {}  # of maps
        self.constants: dict[ir.Value, np.ndarray] = {}
        self.norms: dict[ir.Value, tuple[str, tuple[Norm, ...]]] = {}  # a or b of these, one after the other
        self.affine: list[tuple[np.ndarray, np.ndarray, Norm]] = []  # a and b of each BatchNorm
        self._used: dict[str, np.ndarray] = {}
        self._split: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        self._made: dict[Any, str] = {}  # steps of prologues that are there already
        for name, value in graph.initializers.items():
            if name in state:
                self.constants[value] = np.asarray(state[name])
            elif value.const_value is not None:
                self.constants[value] = value.const_value.numpy()
        for value in graph.inputs:
            if value not in self.constants:
                self.names[value] = str(value.name)
        self._taken = {*self.names.values(), *graph.initializers, *(str(v.name) for n in graph for v in n.outputs)}

    def run(self) -> None:
        """Write the nodes that the output depends on."""
        needed = ancestors(self.graph.outputs)  # statistics of batches are none of them
        for node in [node for node in self.graph if node in needed]:
            if all(value is None or value in self.constants for value in node.inputs):
                self._fold(node)
            elif node.domain == DOMAIN:
                self._expand(node)
            else:
                self._standard(node)
        self._name_output()
        self._prune()

    def _prune(self) -> None:
        """Take out what nothing reads: concatenations of maps before their steps."""
        read = {self.output}
        kept = []
        for node in reversed(self.nodes):
            if read & {*node.output}:
                read |= {*node.input}
                kept.append(node)
        self.nodes = kept[::-1]

    def _name_output(self) -> None:
        """Give the result the name that it has in the training graph, whichever node it came from."""
        made, wanted = self.output, str(self.graph.outputs[0].name)
        for node in self.nodes:
            for names in (node.input, node.output):
                names[:] = [wanted if name == made else name for name in names]
        self.names[self.graph.outputs[0]] = wanted

    @property
    def output(self) -> str:
        """The name of the result."""
        return self.names[self.graph.outputs[0]]

    def initializers(self) -> list[onnx.TensorProto]:
        """List the constants that nodes read."""
        read = {name for node in self.nodes for name in node.input}
        used = {name: array for name, array in self._used.items() if name in read}
        return [onnx.numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in used.items()]

    # -- constants -----------------------------------------------------------------------------------------------

    def _fold(self, node: ir.Node) -> None:
        inputs = [self.constants[value] if value is not None else None for value in node.inputs]
        results = (self._fold_own if node.domain == DOMAIN else self._evaluate)(node, inputs)
        for value, result in zip(node.outputs, results, strict=False):
            self.constants[value] = result
        self._follow_norms(node)

    def _fold_own(self, node: ir.Node, inputs: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        op = find(node.op_type)
        if op is None:
            raise self._unknown(node)
        operands = {name: x for name, x in zip(op.operands, inputs, strict=False) if x is not None}
        found = reference.run(op, operands, {name: node.attributes[name].value for name in op.attributes})
        return [found[name] for name in op.results]

    def _evaluate(self, node: ir.Node, inputs: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        """One standard node."""
        if node.domain not in ("", "ai.onnx"):
            raise self._unknown(node)
        try:
            return evaluate(node, inputs, self.opset, self.file)
        except BnfuseError:
            raise
        except Exception as error:
            what = f"cannot be computed from constants: {error}"
            raise at_node(node.name or "", node.op_type, " ".join(what.split())[:200], file=self.file) from None

    def _follow_norms(self, node: ir.Node) -> None:
        """Which BatchNorms the coefficients a and b are of, also where they are concatenated."""
        if node.domain == DOMAIN and node.op_type == "BatchNormFinalize":
            operands = tuple(value for value in node.inputs[:4] if value is not None)
            norm = Norm(base_name(node), operands, float(node.attributes["epsilon"].value))
            for which, value in zip("ab", node.outputs, strict=False):
                self.norms[value] = (which, (norm,))
            self.affine.append((self.constants[node.outputs[0]], self.constants[node.outputs[1]], norm))
        elif node.op_type in ("Concat", "Identity") and not node.domain:
            parts = [self.norms.get(value) for value in node.inputs if value is not None]
            if all(parts) and len({part[0] for part in parts if part}) == 1:
                joined = tuple(norm for part in parts if part for norm in part[1])
                self.norms[node.outputs[0]] = (parts[0][0], joined)  # type: ignore[index]

    # -- nodes ---------------------------------------------------------------------------------------------------

    def _expand(self, node: ir.Node) -> None:
        op = find(node.op_type)
        if isinstance(op, PlainOp) and op.name in ("GroupNorm", *groups.HALVES):
            self._expand_group_norm(op, node)
            return
        if not isinstance(op, OpSpec) or op.is_gradient:
            raise self._unknown(node)
        self._expand_steps(op, node)
        if "ImageStatistics" in op.epilogue:
            results = dict(zip(op.results, node.outputs, strict=True))
            taken = {"mean": results["image_mean"], "variance": results["image_variance"]}
            self._half(PLAIN_OPS["GroupNormStatistics"], node, {"x": results["y"]}, taken)

    def _expand_steps(self, op: OpSpec, node: ir.Node) -> None:
        """Write an operator of steps, but for what it sums on its way out."""
        operands = dict(zip(op.operands, node.inputs, strict=True))
        wanted = dict(zip(op.results, node.outputs, strict=True))
        x, steps = self._placed(op, operands, node)
        for step, of_some in steps:
            made = self._enter(step, x, operands, node, skip_activation(op.prologue))
            x = self._chosen(operands["active"], made, x, node) if of_some else made
        if "stored" in wanted:
            self.names[wanted["stored"]] = x
        if op.core == "Pointwise":
            self.names[wanted["y"]] = x
            return
        inputs = [x]
        if op.core in CONVS:
            inputs += [self._name(operands["weight"])]
            inputs += [self._name(operands["bias"])] if "Bias" in op.epilogue else []
        if op.core == "Resample":
            rows, columns = self._name(operands["rows"]), self._name(operands["columns"])
            turned = self._once("Transpose", [columns], node, {"perm": (1, 0)})
            self._result("MatMul", [self._once("MatMul", [rows, x], node), turned], wanted["y"], node)
            return
        given = {name: node.attributes[name].value for name in FORWARD_CORES[op.core]}
        y = str(wanted["y"].name)
        made = self._fresh(f"{y}/before_activation") if "Relu" in op.epilogue else y
        outputs = [made]
        if "indices" in wanted and wanted["indices"].uses():
            outputs.append(self._name_of_result(wanted["indices"]))
        name = base_name(node)
        if op.core not in (*CONVS, "MaxPool", "AveragePool", "GlobalAveragePool"):
            raise self._unknown(node)
        self._node(op.core, inputs, outputs, name, **plain(given, op.core))
        if made != y:
            self._node("Relu", [made], [y], self._fresh(f"{name}/relu"))
        self.names[wanted["y"]] = y

    def _placed(
        self, op: OpSpec, operands: Mapping[str, ir.Value | None], node: ir.Node
    ) -> tuple[str, list[tuple[str, bool]]]:
        """Give x, with its first steps where it is put together from maps that have them each, and the other steps."""
        steps, x = list(applied(op.prologue)), operands["x"]
        assert x is not None
        coefficients = [operands.get(name) for name in ("a", "b")]
        known = all(value in self.constants for value in coefficients if value is not None)
        if op.prologue[:1] != ("Normalize",) or not known or x in self.constants or not is_placed(x):
            return self._name(x), steps
        a, b = (self.constants[value] for value in coefficients if value is not None)
        kind, of_some = steps[1] if len(steps) > 1 and steps[1][0] in ACTIVATIONS else (None, False)
        active = self.constants.get(operands["active"]) if of_some and operands["active"] is not None else None
        if of_some and active is None:
            return self._name(x), steps
        entry = Entry(a, b, np.full(len(a), kind is not None) if active is None else active > 0)
        return self._entered(x, entry, kind, node), steps[1 if kind is None else 2 :]

    def _entered(self, value: ir.Value, entry: Entry, kind: str | None, node: ir.Node) -> str:
        """Write a map after its steps, which what it is put together, permuted or cut from takes before."""
        if (parts := parts_of(value, entry)) is not None:
            names = [self._entered(part, each, kind, node) for part, each in parts]
            return self._once("Concat", names, node, {"axis": 1})
        if (found := shuffled(value, entry, self.constants)) is not None:
            source, each, order = found
            names = [self._entered(source, each, kind, node), self._name(order)]
            return self._once("Gather", names, node, {"axis": 1})
        if (cut := self._cut(value, entry, kind, node)) is not None:
            return cut
        x = self._name(value) if entry.is_identity else self._affine(value, entry, node)
        if kind is None or not entry.active.any():
            return x
        made = self._activated(kind, x, node)
        if entry.active.all():
            return made
        chosen = self._constant(entry.active.reshape(1, -1, 1, 1), f"{value.name}/active")
        return self._once("Where", [chosen, made, x], node)

    def _cut(self, value: ir.Value, entry: Entry, kind: str | None, node: ir.Node) -> str | None:
        """Write a piece of a map that one BatchNorm normalises, activated in all or none of its channels."""
        whole, split = whole_of(value), value.producer()
        if whole is None or split is None or len({*entry.active.tolist()}) > 1:
            return None
        source, start = whole
        for a, b, _ in self.affine:
            stop = start + len(entry.a)
            if len(a) == channels(source) and entry.matches(a[start:stop], b[start:stop]):
                active = np.full(len(a), bool(entry.active[0]))
                return self._piece(split, value, self._entered(source, Entry(a, b, active), kind, node))
        return None

    def _piece(self, split: ir.Node, value: ir.Value, whole: str) -> str:
        """Give one result of a Split of another map than it was."""
        counts = [channels(piece) for piece in split.outputs]
        key = whole, tuple(counts)
        if key not in self._split:
            pieces = [self._fresh(f"{whole}/piece") for _ in counts]
            lengths = self._constant(np.array(counts, np.int64), f"{whole}/lengths")
            self._node("Split", [whole, lengths], pieces, self._fresh(f"{whole}/split"), axis=1)
            self._split[key] = pieces
        return self._split[key][split.outputs.index(value)]

    def _affine(self, value: ir.Value, entry: Entry, node: ir.Node) -> str:
        """a*x + b as the BatchNormalization whose coefficients these are, or as Mul and Add."""
        x = self._name(value)
        for a, b, norm in self.affine:
            if entry.matches(a, b):
                return self._batch_norm(x, (norm,))
        wide = [self._constant(v.reshape(1, -1, 1, 1), f"{value.name}/wide") for v in (entry.a, entry.b)]
        return self._once("Add", [self._once("Mul", [x, wide[0]], node), wide[1]], node)

    def _enter(
        self, step: str, x: str, operands: Mapping[str, ir.Value | None], node: ir.Node, skip_kind: str | None
    ) -> str:
        """One step of a prologue; `skip_kind` is the activation of the skip."""
        if step == "Normalize":
            return self._normalize(x, operands["a"], operands["b"], node)
        if step == "Gate":
            return self._once("Mul", [self._name(operands["gate"]), x], node)
        if step in ("Add", "AddNormalized"):
            skip = self._name(operands["skip"])
            if step == "AddNormalized":
                skip = self._normalize(skip, operands["skip_a"], operands["skip_b"], node)
            skip = self._activated(skip_kind, skip, node) if skip_kind else skip
            if "skip_gate" in operands:
                skip = self._once("Mul", [self._name(operands["skip_gate"]), skip], node)
            x = self._once("Add", [x, skip], node)
            for name, a, b in further_terms(operands):
                plus = self._name(operands[name])
                plus = self._normalize(plus, operands[a], operands[b], node) if a in operands else plus
                x = self._once("Add", [x, plus], node)
            return x
        return x if step in ("SkipGate", *PLUS) or of_skip(step) else self._activated(step, x, node)

    def _activated(self, kind: str, x: str, node: ir.Node) -> str:
        """One activation of a prologue, with the node's attributes."""
        activation = ACTIVATIONS[kind]
        given = {name: float(node.attributes[name].value) for name in activation.attributes}
        return self._activation(activation, x, given, node)

    def _chosen(self, active: ir.Value | None, made: str, kept: str, node: ir.Node) -> str:
        """Choose what is made where `active`, a constant [C], is positive, and what is kept in the other channels."""
        assert active is not None
        if active not in self.constants:
            raise at_node(
                node.name or "", node.op_type, "has an activation in channels that are no constant", file=self.file
            )
        chosen = self._constant(self.constants[active].reshape(1, -1, 1, 1) > 0, f"{active.name}/wide")
        return self._once("Where", [chosen, made, kept], node)

    def _activation(self, activation: Activation, x: str, given: Mapping[str, float], node: ir.Node) -> str:
        """Write an activation: as the standard operator that it is, or by its formula.

        Numbers come behind maps, and none is multiplied by 1.
        """
        standard = standard_node(activation, given, self.opset)
        if standard is not None:
            return self._once(standard[0], [x], node, standard[1])

        def leaf(part: Expression) -> str | float:
            if part.operation == "variable":
                return x
            return given[part.name] if part.operation == "attribute" else part.constant

        def write(op_type: str, *operands: str | float) -> str:
            names = [o if isinstance(o, str) else self._scalar(o) for o in operands]
            return self._once(op_type, names, node)

        def multiply(a: str | float, b: str | float) -> str | float:
            a, b = (b, a) if isinstance(a, float) else (a, b)
            return a if b == 1 else write("Mul", a, b)

        algebra: dict[str, Callable[..., str | float]] = {
            **{name: functools.partial(write, op_type) for name, op_type in OPERATORS.items()},
            "multiply": multiply,
            "fma": lambda a, b, c: write("Add", multiply(a, b), c),
        }
        return str(interpret(activation.value, algebra, leaf))

    def _normalize(self, x: str, a: ir.Value | None, b: ir.Value | None, node: ir.Node) -> str:
        """a*x + b as the BatchNormalization that the coefficients come from, or as Mul and Add."""
        assert a is not None and b is not None
        (first, norms), (second, others) = self.norms.get(a, ("", ())), self.norms.get(b, ("", ()))
        if (first, second) == ("a", "b") and norms == others and norms:
            return self._batch_norm(x, norms)
        if a not in self.constants or b not in self.constants:
            return self._normalize_samples(x, a, b, node)
        wide = [self._constant(self.constants[v].reshape(1, -1, 1, 1), f"{v.name}/wide") for v in (a, b)]
        return self._once("Add", [self._once("Mul", [x, wide[0]], node), wide[1]], node)

    def _normalize_samples(self, x: str, a: ir.Value, b: ir.Value, node: ir.Node) -> str:
        """a*x + b with coefficients of each sample: as the GroupNorm that they come from, or as Mul and Add."""
        norm = groups.group_norm_of(a, b)
        if norm is not None and self._name(norm.x) == x:
            return self._group_norm(norm, node)
        last = self._constant(np.array([-2, -1]), "pixels")
        wide = [self._once("Unsqueeze", [self._name(value), last], node) for value in (a, b)]
        return self._once("Add", [self._once("Mul", [x, wide[0]], node), wide[1]], node)

    def _group_norm(self, norm: groups.GroupNorm, node: ir.Node) -> str:
        operands = [self._name(value) for value in (norm.x, norm.scale, norm.bias)]
        return groups.written(
            norm, operands, lambda kind, *of, **given: self._once(kind, [*of], node, given), self._constant
        )

    def _expand_group_norm(self, op: PlainOp, node: ir.Node) -> None:
        """Write a whole GroupNorm, or a half of one, by standard operators."""
        if op.name == "GroupNorm":
            x, scale, bias = (value for value in node.inputs if value is not None)
            self.names[node.outputs[0]] = self._group_norm(groups.whole(node, x, scale, bias), node)
            return
        operands = dict(zip(op.operands, node.inputs, strict=True))
        self._half(op, node, operands, dict(zip(op.results, node.outputs, strict=True)))

    def _half(
        self, op: PlainOp, node: ir.Node, operands: Mapping[str, ir.Value | None], results: Mapping[str, ir.Value]
    ) -> None:
        """Write a half of a GroupNorm as its function has it."""
        made = {name: self._name_of_result(value) for name, value in results.items()}
        names = {name: self._name(value) for name, value in operands.items()}
        prefix = self._fresh(f"{node.name}/body")
        self.nodes += groups.inlined(op, node, names, made, prefix, self.opset)

    def _batch_norm(self, x: str, norms: tuple[Norm, ...]) -> str:
        key = ("BatchNormalization", x, norms)
        if key not in self._made:
            if len(norms) == 1:
                operands = [self._name(value) for value in norms[0].operands]
                name = norms[0].name
                epsilon = norms[0].epsilon
            else:
                operands, name, epsilon = self._joined(norms)
            y = self._fresh(f"{name}/y")
            self._node("BatchNormalization", [x, *operands], [y], self._fresh(name), epsilon=epsilon)
            self._made[key] = y
        return self._made[key]

    def _joined(self, norms: tuple[Norm, ...]) -> tuple[list[str], str, float]:
        """Several BatchNorms side by side as one; what their epsilons differ by goes into the variances."""
        epsilon = min(norm.epsilon for norm in norms)
        name = f"{norms[0].name}+{len(norms) - 1}"
        columns = []
        for index, what in enumerate(("scale", "bias", "mean", "variance")):
            parts = [self.constants[norm.operands[index]] for norm in norms]
            if what == "variance":
                parts = [part + part.dtype.type(n.epsilon - epsilon) for part, n in zip(parts, norms, strict=True)]
            columns.append(self._constant(np.concatenate(parts), f"{name}/{what}"))
        return columns, name, epsilon

    def _standard(self, node: ir.Node) -> None:
        proto = ir.to_proto(node)
        proto.ClearField("metadata_props")
        del proto.output[:]
        proto.input[:] = [self._name(value) if value is not None else "" for value in node.inputs]
        if node.op_type == "Reshape" or node.op_type == "Expand":
            proto.input[1] = self._without_batch(node, proto.input[1])
        if node.op_type == "BatchNormalization":  # one that a training file of others has
            kept = [attribute for attribute in proto.attribute if attribute.name == "epsilon"]
            del proto.attribute[:]
            proto.attribute.extend(kept)
        wanted = node.outputs[:1] if node.op_type in ("BatchNormalization", "MaxPool") else node.outputs
        proto.output.extend(self._name_of_result(value) if value.name else "" for value in wanted)
        self.nodes.append(proto)

    def _without_batch(self, node: ir.Node, name: str) -> str:
        """Give the target shape of a Reshape (an Expand) that keeps the batch, with 0 (1) in its place."""
        x, shape = node.inputs[0], node.inputs[1]
        rows = x.shape[0] if x is not None and x.shape is not None and len(x.shape) else None
        if shape not in self.constants or rows is None:
            return name
        target = self.constants[shape].copy()  # type: ignore[index]
        allowed = node.attributes.get("allowzero")
        if target.size == 0 or target[0] != rows or (allowed is not None and allowed.value):
            return name
        target[0] = 0 if node.op_type == "Reshape" else 1
        return self._constant(target, f"{shape.name}/any_batch")  # type: ignore[union-attr]

    # -- making --------------------------------------------------------------------------------------------------

    def _node(self, kind: str, inputs: Iterable[str], outputs: Iterable[str], name: str, **attributes: Any) -> None:
        self.nodes.append(onnx.helper.make_node(kind, list(inputs), list(outputs), name=name, **attributes))

    def _result(self, kind: str, inputs: Iterable[str], y: ir.Value, node: ir.Node, **attributes: Any) -> None:
        self._node(kind, inputs, [self._name_of_result(y)], base_name(node), **attributes)

    def _once(self, kind: str, inputs: list[str], node: ir.Node, attributes: Mapping[str, Any] | None = None) -> str:
        """Give a step of a prologue, made where it is not there yet."""
        given = dict(attributes or {})
        key = (kind, *inputs, *given.items())
        if key not in self._made:
            y = self._fresh(f"{inputs[0].removesuffix('/y')}/{kind.lower()}")
            self._node(kind, inputs, [y], y, **given)
            self._made[key] = y
        return self._made[key]

    def _name(self, value: ir.Value | None) -> str:
        """Give a map by its name; a constant, which is used now, by that of its initializer."""
        assert value is not None
        if value not in self.constants:
            return self.names[value]
        self._used[str(value.name)] = self.constants[value]
        return str(value.name)

    def _name_of_result(self, value: ir.Value) -> str:
        self.names[value] = str(value.name)
        return str(value.name)

    def _constant(self, array: np.ndarray, name: str) -> str:
        key = ("constant", name, array.tobytes())
        if key not in self._made:
            found = self._fresh(name)
            self._used[found] = array
            self._made[key] = found
        return self._made[key]

    def _scalar(self, value: float) -> str:
        return self._constant(np.array(value, np.float32), f"{float(value):g}")

    def _fresh(self, name: str) -> str:
        found = fresh(name, self._taken)
        self._taken.add(found)
        return found

    def _unknown(self, node: ir.Node) -> BnfuseError:
        what = "has no standard form for inference: export the graph as built, before it is rewritten"
        return at_node(node.name or "", f"{node.domain}::{node.op_type}", what, file=self.file)


def base_name(node: ir.Node) -> str:
    """Give the name that the node, or the BatchNorm that it was a half of, has in the source."""
    return (node.name or node.op_type).removesuffix("/finalize")


def plain(attributes: Mapping[str, Any], core: str) -> dict[str, Any]:
    """Give the attributes of a core as onnx.helper takes them."""
    lists = {*CONV_TRANSPOSE_ATTRIBUTES} - {"group"}
    return {k: list(v) if k in lists and v is not None else v for k, v in attributes.items() if v is not None}
