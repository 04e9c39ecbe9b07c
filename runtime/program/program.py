"""A compiled step as data: regions of memory, storages in them, kernels by name, and the list of launches.

    forward launches     ->  loss, logits, running statistics
    backward launches    ->  gradients
    accumulate launches  ->  their sum over several steps, where an update is of several
    update launches      ->  parameters, optimiser state, averages

Where several ranks run a program (bnfuse/parallel), some launches are of no kernel of ours: they exchange buffers.

Nothing here knows ONNX or TVM. The whole is written into a `step.bnf` as JSON.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Literal

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np

from bnfuse.core.errors import BnfuseError

SUM = -1  # in the place of a kernel: buffers "inout", each of them summed over the ranks, all in one message
GATHER = -2  # pairs of buffers, own "in" and all "out", which gets every rank's own in the order of ranks
EXCHANGES = {SUM: "sum", GATHER: "gather"}

Phase = Literal["forward", "backward", "accumulate", "update"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "update")
ALL_PHASES: tuple[Phase, ...] = ("forward", "backward", "accumulate", "update")

ALIGNMENT = 64  # bytes: a cache line, and what vector loads may assume

ARENA = "arena"  # shared in time by the planner
PARAMETERS = "parameters"  # trainable, then frozen; updated in place
GRADIENTS = "gradients"  # element for element where `parameters` has the trainable ones
RUNNING = "running"  # running statistics before the step
NEW_RUNNING = "new_running"  # and after it, element for element where `running` has them
OWN_RUNNING = "own_running"  # the same of this rank's batch alone, where `new_running` has the means over the ranks
INPUTS = "inputs"
OUTPUTS = "outputs"
CONSTANTS = "constants"
OPTIMIZER = "optimizer"
WIRE = "wire"  # gradients in half of their bits, on their way between ranks
MAPPED = "mapped"  # where the GPUs of other ranks write what kernels exchange; `mapped_of` has that of each rank, as it
# is seen from here. In the first HEADER words, uint64, are this rank's number, and at STOP whether it has given up
HEADER, STOP = 8, 1
ACCUMULATED = "accumulated"  # gradients of several steps, as `gradients` has them
AVERAGE = "average"  # of the parameters over the updates, element for element as `parameters` has them
AVERAGE_RUNNING = "average_running"  # and of the running statistics


@dataclasses.dataclass(frozen=True)
class Storage:
    """A run of elements in a region; `offset` is in bytes and a multiple of `ALIGNMENT`."""

    region: str
    offset: int
    elements: int
    dtype: str = "float32"

    @property
    def bytes(self) -> int:
        """Size of the storage in bytes."""
        return self.elements * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Scalar:
    """An argument whose value is known only when the step runs, such as the learning rate."""

    name: str


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An argument that is a storage, by its index in the program."""

    storage: int
    access: Literal["in", "out", "inout"]


Argument = Buffer | Scalar | int


@dataclasses.dataclass(frozen=True)
class Launch:
    """One call of a kernel, or an exchange between ranks (`kernel` is SUM or GATHER), which a runner begins at its
    place and has done before the first launch that touches its buffers. `node` is the ONNX node that it stands for."""

    phase: Phase
    kernel: int
    node: str
    arguments: tuple[Argument, ...]

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """List the arguments that are storages, in order."""
        return tuple(a for a in self.arguments if isinstance(a, Buffer))

    @property
    def exchanges(self) -> bool:
        """Whether it is an exchange between ranks."""
        return self.kernel in EXCHANGES


@dataclasses.dataclass(frozen=True)
class Part:
    """What is run at once: launches of a phase, in order, from `start` to before `stop` (None: to its end).

    Behind them, if it `commits`, new running statistics take the place of the old ones.
    """

    phase: Phase
    start: int = 0
    stop: int | None = None
    commits: bool = False


