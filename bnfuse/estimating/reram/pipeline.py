"""Training as a pipeline of ReRAM and GPU tiles ([Joardar22], sections IV and VI): the longest stage sets the pace.

Every Conv and FC layer is a stage on ReRAM tiles, forward and once more for the error; every BatchNorm is a stage on
GPU tiles. The images of a batch follow one another, one period apart:

    T = max(T_conv, T_norm)        T_conv = max over Conv/FC stages, T_norm = max over BatchNorms

    Conv/FC   the weights fill crossbars; a vector (the window of an output pixel) takes data_bits / dac_bits reads at
              10 MHz, whatever the size of the matrix. Spare crossbars hold copies, which share the vectors.
    BN        elements x seconds of a GPU tile for one, by its memory or its issue rate, over the tiles that it has.

All else that the model rests on is in `ReramAssumptions`. ReLU, pooling and Add are done by the tiles' periphery on the
way, and communication is hidden, as the paper has it (section IV-B).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import onnx_graphsurgeon as gs

from bnfuse.core.errors import BnfuseError
from bnfuse.core.text import Section, csv_text, duration, join, number
from bnfuse.estimating.reram.assumptions import ReramAssumptions, Stack, stack
from bnfuse.estimating.reram.layers import Matrix, Network, Norm, network_of
from bnfuse.estimating.reram.tiles import SHARING
from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.passes.removal.placements import Selection


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage, for one image. On ReRAM `work` is vectors and `copies` are those of the weights, of `crossbars` each;
    on the GPU `work` is elements and `tiles` what it has of the tiles.
    """

    name: str
    unit: str  # reram or gpu
    phase: str  # forward, error, gradient; both: forward and error, where they share tiles
    work: int
    time_s: float
    copies: int = 0
    crossbars: int = 0
    tiles: float = 0.0


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """`kept_crossbars` hold maps for the backward pass; `instructions` are of the GPU tiles, for one image."""

    network: str
    config: str
    assumptions: ReramAssumptions
    stages: tuple[Stage, ...]
    crossbars: int
    kept_crossbars: int
    instructions: int
    depth: int

    @property
    def reram_s(self) -> float:
        """T_conv: the longest Conv/FC stage."""
        return max((x.time_s for x in self.stages if x.unit == "reram"), default=0.0)

    @property
    def gpu_s(self) -> float:
        """T_norm: the longest BatchNorm."""
        return max((x.time_s for x in self.stages if x.unit == "gpu"), default=0.0)

    @property
    def period_s(self) -> float:
        """T."""
        return max(self.reram_s, self.gpu_s)

    @property
    def step_s(self) -> float:
        """A batch: filling the pipeline, an image a period, the update (PipeLayer's 2L + B + 1)."""
        return (self.depth + self.assumptions.batch + self.assumptions.update_periods - 1) * self.period_s

    @property
    def used_crossbars(self) -> int:
        """Crossbars that hold weights or maps."""
        return self.kept_crossbars + sum(x.copies * x.crossbars for x in self.stages)

    @property
    def bottleneck(self) -> Stage:
        """The stage that takes longest."""
        return max(self.stages, key=lambda x: x.time_s)

    def to_json(self) -> dict[str, Any]:
        """Give network, config, the times, the crossbars, assumptions {name: value}, stages [{name, unit, phase,
        ...}]."""
        return {
            "network": self.network,
            "config": self.config,
            "period_s": self.period_s,
            "reram_s": self.reram_s,
            "gpu_s": self.gpu_s,
            "step_s": self.step_s,
            "gpu_instructions": self.instructions,
            "depth": self.depth,
            "crossbars": {"all": self.crossbars, "used": self.used_crossbars, "maps": self.kept_crossbars},
            "bottleneck": self.bottleneck.name,
            "assumptions": dataclasses.asdict(self.assumptions),
            "stages": [dataclasses.asdict(stage) for stage in self.stages],
        }

    def to_csv(self) -> str:
        """Give a line for each stage."""
        return csv_text((field.name for field in dataclasses.fields(Stage)), map(dataclasses.astuple, self.stages))

    def sections(self) -> list[Section]:
        """Show the period, what bounds it, and the stages."""
        ratio = self.gpu_s / self.reram_s
        lines = (
            f"period {duration(self.period_s)}: {self.bottleneck.name} ({self.bottleneck.unit}) is the longest stage",
            f"longest Conv/FC stage {duration(self.reram_s)}, longest BatchNorm {duration(self.gpu_s)} ({ratio:.2f} x)",
            (
                f"{number(self.used_crossbars)} of {number(self.crossbars)} crossbars hold something, "
                f"{number(self.kept_crossbars)} of them maps for the backward pass"
            ),
            f"{number(self.instructions)} GPU instructions an image",
            f"batch of {self.assumptions.batch}: {duration(self.step_s)}, {self.depth} stages deep",
        )
        rows = [
            (
                x.name,
                x.phase,
                x.unit,
                number(x.work),
                f"{x.copies} x {number(x.crossbars)}" if x.unit == "reram" else "",
                f"{x.tiles:.3g}" if x.unit == "gpu" else "",
                f"{1e6 * x.time_s:.2f}",
            )
            for x in self.stages
        ]
        columns = ("stage", "phase", "on", "vectors or elements", "copies x crossbars", "GPU tiles", "us")
        changed = [
            f"{field.name}={getattr(self.assumptions, field.name)}"
            for field in dataclasses.fields(self.assumptions)
            if getattr(self.assumptions, field.name) != field.default
        ]
        parts = [
            Section.lines(f"{self.network} on {self.config}", lines),
            Section.table("Stages, for one image", columns, rows),
            Section.lines("Assumptions that are not the default's", changed),
        ]
        return [part for part in parts if part.rows]

    def __str__(self) -> str:
        return join(self.sections())


