"""What torch's exporter writes beside the graph: which call of the module made a node, and what its operands were.

    pkg.torch.onnx.fx_node     %bn : [...] = call_function[target=torch.ops.aten.batch_norm](args = (%x, %p_w, ...
    graph_signature            p_w: PARAMETER target='bn.weight'

An optimiser that ran afterwards changes nodes and operands, not these lines: they tell what it folded and merged.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import onnx

CALL = "pkg.torch.onnx.fx_node"
AROUND = (
    "pkg.torch.onnx.class_hierarchy",
    "namespace",
)  # classes around a node; the last is the operator
MODULES = "pkg.torch.onnx.name_scopes"
SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
PARAMETER = "PARAMETER"

_CALL = re.compile(r"%(\w+) : .*?target=([\w.:]+)\]\(args = \((.*?)(?:\), kwargs|\)$)", re.DOTALL)
_SIGNED = re.compile(r"^(\w+): (\w+) target='([^']+)'", re.MULTILINE)
_FAMILIES = {  # operators whose operands are the call's arguments, in their order
    "Add": "aten.add.",
    "BatchNormalization": "batch_norm",
    "Conv": "conv",
    "ConvTranspose": "conv",
    "Div": "aten.div.",
    "Gemm": "linear",
    "Mul": "aten.mul.",
    "PRelu": "prelu",
    "Sub": "aten.sub.",
}


@dataclasses.dataclass(frozen=True)
class Call:
    """One operator called by the module: its name, which is unique, and its first arguments, those that are tensors."""

    name: str
    operator: str
    arguments: tuple[str | None, ...] = ()
    module: str = ""  # the path of the module that calls it
    kind: str = ""  # that module's class


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What a placeholder of the exported module was: PARAMETER, BUFFER, ..., and its name there."""

    kind: str
    target: str


def call_of(node: onnx.NodeProto) -> Call | None:
    """Give the call that the node was made for, None where the exporter did not say."""
    said = {entry.key: entry.value for entry in node.metadata_props}
    scopes = re.findall(r"'([^']*)'", said.get(MODULES, ""))
    around = next((pieces for key in AROUND if (pieces := _pieces(said.get(key, "")))), [])
    match = _CALL.search(said.get(CALL, ""))
    if match is None and not around:
        return None
    module = scopes[-2] if len(scopes) > 1 else ""
    kind = around[-2] if len(around) > 1 else ""
    if match is None:
        return Call(scopes[-1] if scopes else node.name, around[-1], (), module, kind)
    return Call(match[1], match[2], _tensors(match[3]), module, kind)


def _pieces(text: str) -> list[str]:
    return [piece for raw in re.split(r"[/,]", text) if (piece := raw.strip(" '\"[]").rpartition(": ")[2])]


def _tensors(arguments: str) -> tuple[str | None, ...]:
    found: list[str | None] = []
    for argument in arguments.split(", "):
        if argument != "None" and not argument.startswith("%"):
            break
        found.append(None if argument == "None" else argument.removeprefix("%"))
    return tuple(found)


def has_argument(node: onnx.NodeProto, index: int) -> bool:
    """Tell whether the exporter says what operand `index` was in the module."""
    call, family = call_of(node), _FAMILIES.get(node.op_type)
    return call is not None and family is not None and family in call.operator and index < len(call.arguments)


def argument_of(node: onnx.NodeProto, index: int) -> str | None:
    """Give the placeholder or value that operand `index` was, None where the call had none (affine=False, no bias)."""
    call = call_of(node)
    assert call is not None
    return call.arguments[index]


def signature_of(model: onnx.ModelProto) -> dict[str, Tensor]:
    """Map each placeholder of the exported module to what it was."""
    for entry in (*model.graph.metadata_props, *model.metadata_props):
        if entry.key == SIGNATURE:
            return _signed(entry.value)
    return {}


@functools.lru_cache(maxsize=4)
def _signed(text: str) -> dict[str, Tensor]:
    return {name: Tensor(kind, target) for name, kind, target in _SIGNED.findall(text)}


def lost_parameters(model: onnx.ModelProto) -> list[str]:
    """List the parameters of the exported module that are no initializers under their names: an optimiser folded them
    into constants, or nothing reads them."""
    there = {tensor.name for tensor in model.graph.initializer}
    signed = (tensor for tensor in signature_of(model).values() if tensor.kind == PARAMETER)
    return [tensor.target for tensor in signed if tensor.target not in there]


def parameter_numbers(model: onnx.ModelProto) -> set[str]:
    """List the initializers of shape [] that are parameters of the module, as far as its exporter says so.

    torch's newer exporter does; the older one writes numbers of the code as Constant nodes, and parameters under their
    names.
    """
    numbers = {tensor.name for tensor in model.graph.initializer if not tensor.dims}
    signature = signature_of(model)
    if signature:
        return numbers & {tensor.target for tensor in signature.values() if tensor.kind == PARAMETER}
    return {name for name in numbers if model.producer_name == "pytorch" and not is_generated(name)}


def is_generated(name: str) -> bool:
    """Tell whether a tensor has a name that a tool counted up, as it has none in the module."""
    return _GENERATED.search(name) is not None


_GENERATED = re.compile(
    r"^(onnx::\w+_)?\d+$|^_v_\d+$|^val_\d+$|(^|/)(Constant|Const|ones|zeros|ones_like|zeros_like)(_\d+)*(_output_\d+)?(:0)?$"
)
