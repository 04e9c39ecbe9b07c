"""Levels of rewriting for tests that have many networks."""

from __future__ import annotations

from bnfuse.passes import LEVELS


def by_turns(turn: int) -> tuple[str, ...]:
    """The lowest level, one of those between by turns, and the highest, which has all passes: over some networks each
    level is met, and no network pays for all of them."""
    lowest, *between, highest = LEVELS
    return lowest, between[turn % len(between)], highest
