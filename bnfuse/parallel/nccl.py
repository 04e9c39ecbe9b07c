"""A world of GPUs, one a rank: NCCL carries what lies on them, on any stream that it is given, also into CUDA graphs.

    rank 0's unique id          through the world that MPI or torchrun gives (`bootstrap`), with all that is small
    exchanges of a step         enqueued by the runner (runtime/backends/cuda), nothing waits
    the host waits for a GPU    `watch`: looks at errors of NCCL meanwhile, and gives up after the limit

A rank that has given up has aborted its communicator: what is on its GPU's streams comes to an end then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol, runtime_checkable

import numpy as np

from bnfuse.core import nvidia
from bnfuse.core.errors import BnfuseError, LostRankError, everywhere, first_line, one_line
from bnfuse.parallel import mapping
from bnfuse.parallel.waiting import lost
from bnfuse.parallel.world import Exchanged, Request, World

REMEDY = "install bnfuse[nccl]"
SPINS = 2e-3  # seconds of waiting without a pause: about the time between two steps of a small network
PAUSE = 20e-6
CLOSED = 2.0  # seconds that an abort may take; a kernel of a lost rank's partner looks at its flag all the time
TYPES = {"float32": "Float32", "bfloat16": "Bfloat16", "float16": "Float16", "float64": "Float64", "int64": "Int64"}
TYPES |= {"int32": "Int32"}


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements in a GPU's memory: their address, how many they are, and of which type (by numpy's name)."""

    address: int
    elements: int
    dtype: str = "float32"


UNREACHED = "the step was compiled for GPUs that reach each other's memory, and these do not: compile it again here"


@runtime_checkable
class GpuWorld(World, Protocol):
    """A world that reaches from GPU to GPU."""

    @property
    def device(self) -> int:
        """Number of this rank's GPU, as the driver counts."""

    def enqueue_sums(self, pieces: Sequence[Piece], stream: int) -> None:
        """Enqueue one message: each piece is summed over the ranks, in place. The GPU's context is to be current."""

    def enqueue_gathers(self, pairs: Sequence[tuple[Piece, Piece]], stream: int) -> None:
        """Enqueue one message: of each pair, own and all, `all` gets every rank's own in the order of ranks."""

    @property
    def maps(self) -> bool:
        """Whether the GPUs reach each other's memory, so that kernels may exchange what is small."""

    def share(self, address: int, stop: int, owner: object) -> list[int]:
        """Give the addresses of the same block of all ranks, in their order; they all call it. `stop` is the address of
        a uint64 that becomes 1 where this rank gives up; the block stays as long as its `owner`, whom this keeps."""

    def watch(self, is_done: Callable[[], bool]) -> None:
        """Wait until the GPU is done. Raises LostRankError where that takes longer than the limit, or NCCL failed."""


def gpu_world(world: World | None) -> GpuWorld | None:
    """Give the world of a step on a GPU. Raises BnfuseError for one whose exchanges go through the host."""
    if world is None or isinstance(world, GpuWorld):
        return world
    raise BnfuseError(
        f"a step on a GPU exchanges gradients through NCCL, and this world is {world.name}: open it with "
        "open_world(target='cuda')"
    )


