"""What gpu_build.py builds and gpu_check.py runs: names of cases, and what is in the folder between them.

A folder has index.json (a list of entries), packed files (gpu_pack.py), data.npz and losses.json.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
FAST = ("timing", "profile")


@dataclasses.dataclass(frozen=True)
class Case:
    """A network and its compiled steps: all `levels` in all `precisions`. `parts` are those of gpu_check.py.

    A level can have a sampling after it: "icf fs:1/32".
    """

    name: str
    network: str
    batch: int
    image: int
    precisions: tuple[str, ...]
    levels: tuple[str, ...] = ("icf",)
    parts: tuple[str, ...] = ("timing",)
    settings: tuple[tuple[str, Any], ...] = ()


def small(name: str, network: str, parts: tuple[str, ...] = ("numerics",), **settings: Any) -> Case:
    sizes = {"batch": 5, "image": 32, **settings}
    batch, image = (int(sizes.pop(key)) for key in ("batch", "image"))
    return Case(name, network, batch, image, PRECISIONS, ("none", "icf"), parts, tuple(sizes.items()))


SAMPLED = tuple(f"{level} {spec}".strip() for spec in ("", "fs:1/32", "bs:2") for level in ("none", "icf"))

CASES: tuple[Case, ...] = (
    small("densenet-small", "densenet40", growth=12, depth=4, image=16, classes=10),
    small("densenet-odd", "densenet40", growth=5, depth=3, image=13, batch=3, classes=7),
    small("resnet-small", "resnet20", classes=10),
    small("resnet50-small", "resnet50", image=64, batch=4, classes=11),
    small("mobilenet-small", "mobilenetv2", width=0.25, image=64, classes=10),
    small("squeezenet-small", "squeezenet", image=64, classes=10),
    small("googlenet-small", "googlenet", image=64, classes=10),
    small("training", "densenet40", ("training",), growth=12, depth=6, batch=64, image=28, channels=1, classes=10),
    Case("densenet121", "densenet121", 64, 224, ("bf16", "tf32", "fp32"), ("none", "icf"), (*FAST, "memory")),
    Case("densenet121-levels", "densenet121", 64, 224, ("fp32",), ("none", "rcf", "mvf", "bnff", "icf"), ("timing",)),
    Case("densenet121-sampled", "densenet121", 64, 224, ("bf16",), SAMPLED, ("timing",)),
    Case("resnet50", "resnet50", 64, 224, ("bf16",), ("icf",), FAST),
    Case("mobilenetv2", "mobilenetv2", 64, 224, ("bf16",), ("icf",), FAST),
    Case("resnet50-256", "resnet50", 256, 224, ("bf16",), ("icf",), FAST),
    Case("vgg16", "vgg16", 64, 224, ("bf16",), ("icf",), FAST),
    Case("googlenet", "googlenet", 64, 224, ("bf16",), ("icf",), FAST),
    Case("squeezenet", "squeezenet", 64, 224, ("bf16",), ("icf",), FAST),
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A compiled step in the folder. `train` is the packed graph that it was made of, `report` says what is in it."""

    case: str
    file: str
    train: str
    network: str
    batch: int
    image: int
    level: str
    precision: str
    parts: tuple[str, ...]
    report: dict[str, object]

    @property
    def name(self) -> str:
        return f"{self.case}-{self.level}-{self.precision}"

    @property
    def is_sanitized(self) -> bool:
        """Tell whether NVIDIA's checks run on it: small, and with fused kernels."""
        return "numerics" in self.parts and self.level == "icf"


def chosen(names: Iterable[str] | None) -> list[Case]:
    """The cases of these names; all without any."""
    wanted = list(names or [])
    known = {case.name: case for case in CASES}
    for name in wanted:
        if name not in known:
            raise SystemExit(f"there is no case '{name}': there are {', '.join(known)}")
    return [known[name] for name in wanted] or list(CASES)


def by_training_file(entries: Iterable[Entry], part: str) -> list[tuple[tuple[str, str], list[Entry]]]:
    """Entries of a part, together with those of the same graph: ((case, packed graph), entries), in their order."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        if part in entry.parts:
            found.setdefault((entry.case, entry.train), []).append(entry)
    return list(found.items())


def read_index(folder: Path) -> list[Entry]:
    path = folder / "index.json"
    if not path.exists():
        return []
    return [Entry(**{**data, "parts": tuple(data["parts"])}) for data in json.loads(path.read_text())]


def write_index(folder: Path, entries: Iterable[Entry]) -> None:
    """Entries of the same file replace those that are there."""
    found = {entry.file: entry for entry in (*read_index(folder), *entries)}
    text = json.dumps([dataclasses.asdict(entry) for entry in found.values()], indent=1)
    (folder / "index.json").write_text(text + "\n")
