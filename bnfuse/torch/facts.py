"""What an exported program says beside its graph, and what of it is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from bnfuse.core.errors import BnfuseError
from bnfuse.fromtorch.faithful import check_program, place_of

BATCH_NORM = nn.modules.batchnorm._BatchNorm
STATISTICS = ("running_mean", "running_var")
COUNT = "num_batches_tracked"


@dataclasses.dataclass(frozen=True)
class Facts:
    """What an exported program says beside its graph."""

    inputs: tuple[str, ...]  # placeholders of the tensors of a call
    results: tuple[str, ...]  # of the graph, each once
    places: tuple[int, ...]  # which result each tensor that comes out is
    parameters: frozenset[str]
    buffers: frozenset[str]
    operands: frozenset[str]  # parameters and buffers that something reads
    trains_norms: bool
    counts: dict[str, int]
    reached: tuple[frozenset[str | int], ...]


def read(program: Any, module: nn.Module, name: str) -> Facts:
    """Read the facts. Raises BnfuseError where the module does what a fused one would not."""
    graph, signature = program.graph, program.graph_signature
    check_program(program, name)
    inputs = tuple(
        spec.arg.name
        for spec in signature.input_specs
        if spec.kind.name == "USER_INPUT" and type(spec.arg).__name__ == "TensorArgument"
    )
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    results: dict[str, int] = {}
    returned: list[int] = []
    nodes = {node.name: node for node in graph.nodes}
    for spec in signature.output_specs:
        if spec.kind.name != "USER_OUTPUT":
            continue
        node = nodes[spec.arg.name]
        kind = node.meta["val"].dtype
        if node.op == "placeholder" or kind != torch.float32:
            what = "an input or a parameter as it is" if node.op == "placeholder" else f"a tensor of {kind}"
            raise BnfuseError(f"{name}: returns {what} ('{node.name}'): results are float32 and computed")
        returned.append(results.setdefault(node.name, len(results)))
    known = {node.name for node in graph.nodes if node.op == "placeholder" and node.users}
    places = {key: place for place, key in enumerate(inputs)}
    return Facts(
        inputs=inputs,
        results=tuple(results),
        places=tuple(returned),
        parameters=frozenset(key for key, _ in module.named_parameters(remove_duplicate=False)),
        buffers=frozenset(key for key, _ in module.named_buffers(remove_duplicate=False)),
        operands=frozenset(targets[key] for key in known if key in targets),
        trains_norms=any(is_training_norm(node) for node in graph.nodes),
        counts=counts_of(program, module, name),
        reached=tuple(reach(nodes[key], signature.inputs_to_parameters, places) for key in results),
    )


def is_training_norm(node: Any) -> bool:
    """Tell whether a node normalises by the statistics of the batch, and is a BatchNorm."""
    target = str(node.target)
    if "batch_norm" not in target or node.op != "call_function":
        return False
    if "legit" in target or "native" in target:
        return "no_training" not in target and any(argument is True for argument in node.args[5:6])
    return any(argument is True for argument in node.args[5:6])


def counts_of(program: Any, module: nn.Module, name: str) -> dict[str, int]:
    """Give by how much each forward counts BatchNorms' batches up. Raises where anything else of the module, or an
    input, is changed in place."""
    norms = {key: one for key, one in module.named_modules(remove_duplicate=False) if isinstance(one, BATCH_NORM)}
    own = {f"{key}.{COUNT}".lstrip(".") for key in norms}
    signature = program.graph_signature
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    roots: dict[Any, Any] = {}
    found: dict[str, int] = {}
    for node in program.graph.nodes:
        roots[node] = aliased(node, roots)
        root = roots[node] if is_in_place(node) else None
        if root is None or root.op != "placeholder":
            continue
        target = targets.get(root.name)
        if target not in own:
            what = f"'{target}'" if target else "its input"
            raise BnfuseError(
                f"{name}: its forward changes {what} in place{place_of(node)}, which a fused one would not"
            )
        if "add_" not in str(node.target) or node.args[1] != 1:
            raise BnfuseError(f"{name}: counts the batches of a BatchNorm by '{node.target}', and not one by one")
        found[target] = found.get(target, 0) + 1
    return found


def is_in_place(node: Any) -> bool:
    """Tell whether a node writes to its first operand."""
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    return bool(arguments and arguments[0].alias_info is not None and arguments[0].alias_info.is_write)


def aliased(node: Any, roots: Mapping[Any, Any]) -> Any:
    """Give the node whose memory a node's result is: its own, or that of what it is a view of."""
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    if node.op == "call_function" and returns and returns[0].alias_info is not None and node.all_input_nodes:
        return roots.get(node.all_input_nodes[0], node)
    return node


def refuse_means_of_several_calls(facts: Facts, cumulative: Collection[str], name: str) -> None:
    """Refuse BatchNorms with momentum=None that are called several times: how each call moves the mean is not kept."""
    for count, times in facts.counts.items():
        norm = count.rpartition(".")[0]
        if times > 1 and f"{norm}.{STATISTICS[0]}".lstrip(".") in cumulative:
            raise BnfuseError(f"{name}: '{norm}' has momentum=None and is called several times: give it a momentum")


def reach(result: Any, parameters: Mapping[str, str], places: Mapping[str, int]) -> frozenset[str | int]:
    """List the parameters and inputs that a result is computed of."""
    pending, seen = [result], {result}
    found: set[str | int] = set()
    while pending:
        node = pending.pop()
        if node.op == "placeholder":
            if node.name in parameters:
                found.add(parameters[node.name])
            elif node.name in places:
                found.add(places[node.name])
        for operand in node.all_input_nodes:
            if operand not in seen:
                seen.add(operand)
                pending.append(operand)
    return frozenset(found)
