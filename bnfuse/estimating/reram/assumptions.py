"""What [Joardar22] leaves open about its ReRAM and GPU tiles: every number that a pipeline estimate rests on.

Table I of the paper gives the tiles; where it is silent the defaults are those of the designs that it builds on:
ISAAC (its reference [2]: 2-bit cells, 1-bit DACs, 16-bit numbers, groups of 8 crossbars), PipeLayer (its [1]:
replication of weights, buffers of a pipelined training) and the GTX 480 whose Fermi cores GPGPU-Sim models (its [25]).
"""

from __future__ import annotations

import dataclasses
import math
import re

from bnfuse.core.errors import BnfuseError

REPLICATIONS = ("balanced", "uniform", "none")
SHARINGS = ("own", "balanced", "time")
GRADIENTS = ("hidden", "outer", "mapped")


STACK = re.compile(r"(\d)R(\d)G", re.ASCII | re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class ReramAssumptions:
    """Every modelling choice of a pipeline estimate, settable as `--assume KEY=VALUE`.

    The paper's own (table I):
      crossbar             rows and columns of a crossbar
      crossbars            of a ReRAM tile
      tiles                ReRAM tiles of a layer of the stack: 36 clusters of 4
      clock                crossbar reads per second
      gpu_tiles            GPU tiles of a layer of the stack
      gpu_clock            of a GPU tile, Hz
      layers               of the stack, ReRAM and GPU together (its limit by heat, section V-A)

    ISAAC's:
      cell_bits            bits of a number that a ReRAM cell holds
      data_bits            bits of a weight, and of an element of a map, on ReRAM
      dac_bits             bits of an input that one read takes: data_bits / dac_bits reads make a vector
      group                crossbars that are handed out together (an in-situ multiply-accumulate unit)

    PipeLayer's:
      replication          how spare crossbars speed layers up: balanced (the least longest stage), uniform (as many
                           copies of every layer), none
      error_weights        whether the error goes back through transposed weights in crossbars of its own, and not,
                           in turns, through those of the forward pass
      gradients            of weights: hidden (not longer than the error's pass, on crossbars not counted), outer (as
                           many vectors as the forward pass, on a further copy), mapped (maps are the crossbars'
                           contents, a vector for each output channel)
      buffers              whether inputs of Conv/FC layers wait in ReRAM cells for the backward pass, those of
                           2(L-l)+1 images at layer l of L
      norm_stages          whether L counts BatchNorms too

    The GPU tiles:
      gpu_lanes            instructions that a tile issues per cycle at best, counted by thread (Fermi: 32)
      gpu_bandwidth        bytes/s that a tile reads and writes: GTX 480, 177.4 GB/s by 15 cores
      gpu_sharing          own: a BatchNorm has tiles of its own, unless there are more BatchNorms than tiles; balanced:
                           small ones share a tile wherever that leaves more to the large ones; time: each has all
                           tiles for its part of the time
      norm_reads           of an element in the forward pass (statistics, normalise), norm_writes likewise
      norm_grad_reads      of an element in the backward pass (two for the sums, two for dx), norm_grad_writes likewise
      norm_bytes           of an element on the GPU (float32)
      norm_instructions    of a thread for an element, forward: loads, stores, arithmetic, addresses
      norm_grad_instructions  likewise, backward

    The training:
      batch                images between two updates
      update_periods       periods that an update takes

    The conventional GPU of figure 14 (Titan Xp, data sheet):
      titan_flops, titan_bandwidth   its float32 peak and its memory's bandwidth
      titan_efficiency     the part of the peak that a convolution reaches
    """

    crossbar: int = 128
    crossbars: int = 96
    tiles: int = 144
    clock: float = 10e6
    gpu_tiles: int = 16
    gpu_clock: float = 700e6
    layers: int = 4
    cell_bits: int = 2
    data_bits: int = 16
    dac_bits: int = 1
    group: int = 8
    replication: str = "balanced"
    error_weights: bool = True
    gradients: str = "hidden"
    buffers: bool = True
    norm_stages: bool = False
    gpu_lanes: float = 32
    gpu_bandwidth: float = 177.4e9 / 15
    gpu_sharing: str = "balanced"
    norm_reads: int = 2
    norm_writes: int = 1
    norm_grad_reads: int = 4
    norm_grad_writes: int = 1
    norm_bytes: int = 4
    norm_instructions: int = 12
    norm_grad_instructions: int = 20
    batch: int = 128
    update_periods: int = 1
    titan_flops: float = 12.15e12
    titan_bandwidth: float = 547.6e9
    titan_efficiency: float = 0.5

    def __post_init__(self) -> None:
        for name, choices in (
            ("replication", REPLICATIONS),
            ("gpu_sharing", SHARINGS),
            ("gradients", GRADIENTS),
        ):
            if getattr(self, name) not in choices:
                raise BnfuseError(f"{name}={getattr(self, name)} is unknown: it is {', '.join(choices)}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "float") and not (math.isfinite(value) and 0 <= value <= 1e18):
                raise BnfuseError(f"{field.name}={value} is out of range: it must be from 0 to 1e18")
            if field.type in ("int", "float") and not value and field.name not in MAY_BE_ZERO:
                raise BnfuseError(f"{field.name}={value} is out of range: it must be above 0")
        if self.titan_efficiency > 1:
            raise BnfuseError(f"titan_efficiency={self.titan_efficiency} is out of range: it is a part of 1")

    @property
    def reads(self) -> int:
        """Crossbar reads that a vector takes."""
        return -(-self.data_bits // self.dac_bits)

    @property
    def vector_s(self) -> float:
        """Seconds that a crossbar takes for one vector."""
        return self.reads / self.clock

    @property
    def numbers_per_row(self) -> int:
        """Weights, or elements of a map, that a row of a crossbar holds."""
        return max(1, self.crossbar // -(-self.data_bits // self.cell_bits))

    @property
    def accesses(self) -> int:
        """Of an element of a BatchNorm's map, forward and backward."""
        return self.norm_reads + self.norm_writes + self.norm_grad_reads + self.norm_grad_writes

    @property
    def instructions(self) -> int:
        """Instructions of a BatchNorm for each element, forward and backward."""
        return self.norm_instructions + self.norm_grad_instructions

    @property
    def norm_element_s(self) -> float:
        """Seconds of one GPU tile for an element of a BatchNorm's map: bound by its memory or by its issue rate."""
        by_memory = self.accesses * self.norm_bytes / self.gpu_bandwidth
        by_issue = self.instructions / (self.gpu_lanes * self.gpu_clock)
        return max(by_memory, by_issue)


MAY_BE_ZERO = {
    *("norm_reads", "norm_writes", "norm_grad_reads", "norm_grad_writes"),
    *("norm_instructions", "norm_grad_instructions", "update_periods"),
}


@dataclasses.dataclass(frozen=True)
class Stack:
    """mRnG: layers of ReRAM tiles and layers of GPU tiles, one on another."""

    reram: int
    gpu: int

    def __str__(self) -> str:
        return f"{self.reram}R{self.gpu}G"


def is_stack(text: str) -> bool:
    """Tell whether it is written like a stack; `stack` says whether there is one."""
    return STACK.fullmatch(text.strip()) is not None


def stack(text: str, assumptions: ReramAssumptions) -> Stack:
    """Read "3r1g" as Stack(3, 1); the layers must be those of the stack, and some of each kind."""
    match = STACK.fullmatch(text.strip())
    possible = [Stack(m, assumptions.layers - m) for m in range(1, assumptions.layers)]
    found = Stack(int(match[1]), int(match[2])) if match else None
    if found not in possible:
        names = ", ".join(map(str, possible)).lower() or "none"
        raise BnfuseError(
            f"'{text}' is no stack of {assumptions.layers} layers: there are {names} (assume layers=N for others)"
        )
    return found
