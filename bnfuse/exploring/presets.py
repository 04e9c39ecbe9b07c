"""Sweeps of the papers, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bnfuse.core.errors import BnfuseError


@dataclasses.dataclass(frozen=True)
class Preset:
    """Points from a base: `axes` in every combination, or `changes` one by one."""

    about: str
    network: str
    base: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    axes: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    changes: Sequence[Mapping[str, Any]] = ()


PRESETS = {
    "squeeze-ratio": Preset(
        "[Iandola16], figure 5.3: squeeze filters for each expand filter",
        "squeezenet",
        axes={"squeeze": (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)},
    ),
    "pct3x3": Preset(
        "[Iandola16], figure 5.4: the share of 3x3 filters, at squeeze=0.5",
        "squeezenet",
        base={"squeeze": 0.5},
        axes={"large": (0.01, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 0.99)},
    ),
    "bypass": Preset(
        "[Iandola16], table 5.3: bypasses around Fire modules",
        "squeezenet",
        axes={"bypass": ("none", "simple", "complex")},
    ),
    "nin-changes": Preset(
        "[Iandola16], tables 4.3 to 4.8: one change of NiN at a time",
        "nin",
        base={"batch": 1024},
        changes=(
            {"channels": 12},
            {"filters8": 1536},
            {"kernel7": 6, "pad7": 2},
            {"classes": 4000},
            {"pool3": False},
            {"image": 454},
        ),
    ),
    "densenet-growth": Preset(
        "the growth rate of DenseNet-40",
        "densenet40",
        axes={"growth": (6, 12, 18, 24, 36, 48)},
    ),
    "densenet-depth": Preset(
        "the layers of each block of DenseNet-40",
        "densenet40",
        axes={"depth": (4, 8, 12, 16, 24, 32)},
    ),
}


def preset(name: str) -> Preset:
    """Find a preset by its name. Raises BnfuseError where there is none."""
    if name not in PRESETS:
        raise BnfuseError(f"there is no preset '{name}': there are {', '.join(PRESETS)}")
    return PRESETS[name]
