"""What is varied, and the points that follow: "squeeze=0.125,0.25", "growth=12:48:12" -> settings of networks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from bnfuse.core.errors import BnfuseError
from bnfuse.models import entry_of
from bnfuse.models.registry import read_like

Settings = dict[str, Any]

SIZES = ("batch", "image", "channels", "classes")
# the names of [Iandola16], section 5.5.1, that differ from the zoo's
ALIASES = {"base_e": "base", "incr_e": "step", "pct3x3": "large", "SR": "squeeze"}
LIMIT = 200  # points that nobody asked for on purpose
MOST = 10_000  # values of one axis


def axes_of(network: str, texts: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Read metaparameters, or batch, image, channels, classes, and the values that each takes.

    Values are a list, 12,24,48, or a range FIRST:LAST or FIRST:LAST:STEP, whose last value counts, or both mixed.
    """
    found: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = ALIASES.get(name, name)
        if not equals or not name or not values:
            raise BnfuseError(f"--vary {text}: write it as KEY=VALUE,VALUE,... or KEY=FIRST:LAST:STEP")
        if name in found:
            raise BnfuseError(f"--vary {text}: {name} is varied already: give all its values at once")
        read = [typed(network, name, value) for part in values.split(",") for value in expanded(text, part)]
        found[name] = tuple(dict.fromkeys(read))
    return found


def expanded(text: str, part: str) -> list[str]:
    """Expand "12:48:12" to ["12", "24", "36", "48"]; anything without a colon is itself."""
    if ":" not in part:
        return [part]
    try:
        numbers = [Decimal(number) for number in part.split(":")]
    except InvalidOperation:
        numbers = []
    if len(numbers) == 2:
        numbers.append(Decimal(1))
    if len(numbers) != 3 or not all(number.is_finite() for number in numbers) or numbers[2] <= 0:
        raise BnfuseError(f"--vary {text}: '{part}' is no range: write it as FIRST:LAST or FIRST:LAST:STEP")
    first, last, step = numbers
    count = int((last - first) / step) + 1 if last >= first and last - first <= step * MOST else 0
    if not 1 <= count <= MOST:
        raise BnfuseError(f"--vary {text}: the range {part} has no value, or more than {MOST:,}")
    return [str(first + step * index) for index in range(count)]


def settings_of(network: str, given: Mapping[str, object]) -> Settings:
    """Give settings their types, by the zoo's names."""
    return {ALIASES.get(key, key): typed(network, ALIASES.get(key, key), value) for key, value in given.items()}


def typed(network: str, name: str, value: object) -> Any:
    """Read a setting of a network as what its default is. Raises BnfuseError for a name that it has not."""
    if name == "image":
        return image_of(network, value)
    if name in SIZES:
        return read_like(network, name, value, 1)
    known = entry_of(network).metaparameters
    if name not in known:
        names = ", ".join([*known, *SIZES])
        raise BnfuseError(f"{network} has no metaparameter '{name}': what can vary is {names}")
    return read_like(network, name, value, known[name])


def image_of(network: str, value: object) -> int | tuple[int, int]:
    """Read 224 as 224, "190x226" as (190, 226)."""
    sides = value if isinstance(value, tuple) else tuple(str(value).lower().split("x"))
    if len(sides) > 2 or not all(str(side).isascii() and str(side).isdigit() for side in sides):
        raise BnfuseError(f"{network}: image={value} is no size: write it as 224, or as 190x226 (height x width)")
    height, width = int(sides[0]), int(sides[-1])
    return height if height == width else (height, width)


def product(axes: Mapping[str, Sequence[Any]]) -> list[Settings]:
    """List every combination, the last axis the fastest."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def one_at_a_time(axes: Mapping[str, Sequence[Any]], base: Settings) -> list[Settings]:
    """List the base, and one change of it for each value that differs."""
    return [{}, *({name: value} for name, values in axes.items() for value in values if value != base.get(name))]


def check_number(axes: Mapping[str, Sequence[Any]], *, separately: bool, limit: int | None) -> None:
    """Refuse too many points before they are made, unless `limit` allows them."""
    sizes = [len(values) for values in axes.values()]
    check_limit(1 + sum(sizes) if separately else math.prod(sizes), limit)


def check_limit(number: int, limit: int | None) -> None:
    """Raise BnfuseError where there are more points than may be."""
    allowed = LIMIT if limit is None else limit
    if number > allowed:
        raise BnfuseError(
            f"these are {number:,} points, and {allowed:,} are the limit: vary less, take --one-at-a-time, or allow"
            f" them with --limit {number}"
        )


def full_settings(network: str, given: Settings) -> Settings:
    """Give everything that can be set, with what is given in place of the defaults."""
    entry = entry_of(network)
    sizes = {"batch": entry.batch, "image": entry.image, "channels": 3, "classes": entry.classes}
    return {**{key: value for key, value in sizes.items() if value is not None}, **entry.metaparameters, **given}


def described(changes: Mapping[str, Any]) -> str:
    """Write {"squeeze": 0.25, "bypass": "simple"} as "squeeze=0.25 bypass=simple"."""
    return " ".join(f"{key}={plain(value)}" for key, value in changes.items()) or "base"


def plain(value: Any) -> str:
    """Write a value as people write it: 190x226, true."""
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
