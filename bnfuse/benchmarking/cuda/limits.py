"""What the GPU could do at best: bytes/s of a large copy, FLOP/s of a large matrix product in the step's precision."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from bnfuse.baselines import cuda
from bnfuse.baselines.names import import_torch
from bnfuse.measuring.limits import Limits

SIDE = 8192  # of the square matrices
COPIED = 1 << 30  # bytes: far more than any cache holds
RUNS = 9


def measured_limits(precision: str) -> Limits:
    """Measure the GPU by torch, that is cuBLAS, in this process. float32 by three products of TF32 counts as a third of
    TF32's."""
    torch = import_torch()
    rates = {}
    if precision in ("bf16", "fp16"):
        cuda.set_precision(torch, precision)
        rates[f"torch {precision}"] = product_rate(torch, torch.bfloat16 if precision == "bf16" else torch.float16)
    else:
        cuda.set_precision(torch, "tf32")
        tf32 = product_rate(torch, torch.float32)
        if precision == "tf32":
            rates["torch tf32"] = tf32
        else:
            rates["a third of torch tf32"] = tf32 / 3
            cuda.set_precision(torch, "fp32")
            rates["torch fp32"] = product_rate(torch, torch.float32)
    return Limits(rates, copy_rate(torch))


def product_rate(torch: Any, dtype: Any) -> float:
    """Measure FLOP/s of random numbers: zeros would run faster."""
    a, b = (torch.randn(SIDE, SIDE, device="cuda").to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    with torch.no_grad():
        return 2 * SIDE**3 / median_seconds(torch, lambda: torch.matmul(a, b, out=out))


def copy_rate(torch: Any) -> float:
    """Measure bytes/s, read and written together."""
    source = torch.randn(COPIED // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED / median_seconds(torch, lambda: target.copy_(source))


def median_seconds(torch: Any, run: Callable[[], Any], repeats: int = 3) -> float:
    """Time one run: some in a row between events, the median of several such rows after one that does not count."""
    cuda.seconds_a_step(torch, run, repeats)
    return statistics.median(cuda.seconds_a_step(torch, run, repeats) for _ in range(RUNS))
