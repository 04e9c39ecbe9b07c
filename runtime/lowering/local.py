"""Lowering of BatchNorms over groups of samples (LOCAL_OPS): for each group the kernels of a whole batch.

A group is a run of images, and so a map of its own that begins later in the same buffer; a row of its coefficients is a
vector (vectors.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from bnfuse.opset.spec import OpSpec
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.kernel import Problem
from bnfuse.runtime.lowering.layout import MapRef
from bnfuse.runtime.lowering.norm import coefficients, moving
from bnfuse.runtime.lowering.state import Lowering, Ref
from bnfuse.runtime.lowering.steps import updated
from bnfuse.runtime.lowering.vectors import new_rows, padded, row, rows

Values = Mapping[str, ir.Value]
Attributes = Mapping[str, Any]


def each_group(low: Lowering, node: ir.Node, x: MapRef, attributes: Attributes) -> Iterator[tuple[int, int, int]]:
    """Give the number of each group, and the images [start, stop) of it that count."""
    samples = int(attributes["samples"])
    first, count = int(attributes.get("first", 0)), int(attributes.get("rows", samples))
    if samples < 1 or x.type.n % samples or first < 0 or count < 1 or first + count > samples:
        raise low.error(node, f"takes samples {first} to {first + count} of groups of {samples} of {x.type.n}")
    for group in range(x.type.n // samples):
        start = group * samples + first
        yield group, start, start + count


def local_statistics(low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower LocalStatistics: a launch for each group, which writes its row of [groups, C]."""
    x = low.map(operands["x"])
    groups = list(each_group(low, node, x, attributes))
    found = {name: new_rows(low, results.get(name), len(groups), x.type.c) for name in ("mean", "variance")}
    for group, start, stop in groups:
        part = x.images(start, stop)
        refs: dict[str, Ref] = {"x": part, **{name: row(low, ref, group) for name, ref in found.items()}}
        low.launch(registry.BATCH_NORM_STATISTICS, (part.type, low.target, 1), refs)


def local_finalize(low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower LocalFinalize: coefficients [groups, C], and running statistics [C] from the mean over the groups."""
    groups, channels = low.shape(operands["mean"])
    matrices = ("mean", "variance", "a", "b", "inv_std")
    refs: dict[str, Ref] = {
        name: rows(low, value).storage if name in matrices else low.dense(value) for name, value in operands.items()
    }
    for name, value in results.items():
        if name in matrices:
            refs[name] = new_rows(low, value, groups, channels).storage
        else:
            refs[name] = low.new_dense(value, (channels,))
    coefficients(low, "local_finalize", (channels, padded(channels), groups, *moving(attributes)), refs)


def local_normalize(low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower LocalNormalize: a Pointwise over each group with its own a and b."""
    x = low.map(operands["x"])
    y = low.new_map(results.get("y"), low.shape(operands["x"]))
    factors = {name: rows(low, operands[name]) for name in ("a", "b")}
    _map_groups(low, node, OpSpec(("Normalize",), "Pointwise"), {"x": x, "y": y}, factors, attributes)


def local_scale(low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower LocalScale: dz times each group's own a."""
    dz = low.map(operands["dz"])
    dx = low.new_map(results.get("dx"), low.shape(operands["dz"]))
    factors = {"acc_p": rows(low, operands["p"])}
    _map_groups(low, node, OpSpec((), "PointwiseGrad", ("Scale",)), {"dy": dz, "dx": dx}, factors, attributes)


def _map_groups(
    low: Lowering,
    node: ir.Node,
    spec: OpSpec,
    maps: Mapping[str, MapRef],
    factors: Mapping[str, MapRef],
    attributes: Attributes,
) -> None:
    """Launch a Pointwise or PointwiseGrad over each group with its own coefficients."""
    kind = registry.POINTWISE_BACKWARD if spec.is_gradient else registry.POINTWISE_FORWARD
    for group, start, stop in each_group(low, node, next(iter(maps.values())), attributes):
        parts = {name: ref.images(start, stop) for name, ref in maps.items()}
        problem = Problem(spec.name, tuple((name, part.type) for name, part in parts.items()))
        own = {name: row(low, ref, group) for name, ref in factors.items()}
        low.launch(kind, (problem, low.target), {**parts, **own})


def local_grad_reduce(low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower LocalGradReduce: dbeta and dgamma of each group, [groups, C]."""
    dz, x = low.map(operands["dz"]), low.map(operands["x"])
    groups = list(each_group(low, node, x, attributes))
    matrices = {name: rows(low, operands[name]) for name in ("mean", "inv_std")}
    for name in ("dbeta", "dgamma"):
        matrices[name] = new_rows(low, results.get(name), len(groups), x.type.c)
    for group, start, stop in groups:
        parts = {"dz": dz.images(start, stop), "x": x.images(start, stop)}
        own = {name: row(low, ref, group) for name, ref in matrices.items()}
        arguments = (parts["dz"].type, parts["x"].type, low.target)
        low.launch(registry.BATCH_NORM_GRAD_REDUCE, arguments, {**parts, **own})


def local_add_sampled(low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes) -> None:
    """For each group a box that is all of its map."""
    x = low.map(operands["x"])
    matrices = {name: rows(low, operands[name]) for name in ("q", "w")}
    dx = updated(low, node, operands["acc"], results.get("dx"), [x])
    if low.origin is None:
        low.origin = low.constant_storage(np.zeros(3, np.int64))
    for group, start, stop in each_group(low, node, x, attributes):
        parts = {"x": x.images(start, stop), "dx": dx.images(start, stop)}
        own = {name: row(low, ref, group) for name, ref in matrices.items()}
        extent = (stop - start, x.type.h, x.type.w)
        arguments = (parts["x"].type, parts["dx"].type, extent, low.target)
        low.launch(registry.ADD_SAMPLED, arguments, {**parts, **own, "offset": low.origin})
