"""Lowering of operators that are composed of steps, from `ai.bnfuse` or stood for by a source operator.

What kernels never see is resolved here: a `Slice` is the slot of those channels; `Accumulate` writes into the slot
of the accumulator where nobody needs its former contents any more, and into a copy of it otherwise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import onnx_ir as ir

from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.opset.shapes import transposed_shape
from bnfuse.opset.spec import (
    CONV_GRADS,
    CONVS,
    DOMAIN,
    MAPS_LIKE_DY,
    MAPS_LIKE_X,
    OF_GRADIENT,
    READ_X,
    RESAMPLES,
    OpSpec,
    image_step,
    is_numbered_map,
    is_of_images,
    may_be_of_samples,
    parse,
    parts_of,
)
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.common.images import of_map, source_of
from bnfuse.runtime.kernels.common.sides import TOWARDS_INPUT, TOWARDS_OUTPUT
from bnfuse.runtime.kernels.common.windows import index_dtype
from bnfuse.runtime.kernels.kernel import MapType, Problem, is_gate
from bnfuse.runtime.lowering.layout import Guards, MapRef, realigned
from bnfuse.runtime.lowering.resample import MATRICES
from bnfuse.runtime.lowering.resample import launch as launch_resample
from bnfuse.runtime.lowering.state import Lowering, Ref
from bnfuse.runtime.lowering.weights import weight_ref
from bnfuse.runtime.program.program import ARENA

POOL_GRADS = ("MaxPoolGrad", "AveragePoolGrad", "GlobalAveragePoolGrad")
INPUT_GRADS = ("ConvGradInput", "ConvTransposeGradInput")
KINDS = {
    **dict.fromkeys(TOWARDS_OUTPUT, registry.CONV_FORWARD),
    **dict.fromkeys(TOWARDS_INPUT, registry.CONV_BACKWARD),
    "Pointwise": registry.POINTWISE_FORWARD,
    "PointwiseGrad": registry.POINTWISE_BACKWARD,
    **dict.fromkeys(("MaxPool", "AveragePool", "GlobalAveragePool"), registry.POOL_FORWARD),
    **dict.fromkeys(POOL_GRADS, registry.POOL_BACKWARD),
}
MAP_OPERANDS = (*MAPS_LIKE_X, *MAPS_LIKE_DY, "indices")
RESOLVED = ("grad_start", "grad_stop", "acc_start", "acc_stop")  # attributes that say where, not what, and start_i

Values = Mapping[str, ir.Value]


def is_map(name: str) -> bool:
    """Whether an operand is a feature map; x_1, x_2, ... are those of further reductions."""
    return name in MAP_OPERANDS or is_numbered_map(name) or is_gate(name)


def coefficient(low: Lowering, name: str, value: ir.Value) -> Ref:
    """Give an operand that is no map: dense, or as a map of one pixel a sample where each sample has its own."""
    shape = low.shape(value)
    if not may_be_of_samples(name) or len(shape) != 2 or shape[0] == 1:
        return low.dense(value)
    return MapRef(low.dense(value), 0, low.map_type((*shape, 1, 1)))


def composed(
    low: Lowering, node: ir.Node, spec: OpSpec, operands: Values, results: Values, attributes: Mapping[str, Any]
) -> None:
    """Launch the kernel of one operator. `operands` and `results` are the values by the names of the spec."""
    require_kernel(low, node, spec)
    unread = unread_operands(spec)
    refs: dict[str, Ref] = {
        name: low.map(value) if is_map(name) else coefficient(low, name, value)
        for name, value in operands.items()
        if name not in unread and name not in ("weight", *MATRICES)
    }
    if "weight" in operands:
        refs["weight"] = weight_ref(low, spec.core, operands["weight"], attributes["group"])
    if "Slice" in spec.prologue:
        dy = refs["dy"]
        assert isinstance(dy, MapRef)
        refs["dy"] = dy.channels(attributes["grad_start"], attributes["grad_stop"])
    if "Accumulate" in spec.epilogue:
        refs["dx"] = accumulator(low, node, operands, results, attributes, refs)
    elif spec.is_gradient and "dx" in spec.results:
        refs["dx"] = low.new_map(results.get("dx"), gradient_shape(low, spec, operands, refs))
    for number in parts_of(spec.epilogue):
        beside(low, refs, f"x_{number}", attributes[f"start_{number}"])
    if not spec.is_gradient:
        forward_maps(low, spec, operands, results, attributes, refs)
    if "x" in unread:
        refs["x"] = refs["dx"]  # any map of that shape will do
    weight = low.shape(operands["weight"]) if "weight" in operands else ()
    for name, value in results.items():
        if name not in refs:
            refs[name] = low.new_dense(value, vector_shape(spec, name, weight, refs))
    made = problem(low, spec, refs, attributes, weight)
    step, apart = image_step(spec.epilogue), None
    if step is not None and (spec.core in RESAMPLES or not KINDS[spec.core].takes_image_sums(made, low.target)):
        bare = OpSpec(spec.prologue, spec.core, tuple(other for other in spec.epilogue if other != step))
        made, apart = problem(low, bare, refs, attributes, weight), of_map(made)
    if spec.core in RESAMPLES:
        launch_resample(low, node, made, refs, operands)
    else:
        low.launch(KINDS[spec.core], (made, low.target), refs)
    if apart is not None:
        image_sums(low, apart, refs)


def require_kernel(low: Lowering, node: ir.Node, spec: OpSpec) -> None:
    """Raise BnfuseError for what the grammar has and no kernel: no pass makes it."""
    if "StoreInput" in spec.epilogue and spec.core not in ("Conv", "Pointwise"):
        raise low.error(node, "stores what it reads, as only convolutions do: store it by a Pointwise in front of it")
    if "BiasGrad" in spec.epilogue and spec.core not in (*CONV_GRADS, "PointwiseGrad"):
        raise low.error(node, "has no bias: sum its dy by a PointwiseGradBiasGrad")


def image_sums(low: Lowering, sums: Problem, refs: Mapping[str, Ref]) -> None:
    """Launch the sweep that sums over the images of what an operator has written (kernels/common/images.py)."""
    written = refs["dx" if sums.spec.is_gradient else "y"]
    low.launch(registry.IMAGE_SUMS, (sums, low.target), {**refs, source_of(sums): written})


def elementwise(
    low: Lowering, node: ir.Node, spec: OpSpec, operands: Values, results: Values, attributes: Mapping[str, Any]
) -> None:
    """Launch the kernel of an operator that works on each element alone: on maps, or on dense tensors as they lie."""
    if not all(low.lies_dense(value) for value in operands.values()):
        composed(low, node, spec, operands, results, attributes)
        return
    shape = low.shape(next(iter(operands.values())))
    kind = low.rows_type(shape)
    refs: dict[str, Ref] = {name: MapRef(low.dense(value), 0, kind) for name, value in operands.items()}
    name = "dx" if spec.is_gradient else "y"
    refs[name] = MapRef(low.new_dense(results.get(name), shape), 0, kind)
    low.launch(KINDS[spec.core], (problem(low, spec, refs, attributes, ()), low.target), refs)


def unread_operands(spec: OpSpec) -> set[str]:
    """Operands that the kernel does not get, or gets for their shape alone and must not keep alive."""
    reads_x = {*READ_X} & {*spec.epilogue}
    of_x = {*spec.prologue} - {*OF_GRADIENT}
    alone = spec.core in (*POOL_GRADS, "ResampleGrad") or (spec.core in INPUT_GRADS and not of_x)
    return {"acc"} | ({"x"} if alone and not reads_x else set())


def problem(
    low: Lowering, spec: OpSpec, refs: Mapping[str, Ref], attributes: Mapping[str, Any], weight: tuple[int, ...]
) -> Problem:
    """Describe what the kernel is made for: of a Slice nothing is left but the type of dy."""
    seen = dataclasses.replace(spec, prologue=tuple(step for step in spec.prologue if step != "Slice"))
    names = dict.fromkeys((*spec.operands, *spec.results))
    maps = {name: ref.type for name in names if isinstance(ref := refs.get(name), MapRef)}
    if spec.core == "MaxPool" and "indices" not in maps:
        maps["indices"] = indices_type(low, maps["y"], attributes)
    for name in ("stored", "dx", "y"):
        assert name not in spec.results or name in maps, (spec.name, name)
    where = (*RESOLVED, *(f"start_{number}" for number in parts_of(spec.epilogue)))
    kept = tuple((name, attributes[name]) for name in spec.attributes if name not in where)
    return Problem(seen.name, tuple(maps.items()), kept, weight)


def beside(low: Lowering, refs: dict[str, Ref], name: str, start: int) -> None:
    """Let a map of fewer channels be read beside dx, its own from `start` on: as one of dx's channels that lie as far
    apart as its own.

    In the other channels a kernel finds those of neighbouring pixels, which it drops; before the first and behind the
    last pixel there is room (`Guards`).
    """
    ref, dx = refs[name], refs["dx"]
    assert isinstance(ref, MapRef) and isinstance(dx, MapRef)
    held = low.storages[ref.storage]
    end = ref.offset - start + (ref.type.pixels - 1) * ref.type.stride + dx.type.c
    if ref.offset < start or end > held.elements:  # an output of the graph, say
        guards = Guards(start, dx.type.c - start - ref.type.c)
        kind = dataclasses.replace(ref.type, stride=ref.type.c, whole=0)
        copy = low.guarded(kind, guards, held.dtype)
        low.copy_map(ref, copy)
        ref, held = copy, low.storages[copy.storage]
    kind = dataclasses.replace(ref.type, c=dx.type.c, whole=held.elements)
    refs[name] = MapRef(ref.storage, ref.offset - start, realigned(kind, ref.offset - start))


def indices_type(low: Lowering, y: MapType, attributes: Mapping[str, Any]) -> MapType:
    """Describe a MaxPool's indices where nobody reads them."""
    return low.map_type((y.n, y.c, y.h, y.w), index_dtype(attributes["kernel_shape"]))


