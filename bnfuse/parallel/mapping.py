"""Memory of other ranks' GPUs, seen from this one: what kernels of ours exchange by (docs/parallel.md, SyncBN).

    everyones(bootstrap, address)    the block at `address` of every rank, as addresses here; None where one of the
                                     ranks cannot reach another's

All ranks call it together, each with a block of the same size that begins an allocation. It goes by CUDA's handles
between processes, so by NVLink or PCIe, and on one machine.
"""

from __future__ import annotations

import ctypes
from typing import Any

from bnfuse.core import nvidia
from bnfuse.parallel.peers import machine
from bnfuse.parallel.world import World

NO = b"!"
HANDLE = 64  # bytes
LAZY = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
LEAST = 2 << 20  # bytes of an allocation that is shared: smaller ones may lie in one with others


def everyones(bootstrap: World, address: int | None) -> list[int] | None:
    """Give the addresses of all ranks' blocks, in their order; of this rank its own. The context is to be current. An
    `address` of None says that this rank has no block."""
    cu = nvidia.bindings()
    said = bootstrap.gather(NO if address is None else handle_of(cu, address))
    found = [address if rank == bootstrap.rank else opened(cu, text) for rank, text in enumerate(said)]
    reached = bootstrap.gather(NO if None in found else b"")
    return None if NO in reached else [each for each in found if each is not None]


def handle_of(cu: Any, address: int) -> bytes:
    """Make what other processes of this machine open a block by."""
    error, *found = cu.cuIpcGetMemHandle(address)
    return NO if int(error) else machine().encode() + b"\n" + ctypes.string_at(int(found[0].getPtr()), HANDLE)


def opened(cu: Any, said: bytes) -> int | None:
    """Open another rank's block; None where this is not possible."""
    where, _, raw = said.partition(b"\n")
    if where != machine().encode():
        return None
    handle = cu.CUipcMemHandle()
    ctypes.memmove(int(handle.getPtr()), raw, HANDLE)
    error, *found = cu.cuIpcOpenMemHandle(handle, LAZY)
    return None if int(error) else int(found[0])
