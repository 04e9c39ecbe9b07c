"""The workload of a compiled step: every launch a layer, every storage of its program a tensor.

What the runtime really does is in it: copies between layouts, scratch, vectors grouped into one launch, the update. A
program says which storages a launch touches and how many bytes it moves in all (runtime/lowering/work.py), but not
which channels of a wider buffer it works on: what a launch's storages hold beyond its bytes is taken off those that
several maps share, in proportion.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from bnfuse.estimating.node_costs import composed_type
from bnfuse.estimating.operations import TYPES
from bnfuse.estimating.workload import Access, Kind, Layer, Tensor, Workload
from bnfuse.opset.spec import OpSpec, find
from bnfuse.runtime.program import program as p

VECTOR = 8192  # elements: a float tensor of the arena that has no more is one of coefficients
KINDS: dict[str, Kind] = {
    p.PARAMETERS: "weight",
    p.GRADIENTS: "weight_gradient",
    p.RUNNING: "vector",
    p.NEW_RUNNING: "vector",
    p.CONSTANTS: "vector",
    p.INPUTS: "data",
    p.OPTIMIZER: "weight",
    p.ACCUMULATED: "weight_gradient",
    p.AVERAGE: "weight",
    p.AVERAGE_RUNNING: "vector",
}
KEPT = (
    p.PARAMETERS,
    p.OPTIMIZER,
    p.GRADIENTS,
    p.NEW_RUNNING,
    p.OUTPUTS,
    p.ACCUMULATED,
    p.AVERAGE,
    p.AVERAGE_RUNNING,
)
WORK_TYPES = {
    "Gemm": "Dense",
    "loss": "Loss",
    "copy": "Copy",
    "coefficients": "BatchNorm",
    "BatchNorm halves": "BatchNorm",
}


def launch_workload(program: p.Program, name: str) -> Workload:
    """Give the launches in the order in which a step runs, forward, backward, update: that of `step.profile`, without
    exchanges between ranks.

    Coefficients have the bytes of the first launch of their kernel, whatever their length: they are few.
    """
    data = program.inputs[program.signature["data"][0]]
    launches = [launch for phase in p.ALL_PHASES for launch in program.phase(phase) if not launch.exchanges]
    shared = shared_storages(program, launches)
    numbers: dict[int, int] = {}
    for launch in launches:
        for buffer in launch.buffers:
            numbers.setdefault(buffer.storage, len(numbers))
    layers = tuple(_layer(program, launch, numbers, shared) for launch in launches)
    return Workload(name, data.shape[0], _tensors(program, launches, numbers), layers)


def shared_storages(program: p.Program, launches: Iterable[p.Launch]) -> set[int]:
    """List the storages of the arena that some launch reads or writes a part of: one that begins behind their start.

    The offsets of maps follow the buffers in a launch's arguments, without saying of which buffers they are: where one
    is not 0, all of the launch's may be shared.
    """
    found: set[int] = set()
    for launch in launches:
        if any(isinstance(a, int) and a for a in launch.arguments):
            found.update(b.storage for b in launch.buffers if program.storages[b.storage].region == p.ARENA)
    return found


def _layer(program: p.Program, launch: p.Launch, numbers: dict[int, int], shared: set[int]) -> Layer:
    work = program.works[launch.kernel]
    touched = touched_bytes(program, launch, work, shared)
    longest = max(
        (size for size, buffer in zip(touched, launch.buffers, strict=True) if buffer.access == "in"), default=0
    )
    reads, writes = [], []
    for buffer, size in zip(launch.buffers, touched, strict=True):
        access = Access(numbers[buffer.storage], size)
        if size and buffer.access != "out":
            reads.append(dataclasses.replace(access, sweeps=work.sweeps if size == longest else 1))
        if size and buffer.access != "in":
            writes.append(access)
    kind = type_of(work.kind, work.op)
    phase = "update" if launch.phase == "accumulate" else launch.phase
    return Layer(launch.node, kind, phase, work.flops, tuple(reads), tuple(writes), launch.node)


def touched_bytes(program: p.Program, launch: p.Launch, work: p.Work, shared: set[int]) -> list[int]:
    """Count the bytes of each buffer of a launch, so that all together they are what it moves (what is updated counts
    twice).

    What a launch reads and writes in one place, it makes itself: a group of coefficients hands on its results, and a
    gradient takes its result for an operand of which only the shape is wanted. Nothing is read then.
    """
    inner = {buffer.storage for buffer in launch.buffers if buffer.access == "out"}
    inner -= shared if work.kind != "coefficients" else set()
    sizes, times = [], []
    for buffer in launch.buffers:
        is_inner = buffer.access == "in" and buffer.storage in inner
        sizes.append(0 if is_inner else program.storages[buffer.storage].bytes)
        times.append(2 if buffer.access == "inout" else 1)
    excess = sum(size * n for size, n in zip(sizes, times, strict=True)) - work.bytes
    if excess <= 0:
        return sizes
    wide = [buffer.storage in shared for buffer in launch.buffers]
    room = sum(size * n for size, n, is_wide in zip(sizes, times, wide, strict=True) if is_wide)
    if room < excess:  # scratch, or a map that only gives its shape
        wide, room = [True] * len(sizes), excess + work.bytes
    left = 1 - excess / room
    return [round(size * left) if is_wide else size for size, is_wide in zip(sizes, wide, strict=True)]


def _tensors(program: p.Program, launches: list[p.Launch], numbers: dict[int, int]) -> tuple[Tensor, ...]:
    first: dict[int, tuple[p.Phase, str]] = {}
    for launch in launches:
        for buffer in launch.buffers:
            first.setdefault(buffer.storage, (launch.phase, buffer.access))
    found = []
    for storage in numbers:
        held = program.storages[storage]
        phase, access = first[storage]
        kind = KINDS.get(held.region) or ("map" if phase == "forward" else "map_gradient")
        if kind in ("map", "map_gradient") and held.elements <= VECTOR:
            kind = "vector"
        found.append(
            Tensor(f"{held.region}.{storage}", held.bytes, kind, given=access != "out", kept=held.region in KEPT)
        )
    return tuple(found)


@functools.cache
def type_of(kind: str, op: str) -> str:
    """Give the type of a launch by its kind and operator in runtime/lowering/work.py."""
    if op == "Sum":
        return "Add"
    if kind in WORK_TYPES:
        return WORK_TYPES[kind]
    if kind.startswith("Conv"):
        return "DepthwiseConv2D" if "depthwise" in kind else "Conv2D"
    spec = find(op)
    if isinstance(spec, OpSpec):
        return composed_type(spec)
    return TYPES.get(op, "Other")
