"""Who hears of long work: a function that takes a line of text, and perhaps has a bar."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]
Bar = Callable[[int, int, str], None]  # done, of how many, what


def quiet(_: str) -> None:
    """Hear nothing: the progress of work that nobody watches."""


def bar_of(progress: Progress) -> Bar | None:
    """Give what hears of single pieces of the work: the method `bar` of `progress`, if it has one."""
    return getattr(progress, "bar", None)
