"""The exceptions that reach a user, as one line."""

from __future__ import annotations


class BnfuseError(Exception):
    """Bad use or bad input. The message names the file (where known), the node and its op, and says what to do."""

    everywhere = False  # whether all ranks of a world raise it at the same place: one line is enough then


class DivergedError(BnfuseError):
    """A training whose loss or parameters are no numbers any more: an outcome where trainings are compared."""


class LostRankError(BnfuseError):
    """Another rank of a run is gone, or did not answer within the limit: this one cannot go on alone."""


class UnknownAttributeError(BnfuseError, AttributeError):
    """An attribute is set that the object does not have."""


def everywhere(error: BnfuseError) -> BnfuseError:
    """Mark an error that all ranks raise at the same place: one of them tells of it, and each ends in order."""
    error.everywhere = True
    return error


def first_line(error: BaseException) -> str:
    """Give the first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def one_line(text: str) -> str:
    """Write a text as one line that a terminal prints as it is: names come from files, and may hold anything."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split()))


def at_node(name: str, op: str, what: str, *, file: str | None = None) -> BnfuseError:
    """Make an error about one node: `file: node 'name' (Op) what`."""
    prefix = f"{file}: " if file else ""
    return BnfuseError(f"{prefix}node '{name}' ({op}) {what}")
