"""Lowering of the halves of a BatchNorm, and of whole ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from bnfuse.opset.spec import OpSpec
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
    finalize(low, channels, {**attributes, "elements": elements_of_run(low, attributes)}, refs)
    if "inv_std" in results:
        assert isinstance(a, int)
        low.normalizing[results["inv_std"]] = a


def elements_of_run(low: Lowering, attributes: Attributes) -> float:
    """Give how many elements a channel the variance is of that a BatchNormFinalize reads, in the run of all ranks."""
    elements, own = float(attributes.get("elements", 0.0)), float(attributes.get("own_share", 0.0))
    ranks = min(int(attributes.get("of_ranks", 1)) or low.ranks.size, low.ranks.size)
    return 1 / (own + (1 / elements - own) / ranks) if elements and ranks > 1 else elements


def finalize(low: Lowering, channels: int, attributes: Attributes, refs: Mapping[str, Ref]) -> None:
    """Launch the kernel that makes coefficients and running statistics, [C] each, of mean and variance."""
    coefficients(low, "finalize", (channels, *moving(attributes)), refs)


def moving(attributes: Attributes) -> tuple[float, ...]:
    """Give epsilon, momentum and, where the running variance is the unbiased one, its number of elements."""
    elements = float(attributes.get("elements", 0.0))
    return (float(attributes["epsilon"]), float(attributes["momentum"]), *((elements,) if elements else ()))


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


# -- whole ones, of training graphs before any pass ----------------------------------------------------------------


def batch_norm(low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower BatchNorm of a map [N, C, ...]: two sweeps of statistics, coefficients, and a NormalizePointwise."""
    channels = low.shape(operands["scale"])[0]

    def vector(name: str | None = None) -> int:
        return low.new_dense(results.get(name) if name else None, (channels,))

    x = as_map(low, node, operands["x"])
    batch = {"mean": vector("mean"), "variance": vector()}
    statistics(low, x, batch, BASELINE_SWEEPS)
    a, b = vector(), vector()
    refs: dict[str, Ref] = {
        **batch,
        "a": a,
        "b": b,
        **vectors(low, {name: operands[name] for name in ("scale", "bias", "running_mean", "running_variance")}),
        **{name: vector(name) for name in ("inv_std", "new_running_mean", "new_running_variance")},
    }
    count = float(math.prod(low.shape(x)) // channels) if attributes.get("unbiased") else 0.0
    finalize(low, channels, {**attributes, "elements": count}, refs)
    if "inv_std" in results:
        low.normalizing[results["inv_std"]] = a
    if "y" not in results:
        return
    normalized = {name: _intermediate(low, node, name, channels) for name in ("a", "b")}
    for value, storage in zip(normalized.values(), (a, b), strict=True):
        low.forms[value].dense = storage
    with_result(
        low, OpSpec(("Normalize",), "Pointwise"), node, {"x": x, **normalized}, "y", results["y"], operands["x"]
    )


def batch_norm_grad(low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower BatchNormGrad of a map [N, C, ...]: sums, coefficients, a sweep."""
    dy, x = (as_map(low, node, operands[name]) for name in ("dy", "x"))
    scale, mean, inv_std = (operands[name] for name in ("scale", "mean", "inv_std"))
    channels = low.shape(scale)[0]
    made = {
        name: _intermediate(low, node, name, channels)
        for name in ("dbeta", "dgamma", "a", "beta_term", "gamma_term", "q", "w")
    }
    low.forms[made["a"]].dense = normalizing_factor(low, scale, inv_std)
    sums = {"dbeta": results.get("dbias", made["dbeta"]), "dgamma": results.get("dscale", made["dgamma"])}
    batch_norm_grad_reduce(low, {"dz": dy, "x": x, "mean": mean, "inv_std": inv_std}, sums, {})
    if "dx" not in results:
        return
    terms = {name: made[name] for name in ("beta_term", "gamma_term")}
    batch_norm_grad_terms(low, {**sums, "a": made["a"], "inv_std": inv_std}, terms, {})
    count = math.prod(low.shape(x)) // channels
    qw = {name: made[name] for name in ("q", "w")}
    batch_norm_grad_finalize(low, {**terms, "mean": mean}, qw, {"count": count, "start": 0, "stop": channels})
    read = {"dy": dy, "grad_x": x, "grad_p": made["a"], "grad_q": made["q"], "grad_w": made["w"]}
    with_result(low, OpSpec(("BatchNormGrad",), "PointwiseGrad"), node, read, "dx", results["dx"], operands["x"])


def as_map(low: Lowering, node: ir.Node, value: ir.Value) -> ir.Value:
    """Give a tensor [N, C, ...] as the map or matrix that kernels take: of another rank as [N, C, the rest, 1]."""
    shape = low.shape(value)
    if len(shape) in (2, 4):
        return value
    made = ir.Value(name=f"{node.name}/{value.name}")
    low.alias(made, value, (*shape[:2], math.prod(shape[2:]), 1))
    return made


def with_result(
    low: Lowering, spec: OpSpec, node: ir.Node, operands: Values, name: str, result: ir.Value, like: ir.Value
) -> None:
    """Launch an operator whose one result has the shape of `like`, which `as_map` may have changed."""
    shape = low.shape(like)
    made = result if len(shape) in (2, 4) else ir.Value(name=f"{node.name}/{result.name}")
    composed(low, node, spec, operands, {name: made}, {})
    if made is not result:
        low.alias(result, made, shape)


def normalizing_factor(low: Lowering, scale: ir.Value, inv_std: ir.Value) -> int:
    """scale*inv_std: the one that the forward operator computed, else computed now."""
    known = low.normalizing.get(inv_std)
    if known is not None:
        return known
    kinds = tuple((low.shape(value), "float32") for value in (scale, inv_std))
    made = low.new_dense(None, low.shape(inv_std))
    refs = {"in0": low.dense(scale), "in1": low.dense(inv_std), "out0": made}
    low.launch(registry.GENERIC, (GenericProblem("Mul", kinds, kinds[1:]), low.target), refs)
    return made


def _intermediate(low: Lowering, node: ir.Node, name: str, channels: int) -> ir.Value:
    """Make a vector that the file does not name."""
    value = ir.Value(name=f"{node.name}/{name}")
    low.define(value, (channels,))
    return value
