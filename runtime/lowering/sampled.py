"""Lowering of statistics from samples, and of those that cheaper ones are compared with (SAMPLING_OPS, BASELINE_OPS).

Where a sample lies is an operand on the device, so the program is the same for all places. AddSampled and AddAtPoints
touch nothing but the sample: they update `acc` where it lies, if nobody needs its former contents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.sampling import Box, Points, Sampling
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.lowering.layout import MapRef
from bnfuse.runtime.lowering.norm import coefficients
from bnfuse.runtime.lowering.state import Lowering, Ref
from bnfuse.runtime.lowering.steps import updated
from bnfuse.runtime.lowering.vectors import coefficient_rows, new_vectors, vectors

Values = Mapping[str, ir.Value]
Attributes = Mapping[str, Any]


# -- where samples lie ---------------------------------------------------------------------------------------------


def box_ref(low: Lowering, node: ir.Node, offset: ir.Value, x: MapRef, extent: tuple[int, int, int]) -> int:
    """Give the storage of a box's offset. Keeps in mind, or checks now, how far it may go without leaving the map."""
    sizes = (x.type.n, x.type.h, x.type.w)
    if len(extent) != 3 or min(extent) < 1 or any(e > size for e, size in zip(extent, sizes, strict=True)):
        raise low.error(node, f"samples {list(extent)} of a map of {list(sizes)}: choose a smaller sample")
    high = tuple(size - e for size, e in zip(sizes, extent, strict=True))
    return _place(low, node, offset, Box((0, 0, 0), high))  # type: ignore[arg-type]


def points_ref(low: Lowering, node: ir.Node, points: ir.Value, x: MapRef) -> int:
    """Give the storage of the points; keeps in mind, or checks now, that they lie within the map."""
    count, pixels = math.prod(low.shape(points)), x.type.pixels
    if not 0 < count <= pixels:
        raise low.error(node, f"samples {count} points of a map of {pixels}: choose a smaller sample")
    return _place(low, node, points, Points(count, 0, pixels))


def _place(low: Lowering, node: ir.Node, value: ir.Value, limit: Box | Points) -> int:
    constant = low.constant(value)
    if constant is not None and not limit.admits(np.asarray(constant)):
        raise low.error(node, f"has a sample outside of its map: '{value.name}' must lie within {limit}")
    if constant is None and not value.is_graph_input():
        raise low.error(node, f"reads where its sample lies from '{value.name}': only inputs and constants can say it")
    if constant is None and value.name not in low.signature.offsets:
        raise low.error(node, f"reads where its sample lies from input '{value.name}', which has another role")
    if low.form(value).dtype != "int64":
        raise low.error(node, f"reads where its sample lies from '{value.name}', which is no int64")
    if constant is None:
        low.places.setdefault(value.name or "", []).append(limit)
    return low.dense(value)


def drawn(low: Lowering, said: Sampling) -> Sampling:
    """Say what the session has to draw. `said` is what the file says of it, and is held against the maps.

    An input of which nothing is said may lie wherever its map allows it.
    """
    places: dict[str, Box | Points] = {}
    for name, limits in low.places.items():
        place = said.places.get(name) or limits[0]
        for limit in limits:
            if not _within(place, limit):
                raise BnfuseError(
                    f"input '{name}' may lie within {place} by the file's metadata, by its map within {limit}: "
                    f"rewrite the source graph anew"
                )
        places[name] = place
    order = [*(name for name in said.places if name in places), *(name for name in places if name not in said.places)]
    return Sampling({name: places[name] for name in order}, low.signature.virtual, said.random)


def _within(place: Box | Points, limit: Box | Points) -> bool:
    if isinstance(place, Box) and isinstance(limit, Box):
        return limit.admits(np.array(place.low)) and limit.admits(np.array(place.high))
    if isinstance(place, Points) and isinstance(limit, Points):
        return place.count == limit.count and limit.first <= place.first and place.stop <= limit.stop
    return False


# -- samples -------------------------------------------------------------------------------------------------------


