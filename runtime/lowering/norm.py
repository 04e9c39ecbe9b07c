"""Lowering of the halves of a BatchNorm, and of the source graph's whole ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from bnfuse.opset.spec import OpSpec
from bnfuse.opset.training_ops import batch_norm_constants
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.common.generic import GenericProblem
from bnfuse.runtime.lowering.state import Lowering, Ref
from bnfuse.runtime.lowering.steps import composed
from bnfuse.runtime.lowering.vectors import coefficient_rows, new_vectors, vector_range, vectors

Values = Mapping[str, ir.Value]
Attributes = Mapping[str, Any]

BASELINE_SWEEPS = 2  # of a BatchNorm that no pass has touched: mean, then variance


def batch_norm_statistics(low: Lowering, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower BatchNormStatistics: mean and variance, [C] each, in one sweep."""
    statistics(low, operands["x"], new_vectors(low, results, low.shape(operands["x"])[1]), 1)


def statistics(low: Lowering, x: ir.Value, refs: Mapping[str, Ref], sweeps: int) -> None:
    """Launch the statistics of a map: one sweep for both, or two, mean and then variance."""
    ref = low.map(x)
    low.launch(registry.BATCH_NORM_STATISTICS, (ref.type, low.target, sweeps), {"x": ref, **refs})