def vector_shape(spec: OpSpec, result: str, weight: tuple[int, ...], refs: Mapping[str, Ref]) -> tuple[int, ...]:
    """Shape of a result that is no map: of each channel, of each image and channel, or the weight's."""
    if result == "dweight":
        return weight
    name = "dy" if result == "dbias" else "dx" if spec.is_gradient else "y"
    ref = refs[name]
    assert isinstance(ref, MapRef)
    return (ref.type.n, ref.type.c) if is_of_images(result) else (ref.type.c,)


def gradient_shape(low: Lowering, spec: OpSpec, operands: Values, refs: Mapping[str, Ref]) -> tuple[int, ...]:
    """Give the shape of dx: that of x; where x is not read, that of dy."""
    if "x" in operands:
        return low.shape(operands["x"])
    dy = refs["dy"]
    assert isinstance(dy, MapRef)
    shape = list(low.shape(operands["dy"]))
    if len(shape) == 4:
        shape[1] = dy.type.c
    return tuple(shape)


# -- forward -------------------------------------------------------------------------------------------------------


def forward_maps(
    low: Lowering, spec: OpSpec, operands: Values, results: Values, attributes: Mapping[str, Any], refs: dict[str, Ref]
) -> None:
    """Define the maps that a forward operator writes."""
    shape = low.shape(operands["x"])
    weight = low.shape(operands["weight"]) if "weight" in operands else ()
    if spec.core == "Resample":
        out = (*shape[:2], *(low.shape(operands[name])[0] for name in MATRICES))
    else:
        out = output_shape(spec, shape, weight, attributes)
    refs["y"] = low.new_map(results.get("y"), out)
    if "StoreInput" in spec.epilogue:
        refs["stored"] = low.new_map(results.get("stored"), shape)
    if "indices" in results:
        refs["indices"] = low.new_map(results["indices"], out, index_dtype(attributes["kernel_shape"]))


