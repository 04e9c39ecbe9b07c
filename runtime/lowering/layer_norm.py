"""Lowering of LayerNorms over channels, of maps and of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from bnfuse.runtime.kernels import registry
from bnfuse.runtime.lowering.norm import as_map
from bnfuse.runtime.lowering.state import Lowering, Ref
from bnfuse.runtime.lowering.vectors import new_vectors, vectors

Values = Mapping[str, ir.Value]
Attributes = Mapping[str, Any]


def layer_norm(low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower LayerNorm of a map [N, C, ...]: one sweep."""
    source = as_map(low, node, operands["x"])
    made = _as_made(node, results.get("y"), operands["x"], source)
    x, y = low.map(source), low.new_map(made, low.shape(source))
    batch, _, *rest = low.shape(operands["x"])
    refs: dict[str, Ref] = {"x": x, "y": y, **vectors(low, {name: operands[name] for name in ("scale", "bias")})}
    refs |= {name: low.new_dense(results.get(name), (batch, *rest)) for name in ("mean", "inv_std")}
    low.launch(registry.LAYER_NORM, (x.type, y.type, low.target, float(attributes["epsilon"])), refs)
    _give(low, results.get("y"), made, operands["x"])


def layer_norm_grad(low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower LayerNormGrad of a map [N, C, ...]: one sweep for all three gradients."""
    sources = {name: as_map(low, node, operands[name]) for name in ("dy", "x")}
    made = _as_made(node, results.get("dx"), operands["x"], sources["x"])
    dy, x = (low.map(value) for value in sources.values())
    dx = low.new_map(made, low.shape(sources["x"]))
    refs: dict[str, Ref] = {"dy": dy, "x": x, "dx": dx, **vectors(low, {"scale": operands["scale"]})}
    refs |= {name: low.dense(operands[name]) for name in ("mean", "inv_std")}
    refs |= new_vectors(low, {name: results[name] for name in ("dscale", "dbias") if name in results}, x.type.c)
    low.launch(registry.LAYER_NORM_GRAD, (dy.type, x.type, dx.type, low.target), refs)
    _give(low, results.get("dx"), made, operands["x"])


def _as_made(node: ir.Node, result: ir.Value | None, x: ir.Value, source: ir.Value) -> ir.Value | None:
    """Give the value that the kernel makes: the result itself, unless `as_map` has given x another shape."""
    return result if result is None or source is x else ir.Value(name=f"{node.name}/{result.name}")


def _give(low: Lowering, result: ir.Value | None, made: ir.Value | None, x: ir.Value) -> None:
    """Give the result the shape of x."""
    if result is not None and made is not None and made is not result:
        low.alias(result, made, low.shape(x))
