"""The gradient graph around a prepared forward graph, and the training file made of both (docs/training-file.md).

    data, labels, parameters, running statistics  ->  loss, logits, <parameter>_grad, new running statistics

The gradients are of bnfuse.autodiff. Parameters are inputs with an initializer of the same name, put there at the end:
values are large.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from bnfuse.autodiff import differentiate
from bnfuse.graph.protos import attributes, fresh, set_attribute, typed_values
from bnfuse.graph.signature import METADATA_KEY, GraphSignature
from bnfuse.opset.functions import add_functions
from bnfuse.opset.spec import DOMAIN, VERSION
from bnfuse.opset.training_ops import BATCH_NORM_DEFAULTS

from .forward import infer_shapes
from .graph import Forward
from .losses import LOSSES, Formula, Term
from .traps import WITHOUT_LOSS

NOTES_KEY = "bnfuse.notes"


@dataclasses.dataclass(frozen=True)
class Variables:
    """Initializers of the forward graph by what becomes of them."""

    trainable: tuple[str, ...]
    frozen: tuple[str, ...]
    running: dict[str, str]  # running statistic -> the BN output that replaces it

    @property
    def all(self) -> tuple[str, ...]:
        """All of them, in the order of the training file's inputs."""
        return (*self.trainable, *self.frozen, *self.running)


@dataclasses.dataclass(frozen=True)
class Ends:
    """What the graph ends in: a loss with its labels, or else inputs that hold the gradients of outputs."""

    outputs: tuple[str, ...]  # of the network, that the loss reads, or whose gradients come in; scores of classes first
    loss: str | None = None
    labels: tuple[str, ...] = ()
    gradients: dict[str, str] = dataclasses.field(default_factory=dict)  # output -> the input with its gradient


def add_loss(forward: Forward, terms: Sequence[Term], outputs: Sequence[str]) -> Ends:
    """Append the weighted sum of the terms, each over its output, and an input with the labels of each.

    The loss becomes the first graph output. Without terms each output gets an input of its own shape, which holds the
    gradient of a loss that somebody else computes.
    """
    taken, nodes = forward.names(), {node.name for node in forward.graph.node}

    def unused(base: str) -> str:
        """Name a tensor, and the node that gives it."""
        name = fresh(base, taken | nodes)
        taken.add(name)
        return name

    shapes = forward.shapes()
    if not terms:
        gradients = {name: unused(f"{name}_grad") for name in outputs}
        for name, gradient in gradients.items():
            forward.graph.input.append(helper.make_tensor_value_info(gradient, TensorProto.FLOAT, shapes[name]))
        return Ends(tuple(outputs), gradients=gradients)
    parts, labels = [], []
    loss, node_name = fresh("loss", taken), fresh("loss", nodes)  # of tensors and of nodes, which are other names
    taken.add(loss)
    for term, output in zip(terms, outputs, strict=True):
        kind, shape = LOSSES[term.kind], shapes[output] or []
        if kind.classes and len(shape) < 2:
            what = f"output '{output}' has shape {shape}: {term.kind} needs [batch, classes, ...]. {WITHOUT_LOSS}"
            raise forward.error(what)
        labels.append(unused("labels" if len(terms) == 1 else f"labels_{output}"))
        forward.graph.input.append(helper.make_tensor_value_info(labels[-1], *kind.label_type(shape)))
        formula = Formula(loss if len(terms) == 1 else f"{loss}/{output}", unused, shape)
        value = kind.formula(formula, output, labels[-1], term.options)
        parts.append(value if term.weight == 1.0 else formula("Mul", value, formula.constant(term.weight)))
        forward.graph.node.extend(formula.nodes)
        forward.graph.initializer.extend(formula.constants)
    if len(parts) > 1:
        forward.graph.node.append(helper.make_node("Sum", parts, [loss], name=node_name))
    else:  # the node that gives it is the loss
        last = next(node for node in forward.graph.node if parts[0] in node.output)
        last.name, last.output[list(last.output).index(parts[0])] = node_name, loss
    forward.graph.output.insert(0, helper.make_tensor_value_info(loss, TensorProto.FLOAT, []))
    infer_shapes(forward)
    scores = [output for term, output in zip(terms, outputs, strict=True) if LOSSES[term.kind].classes]
    return Ends(tuple(dict.fromkeys((*scores, *outputs))), loss, tuple(labels))


def differentiated_inputs(forward: Forward, wanted: Sequence[str]) -> tuple[str, ...]:
    """Give the data inputs whose gradients are wanted, in the order of the graph."""
    there = [value.name for value in forward.graph.input]
    for name in wanted:
        if name not in there:
            raise forward.error(f"has no input '{name}' to give the gradient of: there are {', '.join(there)}")
    return tuple(name for name in there if name in wanted)


