"""The gradient graph around a prepared forward graph, and the training file made of both (docs/training-file.md).

    data, labels, parameters, running statistics  ->  loss, logits, <parameter>_grad, new running statistics

The gradients are onnxruntime-training's, through its C interface. It wants the parameters as graph inputs without
values; the values come back afterwards as initializers of the same name.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

import numpy as np
import onnx
from onnx import TensorProto, helper

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.protos import attributes, fresh, set_attribute
from bnfuse.graph.signature import METADATA_KEY, GraphSignature
from bnfuse.ort.process import OrtError, borrowed

from .activations import put_stand_ins, take_stand_ins
from .graph import Forward
from .traps import WITHOUT_LOSS, builder_error

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
class Loss:
    """Names of what `add_loss` added."""

    loss: str
    labels: str
    logits: str


def add_loss(forward: Forward, kind: str, logits: str) -> Loss:
    """Append the loss over `logits` and its labels input; the loss becomes the first graph output.

    cross-entropy: logits [N, K, ...] float32, labels [N, ...] int64, mean over all labels.
    mse: logits of any shape, labels of the same shape float32, mean over all elements.
    """
    taken = forward.names()
    labels, loss = fresh("labels", taken), fresh("loss", taken)
    prefix = fresh("loss", {node.name for node in forward.graph.node})  # of the names of nodes, which are other names
    shape = forward.shapes()[logits]
    assert shape is not None
    if kind == "cross-entropy":
        if len(shape) < 2:
            raise forward.error(
                f"output '{logits}' has shape {shape}: cross-entropy needs [batch, classes, ...]. {WITHOUT_LOSS}"
            )
        log_prob = fresh("log_prob", taken)
        nodes = [
            helper.make_node(
                "SoftmaxCrossEntropyLoss", [logits, labels], [loss, log_prob], name=prefix, reduction="mean"
            )
        ]
        value = helper.make_tensor_value_info(labels, TensorProto.INT64, [shape[0], *shape[2:]])
    elif kind == "mse":
        difference, square = fresh("loss/difference", taken), fresh("loss/square", taken)
        nodes = [
            helper.make_node("Sub", [logits, labels], [difference], name=f"{prefix}/sub"),
            helper.make_node("Mul", [difference, difference], [square], name=f"{prefix}/mul"),
            helper.make_node("ReduceMean", [square], [loss], name=f"{prefix}/mean", keepdims=0),
        ]
        value = helper.make_tensor_value_info(labels, TensorProto.FLOAT, shape)
    else:
        raise BnfuseError(f"loss '{kind}' is unknown: it is cross-entropy or mse")
    forward.graph.node.extend(nodes)
    forward.graph.input.append(value)
    forward.graph.output.insert(0, helper.make_tensor_value_info(loss, TensorProto.FLOAT, []))
    return Loss(loss, labels, logits)


def gradient_graph(forward: Forward, variables: Variables, loss: Loss) -> onnx.ModelProto:
    """Give the training graph without values: variables are plain inputs, outputs in the file's order."""
    model = without_values(forward.model, variables)
    tell_draws_apart(model.graph)
    replaced = put_stand_ins(model)
    for output in variables.running.values():
        model.graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, None))
    try:
        built = differentiated(model, variables.trainable, loss.loss)
    except OrtError as error:
        if "Duplicate definition" not in str(error):
            raise builder_error(forward, error) from None
        built = differentiated_whole(forward, model, variables, loss.loss)
    order = [*(value.name for value in model.graph.output), *(f"{name}_grad" for name in variables.trainable)]
    outputs = {value.name: value for value in built.graph.output}
    del built.graph.output[:]
    built.graph.output.extend(outputs[name] for name in order)
    prune(built.graph)
    take_stand_ins(built, replaced)
    give_seeds_back(built.graph, forward.graph)
    return built


def tell_draws_apart(graph: onnx.GraphProto) -> None:
    """Tell two Bernoulli of one probability apart: onnxruntime takes them for the same, and would let both have one
    mask."""
    for index, node in enumerate(graph.node):
        if node.op_type == "Bernoulli":
            set_attribute(node, "seed", float(index))