@functools.cache
def bindings() -> Any:
    """nccl.bindings.nccl, NVIDIA's own: functions of NCCL that take addresses. Its library is looked for at once."""
    try:
        found = importlib.import_module("nccl.bindings.nccl")
        found.get_version()
    except ImportError as error:
        raise BnfuseError(f"ranks on GPUs need the package nccl4py ({first_line(error)}): {REMEDY}") from None
    except RuntimeError as error:  # the library, or a function in it, is not found
        raise BnfuseError(f"NCCL's library cannot be used ({first_line(error)}): {REMEDY}") from None
    return found


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The GPU of this rank: its number, its primary context, and what tells it from all others."""

    ordinal: int
    context: Any
    identity: bytes


def local_gpu(local_rank: int) -> Gpu:
    """Choose this rank's GPU: that of the thread's current context, else the local rank's, which becomes current.

    Where a launcher shows each rank one GPU alone, that is the one.
    """
    cu = nvidia.bindings()
    try:
        nvidia.start(cu)
        context = checked("cuCtxGetCurrent", cu.cuCtxGetCurrent())
        if int(context):
            device = checked("cuCtxGetDevice", cu.cuCtxGetDevice())
        else:
            device = checked("cuDeviceGet", cu.cuDeviceGet(local_rank % checked("count", cu.cuDeviceGetCount())))
            context = checked("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(device))
            checked("cuCtxSetCurrent", cu.cuCtxSetCurrent(context))
        return Gpu(int(device), context, bytes(checked("cuDeviceGetUuid", cu.cuDeviceGetUuid(device)).bytes))
    except RuntimeError as error:
        raise nvidia.unusable(error) from None


def checked(name: str, found: Sequence[Any]) -> Any:
    """Give what a function of the driver returns behind its error code."""
    error, *rest = found
    if int(error) != 0:
        raise BnfuseError(f"the GPU of this rank fails in {name}: {error.name}")
    return rest[0] if rest else None


def open_nccl(bootstrap: World) -> NcclWorld:
    """Join the GPUs of all ranks of a world. Raises BnfuseError, the same on all ranks, where one of them has none, or
    two have the same one.
    """
    try:
        nccl, gpu = bindings(), local_gpu(bootstrap.local_rank)
        said = f"{nccl.get_version()}:".encode() + gpu.identity
    except BnfuseError as error:
        agree(bootstrap.gather(b"!" + str(error).encode()))
        raise
    agree(bootstrap.gather(said))
    unique = bootstrap.broadcast(bytes(nccl.get_unique_id()) if bootstrap.rank == 0 else b"")

    def join() -> Any:
        checked("cuCtxSetCurrent", nvidia.bindings().cuCtxSetCurrent(gpu.context))
        return nccl.comm_init_rank_scalable(bootstrap.size, bootstrap.rank, 1, bytearray(unique), 0)

    try:
        communicator = within(bootstrap.limit, join, "find each other's GPUs")
    except nccl.NCCLError as error:
        raise BnfuseError(f"NCCL does not start ({one_line(str(error))}): NCCL_DEBUG=WARN says more") from None
    return NcclWorld(bootstrap, nccl, communicator, gpu.ordinal, maps=reach(bootstrap))


def agree(said: Sequence[bytes]) -> None:
    """See that every rank has a GPU of its own, and the same NCCL."""
    for rank, text in enumerate(said):
        if text.startswith(b"!"):
            raise everywhere(BnfuseError(f"rank {rank}: {text[1:].decode(errors='replace')}"))
    versions = [text.partition(b":")[0].decode() for text in said]
    if len(set(versions)) > 1:
        other = next(rank for rank, version in enumerate(versions) if version != versions[0])
        what = f"rank 0 has NCCL {versions[0]}, rank {other} has {versions[other]}: install the same on all machines"
        raise everywhere(BnfuseError(what))
    first: dict[bytes, int] = {}
    for rank, text in enumerate(said):
        if (other := first.setdefault(text.partition(b":")[2], rank)) != rank:
            what = (
                "start one rank a GPU, and let each choose its own (torch.cuda.set_device(local_rank)) where the script"
            )
            raise everywhere(BnfuseError(f"ranks {other} and {rank} have the same GPU: {what} chooses one"))


def reach(bootstrap: World) -> bool:
    """Tell whether the GPUs of all ranks reach each other's memory, by trying it."""
    cu = nvidia.bindings()
    error, *found = cu.cuMemAlloc(mapping.LEAST)  # others may have it open until they end
    return mapping.everyones(bootstrap, None if int(error) else int(found[0])) is not None


def within(limit: float, call: Callable[[], Any], what: str) -> Any:
    """Give what a call gives that has no limit of its own. Raises LostRankError where it takes longer."""
    found: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # it is the caller's
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(min(limit, threading.TIMEOUT_MAX))
    if failed:
        raise failed[0]
    if thread.is_alive():
        raise LostRankError(f"the ranks did not {what} within {limit:g} s: one of them is gone, or stopped")
    return found[0]


