"""AMX's tiles are 8 KiB of state a thread that Linux keeps for processes alone that have asked for them."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.targets.target import CpuTarget

ARCH_PRCTL = 158  # the number of the system call, of x86-64
REQUEST, TILE_DATA = 0x1023, 18  # ARCH_REQ_XCOMP_PERM, and the state component


@functools.cache
def is_granted() -> bool:
    """Ask for this process, once, and tell whether it may use tiles: its threads that run already may, too."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST, TILE_DATA) == 0)


def require(target: CpuTarget) -> None:
    """Raise BnfuseError where the code of a target uses tiles that this process may not."""
    if target.amx and not is_granted():
        raise BnfuseError(
            f"the code for {target.mcpu} uses AMX, for which Linux gives this process no permission (5.16 or later "
            f"does, unless a sandbox keeps it): compile for cpu, the host itself, which does without"
        )
