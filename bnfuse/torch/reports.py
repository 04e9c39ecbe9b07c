"""What of a module was fused, what was left to torch, and why."""

from __future__ import annotations

import dataclasses
from typing import Any

from bnfuse.core.errors import BnfuseError


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a module, by its path ('' is the whole): fused with what `rewrite` reports of it, or left to torch
    for a reason."""

    path: str
    rewrite: Any = None  # bnfuse.passes.Report
    reason: str = ""

    @property
    def is_fused(self) -> bool:
        """Tell whether it runs as a fused step."""
        return self.rewrite is not None

    def __str__(self) -> str:
        name = f"'{self.path}'" if self.path else "the whole module"
        if not self.is_fused:
            return f"{name}: left to torch: {self.reason}"
        counted = f"{self.rewrite.batch_norms} BatchNorms, {len(self.rewrite.unfused)} unfused"
        return f"{name}: fused at level {self.rewrite.level} ({counted})"


@dataclasses.dataclass(frozen=True)
class Report:
    """All parts that were captured or tried, in the order of the module."""

    parts: tuple[Part, ...]

    @property
    def fused(self) -> tuple[str, ...]:
        """The paths of what is fused."""
        return tuple(part.path for part in self.parts if part.is_fused)

    @property
    def left(self) -> dict[str, str]:
        """Why what is left to torch is: reasons by path."""
        return {part.path: part.reason for part in self.parts if not part.is_fused}

    def to_json(self) -> list[dict[str, Any]]:
        """Give it as JSON's types: path, fused, reason, and `rewrite`, which is that of `bnfuse rewrite --report`."""
        return [
            {
                "path": part.path,
                "fused": part.is_fused,
                "reason": part.reason,
                "rewrite": part.rewrite.to_json() if part.is_fused else None,
            }
            for part in self.parts
        ]

    def __str__(self) -> str:
        return "\n".join(map(str, self.parts))


def report(module: Any) -> Report:
    """Tell what of a module that `fuse` gave is fused, and why the rest is not. Raises BnfuseError for any other."""
    found = getattr(module, "_bnfuse", None)
    if found is None:
        raise BnfuseError("is no module that bnfuse.torch.fuse gave: it has no report")
    made: Report = found.report
    return made
