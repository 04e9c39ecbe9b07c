"""What work gives on each of several ranks that are threads, errors too: `on_ranks(2, lambda w: w.rank) == [0, 1]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thread_ranks import ThreadWorld, together


def on_ranks(size: int, work: Callable[[ThreadWorld], Any]) -> list[Any]:
    """What `work` gives on each rank, or the exception that it raises."""

    def caught(world: ThreadWorld) -> Any:
        try:
            return work(world)
        except Exception as error:
            return error

    return together(size, caught)
