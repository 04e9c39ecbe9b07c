"""From a graph of onnxruntime-training to one of our dialect: one node after the other, in the order of the graph."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.microsoft import activations, dense, losses, moves, norms, windows
from bnfuse.graph.microsoft.source import Source
from bnfuse.graph.names import Names
from bnfuse.opset.functions import add_functions
from bnfuse.opset.spec import DOMAIN

MICROSOFT = "com.microsoft"
POOL_GRADIENTS = ("MaxPoolGrad", "AveragePoolGrad")  # onnxruntime has them in the standard domain
SCATTER_OPSET = 16  # ScatterElements and ScatterND can add from here on
OLDEST_OPSET = 13  # what is written here is of that opset, or of a later one
CHANGED = ("BatchNormalization", "RoiAlign")  # operators that mean something else between OLDEST and SCATTER_OPSET

Conversion = Callable[[Source], None]

CONVERSIONS: dict[str, Conversion] = {
    **norms.CONVERSIONS,
    **windows.CONVERSIONS,
    **activations.CONVERSIONS,
    **moves.CONVERSIONS,
    **dense.CONVERSIONS,
    **losses.CONVERSIONS,
}
# chains of standard nodes that are one operator of ours, by the node that they end in: whether there was one
CHAINS: dict[str, Callable[[Source], bool]] = {"Mul": activations.clip_gradient}


def is_foreign(model: ir.Model) -> bool:
    """Tell whether a graph has operators of onnxruntime's that the dialect has not."""
    return any(_is_foreign(node) for node in model.graph)


def _is_foreign(node: ir.Node) -> bool:
    return node.domain == MICROSOFT or (node.op_type in POOL_GRADIENTS and node.domain in ("", "ai.onnx"))


def convert(model: ir.Model, file: str | None = None) -> ir.Model:
    """Give the model in our dialect: itself where it is in it, else a copy; values and nodes keep their names.

    Raises BnfuseError, with file, node and operator, for what has no conversion.
    """
    if not is_foreign(model):
        return model
    copy = model.clone()
    copy.meta.update(model.meta)
    _require_opset(copy, file)
    names = Names(copy.graph)
    for node in list(copy.graph):
        if node.graph is None:
            continue  # a part of a chain that is converted already
        if _is_foreign(node):
            _convert(Source(copy, node, names, file))
        elif node.domain in ("", "ai.onnx") and (chain := CHAINS.get(node.op_type)):
            chain(Source(copy, node, names, file))
    copy.opset_imports.pop(MICROSOFT, None)
    if any(node.domain == DOMAIN for node in copy.graph):
        add_functions(copy)
    return copy


def _convert(source: Source) -> None:
    conversion = CONVERSIONS.get(source.node.op_type)
    if conversion is None:
        known = "standard ONNX and operators of ai.bnfuse are. Build the graph anew with `bnfuse build`."
        raise source.error(f"is an operator of onnxruntime that is not read here: {known}")
    try:
        conversion(source)
    except BnfuseError:
        raise
    except (ArithmeticError, AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        what = f"cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:100]})"
        raise source.error(f"{what}: the graph is damaged. Build it anew.") from error
    if source.node.graph is not None:
        source.finish()


def _require_opset(model: ir.Model, file: str | None) -> None:
    """Raise the standard opset to the one that what is written needs: of the others, operators stayed the same."""
    version = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 1))
    if version >= SCATTER_OPSET:
        return
    changed = next((node for node in model.graph if node.op_type in CHANGED and not node.domain), None)
    if version < OLDEST_OPSET or changed is not None:
        name = f"{file}: " if file else ""
        what = f"has opset {version}, and its gradients are written in {SCATTER_OPSET}"
        raise BnfuseError(f"{name}{what}: convert the network to opset 18 and build it anew")
    model.opset_imports[""] = SCATTER_OPSET
