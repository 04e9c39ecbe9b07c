"""Sets of trainings that are compared with one another: which networks, rewritten how, trained how.

sampling      resnet20 and densenet40 with full statistics and with every sampler, at about 3 % and 1 % ([Chen18])
errors        the same, with the full statistics of every BN beside the sampled ones, for one epoch
placements    a small VGG-11 with every choice of its 8 BNs ([Joardar22])
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

BATCH = 128
SPECS = {
    "BN": "",
    "NS-4/128": "ns:4",
    "NS-1/128": "ns:1",
    "BS-4/128": "bs:4",
    "BS-1/128": "bs:1",
    "FS-1/32": "fs:1/32",
    "FS-1/128": "fs:1/128",
    "FRS-1/32": "frs:1/32",
    "VDN-4/128": "vdn:4",
    "VDN-1/128": "vdn:1",
    "FS-1/64+VDN-2/128": "fs:1/64+vdn:2",
    "FS-1/128+VDN-1/128": "fs:1/128+vdn:1",
}


@dataclasses.dataclass(frozen=True)
class Training:
    """One compiled step, and how it is trained."""

    name: str
    network: str
    label: str
    image: int
    epochs: int
    lr: float
    sample: str = ""
    instrumented: bool = False  # the full statistics of every BN are outputs as well
    settings: tuple[tuple[str, Any], ...] = ()
    batch: int = BATCH
    weight_decay: float = 2e-4
    augment: str = "flip,pad-crop:4"
    warm_up: float = 1.0  # epochs

    @property
    def file(self) -> str:
        return f"{self.name}.step"


def sampling() -> list[Training]:
    return [
        Training(f"{network}-{slug(label)}", network, label, 28, epochs, 0.1, sample=spec)
        for network, epochs in (("resnet20", 8), ("densenet40", 5))
        for label, spec in SPECS.items()
    ]


def errors() -> list[Training]:
    return [
        Training(f"resnet20-errors-{slug(label)}", "resnet20", label, 28, 1, 0.1, sample=spec, instrumented=True)
        for label, spec in SPECS.items()
        if spec
    ]


SETS = {"sampling": sampling, "errors": errors}


def slug(label: str) -> str:
    return label.lower().replace("/", "of").replace("+", "-")


def write_index(folder: Path, trainings: list[Training]) -> None:
    known = {training.name: training for training in (*read_index(folder), *trainings)}
    text = json.dumps([dataclasses.asdict(training) for training in known.values()], indent=1)
    (folder / "index.json").write_text(text + "\n")


def read_index(folder: Path) -> list[Training]:
    path = folder / "index.json"
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    return [Training(**{**one, "settings": tuple(map(tuple, one["settings"]))}) for one in found]