def sampled_statistics(low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower SampledStatistics: mean and variance of a box, [C] each."""
    x, extent = low.map(operands["x"]), tuple(attributes["extent"])
    refs: dict[str, Ref] = {"x": x, "offset": box_ref(low, node, operands["offset"], x, extent)}
    refs |= new_vectors(low, results, x.type.c)
    low.launch(registry.SAMPLED_STATISTICS, (x.type, extent, low.target), refs)


def point_statistics(low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower PointStatistics: mean and variance over points, [C] each."""
    x = low.map(operands["x"])
    refs = {"x": x, "points": points_ref(low, node, operands["points"], x), **new_vectors(low, results, x.type.c)}
    low.launch(registry.POINT_STATISTICS, (x.type, low.shape(operands["points"])[0], low.target), refs)


def add_sampled(low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower AddSampled: dx is acc, and acc + q*x + w in the box."""
    x, extent = low.map(operands["x"]), tuple(attributes["extent"])
    offset = box_ref(low, node, operands["offset"], x, extent)
    dx = updated(low, node, operands["acc"], results.get("dx"), [x])
    refs: dict[str, Ref] = {"x": x, "offset": offset, "dx": dx, "q": low.dense(operands["q"])}
    refs["w"] = low.dense(operands["w"])
    low.launch(registry.ADD_SAMPLED, (x.type, dx.type, extent, low.target), refs)


def add_at_points(low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower AddAtPoints: dx is acc, and acc + q*x + w at the points."""
    x = low.map(operands["x"])
    points = points_ref(low, node, operands["points"], x)
    dx = updated(low, node, operands["acc"], results.get("dx"), [x])
    refs: dict[str, Ref] = {"x": x, "points": points, "dx": dx, "q": low.dense(operands["q"])}
    refs["w"] = low.dense(operands["w"])
    low.launch(registry.ADD_AT_POINTS, (x.type, dx.type, low.shape(operands["points"])[0], low.target), refs)


def mix_statistics(low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower MixStatistics: mean and variance of two parts by their weights, [C] or [groups, C] each."""
    length, refs = coefficient_rows(low, operands, results)
    coefficients(low, "mix_statistics", (length, float(attributes["weight"])), refs)


def sampled_grad_finalize(
    low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes
) -> None:
    """Lower SampledGradFinalize: q and w of a part of the batch, [C] or [groups, C] each."""
    length, refs = coefficient_rows(low, operands, results)
    arguments = (length, int(attributes["count"]), float(attributes["weight"]))
    coefficients(low, "sampled_grad_finalize", arguments, refs)


# -- mean absolute deviation, range --------------------------------------------------------------------------------


def map_statistics(low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes) -> None:
    """L1Statistics and RangeStatistics."""
    x = low.map(operands["x"])
    kind = {"L1Statistics": registry.L1_STATISTICS, "RangeStatistics": registry.RANGE_STATISTICS}[node.op_type]
    refs = {"x": x, **new_vectors(low, results, x.type.c)}
    low.launch(kind, (x.type, low.target), refs)


def map_gradient(low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes) -> None:
    """L1GradInput and RangeGradInput."""
    dz, x = low.map(operands["dz"]), low.map(operands["x"])
    refs: dict[str, Ref] = dict(vectors(low, {n: v for n, v in operands.items() if n not in ("dz", "x")}))
    dx = low.new_map(results.get("dx"), low.shape(operands["x"]))
    kind = {"L1GradInput": registry.L1_GRAD_INPUT, "RangeGradInput": registry.RANGE_GRAD_INPUT}[node.op_type]
    arguments = (dz.type, x.type, dx.type, low.target)
    low.launch(kind, arguments, {**refs, "dz": dz, "x": x, "dx": dx})


def grad_finalize(low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Attributes) -> None:
    """L1GradFinalize and RangeGradFinalize."""
    channels = low.shape(operands["beta_term"])[0]
    refs = {**vectors(low, operands), **new_vectors(low, results, channels)}
    name = {"L1GradFinalize": "l1_grad_finalize", "RangeGradFinalize": "range_grad_finalize"}[node.op_type]
    coefficients(low, name, (channels, int(attributes["count"])), refs)
