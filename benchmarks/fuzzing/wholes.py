"""Mutations of a model as a whole: versions, functions, metadata, graphs within graphs."""

from __future__ import annotations

import json
import random

import onnx
from onnx import AttributeProto, NodeProto, ValueInfoProto, helper

from bnfuse.graph.signature import GraphSignature

from .mutators import LARGEST, SMALLEST, mutator, value_names
from .values import NAMES, NUMBERS, disturb_text, pick

# Versions, functions, metadata, subgraphs


@mutator
def opset_version(model: onnx.ModelProto, rng: random.Random) -> None:
    kind = rng.choice(("version", "ir", "none", "twice", "domain"))
    if kind == "ir":
        model.ir_version = rng.choice((0, 1, 3, 9, 99, LARGEST, SMALLEST))
    elif kind == "none" or not model.opset_import:
        del model.opset_import[:]
    elif kind == "version":
        rng.choice(model.opset_import).version = rng.choice((0, 1, 6, 9, 12, 25, 9999, -1, LARGEST))
    elif kind == "twice":
        model.opset_import.add(domain=rng.choice(model.opset_import).domain, version=rng.choice((7, 13, 99)))
    else:
        model.opset_import.add(domain=rng.choice(NAMES), version=1)


@mutator
def local_function(model: onnx.ModelProto, rng: random.Random) -> None:
    """A function in the place of a node's operator: it calls itself, another, one that is missing, or is too deep."""
    if (node := pick(rng, [node for node in model.graph.node if node.input and node.output])) is None:
        return
    kind = rng.choice(("itself", "ring", "missing", "deep", "arity", "wide", "shadow", "empty"))
    domain = rng.choice(("local", "", "ai.bnfuse"))

    def function(name: str, *calls: tuple[str, str]) -> None:
        nodes = [helper.make_node(op, [f"v{i}"], [f"v{i + 1}"], domain=d) for i, (d, op) in enumerate(calls)]
        imports = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
        made = helper.make_function(domain, name, ["v0"], [f"v{len(calls)}"], nodes, imports)
        model.functions.append(made)

    if kind == "itself":
        function("F", (domain, "F"))
    elif kind == "ring":
        function("F", (domain, "G"))
        function("G", (domain, "F"))
    elif kind == "missing":
        function("F", (domain, "Gone"))
    elif kind in ("deep", "wide"):  # each calls the next twice: 2^depth nodes
        depth = 40 if kind == "deep" else 12
        for level in range(depth):
            function("F" if level == 0 else f"F{level}", *[(domain, f"F{level + 1}")] * 2)
        function(f"F{depth}", ("", "Identity"))
    elif kind == "shadow":
        function("Relu", ("", "Relu"))
    elif kind == "empty":
        function("F")
    else:
        function("F", ("", "Relu"))
    if kind != "shadow":
        node.op_type, node.domain = "F", domain
        if kind != "arity":
            node.input[:], node.output[:] = node.input[:1], node.output[:1]
    if rng.random() < 0.7:
        model.opset_import.add(domain="local", version=1)


@mutator
def metadata_text(model: onnx.ModelProto, rng: random.Random) -> None:
    if entry := pick(rng, model.metadata_props):
        entry.value = disturb_text(entry.value, rng)


@mutator
def swap_signature(model: onnx.ModelProto, rng: random.Random) -> None:
    """Names of two roles change places, or one takes another's: still JSON, still of the right form."""
    for entry in model.metadata_props:
        if entry.key != "bnfuse.roles":
            continue
        try:
            signature = json.loads(GraphSignature.from_json(entry.value).to_json())
        except ValueError:  # something else was done to it before
            return
        names = sorted(name for value in signature.values() if isinstance(value, list | dict) for name in value)
        outputs = sorted([signature["loss"], *signature["gradients"].values(), *signature["running"].values()])
        field = rng.choice(("loss", "logits", "gradients", "running", "list", "move"))
        if field in ("loss", "logits"):
            signature[field] = rng.choice([*outputs, *names])
        elif field in ("gradients", "running") and signature[field]:
            signature[field][rng.choice(sorted(signature[field]))] = rng.choice(outputs)
        else:
            lists = [key for key, value in signature.items() if isinstance(value, list)]
            source, target = rng.choice(lists), rng.choice(lists)
            if signature[source]:
                moved = rng.choice(signature[source])
                if field == "move":
                    signature[source].remove(moved)
                signature[target] = [*signature[target], moved]
        entry.value = json.dumps(signature)


@mutator
def metadata_entries(model: onnx.ModelProto, rng: random.Random) -> None:
    if rng.random() < 0.5:
        del model.metadata_props[:]
    else:
        model.metadata_props.add(key=rng.choice(("bnfuse.roles", "", *NAMES)), value=rng.choice(("", "{}", "null")))


@mutator
def node_metadata(model: onnx.ModelProto, rng: random.Random) -> None:
    if node := pick(rng, model.graph.node):
        key = rng.choice(("bnfuse.sources", "bnfuse.pass", "bnfuse.removed", ""))
        node.metadata_props.add(
            key=key, value=rng.choice(("", "[1]", '["a", "a"]', "{", "\n", "9" * 5000, "[" * 100_000))
        )


@mutator
def subgraph(model: onnx.ModelProto, rng: random.Random) -> None:
    """An If or a Loop whose body reads a value of the graph; perhaps nested deeply."""
    if (node := pick(rng, [node for node in model.graph.node if node.input and node.output])) is None:
        return
    body = helper.make_graph(
        [helper.make_node("Identity", [node.input[0]], ["inner"])], "body", [], [ValueInfoProto(name="inner")]
    )
    for level in range(rng.choice((0, 0, 3, 20))):
        outer = NodeProto(op_type="If", input=["on"], output=[f"inner{level}"])
        outer.attribute.append(AttributeProto(name="then_branch", type=AttributeProto.GRAPH, g=body))
        body = helper.make_graph([outer], f"body{level}", [], [ValueInfoProto(name=f"inner{level}")])
    node.op_type, node.domain = rng.choice(("If", "Loop", "Scan")), ""
    for name in ("then_branch", "else_branch", "body"):
        node.attribute.append(AttributeProto(name=name, type=AttributeProto.GRAPH, g=body))


@mutator
def quantization(model: onnx.ModelProto, rng: random.Random) -> None:
    model.graph.quantization_annotation.add(tensor_name=rng.choice(value_names(model)))


@mutator
def training_info(model: onnx.ModelProto, rng: random.Random) -> None:
    info = model.training_info.add()
    info.algorithm.node.append(helper.make_node("Identity", [rng.choice(value_names(model))], ["next"]))
    info.update_binding.add(key="a", value=str(rng.choice(NUMBERS)))
