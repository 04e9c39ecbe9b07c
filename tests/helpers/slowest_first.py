"""The slowest files first, so that no worker of pytest-xdist is left with one of them when the others are done.

`tests/slowest_first.txt` has their times: a file a line, `seconds path`. `pytest --update-slowest` writes it from that
run. What is not in it (a new file, a fast one) comes after what is, in the usual order.
"""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

TABLE = Path(__file__).resolve().parents[1] / "slowest_first.txt"
LEAST = 3.0  # seconds of a file that is worth a line


def read(table: Path) -> dict[str, float]:
    """Seconds by file."""
    lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    return {path: float(seconds) for seconds, _, path in (line.strip().partition(" ") for line in lines)}


def write(table: Path, seconds: dict[str, float]) -> None:
    """The files that take long, the slowest first."""
    slow = sorted(((time, path) for path, time in seconds.items() if time >= LEAST), key=lambda row: (-row[0], row[1]))
    table.write_text("".join(f"{time:.0f} {path}\n" for time, path in slow), encoding="utf-8")


class SlowestFirst:
    """A plugin of pytest: orders the tests of a worker, and sums up how long each file takes."""

    def __init__(self, table: Path = TABLE) -> None:
        self.table = table
        self.seconds: dict[str, float] = collections.defaultdict(float)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if hasattr(config, "workerinput"):  # with one process the order costs nothing
            known = read(self.table)
            items.sort(key=lambda item: -known.get(item.nodeid.partition("::")[0], 0.0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.getoption("--update-slowest") and not hasattr(session.config, "workerinput"):
            write(self.table, {**read(self.table), **self.seconds})