def output_shape(
    spec: OpSpec, shape: tuple[int, ...], weight: tuple[int, ...], attributes: Mapping[str, Any]
) -> tuple[int, ...]:
    """Give the shape [N, C, H, W] of y, from that of x."""
    if spec.core == "Pointwise":
        return shape
    n, c, *size = shape
    if spec.core == "GlobalAveragePool":
        return n, c, 1, 1
    if spec.core == "ConvTranspose":
        return tuple(int(size) for size in transposed_shape(shape, weight, attributes) or ())  # type: ignore[arg-type]
    window = weight[2:] if spec.core in CONVS else attributes["kernel_shape"]
    pads, rank = attributes["pads"], len(size)
    out = [
        extent(
            size[i],
            window[i],
            attributes["strides"][i],
            attributes.get("dilations", (1,) * rank)[i],
            (pads[i], pads[i + rank]),
            bool(attributes.get("ceil_mode", 0)),
        )
        for i in range(rank)
    ]
    return n, weight[0] if weight else c, *out


def extent(size: int, window: int, stride: int, dilation: int, pads: tuple[int, int], ceil: bool) -> int:
    """Output pixels along one axis. With `ceil`, the last window starts in the image or its left border, as in ONNX."""
    span = size + sum(pads) - dilation * (window - 1) - 1
    count = (math.ceil(span / stride) if ceil else span // stride) + 1
    if ceil and (count - 1) * stride >= size + pads[0]:
        count -= 1
    return count


# -- accumulation --------------------------------------------------------------------------------------------------


def accumulator(
    low: Lowering, node: ir.Node, operands: Values, results: Values, attributes: Mapping[str, Any], refs: dict[str, Ref]
) -> MapRef:
    """Give the map that dx is added to: the channels of `acc` themselves, or a copy where they are still needed."""
    channels = attributes["acc_start"], attributes["acc_stop"]
    return updated(low, node, operands["acc"], results.get("dx"), refs.values(), channels)


def updated(
    low: Lowering,
    node: ir.Node,
    acc: ir.Value,
    dx: ir.Value | None,
    read: Iterable[Ref],
    channels: tuple[int, int] | None = None,
) -> MapRef:
    """Make the map `dx`, which begins as (channels of) `acc`; a kernel that also reads `read` updates it in place."""
    shape = low.shape(acc)
    target = low.map(acc)
    if channels is not None:
        target = target.channels(*channels)
        shape = (shape[0], channels[1] - channels[0], *shape[2:])
    is_own = low.storages[target.storage].region == ARENA
    if dx in low.slots.of or not is_own or still_needed(low, node, target) or any(meets(ref, target) for ref in read):
        source, target = target, low.new_map(dx, shape)
        low.copy_map(source, target)
        return target
    if dx is not None:
        low.define(dx, shape)
        low.place(dx, target)
    return target


def meets(ref: Ref, target: MapRef) -> bool:
    """Tell whether an operand shares elements with a map that is written."""
    return isinstance(ref, MapRef) and ref.storage == target.storage and ref.overlaps(target)


def still_needed(low: Lowering, node: ir.Node, target: MapRef) -> bool:
    """Whether a later node, or the caller, reads what the target's channels hold now."""
    now = low.order[node]
    for value, ref in low.residents.get(target.storage, ()):
        if not ref.overlaps(target):
            continue
        if value.is_graph_output():
            return True
        for use in value.uses():
            later = use.node in low.order and low.order[use.node] > now
            if later and ref.channels(*channels_read(use, ref.type.c)).overlaps(target):
                return True
    return False


def channels_read(use: Any, channels: int) -> tuple[int, int]:
    """Give the channel range that one use of a map of so many channels reads."""
    names = operand_names(use.node)
    name = names[use.idx] if use.idx < len(names) else ""
    attributes = use.node.attributes
    if name == "dy" and "grad_start" in attributes:
        return attributes["grad_start"].as_int(), attributes["grad_stop"].as_int()
    if name == "acc" and "acc_start" in attributes:
        return attributes["acc_start"].as_int(), attributes["acc_stop"].as_int()
    return 0, channels


def operand_names(node: ir.Node) -> tuple[str, ...]:
    """Name the operands of a node of this domain, in the order of its inputs; none for another's."""
    if node.domain != DOMAIN:
        return ()
    plain = PLAIN_OPS.get(node.op_type)
    spec = None if plain else parse(node.op_type)
    return plain.operands if plain else spec.operands if spec else ()