def pipeline(
    network: gs.Graph | TrainingGraph | Network,
    config: str = "3r1g",
    assumptions: ReramAssumptions | None = None,
    *,
    remove: Selection | None = None,
) -> Pipeline:
    """Give the pipeline of a network on a stack of ReRAM and GPU layers, such as 3r1g.

    `network` is a forward graph of the zoo, a source training graph, or what `network_of` read of one.
    With `remove`, BatchNorms are taken out first: numbers, or a list in words such as "paper"
    (passes/removal/placements.py). Raises BnfuseError where the weights and the kept maps do not fit.
    """
    assumed = assumptions or ReramAssumptions()
    layers = stack(config, assumed)
    found = network if isinstance(network, Network) else network_of(network, remove)
    if isinstance(network, Network) and remove is not None:
        raise BnfuseError("BatchNorms are removed where the layers are read: give `remove` to network_of")
    capacity = layers.reram * assumed.tiles * assumed.crossbars
    kept = kept_crossbars(found, assumed)
    jobs = matrix_jobs(found, assumed)
    needed = kept + sum(job.crossbars for job in jobs)
    if needed > capacity:
        raise too_large(found, layers, needed, kept, capacity)
    copies = replicate(jobs, capacity - kept, assumed)
    reram = [
        Stage(job.name, "reram", job.phase, job.vectors, -(-job.vectors // n) * assumed.vector_s, n, job.crossbars)
        for job, n in zip(jobs, copies, strict=True)
    ]
    gpu = norm_stages(found.norms, layers.gpu * assumed.gpu_tiles, assumed)
    return Pipeline(
        network=found.name,
        config=str(layers),
        assumptions=assumed,
        stages=in_order(found, [*reram, *gpu]),
        crossbars=capacity,
        kept_crossbars=kept,
        instructions=sum(norm.elements for norm in found.norms) * assumed.instructions,
        depth=2 * len(found.layers) + 1,  # and the loss
    )


def too_large(found: Network, layers: Stack, needed: int, kept: int, capacity: int) -> BnfuseError:
    """Make the error of a network that does not fit."""
    return BnfuseError(
        f"{found.name} does not fit on {layers}: weights and maps need {number(needed)} crossbars ({number(kept)} of"
        f" them for maps), and there are {number(capacity)}. Take more ReRAM layers, a smaller network (CIFAR-10:"
        " --image 32 --classes 10, vgg with --set hidden=512, resnet with --set stem=small), or keep maps elsewhere"
        " (--assume buffers=false)"
    )


def in_order(network: Network, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Order the stages: forward layer by layer, then the backward stages from the end; a BatchNorm is where its layer
    is."""
    place = {layer.name: index for index, layer in enumerate(network.layers)}
    backward = ("error", "gradient")
    return tuple(
        sorted(stages, key=lambda x: (x.phase in backward, (-1 if x.phase in backward else 1) * place[x.name], x.phase))
    )


@dataclasses.dataclass(frozen=True)
class Job:
    """Vectors through a matrix: one copy of it takes so many crossbars."""

    name: str
    phase: str
    vectors: int
    crossbars: int


def matrix_jobs(network: Network, assumed: ReramAssumptions) -> list[Job]:
    """Tell what the Conv/FC layers ask of the crossbars. The first needs no error: nothing before it is trained."""
    jobs = []
    for index, layer in enumerate(network.matrices):
        forward = crossbars_for(layer.groups, layer.rows, layer.columns, assumed)
        error_vectors = layer.error_vectors if index else 0
        if assumed.error_weights or not error_vectors:
            jobs.append(Job(layer.name, "forward", layer.vectors, forward))
        else:
            jobs.append(Job(layer.name, "both", layer.vectors + error_vectors, forward))
        if assumed.error_weights and error_vectors:
            own = crossbars_for(layer.groups, layer.error_rows, layer.error_columns, assumed)
            jobs.append(Job(layer.name, "error", error_vectors, own))
        if assumed.gradients == "outer":
            jobs.append(Job(layer.name, "gradient", layer.vectors, forward))
        elif assumed.gradients == "mapped":
            maps = crossbars_for(layer.groups, layer.vectors, layer.rows, assumed)
            jobs.append(Job(layer.name, "gradient", layer.columns, maps))
    return jobs


def crossbars_for(groups: int, rows: int, columns: int, assumed: ReramAssumptions) -> int:
    """Count crossbars for matrices of rows x columns numbers, in whole groups of crossbars."""
    down, across = -(-rows // assumed.crossbar), -(-columns // assumed.numbers_per_row)
    return -(-groups * down * across // assumed.group) * assumed.group


def kept_crossbars(network: Network, assumed: ReramAssumptions) -> int:
    """Count the crossbars that keep the inputs of Conv/FC layers until the error comes back.

    Layer l of L has 2(L - l) + 1 images under way (PipeLayer, its section on training).
    """
    if not assumed.buffers:
        return 0
    counted: Sequence[Matrix | Norm] = network.layers if assumed.norm_stages else network.matrices
    depth = len(counted)
    numbers = sum(
        layer.inputs * (2 * (depth - index) + 1) for index, layer in enumerate(counted, 1) if isinstance(layer, Matrix)
    )
    return -(-numbers // (assumed.crossbar * assumed.numbers_per_row))


def replicate(jobs: Sequence[Job], budget: int, assumed: ReramAssumptions) -> list[int]:
    """Tell how many copies each job's matrix has, within `budget` crossbars."""
    most = max(job.vectors for job in jobs)

    def enough(copies: Callable[[Job], int]) -> bool:
        return sum(job.crossbars * copies(job) for job in jobs) <= budget

    if assumed.replication == "none":
        return [1] * len(jobs)
    if assumed.replication == "uniform":
        same = _first(range(most, 0, -1), lambda n: enough(lambda job: min(n, job.vectors)))
        return [min(same, job.vectors) for job in jobs]
    longest = _first(range(1, most + 1), lambda n: enough(lambda job: -(-job.vectors // n)))
    return [-(-job.vectors // longest) for job in jobs]


def _first(values: range, holds: Callable[[int], bool]) -> int:
    """Give the first of the values for which a condition holds that stays true from there on; the last always does."""
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(values[middle]) else (middle + 1, high)
    return values[low]


def norm_stages(norms: Sequence[Norm], tiles: int, assumed: ReramAssumptions) -> list[Stage]:
    """Spread the BatchNorms over the GPU tiles: what each has of them, and the time of the busiest of its tiles."""
    loads = [norm.elements * assumed.norm_element_s for norm in norms]
    shares, times = SHARING[assumed.gpu_sharing](loads, tiles)
    return [
        Stage(norm.name, "gpu", "both", norm.elements, time, tiles=share)
        for norm, time, share in zip(norms, times, shares, strict=True)
    ]


def conventional_s(network: Network, assumed: ReramAssumptions) -> float:
    """Give the seconds of an image on the conventional GPU of figure 14: Conv/FC at its rate, the rest at its memory's.

    The first layer has no input gradient. A ReLU behind each Conv/FC reads one map and writes one, and backward reads
    two and writes one.
    """
    flops = sum((3 if index else 2) * layer.flops for index, layer in enumerate(network.matrices))
    norms = sum(norm.elements for norm in network.norms) * assumed.accesses
    relus = sum(layer.outputs for layer in network.matrices) * 5
    return flops / (assumed.titan_flops * assumed.titan_efficiency) + 4 * (norms + relus) / assumed.titan_bandwidth
