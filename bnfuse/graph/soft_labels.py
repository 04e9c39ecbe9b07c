"""A training graph whose labels are classes, with probabilities of the classes as labels instead.

    labels int64 [N]                                       labels float32 [N, C]
    loss, log_prob = SoftmaxCrossEntropyLoss(x, labels)    log_prob = LogSoftmax(x)
                                                    ->     loss = -mean(sum(labels*log_prob over C))
    dx = SoftmaxCrossEntropyGrad(share, log_prob, labels)  dx = share*(exp(log_prob)*sum(labels over C) - labels)

A row of labels need not sum up to 1: label smoothing, the weights of classes, mixup and cutmix are all numbers in that
row, whoever makes the batch. The graph may be of any level: the loss and its gradient are in no fusion.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.names import Names
from bnfuse.graph.training_graph import TrainingGraph, put_in_place
from bnfuse.graph.values import static_shape

KEY, KIND = "bnfuse.soft_labels", "cross-entropy"  # metadata of a model that was made here
LOSS, GRADIENT = "SoftmaxCrossEntropyLoss", "SoftmaxCrossEntropyGrad"
SIZES = ("Shape", "Size")
REMEDY = "label smoothing, class weights, mixup and cutmix need a plain one: build the graph with --loss cross-entropy"


def with_soft_labels(graph: TrainingGraph) -> TrainingGraph:
    """Copy the graph, with float32 [N, classes] in the place of integer labels [N], under the same name.

    Raises BnfuseError where the labels are not those of a mean cross-entropy over classes, one for each image.
    """
    model = graph.model.clone()
    names = Names(model.graph)
    for name in graph.signature.labels:
        soften(model.graph, next(value for value in model.graph.inputs if value.name == name), names, graph.name)
    model.graph.sort()
    model.metadata_props[KEY] = KIND
    return TrainingGraph(model, graph.signature, graph.name)


def soften(graph: ir.Graph, labels: ir.Value, names: Names, file: str) -> None:
    """Put probabilities in the place of one input with labels."""
    shape, losses = static_shape(labels), [n for n, i in labels.uses() if n.op_type == LOSS and i == 1]
    scores = losses[0].inputs[0] if len(losses) == 1 else None
    of_scores = static_shape(scores) if scores is not None else None
    if shape is None or len(shape) != 1 or of_scores is None or len(of_scores) != 2:
        raise BnfuseError(f"{file}: '{labels.name}' is not a class for each image, read by one cross-entropy; {REMEDY}")
    loss = losses[0]
    others = {
        node.op_type
        for node, index in labels.uses()
        if node is not loss and node.op_type not in SIZES and (node.op_type, index) != (GRADIENT, 2)
    }
    given = {name: attribute.value for name, attribute in loss.attributes.items()}
    if len(loss.inputs) > 2 or "ignore_index" in given or given.get("reduction", "mean") not in ("mean", b"mean"):
        raise BnfuseError(
            f"{file}: its cross-entropy '{loss.name}' has weights of classes, a label to ignore or a reduction of its "
            f"own; {REMEDY}, without options"
        )
    if others:
        readers = ", ".join(sorted(others))
        raise BnfuseError(f"{file}: its labels '{labels.name}' are read by {readers} too; {REMEDY}")
    more = {node.op_type for result in loss.outputs[1:] for node, _ in result.uses() if node.op_type != GRADIENT}
    if more:
        raise BnfuseError(
            f"{file}: its loss has more than the cross-entropy '{loss.name}', such as label smoothing; {REMEDY}, "
            "without options"
        )
    made = Softened(graph, loss, labels, names)
    labels.type, labels.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(of_scores)  # a clone shares its types
    rows = made.loss(of_scores)
    for node, index in list(labels.uses()):
        if node.op_type in SIZES:
            node.replace_input_with(index, rows)
        elif node.op_type == GRADIENT:
            made.gradient(node, of_scores)
    graph.remove(loss, safe=True)


class Softened:
    """One loss under construction: nodes before the one that they replace."""

    def __init__(self, graph: ir.Graph, node: ir.Node, labels: ir.Value, names: Names) -> None:
        self.graph, self.node, self.labels, self.names = graph, node, labels, names
        self.place = node

    def loss(self, shape: tuple[int, ...]) -> ir.Value:
        """Write the loss, and hand its results on. Gives the sum of each row [N]."""
        scores = self.node.inputs[0]
        assert scores is not None
        log_prob = self.op("LogSoftmax", [scores], shape, axis=1)
        product = self.op("Mul", [self.labels, log_prob], shape)
        rows = self.op("ReduceSum", [product, self.ints(1)], shape[:1], keepdims=0)
        loss = self.op("Neg", [self.op("ReduceMean", [rows], (), keepdims=0)], ())
        for old, new in zip(self.node.outputs, (loss, log_prob), strict=False):
            put_in_place(old, new)
        return rows

    def gradient(self, node: ir.Node, shape: tuple[int, ...]) -> None:
        """Write the gradient at the scores in the place of SoftmaxCrossEntropyGrad."""
        shares, log_prob, _ = node.inputs
        assert shares is not None and log_prob is not None
        self.place = node
        column = (shape[0], 1)
        mass = self.op("ReduceSum", [self.labels, self.ints(1)], column, keepdims=1)
        expected = self.op("Mul", [self.op("Exp", [log_prob], shape), mass], shape)
        difference = self.op("Sub", [expected, self.labels], shape)
        found = self.op("Mul", [difference, self.op("Unsqueeze", [shares, self.ints(1)], column)], shape)
        put_in_place(node.outputs[0], found)
        self.graph.remove(node, safe=True)

    def op(self, kind: str, operands: list[ir.Value], shape: tuple[int, ...], **given: int) -> ir.Value:
        """Add a node before the one that is replaced; gives its result, float32 of this shape."""
        name = self.names.fresh(f"{self.place.name or 'loss'}/{kind.lower()}")
        node = ir.node(kind, operands, given, name=name)
        result = node.outputs[0]
        result.name, result.dtype, result.shape = self.names.fresh(f"{name}_result"), ir.DataType.FLOAT, ir.Shape(shape)
        self.graph.insert_before(self.place, node)
        return result

    def ints(self, *values: int) -> ir.Value:
        """Add a constant int64 vector."""
        name = self.names.fresh("soft_labels/axes")
        array = np.array(values, np.int64)
        value = ir.Value(
            name=name,
            shape=ir.Shape(array.shape),
            type=ir.TensorType(ir.DataType.INT64),
            const_value=ir.tensor(array, name=name),
        )
        self.graph.initializers[name] = value
        return value
