"""A forward model while it is repaired: its graph, names and neighbours, and what is said of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import onnx
from onnx import numpy_helper

from bnfuse.core.errors import BnfuseError, at_node
from bnfuse.graph.drawing import FED, LIKE
from bnfuse.graph.protos import fresh, shapes_of

OF_TYPES = {"CastLike": 1, "Shape": 0, "Size": 0}  # how many operands they read more of than type and shape


@dataclasses.dataclass
class Forward:
    """A forward model on its way to a training graph, with what was repaired in it."""

    model: onnx.ModelProto
    file: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    numbers: frozenset[str] = frozenset()  # initializers of shape [] that the exporter says to be parameters
    signed: frozenset[str] = frozenset()  # what the exporter lists by the names of the module: parameters, buffers
    lost: frozenset[str] = frozenset()  # parameters of the exported module that the file does not have by their names
    variables: frozenset[str] = frozenset()  # once they are chosen; they stay, whether anything reads them or not

    @property
    def graph(self) -> onnx.GraphProto:
        """The model's graph."""
        return self.model.graph

    def note(self, text: str) -> None:
        """Say what was repaired."""
        self.notes.append(text)

    def warn(self, text: str) -> None:
        """Say what is likely to be wrong with the file, where a note says what was repaired."""
        self.warnings.append(text)

    def error(self, what: str) -> BnfuseError:
        """Make an error about the file."""
        return BnfuseError(f"{self.file}: {what}" if self.file else what)

    def error_at(self, node: onnx.NodeProto, what: str) -> BnfuseError:
        """Make an error about one node of the file."""
        return at_node(node.name or (node.output[0] if node.output else ""), node.op_type, what, file=self.file)

    @property
    def opset(self) -> int:
        """Of the standard domain; 1 where the file names none."""
        return next((o.version for o in self.model.opset_import if o.domain in ("", "ai.onnx")), 1)

    def initializers(self) -> dict[str, onnx.TensorProto]:
        """Map names to initializers."""
        return {tensor.name: tensor for tensor in self.graph.initializer}

    def producers(self) -> dict[str, onnx.NodeProto]:
        """Map the names of results to the nodes that give them."""
        return {name: node for node in self.graph.node for name in node.output if name}

    def consumers(self) -> dict[str, list[onnx.NodeProto]]:
        """Map each tensor to its readers, a node once for each time it reads it."""
        readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.graph.node:
            for name in node.input:
                readers.setdefault(name, []).append(node)
        return readers

    def output_names(self) -> set[str]:
        """List the names of the graph's outputs."""
        return {value.name for value in self.graph.output}

    def random_names(self) -> set[str]:
        """List the tensors that follow from what is drawn at random and from constants alone."""
        known: set[str] = {*self.initializers(), ""}
        found: set[str] = set()
        for node in self.graph.node:
            drawn = node.op_type in LIKE or all(name in known or name in found for name in node.input)
            if drawn and (node.op_type in FED or found.intersection(node.input)):
                found.update(node.output)
        return found

    def from_data(self) -> set[str]:
        """List the tensors that depend on an input of the graph, or on what is drawn at random."""
        found = {value.name for value in self.graph.input}
        for node in self.graph.node:
            read = node.input[: OF_TYPES.get(node.op_type)]
            if node.op_type in FED or found.intersection(read):
                found.update(filter(None, node.output))
        return found

    def shapes(self) -> dict[str, list[int] | None]:
        """Map names to static shapes; None where a dimension is unknown."""
        return shapes_of(self.graph)

    def names(self) -> set[str]:
        """List every tensor name in use."""
        graph = self.graph
        taken = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
        return taken | {name for node in graph.node for name in (*node.input, *node.output)}

    def fresh(self, name: str) -> str:
        """Give `name`, or with a number where it is taken."""
        return fresh(name, self.names())

    def remove_nodes(self, nodes: Iterable[onnx.NodeProto]) -> None:
        """Take these nodes out."""
        gone = {id(node) for node in nodes}
        kept = [node for node in self.graph.node if id(node) not in gone]
        del self.graph.node[:]
        self.graph.node.extend(kept)

    def remove_dead_nodes(self) -> None:
        """Remove nodes that no output depends on: they would ask for gradients that nobody needs."""
        needed, dead = self.output_names(), []
        for node in reversed(list(self.graph.node)):
            if needed.intersection(node.output):
                needed.update(node.input)
            else:
                dead.append(node)
        self.remove_nodes(dead)
        self.remove_unread_initializers()

    def remove_unread_initializers(self) -> None:
        """Take out the initializers that nothing reads and that are no variables."""
        read = self.variables | {name for node in self.graph.node for name in node.input} | self.output_names()
        for index in reversed(range(len(self.graph.initializer))):  # in place: weights are large
            if self.graph.initializer[index].name not in read:
                del self.graph.initializer[index]

    def set_initializer(self, name: str, values: np.ndarray) -> None:
        """Add the initializer, or replace the one of that name."""
        tensor = numpy_helper.from_array(values, name)
        for existing in self.graph.initializer:
            if existing.name == name:
                existing.CopyFrom(tensor)
                return
        self.graph.initializer.append(tensor)
