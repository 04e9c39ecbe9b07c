"""Sizes and rates as people write them.

Bytes of a cache count as caches are sold: KB, MB, GB are 2^10, 2^20, 2^30 bytes, the same as KiB, MiB, GiB. Rates are
decimal, as data sheets have them: 616 GB/s is 616e9 bytes a second (GiB/s is binary), 13.45 TFLOP/s 13.45e12.
"""

from __future__ import annotations

import re

from bnfuse.core.errors import BnfuseError

PREFIXES = "KMGTP"
MOST_BYTES, MOST_RATE = 2.0**60, 1e24  # of a cache, of a second: beyond these something is mistyped
NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*")


def parse_bytes(text: str) -> int:
    """Read '24MB', '24 MiB', '1GB', '5.5mb', '1048576', '512B' as bytes, at least one."""
    value, unit = split(text, "a size, like 24MB or 1GiB")
    found = re.fullmatch(rf"([{PREFIXES}]?)(I?)B?", unit)
    if found is None or (found[2] and not found[1]):
        raise BnfuseError(f"'{text}' is no size: it is a number with B, KB, MB or GB (2^10, 2^20, 2^30 bytes)")
    size = value * 1024 ** exponent(found[1])
    if not size <= MOST_BYTES:
        raise BnfuseError(f"'{text}' is out of range: it must be at most 1024 PB")
    return at_least_one(round(size), text)


def parse_bandwidth(text: str) -> float:
    """Read '616GB/s', '1.5 TB/s', '616e9', '100GiB/s', '94G' as bytes/s."""
    value, unit = split(text, "a bandwidth, like 616GB/s")
    if re.search(r"[KMGTP]i?b(/s|ps)?\s*$", text):
        raise BnfuseError(f"'{text}' may be bits or bytes: write B for bytes, as in 6GB/s")
    found = re.fullmatch(rf"([{PREFIXES}]?)(I?)(?:B(?:/S|PS)?)?", unit)
    if found is None or (found[2] and not found[1]):
        raise BnfuseError(f"'{text}' is no bandwidth: it is a number with B/s, MB/s, GB/s or TB/s")
    return rate(value * (1024 if found[2] else 1000) ** exponent(found[1]), text)


def parse_flops(text: str) -> float:
    """Read '13.45TFLOP/s', '13.45 TFLOPS', '13.45T', '2e12' as FLOP/s."""
    value, unit = split(text, "a rate, like 13.45TFLOP/s")
    found = re.fullmatch(rf"([{PREFIXES}]?)(?:FLOPS?(?:/S)?)?", unit)
    if found is None:
        raise BnfuseError(f"'{text}' is no rate of computing: it is a number with GFLOP/s or TFLOP/s")
    return rate(value * 1000 ** exponent(found[1]), text)


def parse_count(text: str) -> int:
    """Read a whole number of at least one."""
    if not (text.strip().isascii() and text.strip().isdecimal()):
        raise BnfuseError(f"'{text}' is no whole number")
    return at_least_one(int(text), text)


def split(text: str, what: str) -> tuple[float, str]:
    """Split a quantity into its number and its unit, in capitals. Raises BnfuseError where it is none."""
    found = NUMBER.fullmatch(text)
    if found is None:
        raise BnfuseError(f"'{text}' is not {what}")
    return float(found[1]), found[2].upper()


def exponent(prefix: str) -> int:
    """Give the power of a prefix: 1 for K, 2 for M; 0 for none."""
    return PREFIXES.index(prefix) + 1 if prefix else 0


def rate(value: float, text: str) -> float:
    """Check a rate. Raises BnfuseError where it is out of range."""
    if not 1 <= value <= MOST_RATE:
        raise BnfuseError(f"'{text}' is out of range: it must be from 1 to {MOST_RATE:g} a second")
    return value


def at_least_one(value: int, text: str) -> int:
    """Check a count. Raises BnfuseError where it is below one."""
    if value < 1:
        raise BnfuseError(f"'{text}' is out of range: it must be at least 1")
    return value


def cache_text(count: float) -> str:
    """Write 25165824 as '24 MB', as `parse_bytes` reads it."""
    for prefix in ("", *PREFIXES):
        if abs(count) < 1024 or prefix == PREFIXES[-1]:
            break
        count /= 1024
    return f"{count:.4g} {prefix}B"
