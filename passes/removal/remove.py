"""Removal: chosen BatchNorms leave the graph, or leave only their affine part ([Joardar22]).

    y, rm', rv', mean, inv_std =             y  = x            with the affine part:
      BatchNorm(x, g, b, ...)                                  y  = NormalizePointwise(x, g, b)
    dx, dg, db =                       ->    dx = dz           db, dg = BatchNormGradReduce(dz, x, 0, 1)
      BatchNormGrad(dz, x, ...)                                dx = PointwiseGradScale(dz, g)

The running statistics go, as inputs and as outputs; without the affine part g, b and their gradients go as well. What
is left is fused as ever: a Relu behind a removed BatchNorm goes into the convolutions that read it, and so on.

A convolution that had no bias because a BatchNorm followed it gets none. One that had a bias keeps it: there is no mean
any more that would take it out.

Raises an error for a BatchNorm whose parameters or batch statistics something else reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import at_node
from bnfuse.graph.signature import METADATA_KEY, GraphSignature
from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.passes.dialect.source_ops import is_batch_norm, is_batch_norm_grad, is_map, sizes
from bnfuse.passes.fission.batch_norm import NORMALIZE
from bnfuse.passes.fission.batch_norm_grad import SCALED, gradients_of
from bnfuse.passes.removal.placements import nodes_of
from bnfuse.passes.rewriter import Editor, FusionResult, is_unused


@dataclasses.dataclass(frozen=True)
class Removed:
    """A BatchNorm that left: its number in forward order, its name, and whether its affine part stayed."""

    index: int
    node: str
    kept_affine: bool


class RemoveBatchNorm(ir.passes.InPlacePass):
    """Take the BatchNorms of these names out; with `keep_affine` y = scale*x + bias stays of each."""

    def __init__(self, names: Collection[str], signature: GraphSignature, *, keep_affine: bool) -> None:
        super().__init__()
        self.names, self.signature, self.keep_affine = names, signature, keep_affine

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model and its signature in place. Raises BnfuseError where other nodes read what would go."""
        editor = Editor(model, "remove")
        gone: set[str] = set()
        for node in [node for node in nodes_of(model) if node.name in self.names]:
            gone |= remove(editor, node, self.signature, keep_affine=self.keep_affine)
        model.metadata_props[METADATA_KEY] = without(self.signature, gone).to_json()
        return editor.result()


def remove(editor: Editor, node: ir.Node, signature: GraphSignature, *, keep_affine: bool) -> set[str]:
    """Take one BatchNorm out; gives the names of the inputs that went with it."""
    gradient = next(iter(gradients_of(node)), None)  # there is none where nothing before it is trained
    x, scale, bias, running_mean, running_variance = node.inputs
    assert x is not None and scale is not None and bias is not None
    require_own(node, gradient, [scale, bias, running_mean, running_variance])
    if keep_affine and not is_map(x):
        raise at_node(node.name or "", node.op_type, f"keeps no affine part: '{x.name}' is no float32 map of rank 4")
    if keep_affine:
        values = {"x": x, "a": scale, "b": bias}
        editor.emit(NORMALIZE, values, {}, {"y": node.outputs[0]}, before=node, of=[node], name=node.name)
    else:
        bypass(editor, node, x)
    if gradient is not None:
        (affine_gradient if keep_affine else plain_gradient)(editor, gradient, node)
    gone = [running_mean, running_variance, *(() if keep_affine else (scale, bias))]
    names = {str(value.name) for value in gone if value is not None}
    drop_outputs(editor.graph, signature, names)
    remove_dead_chain(editor.graph, [n for n in (gradient, node) if n is not None])
    for value in gone:
        if value is not None:
            drop_input(editor.graph, value)
    return names


def require_own(node: ir.Node, gradient: ir.Node | None, parameters: Iterable[ir.Value | None]) -> None:
    """Raise BnfuseError unless only the BatchNorm and its gradient read its parameters and its batch's statistics."""
    own, name = (node, gradient), node.name or ""
    for value in filter(None, (*parameters, *node.outputs[3:])):
        other = next((use.node for use in value.uses() if use.node not in own), None)
        if other is not None:
            reader = f"{other.op_type} '{other.name}'"
            raise at_node(name, node.op_type, f"cannot be removed: {reader} reads '{value.name}' too. Keep it.")
    seen = next((value for value in node.outputs[3:] if value.is_graph_output()), None)
    if seen is not None:
        raise at_node(name, node.op_type, f"cannot be removed: '{seen.name}' is a graph output. Keep it.")


