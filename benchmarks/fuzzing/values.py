"""Odd names, numbers and texts, and what disturbs bytes and JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

NAMES = (
    "",
    "x",
    "a\nb",
    "\x1b[31mred",
    "a'b\"c",
    "../up",
    "/",
    "名前",
    "\u202eback",
    "n" * 3000,
    "%s{0}",
    "\t ",
    "conv1/y",
)
NUMBERS = (-1, 0, 1, 2, 7, -(2**31), 2**31, 2**40, 2**63, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"))
ODD: tuple[Any, ...] = (*NUMBERS, None, True, "", "x", "a\nb", [], {}, [[]], [1, 2], {"a": 1})


def pick(rng: random.Random, of: Sequence[T]) -> T | None:
    """One of them, or None where there is none."""
    return rng.choice(of) if len(of) else None


def disturb_bytes(data: bytes, rng: random.Random) -> bytes:
    """A few bytes flipped, a piece cut off, cut out, doubled or zeroed."""
    if not data:
        return b"\0"
    at, length = rng.randrange(len(data)), rng.choice((1, 2, 8, 64, 1024))
    kind = rng.choice(("flip", "flip", "flip", "truncate", "cut", "double", "zero", "empty"))
    if kind == "flip":
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 4, 32))):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    pieces = {
        "truncate": data[:at],
        "cut": data[:at] + data[at + length :],
        "double": data[: at + length] + data[at:],
        "zero": data[:at] + bytes(min(length, len(data) - at)) + data[at + length :],
        "empty": b"",
    }
    return pieces[kind]


def disturb_text(text: str, rng: random.Random) -> str:
    """JSON that says something else, is none, or is too deep or too long to be read."""
    kind = rng.choice(("value", "value", "value", "cut", "deep", "digits", "other"))
    if kind == "value":
        try:
            value = json.loads(text)
        except ValueError:
            return text[::-1]
        return json.dumps(disturb_json(value, rng))
    if kind == "cut":
        return text[: rng.randrange(len(text) + 1)]
    return {
        "deep": "[" * 100_000,
        "digits": "9" * 5000,
        "other": rng.choice(("", "null", "{}", "1", "[]", '"a"', "\0")),
    }[kind]


def disturb_json(value: Any, rng: random.Random) -> Any:
    """The value with one of its parts, chosen at random, replaced, removed, doubled or renamed."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.08:
        return rng.choice(ODD)
    if isinstance(value, dict):
        key = rng.choice(list(value))
        changed = dict(value)
        if rng.random() < 0.12:
            del changed[key]
        elif rng.random() < 0.1:
            changed[rng.choice(NAMES)] = changed.pop(key)
        else:
            changed[key] = disturb_json(value[key], rng)
        return changed
    index = rng.randrange(len(value))
    if rng.random() < 0.12:
        return value[:index] + value[index + 1 :]
    if rng.random() < 0.1:
        return [*value, value[index]]
    return [*value[:index], disturb_json(value[index], rng), *value[index + 1 :]]