def batch_norm_finalize(low: Lowering, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower BatchNormFinalize: coefficients and running statistics, [C] each; notes whose inv_std has which a."""
    channels = low.shape(operands["scale"])[0]
    refs = {**vectors(low, operands), **new_vectors(low, results, channels)}
    a = refs.setdefault("a", low.new_dense(None, (channels,)))
    finalize(low, channels, attributes, refs)
    if "inv_std" in results:
        assert isinstance(a, int)
        low.normalizing[results["inv_std"]] = a


def finalize(low: Lowering, channels: int, attributes: Attributes, refs: Mapping[str, Ref]) -> None:
    """Launch the kernel that makes coefficients and running statistics, [C] each, of mean and variance."""
    coefficients(low, "finalize", (channels, float(attributes["epsilon"]), float(attributes["momentum"])), refs)


def coefficients(low: Lowering, name: str, arguments: tuple[Any, ...], refs: Mapping[str, Ref]) -> None:
    """Launch a per-channel operator (kernels/common/coefficients.py)."""
    low.launch(registry.COEFFICIENTS, (((name, arguments),), low.target), refs)


def batch_norm_grad_reduce(low: Lowering, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower BatchNormGradReduce: dbeta and dgamma, [C] each, in a sweep of their own."""
    dz, x = low.map(operands["dz"]), low.map(operands["x"])
    refs = {**vectors(low, {name: operands[name] for name in ("mean", "inv_std")}), "dz": dz, "x": x}
    new = new_vectors(low, results, x.type.c)
    low.launch(registry.BATCH_NORM_GRAD_REDUCE, (dz.type, x.type, low.target), {**refs, **new})


def batch_norm_grad_terms(low: Lowering, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower BatchNormGradTerms: a BatchNorm's shares of q and w, [C] or [groups, C] each."""
    length, refs = coefficient_rows(low, operands, results)
    coefficients(low, "grad_terms", (length,), refs)


def batch_norm_grad_terms_accumulate(low: Lowering, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower BatchNormGradTermsAccumulate: the same, added to channels [acc_start, acc_stop) of former shares."""
    start, stop = attributes["acc_start"], attributes["acc_stop"]
    refs = {**vectors(low, operands), **new_vectors(low, results, stop - start)}
    for name in ("beta_acc", "gamma_acc"):
        refs[name] = vector_range(low, operands[name], start)
    total = low.shape(operands["beta_acc"])[0]
    coefficients(low, "grad_terms_accumulate", (stop - start, total), refs)


def batch_norm_grad_finalize(low: Lowering, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower BatchNormGradFinalize: q and w of channels [start, stop) of the accumulated shares."""
    start, stop = attributes["start"], attributes["stop"]
    refs = {**vectors(low, operands), **new_vectors(low, results, stop - start)}
    for name in ("beta_term", "gamma_term"):
        refs[name] = vector_range(low, operands[name], start)
    arguments = (stop - start, low.shape(operands["beta_term"])[0], int(attributes["count"]))
    coefficients(low, "grad_finalize", arguments, refs)


# -- the source graph's operators ----------------------------------------------------------------------------------


def batch_norm_source(low: Lowering, node: ir.Node) -> None:
    """BatchNormInternal: x, scale, bias, running_mean, running_variance -> y, the new ones, mean, inv_std."""
    x, scale, bias, running_mean, running_variance = (low.operand(node, i) for i in range(5))
    y, new_mean, new_variance, mean, inv_std = (v if v.name else None for v in node.outputs)
    channels = low.shape(scale)[0]
    if len(low.shape(x)) not in (2, 4):
        raise low.error(
            node,
            f"normalises a tensor of rank {len(low.shape(x))}: only maps and matrices are compiled. Reshape "
            "it to a map of 4 axes in front of it, and back.",
        )

    def vector(value: ir.Value | None) -> int:
        return low.new_dense(value, (channels,))

    batch = {"mean": vector(mean), "variance": vector(None)}
    statistics(low, x, batch, BASELINE_SWEEPS)
    a, b = vector(None), vector(None)
    refs: dict[str, Ref] = {
        **batch,
        "a": a,
        "b": b,
        "scale": low.dense(scale),
        "bias": low.dense(bias),
        "running_mean": low.dense(running_mean),
        "running_variance": low.dense(running_variance),
        "inv_std": vector(inv_std),
        "new_running_mean": vector(new_mean),
        "new_running_variance": vector(new_variance),
    }
    finalize(low, channels, batch_norm_constants(node), refs)
    if inv_std is not None:
        low.normalizing[inv_std] = a
    assert y is not None
    normalized = ir.Value(name=f"{y.name}/a"), ir.Value(name=f"{y.name}/b")
    for value, storage in zip(normalized, (a, b), strict=True):
        low.define(value, (channels,))
        low.forms[value].dense = storage
    operands = {"x": x, "a": normalized[0], "b": normalized[1]}
    composed(low, node, OpSpec(("Normalize",), "Pointwise"), operands, {"y": y}, {})


def batch_norm_grad_source(low: Lowering, node: ir.Node) -> None:
    """BatchNormalizationGrad: dy, x, scale, mean, inv_std -> dx, dscale, dbias: sums, coefficients, a sweep."""
    dy, x, scale, mean, inv_std = (low.operand(node, i) for i in range(5))
    dx, dscale, dbias = (v if v.name else None for v in node.outputs)
    channels = low.shape(scale)[0]
    made = {
        name: _intermediate(low, node, name, channels)
        for name in ("dbeta", "dgamma", "a", "beta_term", "gamma_term", "q", "w")
    }
    low.forms[made["a"]].dense = normalizing_factor(low, scale, inv_std)
    sums = {"dbeta": dbias or made["dbeta"], "dgamma": dscale or made["dgamma"]}
    batch_norm_grad_reduce(low, {"dz": dy, "x": x, "mean": mean, "inv_std": inv_std}, sums, {})
    if dx is None:
        return
    terms = {name: made[name] for name in ("beta_term", "gamma_term")}
    batch_norm_grad_terms(low, {**sums, "a": made["a"], "inv_std": inv_std}, terms, {})
    count = math.prod(low.shape(x)) // channels
    qw = {name: made[name] for name in ("q", "w")}
    batch_norm_grad_finalize(low, {**terms, "mean": mean}, qw, {"count": count, "start": 0, "stop": channels})
    operands = {"dy": dy, "grad_x": x, "grad_p": made["a"], "grad_q": made["q"], "grad_w": made["w"]}
    composed(low, node, OpSpec(("BatchNormGrad",), "PointwiseGrad"), operands, {"dx": dx}, {})


def normalizing_factor(low: Lowering, scale: ir.Value, inv_std: ir.Value) -> int:
    """scale*inv_std: the one that the forward operator computed, else computed now."""
    known = low.normalizing.get(inv_std)
    if known is not None:
        return known
    kind = (low.shape(scale), "float32")
    made = low.new_dense(None, low.shape(scale))
    refs = {"in0": low.dense(scale), "in1": low.dense(inv_std), "out0": made}
    low.launch(registry.GENERIC, (GenericProblem("Mul", (kind, kind), (kind,)), low.target), refs)
    return made


def _intermediate(low: Lowering, node: ir.Node, name: str, channels: int) -> ir.Value:
    """Make a vector that the file does not name."""
    value = ir.Value(name=f"{node.name}/{name}")
    low.define(value, (channels,))
    return value