def bypass(editor: Editor, node: ir.Node, source: ir.Value) -> None:
    """Let readers of a node's first result read `source`; a graph output stays, as a copy under its old name."""
    old = node.outputs[0]
    if old.is_graph_output():
        (copy,) = editor.standard("Identity", [source], 1, before=node, of=[node])
        editor.take_over(old, copy)
    else:
        old.replace_all_uses_with(source)
    editor.fused.append(node.name or node.op_type)


def plain_gradient(editor: Editor, gradient: ir.Node, node: ir.Node) -> None:
    """Let what read the BatchNorm's dx read dz: without a BatchNorm they are the same."""
    assert gradient.inputs[0] is not None
    if gradient.outputs[0].name and not is_unused(gradient.outputs[0]):
        bypass(editor, gradient, gradient.inputs[0])


def affine_gradient(editor: Editor, gradient: ir.Node, node: ir.Node) -> None:
    """Put the gradients of scale*x + bias in the place of a BatchNorm's: dx = scale*dz, and two sums per channel."""
    dz, x, scale = gradient.inputs[:3]
    assert dz is not None and x is not None and scale is not None
    dx, *parameters = gradient.outputs
    of = [node, gradient]
    if any(value.name and not is_unused(value) for value in parameters):
        width = sizes(x)[1]
        zeros = editor.constant(f"{node.name}/zeros", np.zeros(width, np.float32))
        ones = editor.constant(f"{node.name}/ones", np.ones(width, np.float32))
        keep = {result: value for result, value in zip(("dgamma", "dbeta"), parameters, strict=False) if value.name}
        editor.emit(
            PLAIN_OPS["BatchNormGradReduce"], {"dz": dz, "x": x, "mean": zeros, "inv_std": ones}, {}, keep,
            before=gradient, of=of, name=editor.fresh(f"{gradient.name}/reduce"),
        )  # fmt: skip
    if dx.name and not is_unused(dx):
        operands = {"dy": dz, "acc_p": scale}
        editor.emit(SCALED, operands, {}, {"dx": dx}, before=gradient, of=of, name=gradient.name)


def drop_outputs(graph: ir.Graph, signature: GraphSignature, names: set[str]) -> None:
    """Take away the outputs that are gradients or successors of inputs that are gone."""
    lost = {output for name, output in (*signature.gradients.items(), *signature.running.items()) if name in names}
    for value in [value for value in graph.outputs if value.name in lost]:
        graph.outputs.remove(value)
        producer = value.producer()
        if producer is not None and not is_batch_norm(producer) and not is_batch_norm_grad(producer):
            remove_dead_chain(graph, [producer])


def remove_dead_chain(graph: ir.Graph, nodes: Iterable[ir.Node]) -> None:
    """Remove those of the nodes that nothing reads, and what only they read."""
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node.graph is None or not all(is_unused(value) for value in node.outputs):
            continue
        producers = [value.producer() for value in node.inputs if value is not None]
        graph.remove(node, safe=True)
        pending += [producer for producer in producers if producer is not None]


def drop_input(graph: ir.Graph, value: ir.Value) -> None:
    """Take an input that nothing reads out of the graph, with its initial value."""
    assert is_unused(value), f"{value.name} is still read"
    if value.is_graph_input():
        graph.inputs.remove(value)
    graph.initializers.pop(str(value.name), None)


def without(signature: GraphSignature, names: Collection[str]) -> GraphSignature:
    """Give the signature of a graph that lost these inputs."""
    return dataclasses.replace(
        signature,
        trainable=tuple(name for name in signature.trainable if name not in names),
        frozen=tuple(name for name in signature.frozen if name not in names),
        running={name: new for name, new in signature.running.items() if name not in names},
        gradients={name: gradient for name, gradient in signature.gradients.items() if name not in names},
    )
