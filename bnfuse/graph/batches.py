"""A training graph at another batch: the same nodes and values, with all shapes and constants that hold the batch anew.

    images [16, 3, 32, 32]                            images [7, 3, 32, 32]
    y = Reshape(x, [16, 512])                 ->      y = Reshape(x, [7, 512])
    dlosses = Expand(share, [16])                     dlosses = Expand(share, [7])

Nodes are followed in their order; shapes of results come from the schemas of the operators. In a Reshape the dimension
that holds the batch is found by where the batch lies among the elements. Where something is broadcast to a constant
shape, its first dimension is the batch if it was as large, unless what reads it says otherwise. A constant that holds
the batch in another way is refused, with the node that reads it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError, at_node
from bnfuse.core.ranges import check_whole
from bnfuse.graph.batch_constants import HANDLERS
from bnfuse.graph.constants import Known
from bnfuse.graph.module_state import ModuleState
from bnfuse.graph.names import Names
from bnfuse.graph.node_shapes import Type, result_types
from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.graph.values import static_shape
from bnfuse.opset.schemas import register, register_training_ops
from bnfuse.opset.spec import DOMAIN, find

Shape = tuple[int, ...]
BATCH_NORM_GRADIENT = "BatchNormGradFinalize"  # its count is that of the elements of a channel
BATCH_NORM_FINALIZE = "BatchNormFinalize"  # its elements are, where it takes the unbiased variance
OF_SAMPLES = ("GroupNormGradFinalize",)  # their counts are of one sample each
OF_A_PART = ("count", "extent", "first", "samples")  # attributes of statistics over a part of the batch
SMALL = 1 << 12  # elements of a constant that a shape may follow from
UNCHECKED = ("Gemm", "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")  # onnx infers shapes of what does not fit
PROBES = (1009, 1013)  # batches that no other dimension is as large as


def with_batch(graph: TrainingGraph, batch: int) -> TrainingGraph:
    """Give the graph with `batch` samples in a batch, or itself where it has them.

    Raises BnfuseError where a constant depends on the batch in a way that cannot be followed, or statistics are taken
    from a part of the batch: it names the node.
    """
    check_whole("batch", batch, 1)
    if batch == graph.batch:
        return graph
    require_followed(graph)
    if batch == 1:  # what does not fit to it would be broadcast in silence
        followed(graph, next(probe for probe in PROBES if probe != graph.batch))
    return TrainingGraph(followed(graph, batch), graph.signature, graph.name)


def followed(graph: TrainingGraph, batch: int) -> ir.Model:
    """Give the model at another batch. Where something does not fit that is made of constants whose elements are all
    the same and which are as large as the batch (a first state of zeros), they are taken to be one for each sample."""
    assumed: frozenset[str] = frozenset()
    while True:
        attempt = Rebatched(graph, batch, assumed)
        try:
            return attempt.run()
        except Unfit as unfit:
            found = attempt.uniform_constants(unfit.node) - assumed
            if not found:
                raise
            assumed |= found


class Unfit(BnfuseError):
    """A node whose operands do not fit together at the other batch."""

    def __init__(self, error: BnfuseError, node: ir.Node) -> None:
        super().__init__(str(error))
        self.node = node


def require_followed(graph: TrainingGraph) -> None:
    """Raise where the batch of a graph could not be told from other dimensions, or its statistics are of a part."""
    if graph.batch == 1:
        raise BnfuseError(
            f"{graph.name}: has a batch of 1, which cannot be told from other dimensions of 1: build it anew with the "
            "--batch that it is to have"
        )
    if fixed := ModuleState.from_metadata(graph.model.metadata_props).fixed_batch:
        raise BnfuseError(f"{graph.name}: is of its batch of {graph.batch} alone: {fixed}: build it with the other one")
    for node in graph.model.graph:
        own = find(node.op_type) if node.domain == DOMAIN else None
        if own is None or own.name in (BATCH_NORM_GRADIENT, *OF_SAMPLES):
            continue
        if {*own.attributes} & {*OF_A_PART}:
            what = "takes statistics from a part of the batch: build and rewrite the graph anew with the other --batch"
            raise at_node(node.name or "?", node.op_type, what, file=graph.name)
    drawn = (*graph.signature.offsets, *graph.signature.virtual)
    if drawn:
        raise BnfuseError(
            f"{graph.name}: input '{drawn[0]}' is drawn for its batch of {graph.batch}: build and rewrite the graph "
            "anew with the other --batch"
        )


@dataclasses.dataclass
class Rebatched:
    """One graph on its way to another batch."""

    graph: TrainingGraph
    batch: int
    assumed: frozenset[str] = frozenset()  # constants that have an element for each sample
    model: ir.Model = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.model = self.graph.model.clone()
        self.old = self.graph.batch
        self.before: dict[ir.Value, Shape] = {}  # of values that have another shape now
        self.touched: set[ir.Value] = set()  # what follows from data, or from their shapes
        self.outer: dict[ir.Value, dict[int, int]] = {}  # axis -> how many elements of it lie outside of the batch
        self.opset = self.model.opset_imports.get("", 1)
        self.known = Known(self.opset, self.graph.name)
        self._names: Names | None = None
        self._constants: dict[tuple[str, bytes], ir.Value] = {}

    def run(self) -> ir.Model:
        """Give the model at the other batch."""
        register_training_ops()
        register({node.op_type for node in self.model.graph if node.domain == DOMAIN})
        signature, inputs = self.graph.signature, {value.name: value for value in self.model.graph.inputs}
        for name in (*signature.data, *signature.labels):
            self.enter(inputs[name])
        for name in self.assumed:
            self.repeat(self.model.graph.initializers[name])
        forward = self.forward_nodes()
        for node in (node for node in self.model.graph if node in forward):
            self.follow(node)
        outputs = {value.name: value for value in self.model.graph.outputs}
        for output, gradient in signature.output_gradients.items():
            shape = static_shape(outputs[output])
            if shape is not None:
                self.change(inputs[gradient], shape)
        for node in (node for node in self.model.graph if node not in forward):
            self.follow(node)
        self.count_elements()
        for name, output in (*signature.gradients.items(), *signature.running.items()):
            if outputs[output] in self.before:
                what = f"output '{output}' would have another shape than '{name}', at a batch of {self.batch}"
                raise BnfuseError(f"{self.graph.name}: {what}: {self.remedy}")
        return self.model

    @property
    def remedy(self) -> str:
        """What to do where a graph cannot be followed."""
        return f"build it anew with --batch {self.batch}"

    def error(self, node: ir.Node, what: str) -> BnfuseError:
        """Make an error that names file and node."""
        said = f"{what}, at a batch of {self.batch} in the place of {self.old}: {self.remedy}"
        return at_node(node.name or "?", node.op_type, said, file=self.graph.name)

    def forward_nodes(self) -> set[ir.Node]:
        """Find the nodes that outputs other than gradients follow from."""
        gradients = self.graph.signature.backward_results
        pending = [value.producer() for value in self.model.graph.outputs if value.name not in gradients]
        found: set[ir.Node] = set()
        while pending:
            node = pending.pop()
            if node is not None and node not in found:
                found.add(node)
                pending += [value.producer() for value in node.inputs if value is not None]
        return found

    # -- values --------------------------------------------------------------------------------------------------

    def enter(self, value: ir.Value) -> None:
        """Give an input of the graph the other batch, in its first dimension."""
        shape = self.graph.shape_of(str(value.name))
        if not shape or shape[0] % self.old or not shape[0]:
            what = f"input '{value.name}' is {list(shape)}, which does not begin with the batch of {self.old}"
            raise BnfuseError(f"{self.graph.name}: {what}: {self.remedy}")
        self.change(value, (self.scaled(shape[0]), *shape[1:]))

    def repeat(self, value: ir.Value) -> None:
        """Give a constant whose elements are all the same as many as there are samples now."""
        assert value.const_value is not None
        array = value.const_value.numpy()
        shape = list(array.shape)
        shape[shape.index(self.old)] = self.batch
        value.const_value = ir.tensor(np.full(shape, array.reshape(-1)[0], array.dtype), name=value.name)
        value.shape = ir.Shape(array.shape)
        self.change(value, tuple(shape))

    def uniform_constants(self, node: ir.Node) -> frozenset[str]:
        """Name the constants that a node depends on which are as large as the batch and have one value throughout."""
        found: set[str] = set()
        pending, seen = [value for value in node.inputs if value is not None], set()
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            maker, constant = value.producer(), value.const_value
            if maker is not None and value not in self.before:
                pending += [operand for operand in maker.inputs if operand is not None]
            elif constant is not None and not value.is_graph_input() and self.old in constant.shape.numpy():
                array = constant.numpy()
                if array.size and (array == array.reshape(-1)[0]).all():
                    found.add(str(value.name))
        return frozenset(found)

    def scaled(self, size: int) -> int:
        """Give what a multiple of the batch becomes."""
        return size // self.old * self.batch

    def change(self, value: ir.Value, shape: Shape) -> None:
        """Note that a value follows from data, and the shape that it has now."""
        before = static_shape(value)
        if before is not None and before != shape:
            self.before[value] = before
        value.shape = ir.Shape(shape)
        self.touched.add(value)

    def changed(self, value: ir.Value | None) -> dict[int, tuple[int, int]]:
        """List the axes of a value that have another size now: before and now."""
        if value is None or value not in self.before:
            return {}
        pairs = enumerate(zip(self.before[value], static_shape(value) or (), strict=False))
        return {axis: pair for axis, pair in pairs if pair[0] != pair[1]}

    def shape_before(self, value: ir.Value | None) -> Shape | None:
        """Give the shape that a value has in the graph as it is."""
        return None if value is None else self.before.get(value, static_shape(value))

    def constant(self, node: ir.Node, place: int) -> np.ndarray | None:
        """Give the elements of an operand that is the same at every batch as yet; None for any other."""
        value = node.inputs[place] if place < len(node.inputs) else None
        if value is None or value in self.touched or (value.const_value is not None and value.const_value.size > SMALL):
            return None
        return self.known(value)

    def replace(self, node: ir.Node, place: int, elements: Sequence[int]) -> None:
        """Put other numbers in the place of a constant operand, which others may read too."""
        self.put(node, place, np.array(elements, np.int64))

    def put(self, node: ir.Node, place: int, array: np.ndarray) -> None:
        """Put another constant in the place of an operand."""
        value = node.inputs[place]
        key = (str(value.name), array.tobytes()) if value is not None else ("", b"")
        if key not in self._constants:
            self._names = self._names or Names(self.model.graph)
            name = self._names.fresh(f"{key[0]}/batch_{self.batch}")
            made = ir.Value(name=name, const_value=ir.tensor(array, name=name))
            made.shape, made.type = ir.Shape(array.shape), ir.TensorType(ir.DataType.from_numpy(array.dtype))
            self.model.graph.register_initializer(made)
            self._constants[key] = made
        node.replace_input_with(place, self._constants[key])

    # -- nodes ---------------------------------------------------------------------------------------------------

    def follow(self, node: ir.Node) -> None:
        """Give the results of a node their shapes, once what it has of constants is as it must be."""
        if node.domain == DOMAIN:
            self.check_own(node)
        elif (handler := HANDLERS.get(node.op_type)) is not None:
            handler(self, node)
        self.check_mean(node)
        if not any(value in self.touched for value in node.inputs if value is not None):
            return
        types: list[Type | None] = []
        for value in node.inputs:
            shape, dtype = static_shape(value), None if value is None else value.dtype
            if value is not None and (shape is None or dtype is None):
                raise self.error(node, f"reads '{value.name}', of which the file does not say shape and type")
            types.append(None if shape is None or dtype is None else (shape, np.dtype(dtype.numpy()).name))
        constants = [self._elements(value) for value in node.inputs]
        try:
            results = result_types(node, types, constants, self.opset)
        except BnfuseError:
            raise self.unfit(node) from None
        for value, (shape, _) in zip((value for value in node.outputs if value.name), results, strict=True):
            self.change(value, shape)
            self.inherit(node, value)
        if node.domain == DOMAIN or node.op_type in UNCHECKED:
            self.check_rows(node)

    def unfit(self, node: ir.Node) -> Unfit:
        """Make the error of operands that do not fit together."""
        told = ", ".join(f"'{v.name}' {list(static_shape(v) or ())}" for v in node.inputs if v is not None)
        return Unfit(self.error(node, f"does not fit its operands {told}"), node)

    def check_rows(self, node: ir.Node) -> None:
        """Raise where one operand has as many rows as another had, and another number now. The schema does not say."""
        summed = (*node.inputs[2:], node.outputs[0])
        values = [v for v in (summed if node.op_type == "Gemm" else node.inputs) if v is not None]
        rows = {self.changed(value)[0][0] for value in values if 0 in self.changed(value)}
        for value in values:
            shape = static_shape(value) or ()
            follows = value in self.touched or node.op_type in UNCHECKED
            if follows and len(shape) > 1 and shape[0] in rows and value not in self.before:
                raise self.unfit(node)

    def _elements(self, value: ir.Value | None) -> np.ndarray | None:
        if value is None or (value.const_value is not None and value.const_value.size > SMALL):
            return None
        return self.known(value)

    def inherit(self, node: ir.Node, value: ir.Value) -> None:
        """Note where in a dimension of a result the batch lies, as in that of an operand of its size."""
        if value in self.outer:
            return
        parts = {}
        for axis, sizes in self.changed(value).items():
            if node.op_type in ("Concat", "Pad", "Slice", "Split") and self.whole_batches(node, axis):
                parts[axis] = sizes[0] // self.old
                continue
            for operand in node.inputs:
                same = [a for a, other in self.changed(operand).items() if other == sizes]
                if same and operand in self.outer:
                    parts[axis] = self.outer[operand].get(same[0], 1)
        if parts:
            self.outer[value] = parts

    def whole_batches(self, node: ir.Node, axis: int) -> bool:
        """Tell whether a dimension of the first operand is batches, one behind the other."""
        sizes = self.changed(node.inputs[0]).get(axis)
        outer = self.outer.get(node.inputs[0], {}).get(axis, 1) if node.inputs[0] is not None else 1
        return sizes is not None and sizes[0] == outer * self.old

    def check_own(self, node: ir.Node) -> None:
        """Raise where an operator of ours has the batch somewhere else than in the first dimension of a map."""
        if node.op_type == "BatchNorm":
            self.require_several(node, static_shape(node.inputs[0]) or ())
        for value in node.inputs:
            if value is not None and {*self.changed(value)} - {0}:
                raise self.error(node, f"reads '{value.name}', whose channels or pixels depend on the batch")

    def require_several(self, node: ir.Node, shape: Shape) -> None:
        """Raise where a channel has one element, whose variance is none."""
        if math.prod(shape) == shape[1]:
            raise self.error(node, "has one value in a channel, which has no variance")

    def check_mean(self, node: ir.Node) -> None:
        """Raise where what is summed over the batch is divided by a constant that may be a count of samples."""
        if node.domain or node.op_type not in ("Div", "Mul") or len(node.inputs) != 2:
            return
        for place in (1,) if node.op_type == "Div" else (0, 1):
            found, other = self.constant(node, place), node.inputs[1 - place]
            if found is None or found.size != 1 or other is None or found.dtype.kind != "f":
                continue
            shape = self.shape_before(other)
            divisor = float(found.reshape(())) if node.op_type == "Div" else 1 / (float(found.reshape(())) or math.inf)
            whole = math.isfinite(divisor) and abs(divisor - round(divisor)) <= 1e-6 * abs(divisor)
            counts = whole and divisor >= self.old and round(divisor) % self.old == 0
            summed = other in self.touched and other not in self.before  # it follows from data, over the batch
            if counts and shape is not None and (math.prod(shape) == 1 or summed):
                raise self.error(node, f"divides by the constant {divisor:g}, which may count samples")

    def count_elements(self) -> None:
        """Correct the counts of a channel's elements in halves of BatchNorms, which have no map."""
        for node in (node for node in self.model.graph if node.domain == DOMAIN):
            elements = node.attributes.get_float("elements", 0.0) if node.op_type == BATCH_NORM_FINALIZE else 0.0
            if node.op_type == BATCH_NORM_GRADIENT:
                count = self.counted(node, node.attributes["count"].as_int(), forward=True)
                node.attributes["count"] = ir.AttrInt64("count", count)
            elif elements:
                count = self.counted(node, elements, forward=False)
                node.attributes["elements"] = ir.AttrFloat32("elements", float(count))

    def counted(self, node: ir.Node, count: float, *, forward: bool) -> int:
        """Give how many elements a channel has now where it had `count`: of a map that is read with the results of the
        node (or, not forward, that its operands are statistics of)."""
        for was, now in sorted(self.maps_with(node, forward), key=lambda pair: pair[0] == pair[1]):
            if was == count:
                self.require_several(node, (now, 1))
                return now
        raise self.error(node, f"counts {count:g} elements, which are those of no map that it belongs to")

    def maps_with(self, node: ir.Node, forward: bool) -> list[tuple[int, int]]:
        """List how many elements a channel has, before and now, of the maps that are read with a node's results, or
        that its operands were made of."""
        found, pending, seen = [], [node], {node}
        near: list[ir.Node | None]
        while pending:
            one = pending.pop()
            if forward:
                near = [use.node for value in one.outputs for use in value.uses()]
            else:
                near = [value.producer() for value in one.inputs if value is not None]
            for other in near:
                if other is None or other in seen:
                    continue
                seen.add(other)
                maps = [v for v in (*other.inputs, *other.outputs) if v is not None and len(static_shape(v) or ()) > 1]
                for value in maps:
                    was, now = self.shape_before(value) or (), static_shape(value) or ()
                    found.append((math.prod(was) // was[1], math.prod(now) // now[1]))
                if not maps:
                    pending.append(other)
        return found
