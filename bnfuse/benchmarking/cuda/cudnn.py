"""A network's convolutions alone by cuDNN: what a step would take if all the rest of it were free.

Each shape's forward, grad-input and grad-weight is timed on its own: channels_last, cuDNN's fastest algorithm, some
in a row in a CUDA graph, over several sets of buffers where one would stay in the cache.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

from bnfuse.baselines import cuda
from bnfuse.baselines.names import import_torch
from bnfuse.baselines.writer import attribute
from bnfuse.benchmarking.cuda.limits import median_seconds
from bnfuse.core.text import Section
from bnfuse.graph.training_graph import TrainingGraph

IN_CACHES = 128 << 20  # bytes that a row of calls should touch
CALLS = 8  # in a row, at least
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclasses.dataclass(frozen=True)
class Convolution:
    """x is [n, cin, h, w], weight [cout, cin/group, kh, kw]. `needs_dx`: not of the images."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]
    group: int
    needs_dx: bool

    @property
    def kind(self) -> str:
        """As profiles of our kernels say it."""
        form = "" if self.group == 1 else "depthwise " if self.weight[1] == 1 else "grouped "
        return form + "x".join(map(str, self.weight[2:]))

    @property
    def shape(self) -> str:
        """The shape in words: 16x56x56x64 -> 128, stride 2."""
        n, c, h, w = self.x
        strided = f", stride {self.strides[0]}" if any(s != 1 for s in self.strides) else ""
        return f"{n}x{h}x{w}x{c} -> {self.weight[0]}{strided}"


@dataclasses.dataclass(frozen=True)
class Floor:
    """Seconds of one layer, and how many such layers the network has."""

    layer: Convolution
    count: int
    forward: float
    grad_input: float
    grad_weight: float

    @property
    def backward(self) -> float:
        """Seconds of both gradients."""
        return self.grad_input + self.grad_weight

    @property
    def total(self) -> float:
        """Seconds of all layers of this shape, forward and backward."""
        return self.count * (self.forward + self.backward)

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON's types, times in seconds."""
        own = {name: getattr(self, name) for name in ("count", "forward", "grad_input", "grad_weight", "total")}
        return {"kind": self.layer.kind, "shape": self.layer.shape, **own}


def convolutions(graph: TrainingGraph) -> collections.Counter[Convolution]:
    """List the convolutions of the forward part, alike ones counted. Padding that differs between sides is taken as the
    larger one."""
    found: collections.Counter[Convolution] = collections.Counter()
    for node in graph.model.graph:
        if node.op_type != "Conv" or node.domain not in ("", "ai.onnx"):
            continue
        x, weight = node.inputs[0], node.inputs[1]
        assert x is not None and weight is not None and x.shape is not None and weight.shape is not None
        rank = len(x.shape) - 2
        pads = attribute(node, "pads", [0] * 2 * rank)
        layer = Convolution(
            tuple(int(d) for d in x.shape),  # type: ignore[arg-type]
            tuple(int(d) for d in weight.shape),  # type: ignore[arg-type]
            tuple(attribute(node, "strides", [1] * rank)),
            tuple(map(max, pads[:rank], pads[rank:])),
            tuple(attribute(node, "dilations", [1] * rank)),
            attribute(node, "group", 1),
            x.name not in graph.signature.data,
        )
        found[layer] += 1
    return found


def measured_floors(graph: TrainingGraph, precision: str, batch: int | None = None) -> list[Floor]:
    """Measure each different layer, those with the most time first, in this process."""
    torch = import_torch()
    cuda.set_precision(torch, precision)
    found = []
    for layer, count in convolutions(graph).items():
        sized = layer if batch is None else dataclasses.replace(layer, x=(batch, *layer.x[1:]))
        found.append(Floor(sized, count, *measured(torch, sized, precision)))
        torch.cuda.empty_cache()
    return sorted(found, key=lambda floor: -floor.total)


def measured(torch: Any, layer: Convolution, precision: str) -> tuple[float, float, float]:
    """Measure the seconds of forward, grad-input (0 where nobody needs it) and grad-weight."""
    dtype = getattr(torch, DTYPES.get(precision, "float32"))

    def tensor(shape: Iterable[int]) -> Any:
        made = torch.randn(tuple(shape), device="cuda").to(dtype)
        return made.contiguous(memory_format=torch.channels_last)

    how = (list(layer.strides), list(layer.pads), list(layer.dilations))
    weight = tensor(layer.weight)
    y = torch.nn.functional.conv2d(tensor(layer.x), weight, None, *how, layer.group)
    size = (math.prod(layer.x) + y.numel()) * y.element_size()
    sets = [(tensor(layer.x), tensor(y.shape)) for _ in range(max(1, min(CALLS, math.ceil(IN_CACHES / size))))]

    def forward(x: Any, _: Any) -> Any:
        return torch.nn.functional.conv2d(x, weight, None, *how, layer.group)

    def backward(*wanted: bool) -> Callable[[Any, Any], Any]:
        return lambda x, dy: torch.ops.aten.convolution_backward(
            dy, x, weight, None, *how, False, [0, 0], layer.group, [*wanted, False]
        )

    with torch.no_grad():
        grad_input = in_graph(torch, backward(True, False), sets) if layer.needs_dx else 0.0
        return in_graph(torch, forward, sets), grad_input, in_graph(torch, backward(False, True), sets)


def in_graph(torch: Any, call: Callable[[Any, Any], Any], sets: list[tuple[Any, Any]]) -> float:
    """Measure the seconds of one call, of a graph of some calls."""
    calls = [sets[index % len(sets)] for index in range(CALLS)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for operands in sets[:2]:
            call(*operands)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for operands in calls:
            call(*operands)
    return median_seconds(torch, graph.replay) / len(calls)


def beside(floors: list[Floor], ours: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put cuDNN's rows beside the time of our launches of the same layers: `ours` are the rows of a profile in JSON.

    Ours compute more: what was fused into them is in their time. None where no launch is of such a layer.
    """
    times: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for row in ours:
        core, _, kind = row["kind"].partition(" ")
        if core == "Conv" or core.startswith("ConvGrad"):
            times[row["phase"], kind, row["shape"]] += row["seconds"]
    rows = []
    for floor in floors:
        key = (floor.layer.kind, floor.layer.shape)
        own = {phase: times.get((phase, *key)) for phase in ("forward", "backward")}
        rows.append({**floor.to_json(), "our_forward": own["forward"], "our_backward": own["backward"]})
    return rows


def section(rows: list[dict[str, Any]]) -> Section:
    """Give the table by layer: milliseconds of all layers of a shape together."""
    head = ("layer", "count", "cuDNN forward", "ours", "cuDNN backward", "ours", "cuDNN both")
    lines = []
    for row in rows:
        backward = row["count"] * (row["grad_input"] + row["grad_weight"])
        times = (row["count"] * row["forward"], row["our_forward"], backward, row["our_backward"], row["total"])
        lines.append((f"{row['kind']} {row['shape']}", row["count"], *(milliseconds(t) for t in times)))
    total = sum(row["total"] for row in rows)
    return Section.table(f"Convolutions alone by cuDNN: {milliseconds(total)} ms a step", head, lines)


def milliseconds(seconds: float | None) -> str:
    """Write seconds as milliseconds; - where there are none."""
    return "-" if seconds is None else f"{1000 * seconds:.3f}"
