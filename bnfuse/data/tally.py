"""What is left out of a data set, or ignored of its images: counts by reason, each with the first that it met."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

MAX_KINDS = 6  # of what is left out, in one line
UNREADABLE = "unreadable"


@dataclasses.dataclass
class Tally:
    """Counts by reason, each with the first path that it met."""

    root: Path
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    firsts: dict[str, str] = dataclasses.field(default_factory=dict)

    def add(self, reason: str, path: Path | str) -> None:
        """Count a file under a reason; the first of each is kept by name."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if reason not in self.firsts:
            self.firsts[reason] = str(path).removeprefix(f"{self.root}/")

    def parts(self) -> list[str]:
        """Write `3 of .heic (cat/1.heic)`, most first."""
        order = sorted(self.counts, key=lambda reason: -self.counts[reason])
        found = [f"{self.counts[reason]} {reason} ({self.firsts[reason]})" for reason in order[:MAX_KINDS]]
        rest = sum(self.counts[reason] for reason in order[MAX_KINDS:])
        return [*found, *([f"{rest} of other kinds"] if rest else [])]

    def lines(self) -> Iterator[str]:
        """Write `photos: 3 of the images are ... (first: cat/1.png)`, a line for each reason."""
        for reason, count in self.counts.items():
            yield f"{self.root}: {count} of the images {reason} (first: {self.firsts[reason]})"