def give_seeds_back(built: onnx.GraphProto, source: onnx.GraphProto) -> None:
    """Give each Bernoulli the seed of the file, or none: with a seed of its own it draws the same in each session."""
    given = {node.output[0]: attributes(node).get("seed") for node in source.node if node.op_type == "Bernoulli"}
    for node in built.node:
        if node.op_type == "Bernoulli":
            kept = [attribute for attribute in node.attribute if attribute.name != "seed"]
            del node.attribute[:]
            node.attribute.extend(kept)
            if (seed := given.get(node.output[0])) is not None:
                set_attribute(node, "seed", seed)


def differentiated(model: onnx.ModelProto, wanted: Iterable[str], loss: str) -> onnx.ModelProto:
    """Give onnxruntime's graph with the gradients of the `wanted` inputs. Raises OrtError."""
    with borrowed() as process:
        data = np.frombuffer(model.SerializeToString(), np.uint8)
        _, found = process.ask("gradients", {"wanted": sorted(wanted), "loss": loss}, {"model": data})
    return onnx.load_from_string(found["model"].tobytes())


def differentiated_whole(forward: Forward, model: onnx.ModelProto, variables: Variables, loss: str) -> onnx.ModelProto:
    """Give the gradients of the frozen parameters and of the data too.

    The builder names the gradients of a tensor that needs none, but is split off several Concats, all alike. Where
    everything trains, no tensor needs none; what is not wanted is pruned afterwards.
    """
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    data = [value.name for value in forward.graph.input if kinds[value.name] == TensorProto.FLOAT]
    try:
        return differentiated(model, (*variables.trainable, *variables.frozen, *data), loss)
    except OrtError as error:
        raise builder_error(forward, error) from None


def prune(graph: onnx.GraphProto) -> None:
    """Remove nodes that no output needs, and the weight gradients of convolutions that none needs."""
    needed = {value.name for value in graph.output}
    kept = []
    for node in reversed(list(graph.node)):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
            if node.op_type == "ConvGrad":
                outputs = [name if name in needed else "" for name in node.output]
                del node.output[:]
                node.output.extend(outputs)
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


def finish(built: onnx.ModelProto, forward: Forward, variables: Variables, loss: Loss) -> onnx.ModelProto:
    """Give the training file its names, shapes, values and metadata."""
    restore_names(built, forward)
    order_inputs(built, forward, variables, loss)
    names = set(variables.all)
    built.graph.initializer.extend(tensor for tensor in forward.graph.initializer if tensor.name in names)
    prune_opsets(built)
    built.producer_name, built.producer_version = "bnfuse", ""
    built.graph.name = forward.graph.name or "training"
    signature = GraphSignature(
        data=tuple(value.name for value in forward.graph.input if value.name != loss.labels),
        labels=(loss.labels,),
        trainable=variables.trainable,
        frozen=variables.frozen,
        running=dict(variables.running),
        gradients={name: f"{name}_grad" for name in variables.trainable},
        loss=loss.loss,
        logits=loss.logits,
    )
    set_metadata(built, METADATA_KEY, signature.to_json())
    if forward.notes:
        set_metadata(built, NOTES_KEY, json.dumps(forward.notes))
    return built


def restore_names(built: onnx.ModelProto, forward: Forward) -> None:
    """Give forward nodes their own names back; what onnxruntime added is named after its node."""
    own = {node.output[0]: node.name for node in forward.graph.node}
    renamed: dict[str, str] = {}
    for node in built.graph.node:
        if node.output[0] not in own:
            continue
        node.name = own[node.output[0]]
        node.doc_string = ""
        if node.op_type == "BatchNormInternal":
            renamed[node.output[3]] = f"{node.name}/batch_mean"
            renamed[node.output[4]] = f"{node.name}/inv_std"
        elif node.op_type == "ConcatTraining" and len(node.output) > 1:
            renamed[node.output[1]] = f"{node.name}/lengths"
    rename_tensors(built.graph, renamed)


def rename_tensors(graph: onnx.GraphProto, renamed: dict[str, str]) -> None:
    """Rename tensors wherever they are read or written; names that are taken get a number."""
    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    final = {}
    for old, new in renamed.items():
        final[old] = fresh(new, taken)
        taken.add(final[old])
    for node in graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name in final:
                    names[index] = final[name]
    for value in graph.value_info:
        value.name = final.get(value.name, value.name)


def order_inputs(built: onnx.ModelProto, forward: Forward, variables: Variables, loss: Loss) -> None:
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
