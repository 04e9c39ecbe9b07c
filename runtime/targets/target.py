"""What kernels are made for: a CPU or a GPU.

Both say what the lowering has to know of them: how they keep feature maps, and whose kernels they take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from bnfuse.runtime.targets import arch

HALVES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclasses.dataclass(frozen=True)
class CpuTarget:
    """A CPU: `mcpu` is LLVM's name of it, `lanes` the float32 lanes of a vector.

    `precision` is how maps are stored: fp32, or bf16, whose sums, statistics and coefficients are float32 as well.
    `amx` is whether its tiles multiply them: of bf16 alone, and not where the operating system keeps them back.
    """

    mcpu: str
    lanes: int
    threads: int
    precision: str = "fp32"
    amx: bool = False

    kind: ClassVar[str] = "llvm"  # in files and reports
    backend: ClassVar[str] = "cpu"  # the folder of its kernels, and of what runs them
    aligns_maps: ClassVar[bool] = False  # kernels do not look at the alignment of maps
    packs_weights: ClassVar[bool] = False  # convolutions pack what they read, as they go
    is_one_graph: ClassVar[bool] = False  # phases run one after the other

    def __str__(self) -> str:
        fewer_bits = "" if self.precision == "fp32" else f", {self.precision}"
        return f"{self.kind} {self.mcpu}, {self.threads} threads{fewer_bits}{' by AMX' if self.amx else ''}"

    @property
    def map_dtype(self) -> str:
        """The type in which feature maps are stored."""
        return HALVES.get(self.precision, "float32")

    @property
    def machine(self) -> str:
        """What decides the last bits of results."""
        return f"{self.mcpu}, {self.threads} threads"

    @property
    def place(self) -> str:
        """What a step takes of the machine."""
        return f"{self.threads} threads"

    def to_data(self) -> dict[str, Any]:
        """Give a form that JSON takes."""
        fields = {"mcpu": self.mcpu, "lanes": self.lanes, "threads": self.threads}
        further = {"amx": True} if self.amx else {}  # files of version 1 have no such field
        return {"kind": self.kind, **fields, "precision": self.precision, **further}


@dataclasses.dataclass(frozen=True)
class CudaTarget:
    """A GPU: an `architecture` such as sm_90, and the `multiprocessors` that kernels are cut up for.

    `precision` is that of the convolutions: fp32 (three products of TF32 for one of float32), tf32, bf16 or fp16.
    """

    architecture: str
    multiprocessors: int
    precision: str = "fp32"

    kind: ClassVar[str] = "cuda"
    backend: ClassVar[str] = "cuda"
    aligns_maps: ClassVar[bool] = True
    packs_weights: ClassVar[bool] = True  # one launch packs all of them, at the start of a step
    is_one_graph: ClassVar[bool] = True  # of all launches of a call: the state of a step is seen after it alone

    def __str__(self) -> str:
        return f"{self.kind} {self.architecture}, {self.precision}"

    @property
    def map_dtype(self) -> str:
        """The type in which feature maps are stored."""
        return HALVES.get(self.precision, "float32")

    @property
    def has_wgmma(self) -> bool:
        """Whether convolutions multiply by warpgroups: maps of 16 bits, on an architecture that has the instruction."""
        return self.architecture in arch.WITH_WGMMA and self.precision in HALVES

    @property
    def machine(self) -> str:
        """What decides the last bits of results."""
        return self.architecture

    @property
    def place(self) -> str:
        """What a step takes of the machine."""
        return f"GPU {self.architecture}"

    def to_data(self) -> dict[str, Any]:
        """Give a form that JSON takes: the names are a CPU's, by which files of version 1 have both."""
        fields = {"mcpu": self.architecture, "lanes": arch.WARP, "threads": self.multiprocessors}
        return {"kind": self.kind, **fields, "precision": self.precision}


Target = CpuTarget | CudaTarget


def target_of(data: Mapping[str, Any]) -> Target:
    """Read what `to_data` gave. Raises ValueError for a kind that there is not."""
    if data["kind"] == CpuTarget.kind:
        return CpuTarget(data["mcpu"], data["lanes"], data["threads"], data["precision"], data.get("amx", False))
    if data["kind"] == CudaTarget.kind:
        return CudaTarget(data["mcpu"], data["threads"], data["precision"])
    raise ValueError(f"its target is {str(data['kind'])[:20]!r}")