def gradient_graph(
    forward: Forward, variables: Variables, ends: Ends, *, unbiased: bool = False, data: Sequence[str] = ()
) -> onnx.ModelProto:
    """Give the training graph without values: variables are plain inputs, outputs in the file's order.

    Running variances are moved by the unbiased variance of the batch where `unbiased` says so. `data` are inputs whose
    gradients are outputs too, behind those of the parameters.
    """
    bare = without_values(forward.model, variables)
    own_batch_norms(bare, unbiased=unbiased)
    for output in variables.running.values():
        bare.graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, None))
    model = ir.from_proto(bare)
    inputs = {value.name: value for value in model.graph.inputs}
    seeds = {ends.loss: None} if ends.loss else {output: inputs[name] for output, name in ends.gradients.items()}
    wanted = (*variables.trainable, *data)
    gradients = differentiate(model, wanted, seeds, file=forward.file)
    model.graph.outputs.extend(gradients[name] for name in wanted)
    add_functions(model)
    built = ir.to_proto(model)
    prune(built.graph)
    return built


def own_batch_norms(model: onnx.ModelProto, *, unbiased: bool) -> None:
    """Make every training BatchNormalization an `ai.bnfuse::BatchNorm`, which also gives mean and inverse deviation."""
    taken = {name for node in model.graph.node for name in (*node.input, *node.output)}
    types = {value.name: value for value in typed_values(model.graph)}
    for node in model.graph.node:
        given = attributes(node)
        if node.op_type != "BatchNormalization" or not given.get("training_mode"):
            continue
        scale = types[node.input[1]].type
        for what in ("batch_mean", "inv_std"):
            name = fresh(f"{node.name}/{what}", taken)
            taken.add(name)
            node.output.append(name)
            model.graph.value_info.add(name=name).type.CopyFrom(scale)
        node.op_type, node.domain = "BatchNorm", DOMAIN
        del node.attribute[:]
        for name, default in BATCH_NORM_DEFAULTS.items():
            set_attribute(node, name, float(given.get(name, default)))
        if unbiased:
            set_attribute(node, "unbiased", 1)
    if any(node.domain == DOMAIN for node in model.graph.node):
        model.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))


def prune(graph: onnx.GraphProto) -> None:
    """Remove nodes and constants that no output needs, and the types of what is not there."""
    needed = {value.name for value in graph.output}
    kept = []
    for node in reversed(list(graph.node)):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
    del graph.node[:]
    graph.node.extend(reversed(kept))
    typed = {value.name for value in graph.output}
    present = {name for node in graph.node for name in node.output} - typed  # an output has its type already
    values = [value for value in graph.value_info if value.name in present]
    tensors = [tensor for tensor in graph.initializer if tensor.name in needed]
    del graph.value_info[:], graph.initializer[:]
    graph.value_info.extend(values)
    graph.initializer.extend(tensors)


def without_values(model: onnx.ModelProto, variables: Variables) -> onnx.ModelProto:
    """Copy the model with variables as graph inputs, not initializers."""
    names = set(variables.all)
    values = {tensor.name: tensor for tensor in model.graph.initializer}
    inputs = [helper.make_tensor_value_info(n, values[n].data_type, values[n].dims) for n in variables.all]
    graph = helper.make_graph(
        model.graph.node,
        model.graph.name or "forward",
        [*model.graph.input, *inputs],
        model.graph.output,
        [tensor for tensor in model.graph.initializer if tensor.name not in names],
        value_info=model.graph.value_info,
    )
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def finish(
    built: onnx.ModelProto, forward: Forward, variables: Variables, ends: Ends, data: Sequence[str] = ()
) -> onnx.ModelProto:
    """Give the training file its names, shapes, values and metadata."""
    order_inputs(built, forward, variables)
    names = set(variables.all)
    built.graph.initializer.extend(tensor for tensor in forward.graph.initializer if tensor.name in names)
    prune_opsets(built)
    built.producer_name, built.producer_version = "bnfuse", ""
    built.graph.name = forward.graph.name or "training"
    given = {*ends.labels, *ends.gradients.values()}
    signature = GraphSignature(
        data=tuple(value.name for value in forward.graph.input if value.name not in given),
        labels=ends.labels,
        trainable=variables.trainable,
        frozen=variables.frozen,
        running=dict(variables.running),
        gradients={name: f"{name}_grad" for name in variables.trainable},
        loss=ends.loss,
        logits=ends.outputs[0] if ends.outputs else None,
        output_gradients=dict(ends.gradients),
        input_gradients={name: f"{name}_grad" for name in data},
    )
    set_metadata(built, METADATA_KEY, signature.to_json())
    if forward.notes:
        set_metadata(built, NOTES_KEY, json.dumps(forward.notes))
    return built


def order_inputs(built: onnx.ModelProto, forward: Forward, variables: Variables) -> None:
    """Order the inputs: data, labels, trainable, frozen, running. A variable that the graph reads nowhere is still an
    input."""
    inputs = {value.name: value for value in built.graph.input}
    order = [*(value.name for value in forward.graph.input), *variables.all]
    del built.graph.input[:]
    built.graph.input.extend(inputs[name] for name in order)


def prune_opsets(model: onnx.ModelProto) -> None:
    """Take out the imports of domains that no node is of."""
    used = {node.domain for node in model.graph.node} | {""}
    kept = [opset for opset in model.opset_import if opset.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(kept)


def set_metadata(model: onnx.ModelProto, key: str, value: str) -> None:
    """Write a metadata entry, or replace the one of that key."""
    for entry in model.metadata_props:
        if entry.key == key:
            entry.value = value
            return
    model.metadata_props.add(key=key, value=value)
