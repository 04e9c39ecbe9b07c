"""The training iteration of a forward graph: its layers, then their backward passes in reverse ([Tsai21], table 3.1).

    y = f(x, w)     ->     dx, dw = f'(x, dy, w)

Shapes are all that is needed, so networks without weights will do. What a backward layer reads besides dy is in
`saved_by`; a view (Flatten, Reshape) is no layer. A loss is added where the graph has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
import onnx_graphsurgeon as gs

from bnfuse.core.errors import at_node
from bnfuse.estimating import operations
from bnfuse.estimating.assumptions import check_choice, check_times
from bnfuse.estimating.order import Order, arranged
from bnfuse.estimating.workload import Access, Kind, Layer, Phase, Tensor, Workload, is_stored_image
from bnfuse.models.count import parameters_of
from bnfuse.opset.traffic import RESHAPES

FLOAT = 4

# What the backward layer reads: "x" the operands, "y" the output, "m" the second output (a mask). Default: "x".
SAVED = {
    **dict.fromkeys(("Relu", "Clip", "Sigmoid", "Tanh", "Softmax", "LogSoftmax"), "y"),
    **dict.fromkeys(("Add", "Sub", "Sum", "Concat", "Split", "Slice", "Transpose", "Pad", "Expand"), ""),
    **dict.fromkeys(("AveragePool", "GlobalAveragePool"), ""),
    "Dropout": "m",
    "MaxPool": "xy",
    "SoftmaxCrossEntropyLoss": "m",
}
PASSED_ON = frozenset({"Add", "Sum"})  # their operands' gradients are their own gradient
PARTS = frozenset({"Gather", "Slice"})  # they touch as much of their operand as their output has


@dataclasses.dataclass(frozen=True)
class Passes:
    """What [Tsai21] leaves open about the layers of a pass. What each does to its figures: compare assumptions.py."""

    in_place: bool = False
    """ReLU and its kin write their output over their input, and their gradient over the incoming one.

    The paper's traffic falls where three of the largest map fit (X, dY and dX: 294 MB in ResNet-50, 441 MB in
    MobileNetV2). In place, little changes, for BN needs three anyway: MobileNetV2's time falls by 70.6, not 71.1 %.
    """

    sums: Literal["consumer", "layer"] = "layer"
    """Who adds the gradients of a value with several readers: the backward layer of each further reader, which reads
    the sum so far and writes it anew, or a layer of its own (type Add).

    The reader's: ResNet-50's type-II share 41.8 %, its time falls by 45.9 %.
    """

    step_sums: bool = True
    """The same of weights that time steps share: each further step writes a gradient, which a layer of its own
    adds to the sum; otherwise the step's backward layer reads the sum so far and writes it anew.

    The step's backward layer: GNMT's time falls by 73.8 instead of 79.1 %.
    """

    norm_sweeps: int = 1
    """How many times BN passes over its maps, forward (X) and backward (X and dY). It must do so twice, for its sums
    and for its results, but in [Tsai21] no layer fetches anything again. It matters where maps stream.

    Twice: ResNet-50's type-II share 50.9 %, its time falls by 53.7 %; MobileNetV2's by 75.5 %.
    """

    adds_copy: bool = False
    """The backward layer of an Add writes a gradient for each operand, as table 3.1 has it for every layer; otherwise
    it hands on the one that it gets, and is no layer at all.

    Written: ResNet-50's type-II share 48.7 %, its time falls by 51.5 %, the speed-up is 20.5 %.
    """

    def __post_init__(self) -> None:
        check_choice("sums", self.sums, ("consumer", "layer"))
        check_times("norm_sweeps", self.norm_sweeps)


@dataclasses.dataclass
class Gradient:
    """The gradient of a value, as far as it is summed."""

    tensor: int
    owned: bool = True  # nobody else reads it: later contributions may be added in place


def forward_workload(graph: gs.Graph, *, order: Order = "file", passes: Passes | None = None) -> Workload:
    """Give the layers of one training iteration of `graph`, whose tensors have static shapes.

    A node's attribute `recurrence` numbers the time step that it belongs to.
    """
    tape = Tape(passes or Passes())
    nodes = []
    for node in graph.nodes:
        if node.op in RESHAPES:
            tape.view(node)
        else:
            tape.forward(node)
            nodes.append(node)
    node_of = {id(layer): node for layer, node in zip(tape.layers, nodes, strict=True)}
    forward = arranged(tape.layers, order)
    tape.layers = list(forward)
    if not any(is_loss(node) for node in nodes):
        tape.add_loss(graph.outputs[0])
    for layer in reversed(forward):
        tape.backward(node_of[id(layer)])
    batch = next((value.shape[0] for value in graph.inputs if value.shape), 1)
    return Workload(graph.name, batch, tuple(tape.tensors), tuple(tape.layers))


class Tape:
    """Layers and tensors as they come; gradients by the tensor that they belong to."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self.tensors: list[Tensor] = []
        self.layers: list[Layer] = []
        self.by_name: dict[str, int] = {}  # value of the graph -> its tensor; several values may share one
        self.trained: set[int] = set()  # tensors that need a gradient
        self.gradients: dict[int, Gradient] = {}

    def view(self, node: gs.Node) -> None:
        """Let a node that only renames give its operand's tensor."""
        self.by_name[node.outputs[0].name] = self.tensor_of(node.inputs[0], node)

    def forward(self, node: gs.Node) -> None:
        """Add a node's layer of the forward pass."""
        reads = [self.tensor_of(value, node) for value in operands(node)]
        writes = self.outputs_of(node)
        if any(tensor in self.trained for tensor in reads):
            self.trained.update(writes)
        part = size(node.outputs[0], node) if node.op in PARTS else None
        accesses = [self.access(tensor) for tensor in reads]
        accesses[:1] = [self.access(tensor, part, self.sweeps(node)) for tensor in reads[:1]]
        self.append(node, "forward", operations.forward_flops(node), accesses, [self.access(t) for t in writes])

    def outputs_of(self, node: gs.Node) -> list[int]:
        """Make the tensors of a node's results. Gives their indices."""
        first, *more = node.outputs
        if self.works_in_place(node):
            self.by_name[first.name] = self.tensor_of(node.inputs[0], node)
        else:
            self.by_name[first.name] = self.new(
                first.name, size(first, node), "map", kept=is_loss(node), shape=first.shape
            )
        for value in more:
            kind: Kind = "vector" if operations.layer_type(node) in ("BatchNorm", "LayerNorm") else "map"
            running = node.op == "BatchNormalization"
            self.by_name[value.name] = self.new(value.name, size(value, node), kind, kept=running, shape=value.shape)
        found = [self.by_name[value.name] for value in node.outputs]
        if node.op == "BatchNormalization":  # the batch's mean and 1/sigma, for the backward layer
            found.append(self.new(statistics_of(node), 2 * size(node.inputs[1], node), "vector"))
            self.by_name[statistics_of(node)] = found[-1]
        return found

    def works_in_place(self, node: gs.Node) -> bool:
        """Tell whether an activation may write over its input: it alone reads it, and the input's producer does not
        read it backward."""
        if not self.passes.in_place or operations.layer_type(node) != "Activation":
            return False
        x = node.inputs[0]
        return bool(x.inputs) and len(x.outputs) == 1 and "y" not in SAVED.get(x.inputs[0].op, "x")

    def add_loss(self, logits: gs.Tensor) -> None:
        """Add softmax and cross entropy of `logits`: the probabilities are kept for the gradient."""
        tensor, count = self.by_name[logits.name], operations.elements(logits)
        labels = self.new("labels", 8 * count // logits.shape[-1], "data", given=True)
        probabilities = self.new("loss/probabilities", FLOAT * count, "map")
        loss = self.new("loss", FLOAT, "vector", kept=True)
        gradient = self.new(gradient_name(self.tensors[tensor].name), FLOAT * count, "map_gradient")
        forward, backward = operations.ELEMENTWISE["Loss"]
        self.gradients[tensor] = Gradient(gradient)
        reads, writes = (tensor, labels), (probabilities, loss)
        self.layers.append(self.layer("loss", "Loss", "forward", forward * count, reads, writes))
        reads = (probabilities, labels)
        self.layers.append(self.layer("loss/backward", "Loss", "backward", backward * count, reads, (gradient,)))

    def backward(self, node: gs.Node) -> None:
        """Add the layers of a node's gradients."""
        found = [self.gradients.pop(self.by_name[value.name], None) for value in node.outputs]
        incoming = [gradient for gradient in found if gradient is not None]
        if is_loss(node):  # its labels are all that comes in
            labels = [self.tensor_of(value, node) for value in node.inputs[1:]]
            incoming = [Gradient(tensor, owned=False) for tensor in labels]
        wanted = [value for value in operands(node) if self.tensor_of(value, node) in self.trained]
        if not incoming or not wanted:
            return
        passed = [value for value in wanted if self.passes_on(node, value)]
        reads = [self.access(gradient.tensor, None, self.sweeps(node)) for gradient in incoming]
        reads += self.saved_by(node)
        writes: list[Access] = []
        summed = [(value, incoming[0].tensor) for value in passed]
        for value in wanted:
            if value not in passed:
                summed += self.contribute(node, value, incoming[0], reads, writes)
        if writes:
            products = sum(len(value.shape) > 1 for value in wanted)
            self.append(node, "backward", operations.backward_flops(node, products), reads, writes)
        for value, gradient in summed:
            owned = value not in passed or (incoming[0].owned and len(passed) == 1)
            self.hand_on(node, value, Gradient(gradient, owned))

    def passes_on(self, node: gs.Node, value: gs.Tensor) -> bool:
        """Tell whether an operand's gradient is the incoming one itself; a parameter's is always a tensor of its
        own."""
        whole = node.op in PASSED_ON and list(value.shape) == list(node.outputs[0].shape)
        return whole and not isinstance(value, gs.Constant) and not self.passes.adds_copy

    def contribute(
        self, node: gs.Node, value: gs.Tensor, dy: Gradient, reads: list[Access], writes: list[Access]
    ) -> list[tuple[gs.Tensor, int]]:
        """Add the gradient of one operand to a backward layer's `reads` and `writes`.

        Returns what a layer of its own must add to the gradient so far.
        """
        tensor = self.tensor_of(value, node)
        before = self.gradients.get(tensor)
        weight = isinstance(value, gs.Constant)
        part = size(node.outputs[0], node) if node.op in PARTS else None
        apart = self.passes.step_sums if weight else self.passes.sums == "layer"
        if before is not None and not part and apart:
            own = self.new_gradient(value, node)
            writes.append(self.access(own))
            return [(value, own)]
        if before is None:
            over = self.works_in_place(node) and dy.owned
            self.gradients[tensor] = Gradient(dy.tensor if over else self.new_gradient(value, node))
        else:
            if not part:  # parts are apart
                reads.append(self.access(before.tensor))
            if not before.owned:
                self.gradients[tensor] = Gradient(self.new_gradient(value, node))
        writes.append(self.access(self.gradients[tensor].tensor, part))
        return []

    def hand_on(self, node: gs.Node, value: gs.Tensor, gradient: Gradient) -> None:
        """Hand a gradient that exists on to an operand; where the operand has one already, a layer adds the two."""
        tensor = self.tensor_of(value, node)
        before = self.gradients.get(tensor)
        if before is None:
            self.gradients[tensor] = gradient
            return
        name, flops = f"{node.name}/sum/{self.tensors[tensor].name}", operations.elements(value)
        total = before.tensor if before.owned else self.new_gradient(value, node, name)
        self.gradients[tensor] = Gradient(total)
        reads = (before.tensor, gradient.tensor)
        self.layers.append(self.layer(name, "Add", "backward", flops, reads, (total,), node))

    def saved_by(self, node: gs.Node) -> list[Access]:
        """Tell what the backward layer reads besides the gradient."""
        saved = SAVED.get(node.op, "x")
        if "m" in saved and len(node.outputs) < 2:
            saved = "x"
        found = [self.tensor_of(value, node) for value in operands(node)] if "x" in saved else []
        if "y" in saved:
            found.append(self.by_name[node.outputs[0].name])
        if "m" in saved:
            found.append(self.by_name[node.outputs[1].name])
        if node.op == "BatchNormalization":
            x, scale = found[:2]
            others = [self.access(scale), self.access(self.by_name[statistics_of(node)])]
            return [self.access(x, None, self.sweeps(node)), *others]
        if node.op in ("Conv", "Gemm"):  # not the bias
            found = found[:2]
        if node.op == "Gather":  # not the table
            found = found[1:]
        return [self.access(tensor) for tensor in found]

    def tensor_of(self, value: gs.Tensor, node: gs.Node) -> int:
        """Give the tensor of a value; constants and inputs of the graph become tensors when they are first read."""
        if value.name not in self.by_name:
            constant = isinstance(value, gs.Constant)
            kind: Kind = ("weight" if len(value.shape) > 1 else "vector") if constant else "data"
            self.by_name[value.name] = self.new(value.name, size(value, node), kind, given=True)
            if any(value is parameter for parameter in parameters_of(node)):
                self.trained.add(self.by_name[value.name])
        return self.by_name[value.name]

    def new(
        self,
        name: str,
        count: int,
        kind: Kind,
        *,
        given: bool = False,
        kept: bool = False,
        shape: Sequence[int] = (),
    ) -> int:
        """Add a tensor. Gives its index."""
        self.tensors.append(Tensor(name, count, kind, given, kept, is_stored_image(kind, shape)))
        return len(self.tensors) - 1

    def new_gradient(self, value: gs.Tensor, node: gs.Node, giver: str = "") -> int:
        """Add a tensor for the gradient of a value. Gives its index."""
        tensor = self.tensor_of(value, node)
        name = gradient_name(self.tensors[tensor].name)
        further = tensor in self.gradients  # of one value, by who gives them
        if further:
            name = f"{name}/{giver or node.name}"
        weight = isinstance(value, gs.Constant)
        kind: Kind = "map_gradient"
        if weight:
            kind = "weight_gradient" if len(value.shape) > 1 else "vector"
        return self.new(name, size(value, node), kind, kept=weight and not further, shape=value.shape)

    def access(self, tensor: int, part: int | None = None, sweeps: int = 1) -> Access:
        """Make an access to a tensor, or to so many bytes of it."""
        whole = self.tensors[tensor].bytes
        return Access(tensor, whole if part is None else min(part, whole), sweeps)

    def sweeps(self, node: gs.Node) -> int:
        """Tell how many times a node passes over its maps."""
        return self.passes.norm_sweeps if node.op == "BatchNormalization" else 1

    def append(self, node: gs.Node, phase: Phase, flops: int, reads: list[Access], writes: list[Access]) -> None:
        """Add a layer."""
        name = node.name if phase == "forward" else f"{node.name}/backward"
        kind, step = operations.layer_type(node), node.attrs.get("recurrence")
        self.layers.append(Layer(name, kind, phase, flops, tuple(reads), tuple(writes), node.name, step))

    def layer(
        self,
        name: str,
        kind: str,
        phase: Phase,
        flops: int,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        node: gs.Node | None = None,
    ) -> Layer:
        """Give a layer over whole tensors that belongs to a node, or to the loss that the graph lacks."""
        read, written = (tuple(self.access(tensor) for tensor in tensors) for tensors in (reads, writes))
        part, step = ("loss", None) if node is None else (node.name, node.attrs.get("recurrence"))
        return Layer(name, kind, phase, flops, read, written, part, step)


def operands(node: gs.Node) -> list[gs.Tensor]:
    """List the inputs that are read as arrays, each once: not shapes, axes, limits and ratios."""
    found: dict[int, gs.Tensor] = {}
    for value in node.inputs:
        parameter = isinstance(value, gs.Constant)
        if value.name and not (parameter and (not value.shape or np.dtype(value.dtype).kind != "f")):
            found.setdefault(id(value), value)
    return list(found.values())


def size(value: gs.Tensor, node: gs.Node) -> int:
    """Count the bytes of a value."""
    if value.dtype is None or value.shape is None or not all(isinstance(side, int) for side in value.shape):
        raise at_node(
            node.name, node.op, f"has '{value.name}' of unknown shape. Build it with a fixed batch and image."
        )
    return operations.elements(value) * np.dtype(value.dtype).itemsize


def is_loss(node: gs.Node) -> bool:
    """Tell whether a node is the loss."""
    return operations.layer_type(node) == "Loss"


def statistics_of(norm: gs.Node) -> str:
    """Name the statistics of a BatchNorm."""
    return f"{norm.name}/statistics"


def gradient_name(value: str) -> str:
    """Name the gradient of a value."""
    return f"{value}/gradient"
