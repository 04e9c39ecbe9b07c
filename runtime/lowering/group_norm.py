"""Lowering of GroupNorms: whole ones, and their halves. Coefficients are [N, C], dense."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from bnfuse.opset.spec import OpSpec
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.common.group_norm import OF_CHANNELS, GroupProblem
from bnfuse.runtime.kernels.registry import Kind
from bnfuse.runtime.lowering.norm import as_map, normalizing_factor, with_result
from bnfuse.runtime.lowering.state import Lowering, Ref

Values = Mapping[str, ir.Value]
Attributes = Mapping[str, Any]


def group_norm_statistics(
    low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes
) -> None:
    """Lower GroupNormStatistics: mean and variance of each sample's channels in one sweep."""
    x = low.map(operands["x"])
    refs: dict[str, Ref] = {"x": x, **_new(low, results, (x.type.n, x.type.c))}
    if x.type.n == 1:  # one image is a batch
        low.launch(registry.BATCH_NORM_STATISTICS, (x.type, low.target, 1), refs)
    else:
        low.launch(registry.GROUP_NORM_STATISTICS, (x.type, low.target), refs)


def group_norm_grad_reduce(
    low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes
) -> None:
    """Lower GroupNormGradReduce: dbeta and dgamma of each sample's channels in one sweep."""
    dz, x = low.map(operands["dz"]), low.map(operands["x"])
    refs: dict[str, Ref] = {"dz": dz, "x": x, **{name: low.dense(operands[name]) for name in ("mean", "inv_std")}}
    refs |= _new(low, results, (x.type.n, x.type.c))
    kind: Kind = registry.BATCH_NORM_GRAD_REDUCE if x.type.n == 1 else registry.GROUP_NORM_GRAD_REDUCE
    low.launch(kind, (dz.type, x.type, low.target), refs)


def group_norm_finalize(
    low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes
) -> None:
    """Lower GroupNormFinalize: the coefficients of each sample's channels by the statistics of their groups."""
    _coefficients(low, node, "GroupNormFinalize", "mean", operands, results, attributes, float(attributes["epsilon"]))
    if "inv_std" in results and "a" in results:
        low.normalizing[results["inv_std"]] = low.dense(results["a"])


def group_norm_grad_finalize(
    low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes
) -> None:
    """Lower GroupNormGradFinalize: q and w of each sample's channels, and the gradients of scale and bias."""
    count = float(attributes["count"])
    _coefficients(low, node, "GroupNormGradFinalize", "dbeta", operands, results, attributes, count)


def _coefficients(
    low: Lowering,
    node: ir.Node,
    op: str,
    like: str,
    operands: Values,
    results: Values,
    attributes: Attributes,
    number: float,
) -> None:
    samples, channels = low.shape(operands[like])
    groups = int(attributes["groups"])
    if groups < 1 or channels % groups:
        raise low.error(node, f"has {groups} groups of {channels} channels: take a divisor of them")
    refs: dict[str, Ref] = {name: low.dense(value) for name, value in operands.items()}
    for name, value in results.items():
        refs[name] = low.new_dense(value, (channels,) if name in OF_CHANNELS else (samples, channels))
    problem = GroupProblem(op, samples, channels, groups, number, bool(attributes.get("raw")))
    low.launch(registry.GROUP_COEFFICIENTS, (problem, low.target), refs)


def _new(low: Lowering, results: Values, shape: tuple[int, int]) -> dict[str, Ref]:
    return {name: low.new_dense(value, shape) for name, value in results.items()}


# -- whole ones, of training graphs before any pass ----------------------------------------------------------------


def group_norm(low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower GroupNorm of a map [N, C, ...]: a sweep of statistics, coefficients, and a NormalizePointwise."""
    x = as_map(low, node, operands["x"])
    shape = low.shape(x)[:2]
    batch = {name: _intermediate(low, node, name, shape) for name in ("mean", "variance")}
    group_norm_statistics(low, node, {"x": x}, batch, {})
    made = {name: _intermediate(low, node, name, shape) for name in ("a", "b")}
    made |= {name: results[own] for own, name in (("mean", "group_mean"), ("inv_std", "inv_std")) if own in results}
    parameters = {name: operands[name] for name in ("scale", "bias")}
    group_norm_finalize(low, node, {**parameters, **batch}, made, attributes)
    if "y" in results:
        read = {"x": x, "a": made["a"], "b": made["b"]}
        with_result(low, OpSpec(("Normalize",), "Pointwise"), node, read, "y", results["y"], operands["x"])


def group_norm_grad(low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower GroupNormGrad of a map [N, C, ...]: sums, coefficients, a sweep."""
    dy, x = (as_map(low, node, operands[name]) for name in ("dy", "x"))
    scale, mean, inv_std = (operands[name] for name in ("scale", "mean", "inv_std"))
    shape = low.shape(x)
    sums = {name: _intermediate(low, node, name, shape[:2]) for name in ("dbeta", "dgamma")}
    group_norm_grad_reduce(low, node, {"dz": dy, "x": x, "mean": mean, "inv_std": inv_std}, sums, {})
    made = {name: _intermediate(low, node, name, shape[:2]) for name in ("q", "w")}
    count = math.prod(shape[1:]) // int(attributes["groups"])
    given = {**sums, "scale": scale, "mean": mean, "inv_std": inv_std}
    gradients = {name: results[name] for name in ("dscale", "dbias") if name in results}
    group_norm_grad_finalize(low, node, given, {**made, **gradients}, {**attributes, "count": count})
    if "dx" in results:
        factor = _intermediate(low, node, "a", shape[:2])
        low.forms[factor].dense = normalizing_factor(low, scale, inv_std)
        read = {"dy": dy, "grad_x": x, "grad_p": factor, "grad_q": made["q"], "grad_w": made["w"]}
        with_result(low, OpSpec(("BatchNormGrad",), "PointwiseGrad"), node, read, "dx", results["dx"], operands["x"])


def _intermediate(low: Lowering, node: ir.Node, name: str, shape: tuple[int, ...]) -> ir.Value:
    """Make a matrix that the file does not name."""
    value = ir.Value(name=f"{node.name}/{name}")
    low.define(value, tuple(shape))
    return value
