"""The code of one kernel for a GPU: a line of JSON, then a cubin.

A kernel is one or several device kernels, its *stages*, that run one after the other. `parameters` are those of the
kernel, in the order of a launch's arguments: buffers, offsets of maps (int32), scalars. A stage takes some of them, in
the order of its own signature.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from bnfuse.core.errors import BnfuseError

BUFFER = "buffer"
TYPES = (BUFFER, "int32", "uint32", "int64", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class Stage:
    """One device kernel: `grid` in blocks, `threads` of a block, `shared` bytes of dynamic shared memory."""

    symbol: str
    grid: tuple[int, int, int]
    threads: int
    shared: int
    arguments: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Code:
    """The code of a kernel: its stages, parameters, architecture (sm_XX) and cubin.

    `parameters` are names and types. `slots` has, for maps that may be a slot of a wider buffer, the channels and
    the buffer's: launches on disjoint slots need not wait for each other. `resources` are what the compiler says of
    registers and the like; nothing here reads them. `waits` tells that stages wait for the launches before them
    themselves, so that their blocks may come to the GPU while those still run. ValueError where stages and parameters
    do not fit together.
    """

    stages: tuple[Stage, ...]
    parameters: tuple[tuple[str, str], ...]
    arch: str
    cubin: bytes
    slots: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    resources: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    waits: bool = False

    def __post_init__(self) -> None:
        names = {name for name, _ in self.parameters}
        if not self.stages or len(names) != len(self.parameters):
            raise ValueError("no stages, or a parameter named twice")
        if unknown := {kind for _, kind in self.parameters} - set(TYPES):
            raise ValueError(f"parameters of the type {min(unknown)}")
        for stage in self.stages:
            if foreign := [name for name in stage.arguments if name not in names]:
                raise ValueError(f"{stage.symbol} takes '{foreign[0]}', which is no parameter")
            if len(stage.grid) != 3 or min(*stage.grid, stage.threads) < 1 or stage.shared < 0:
                raise ValueError(f"{stage.symbol} has no blocks or threads")


def pack(code: Code) -> bytes:
    """Write code as it is kept in caches and files: a line of JSON, then the cubin."""
    header = {f.name: getattr(code, f.name) for f in dataclasses.fields(code) if f.name not in ("cubin", "stages")}
    header["stages"] = [dataclasses.asdict(stage) for stage in code.stages]
    return json.dumps(header, separators=(",", ":")).encode() + b"\n" + code.cubin


def unpack(data: bytes, kernel: str) -> Code:
    """Read what `pack` has written. BnfuseError where it is no such code: `kernel` is what the message calls it."""
    header, _, cubin = data.partition(b"\n")
    try:
        fields: dict[str, Any] = json.loads(header)
        stages = tuple(
            Stage(str(s["symbol"]), _grid(s["grid"]), int(s["threads"]), int(s["shared"]), tuple(s["arguments"]))
            for s in fields["stages"]
        )
        return Code(
            stages,
            tuple((str(name), str(kind)) for name, kind in fields["parameters"]),
            str(fields["arch"]),
            cubin,
            {name: (int(slot[0]), int(slot[1])) for name, slot in fields.get("slots", {}).items()},
            fields.get("resources", {}),
            fields.get("waits") is True,
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise BnfuseError(f"kernel '{kernel}' is no code for a GPU ({error}): compile the model again") from None


def _grid(found: Any) -> tuple[int, int, int]:
    x, y, z = found
    return int(x), int(y), int(z)
