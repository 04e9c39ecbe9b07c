"""Options that a dataclass describes once, for Python and for the command line alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

KEY = "option"  # of a field's metadata


@dataclasses.dataclass(frozen=True)
class Told:
    """What the command line says of an option, beside its name, type and default. `low` and `high` are its range."""

    help: str
    metavar: str | None = None
    flag: str | None = None
    low: float | None = None
    high: float | None = None


def option(default: Any, help: str, *, factory: Callable[[], Any] | None = None, **told: Any) -> Any:
    """Make a field that is an option of a command too; `told` are the other fields of `Told`."""
    metadata = {KEY: Told(help, **told)}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(field: dataclasses.Field[Any]) -> str:
    """Write the option as the command line has it: --weight-decay."""
    told = field.metadata.get(KEY)
    return (told and told.flag) or f"--{field.name.replace('_', '-')}"
