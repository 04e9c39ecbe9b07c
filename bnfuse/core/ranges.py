"""Numbers that come from outside, checked once, for the command line and for Python alike: finite, and within what the
type that they end up as can hold."""

from __future__ import annotations

import numbers

from bnfuse.core.errors import BnfuseError

MAX_REAL = 3.4028234663852886e38  # of float32
MAX_WHOLE = 2**63 - 1  # of int64


def is_number(value: object) -> bool:
    """Tell whether it is a real number, numpy's included, and no truth value."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_real(name: str, value: object, low: float = 0.0) -> None:
    """Raise unless it is a number from `low` on that float32 holds."""
    if not is_number(value) or not low <= float(value) <= MAX_REAL:  # type: ignore[arg-type]
        raise BnfuseError(f"{name}={value!r} is out of range: it must be a number from {low:g} to {MAX_REAL:.3g}")


def check_whole(name: str, value: object, low: int = 0) -> None:
    """Raise unless it is an integer from `low` on that int64 holds."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or not low <= int(value) <= MAX_WHOLE:  # type: ignore[call-overload]
        raise BnfuseError(f"{name}={value!r} is out of range: it must be an integer from {low} to {MAX_WHOLE}")
