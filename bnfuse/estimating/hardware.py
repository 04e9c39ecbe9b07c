"""What a workload is estimated on: a rate of computing, a cache, and the memory behind it."""

from __future__ import annotations

import dataclasses

from bnfuse.core.errors import BnfuseError

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Hardware:
    """`flops` in FLOP/s, of float32 unless `in_precision` took another's; `bandwidth` of the off-chip memory in
    bytes/s, both directions together; `cache` the bytes of the last level on the chip.

    `cache_bandwidth`: bytes/s of that cache, where it is known to matter (None: it never holds a layer up, as in
    [Tsai21]).
    """

    name: str
    about: str
    flops: float
    bandwidth: float
    cache: int
    cache_bandwidth: float | None = None

    @property
    def ridge_point(self) -> float:
        """FLOP/byte from which on computing is the bound ([Tsai21], eq. 3.2)."""
        return self.flops / self.bandwidth


# [Tsai21], table 5.2 (its LLC size of 55 for the RTX 2080 Ti is 5.5 MB with the point lost), and what came later:
# H100 SXM5 by its data sheet, float32 without sparsity.
PROFILES = {
    profile.name: profile
    for profile in (
        Hardware("i9-10980xe", "Intel i9-10980XE, DDR4", 2.765e12, 94e9, int(24.75 * MIB)),
        Hardware("rtx2080ti", "NVIDIA RTX 2080 Ti, GDDR6", 13.45e12, 616e9, int(5.5 * MIB)),
        Hardware("rx6900xt", "AMD Radeon 6900 XT, GDDR6", 23.04e12, 512e9, 128 * MIB),
        Hardware("a100", "NVIDIA A100, HBM2e", 19.45e12, 1555e9, 40 * MIB),
        Hardware("h100", "NVIDIA H100 SXM5, HBM3", 66.9e12, 3350e9, 50 * MIB),
    )
}
# FLOP/s of matrix products with float32 sums by data sheet, without sparsity, where they are not float32's
PRODUCTS = {
    ("rtx2080ti", "fp16"): 53.8e12,
    ("a100", "tf32"): 156e12,
    ("a100", "bf16"): 312e12,
    ("a100", "fp16"): 312e12,
    ("h100", "tf32"): 494.7e12,
    ("h100", "bf16"): 989.4e12,
    ("h100", "fp16"): 989.4e12,
}
HOST = "host"  # measured on this machine (probe.py)


def profile(name: str) -> Hardware:
    """Find a profile by its name. Raises BnfuseError where there is none."""
    if name not in PROFILES:
        raise BnfuseError(f"no hardware '{name}': there are {', '.join(PROFILES)} and {HOST}")
    return PROFILES[name]


def in_precision(hardware: Hardware, precision: str) -> Hardware:
    """Give the hardware at the rate of a precision's products, float32's where no other is known.

    What computes elementwise is given that rate too: it waits for memory at either.
    """
    return dataclasses.replace(hardware, flops=PRODUCTS.get((hardware.name, precision), hardware.flops))
