"""`--assume key=value`: fields of the dataclasses that hold what a model assumes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bnfuse.core.errors import BnfuseError
from bnfuse.models.registry import read_like


def settle(given: Mapping[str, object], *defaults: Any) -> tuple[Any, ...]:
    """Put given values into the defaults, dataclasses; a key belongs to each of them that has such a field.

    Raises BnfuseError for a key that none of them has, and for a value not of the field's type.
    """
    known = {field.name for default in defaults for field in dataclasses.fields(default)}
    for key in given:
        if key not in known:
            raise BnfuseError(f"--assume {key}: there is no such assumption; there are {', '.join(sorted(known))}")
    return tuple(changed(default, given) for default in defaults)


def changed(default: Any, given: Mapping[str, object]) -> Any:
    """Put the values that belong to it into one of them."""
    mine = {field.name for field in dataclasses.fields(default)} & {*given}
    values = {key: read_like("--assume", key, given[key], getattr(default, key)) for key in mine}
    return dataclasses.replace(default, **values)