class NcclWorld:
    """See `World` and `GpuWorld`. What lies on the host goes through `bootstrap`, the world that it was made with."""

    name = "NCCL"

    def __init__(self, bootstrap: World, nccl: Any, communicator: Any, device: int, *, maps: bool = False) -> None:
        self.rank, self.size = bootstrap.rank, bootstrap.size
        self.local_rank, self.local_size = bootstrap.local_rank, bootstrap.local_size
        self.device, self.maps = device, maps
        self._bootstrap, self._nccl, self._communicator = bootstrap, nccl, communicator
        self._lost = ""  # why this rank has given up
        self._stops: list[tuple[int, object]] = []  # where that is written for kernels that wait, and what keeps it
        self._stopped = np.ones(1, np.uint64)
        self._stream: Any = None  # for that alone: on others there are those who wait

    @property
    def limit(self) -> float:
        """Seconds that this rank waits for others, on the host and on the GPU."""
        return self._bootstrap.limit

    @limit.setter
    def limit(self, seconds: float) -> None:
        self._bootstrap.limit = seconds

    # -- on the host -------------------------------------------------------------------------------------------

    def start(self, exchange: Exchanged) -> Request:
        """Begin an exchange of arrays of the host."""
        return self._bootstrap.start(exchange)

    def sum(self, array: np.ndarray) -> None:
        """Sum an array of the host over the ranks, in place."""
        self._bootstrap.sum(array)

    def gather(self, data: bytes) -> list[bytes]:
        """Give every rank's bytes, in the order of ranks."""
        return self._bootstrap.gather(data)

    def broadcast(self, data: bytes) -> bytes:
        """Give rank 0's bytes."""
        return self._bootstrap.broadcast(data)

    def end(self, message: str, status: int) -> NoReturn:
        """End the run on every rank. What is under way on the GPU is given up."""
        self._abort(message or "the run ends")
        self._bootstrap.end(message, status)

    # -- on the GPU --------------------------------------------------------------------------------------------

    def enqueue_sums(self, pieces: Sequence[Piece], stream: int) -> None:
        """Enqueue one message: each piece is summed over the ranks, in place."""
        add = int(self._nccl.RedOp.Sum)
        with self._message(len(pieces)) as communicator:
            for piece in pieces:
                where, kind = piece.address, self._type(piece)
                self._nccl.all_reduce(where, where, piece.elements, kind, add, communicator, stream)

    def enqueue_gathers(self, pairs: Sequence[tuple[Piece, Piece]], stream: int) -> None:
        """Enqueue one message: of each pair `all` gets every rank's own, in the order of ranks."""
        for own, all_ in pairs:
            if all_.elements != self.size * own.elements or all_.dtype != own.dtype:
                raise BnfuseError(
                    f"{self.size} ranks do not give {all_.elements} elements of {own.elements} each: compile the step "
                    "again for this many ranks"
                )
        with self._message(len(pairs)) as communicator:
            for own, all_ in pairs:
                self._nccl.all_gather(own.address, all_.address, own.elements, self._type(own), communicator, stream)

    def share(self, address: int, stop: int, owner: object) -> list[int]:
        """Give the addresses of the same block of all ranks, in their order."""
        found = mapping.everyones(self._bootstrap, address) if self.maps else None
        if found is None:
            raise BnfuseError(UNREACHED)
        if self._stream is None:
            cu = nvidia.bindings()
            self._stream = checked("cuStreamCreate", cu.cuStreamCreate(int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        self._stops.append((stop, owner))
        return found

    def _type(self, piece: Piece) -> int:
        return int(getattr(self._nccl.DataType, TYPES[piece.dtype]))

    @contextlib.contextmanager
    def _message(self, calls: int) -> Iterator[Any]:
        """Make one message of some calls, and one line of what NCCL says to them."""
        if self._lost:
            raise LostRankError(self._lost)
        try:
            if calls > 1:
                self._nccl.group_start()
            try:
                yield self._communicator
            finally:
                if calls > 1:
                    self._nccl.group_end()
        except self._nccl.NCCLError as error:
            raise BnfuseError(f"NCCL fails in an exchange: {one_line(str(error))}") from None

    def watch(self, is_done: Callable[[], bool]) -> None:
        """Wait until the GPU is done. Raises LostRankError where that takes longer than the limit, or NCCL failed."""
        if self._lost:
            raise LostRankError(self._lost)
        start = time.monotonic()
        while not is_done():
            waited = time.monotonic() - start
            if waited < SPINS:
                continue
            self._look()
            if waited > self.limit:
                self._give_up(f"has waited {self.limit:g} s for the other GPUs")
            time.sleep(PAUSE)

    def _look(self) -> None:
        """See whether NCCL has met an error since."""
        found = int(self._nccl.comm_get_async_error(self._communicator))
        if found not in (int(self._nccl.Result.Success), int(self._nccl.Result.InProgress)):
            self._give_up(f"has lost another one (NCCL: {self._nccl.get_error_string(found)})")

    def _give_up(self, what: str) -> NoReturn:
        error = lost(self, what)
        self._abort(str(error))
        raise error

    def _abort(self, why: str) -> None:
        """Let kernels of exchanges that cannot end, end. The abort itself may hang where a rank hangs, and is not
        waited for then."""
        if self._lost:
            return
        self._lost = why
        for stop, _ in self._stops:
            nvidia.bindings().cuMemcpyHtoDAsync(stop, self._stopped.ctypes.data, self._stopped.nbytes, self._stream)
        with contextlib.suppress(BnfuseError, self._nccl.NCCLError):
            within(CLOSED, functools.partial(self._nccl.comm_abort, self._communicator), "abort")
