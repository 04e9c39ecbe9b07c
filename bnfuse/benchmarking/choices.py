"""What a benchmark can be asked for, as text: levels with their options, and baselines."""

from __future__ import annotations

from collections.abc import Iterable

from bnfuse.baselines.names import BASELINES as TORCH_BASELINES
from bnfuse.baselines.names import CUDA_BASELINES
from bnfuse.core.errors import BnfuseError
from bnfuse.passes.variants import split
from bnfuse.runtime.targets.arch import CPU_PRECISIONS, PRECISIONS

BASELINES = ("ort", *TORCH_BASELINES)


def baselines(texts: Iterable[str], target: str = "cpu") -> tuple[str, ...]:
    """Read names of baselines: ["ort,torch", "torch-cl"] -> the three, each once, in this order."""
    named = tuple(dict.fromkeys(split(texts)))
    known, where = (CUDA_BASELINES, " on a GPU") if is_gpu(target) else (BASELINES, "")
    for name in named:
        if name not in known:
            raise BnfuseError(f"cannot measure against '{name}'{where}: there are {', '.join(known)}")
    return named


def is_gpu(target: str) -> bool:
    """Tell whether a target is a GPU."""
    return target.partition(":")[0] == "cuda"


def precision(text: str | None, target: str) -> str:
    """Tell what a target computes in: float32 by default."""
    chosen = text or "fp32"
    if chosen not in PRECISIONS:
        raise BnfuseError(f"there is no precision '{chosen}': there is {', '.join(PRECISIONS)}")
    if chosen not in CPU_PRECISIONS and not is_gpu(target):
        raise BnfuseError(f"precision {chosen} is for a GPU: add --target cuda")
    return chosen
