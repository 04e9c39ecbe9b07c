"""What the machine could do at best, measured in a process of its own: FLOP/s of a matrix product, bytes/s of a copy.

The best of several libraries counts, so that the floor of a step is nobody's in particular: numpy's BLAS, torch's where
it is installed, and our own kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.measuring.children import answer, ask

SIDE = 2048  # of the square matrices
LIBRARIES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclasses.dataclass(frozen=True)
class Limits:
    """FLOP/s by library, and the best of them; bytes/s, read and written together.

    `by_working_set`: the same of chains of copies whose two arrays take so many bytes, where they were asked for
    (runtime/codegen/limits.py).
    """

    flops_by: dict[str, float]
    bytes_per_s: float
    by_working_set: tuple[tuple[int, float], ...] = ()

    @property
    def flops_per_s(self) -> float:
        """The best rate of the libraries."""
        return max(self.flops_by.values())

    @property
    def library(self) -> str:
        """Which was the fastest."""
        return max(self.flops_by, key=lambda name: self.flops_by[name])

    def floor(self, flops: int, moved: int) -> float:
        """Give the seconds that work takes at least: the longer of computing and moving."""
        return max(flops / self.flops_per_s, moved / self.bytes_per_s)

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON's types; the keys are in docs/cli.md."""
        return {
            "flops_per_s": self.flops_per_s,
            "library": self.library,
            "flops_per_s_by_library": self.flops_by,
            "bytes_per_s": self.bytes_per_s,
        }


def measured_limits(threads: int, working_sets: Sequence[int] = ()) -> Limits:
    """Measure in a process of its own how fast this machine computes and reads, for working sets of so many bytes
    too."""
    asked = {"threads": threads, "working_sets": list(working_sets)}
    found = ask("bnfuse.measuring.limits", asked, dict.fromkeys(LIBRARIES, str(threads)))
    by_working_set = zip(working_sets, found["chains"], strict=True)
    return Limits(found["flops_by"], found["bytes_per_s"], tuple(by_working_set))


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure, in the child."""
    from bnfuse.runtime.codegen.limits import chain_rates, copy_rate, gemm_rates

    threads = asked["threads"]
    rates = {"numpy": numpy_rate()}
    with contextlib.suppress(BnfuseError):  # torch is not installed
        rates["torch"] = torch_rate(threads)
    return {
        "flops_by": {**rates, **gemm_rates(threads)},
        "bytes_per_s": copy_rate(threads),
        "chains": chain_rates(threads, [size // 2 for size in asked["working_sets"]]),
    }


def numpy_rate() -> float:
    """Measure numpy's matrix product, in FLOP/s."""
    from bnfuse.runtime.codegen.limits import shortest

    a, out = np.ones((SIDE, SIDE), np.float32), np.empty((SIDE, SIDE), np.float32)
    return 2 * SIDE**3 / shortest(lambda: np.matmul(a, a, out=out))


def torch_rate(threads: int) -> float:
    """Measure torch's matrix product on so many threads, in FLOP/s."""
    from bnfuse.baselines.names import import_torch
    from bnfuse.runtime.codegen.limits import shortest

    torch = import_torch()
    torch.set_num_threads(threads)
    a = torch.ones((SIDE, SIDE))
    out = torch.empty_like(a)
    with torch.no_grad():
        return 2 * SIDE**3 / shortest(lambda: torch.matmul(a, a, out=out))


if __name__ == "__main__":
    answer(measure)