WHOLE: dict[Phase, Part] = {phase: Part(phase, commits=phase == "update") for phase in PHASES}
COMMIT = Part("update", 0, 0, commits=True)  # no launch


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of the ONNX file: its storage, its dtype, and its shape there (always dense, in the file's layout)."""

    storage: int
    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Work:
    """What one launch of a kernel does (work.py counts it). `kind` is a family of kernels, `op` the operator, `shape`
    its sizes for people, `sweeps` how often it passes over the map that it reads."""

    kind: str
    op: str
    shape: str
    flops: int
    bytes: int
    sweeps: int = 1


@dataclasses.dataclass
class Report:
    """What the planner did: bytes, and launches by phase. `copies` are launches that move data and compute nothing."""

    arena_bytes: int = 0
    feature_map_bytes: int = 0  # of all maps, before memory is shared
    stashed_bytes: int = 0  # of the storages that live from the forward into the backward phase
    parameter_bytes: int = 0
    launches: dict[str, int] = dataclasses.field(default_factory=dict)
    copies: list[str] = dataclasses.field(default_factory=list)
    kernels: int = 0
    tuned: int = 0  # of the kernels, how many are made as a measurement chose, and not as the rule does


@dataclasses.dataclass
class Program:
    """All that a session needs. `constants` and `initial` are arrays and travel apart from the JSON.

    `running_outputs` are the running statistics' names as outputs of the file, by their names as inputs.
    """

    regions: dict[str, int]  # bytes
    storages: list[Storage]
    kernels: list[str]  # symbol of each kernel; its object is found under the same index
    launches: list[Launch]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor]
    running: dict[str, Tensor]
    new_running: dict[str, Tensor]
    signature: dict[str, Any]
    report: Report
    classes: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # of integer labels, by input
    initial: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # storage -> value
    works: list[Work] = dataclasses.field(default_factory=list)  # of each kernel
    takes: list[str] = dataclasses.field(default_factory=list)  # of each kernel (`taken`)
    sampling: str = ""  # what the session draws (bnfuse/graph/sampling.py); nothing in a file of an earlier version
    refused: str = ""  # of an evaluation: why there is none
    finite: int | None = None  # storage (int32): 0 where an update left all as it was, for a gradient had overflowed

    seed: int | None = None  # storage: what gradients begin with, where the session writes it (fp16: the loss scale)

    norm: int | None = None  # storage: the norm of all gradients of the last update, before they are clipped

    ranks: int = 1  # how many run it together
    mean_loss: int | None = None  # storage: the loss as the mean over the ranks, where there are several
    counts: int | None = None  # storage (float32): where statistics are of some ranks, the session writes 1 on these,
    counted_ranks: int = 0  # the first so many, and 0 on the others

    def phase(self, phase: Phase) -> list[Launch]:
        """List the launches of a phase, in order."""
        return [launch for launch in self.launches if launch.phase == phase]

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that a whole step has, in order."""
        return ALL_PHASES if self.accumulates else PHASES

    @property
    def accumulates(self) -> bool:
        """Whether gradients of several steps are added up for an update."""
        return ACCUMULATED in self.regions

    def whole(self, phase: Phase) -> Part:
        """Give a phase as what is run. New running statistics take the place of the old ones behind the last phase
        that each step has."""
        return Part(phase, commits=phase == ("accumulate" if self.accumulates else "update"))

    def name_of(self, launch: Launch) -> str:
        """Name the kernel of a launch, or what it exchanges."""
        return EXCHANGES[launch.kernel] if launch.exchanges else self.kernels[launch.kernel]

    def work_of(self, launch: Launch) -> Work | None:
        """Say what a launch does; None in a file of an earlier version. Of an exchange `bytes` are those of its buffers
        that go on their way."""
        if not launch.exchanges:
            return self.works[launch.kernel] if self.works else None
        sent = [self.storages[b.storage] for b in launch.buffers if b.access != "out"]
        elements = sum(s.elements for s in sent)
        return Work("exchange", EXCHANGES[launch.kernel], f"{elements}", 0, sum(s.bytes for s in sent))


def given(launch: Launch, storages: Sequence[Storage]) -> str:
    """Say of a launch what each of its arguments is, in a word: type and elements of a storage, `offset`, `scalar`.

    Kernels look at nothing that they are given.
    """

    def word(argument: Argument) -> str:
        if isinstance(argument, Buffer):
            return f"{storages[argument.storage].dtype}*{storages[argument.storage].elements}"
        return "scalar" if isinstance(argument, Scalar) else "offset"

    return " ".join(map(word, launch.arguments))


def taken(launch: Launch, storages: Sequence[Storage], lengths: Sequence[str]) -> str:
    """Say what the kernel of a launch takes: as `given`, with a name where a buffer's length may be any. `lengths` has
    these names, "" for none, buffer by buffer."""
    words = given(launch, storages).split()
    for place, name in enumerate(lengths):
        if name:
            words[place] = f"{words[place].partition('*')[0]}*{name}"
    return " ".join(words)


def fits(found: str, wanted: str) -> bool:
    """Tell whether what is `given` is what is `taken`, with one and the same number in the place of each name."""
    numbers: dict[str, str] = {}

    def same(one: str, other: str) -> bool:
        kind, _, size = other.partition("*")
        if size and not size.isdigit():
            other = f"{kind}*{numbers.setdefault(size, one.partition('*')[2])}"
        return one == other

    words, others = found.split(), wanted.split()
    return len(words) == len(others) and all(map(same, words, others))


def refusal(why: str) -> Program:
    """Make the program in the place of an evaluation that the graph has not."""
    return Program({}, [], [], [], {}, {}, {}, {}, {}, {}, {}, Report(), refused=why)


def to_json(program: Program) -> str:
    """Write the program without its arrays."""
    fields = {f.name: getattr(program, f.name) for f in dataclasses.fields(Program) if f.name != "initial"}
    fields["launches"] = [_launch_to_data(launch) for launch in program.launches]
    fields["storages"] = [dataclasses.astuple(s) for s in program.storages]
    for name in ("inputs", "outputs", "parameters", "gradients", "running", "new_running"):
        fields[name] = {key: [t.storage, list(t.shape), t.dtype] for key, t in fields[name].items()}
    fields["report"] = dataclasses.asdict(program.report)
    fields["works"] = [dataclasses.astuple(work) for work in program.works]
    return json.dumps(fields)


def from_json(text: str, initial: dict[int, np.ndarray]) -> Program:
    """Read what `to_json` wrote. Raises BnfuseError for anything else."""
    try:
        data = json.loads(text)
        data["launches"] = [_launch_from_data(item) for item in data["launches"]]
        data["storages"] = [Storage(*item) for item in data["storages"]]
        for name in ("inputs", "outputs", "parameters", "gradients", "running", "new_running"):
            data[name] = {k: Tensor(storage, tuple(shape), dt) for k, (storage, shape, dt) in data[name].items()}
        data["report"] = Report(**data["report"])
        data["works"] = [Work(*item) for item in data.get("works", ())]
        program = Program(**data, initial=initial)
        check(program)
        return program
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise BnfuseError(f"not a program of this version of bnfuse ({error}): compile the model again") from None


def check(program: Program) -> None:
    """Raise a ValueError where something is named that is not there, or a storage that is used leaves its region."""
    groups = (program.inputs, program.outputs, program.parameters, program.gradients, program.running)
    tensors = [tensor for group in (*groups, program.new_running) for tensor in group.values()]
    buffers = [buffer for launch in program.launches for buffer in launch.buffers]
    for index in {*program.initial, *(t.storage for t in tensors), *(b.storage for b in buffers)}:
        s = program.storages[index]
        if index < 0 or s.elements < 0 or s.offset < 0 or s.offset + s.bytes > program.regions[s.region]:
            raise ValueError(f"storage {index} leaves the region {s.region}")
    for launch in program.launches:
        known = launch.exchanges or launch.kernel in range(len(program.kernels))
        if launch.phase not in ALL_PHASES or not known:
            raise ValueError(f"node '{launch.node}' has no such phase or kernel")
        if launch.exchanges:
            check_exchange(program, launch)
        elif program.takes and not fits(given(launch, program.storages), program.takes[launch.kernel]):
            raise ValueError(f"node '{launch.node}' gives '{program.name_of(launch)}' other arguments than it takes")
    if not isinstance(program.ranks, int) or program.ranks < 1:
        raise ValueError(f"it is for {program.ranks} ranks")
    if program.mean_loss is not None and program.mean_loss not in range(len(program.storages)):
        raise ValueError("its mean loss lies nowhere")
    if program.counts is not None and program.counts not in range(len(program.storages)):
        raise ValueError("whether its rank counts lies nowhere")


def check_exchange(program: Program, launch: Launch) -> None:
    """Raise a ValueError unless the buffers of an exchange are what it takes."""
    held = [program.storages[buffer.storage] for buffer in launch.buffers]
    kinds = [buffer.access for buffer in launch.buffers]
    wanted = ["inout"] * len(held) if launch.kernel == SUM else ["in", "out"] * (len(held) // 2)
    if program.ranks == 1 or not held or kinds != wanted or len(held) != len(launch.arguments):
        raise ValueError(f"node '{launch.node}' exchanges no such buffers")
    if launch.kernel == SUM:
        fits = all(s.dtype in ("float32", "bfloat16") for s in held)
    else:
        pairs = zip(held[::2], held[1::2], strict=True)
        fits = all(all_.dtype == own.dtype and all_.elements == program.ranks * own.elements for own, all_ in pairs)
    if not fits:
        raise ValueError(f"node '{launch.node}' exchanges buffers of other sizes or types")


def _launch_to_data(launch: Launch) -> list[Any]:
    def argument(a: Argument) -> Any:
        if isinstance(a, Buffer):
            return [a.storage, a.access]
        return a.name if isinstance(a, Scalar) else a

    return [launch.phase, launch.kernel, launch.node, [argument(a) for a in launch.arguments]]


def _launch_from_data(data: list[Any]) -> Launch:
    def argument(a: Any) -> Argument:
        if isinstance(a, list):
            return Buffer(*a)
        return Scalar(a) if isinstance(a, str) else int(a)

    phase, kernel, node, arguments = data
    return Launch(phase, kernel, node, tuple(argument(a) for a in arguments))


def mapped_of(rank: int) -> str:
    """Name the region that is rank `rank`'s MAPPED, as it is seen from this one."""
    return f"{MAPPED}_{rank}"


def mapped_regions(program: Program) -> list[str]:
    """List MAPPED, and the same of each rank in their order; nothing of a program without."""
    return [MAPPED, *map(mapped_of, range(program.ranks))] if MAPPED in program.regions else []


def aligned(size: int) -> int:
    """Round bytes up to the alignment of a storage."""
    return -(-size // ALIGNMENT) * ALIGNMENT
