"""The GPU architectures that code can be made for, and the precisions of all targets."""

from __future__ import annotations

import re

from bnfuse.core.errors import BnfuseError

DEFAULT = "sm_90"
WARP = 32
OLDEST = 80  # the first with bfloat16 and TF32 products and asynchronous copies

# multiprocessors of the largest card of each: kernels are cut up for that many. Other cards of the architecture run
# the same code, so that one compiled elsewhere is the one compiled here
MULTIPROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90": 132, "sm_100": 148}

# architectures with products of a warpgroup (kernels/cuda/wgmma.py), and what code is made for to have them: such code
# runs on no other, so there is nothing to lose by making all of it so
WITH_WGMMA = {"sm_90": "sm_90a"}

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
CPU_PRECISIONS = ("fp32", "bf16")

FORM = re.compile(r"sm_(\d+)(\d)")


def version(arch: str) -> tuple[int, int]:
    """Major and minor version: sm_90 is (9, 0)."""
    found = FORM.fullmatch(arch)
    if found is None:
        raise BnfuseError(f"'{arch}' is no GPU architecture: use one of {', '.join(MULTIPROCESSORS)}")
    return int(found[1]), int(found[2])


def runs_on(built: str, device: str) -> bool:
    """Whether a device executes code made for `built`: the same major version, and no older minor one."""
    (major, minor), (own_major, own_minor) = version(built), version(device)
    return major == own_major and minor <= own_minor


def compiled_as(arch: str) -> str:
    """Name what the CUDA compiler makes code for: the architecture with all of its own instructions."""
    return WITH_WGMMA.get(arch, arch)


def waits(arch: str) -> bool:
    """Tell whether kernels wait themselves for those before them (programmatic dependent launch)."""
    return version(arch) >= (9, 0)


def check(arch: str) -> None:
    """Refuse what no code can be made for."""
    major, minor = version(arch)
    if arch in MULTIPROCESSORS:
        return
    reason = f"needs sm_{OLDEST} or newer" if 10 * major + minor < OLDEST else "is not among those it is made for"
    raise BnfuseError(f"target 'cuda:{arch}' {reason}: use one of {', '.join(MULTIPROCESSORS)}")


def best_for(device: str) -> str:
    """Choose the newest of our architectures whose code the device runs."""
    fitting = [arch for arch in MULTIPROCESSORS if runs_on(arch, device)]
    if not fitting:
        raise BnfuseError(f"the GPU is {device}; code can be made for {', '.join(MULTIPROCESSORS)}")
    return max(fitting, key=version)
