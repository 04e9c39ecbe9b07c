"""A world whose exchanges are MPI's, through mpi4py: ranks on CPUs under mpirun or srun.

MPI is initialised when a world is opened, and not when mpi4py is imported. Calls come from the thread that runs the
step's launches and from the caller's, never two at a time. What is under way goes on whenever MPI is asked about it,
which the runner does between launches.

MPI does not say in which order it sums. MPICH and Open MPI choose an algorithm by the number of ranks, where they are
and the length of the message, and every rank gets the same bits; two runs on the same machines have the same then.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from bnfuse.core.errors import BnfuseError, LostRankError, first_line
from bnfuse.parallel.launched import Launched
from bnfuse.parallel.packing import is_small, packed, sum_in_order, unpack
from bnfuse.parallel.peers import stopped_beside
from bnfuse.parallel.waiting import LAST_TURN, TURN, lost, wait_until
from bnfuse.parallel.world import Exchanged, Request

Stages = Iterator[list[Any]]  # MPI requests that are to be done before the next stage begins
QUIET = "MPIR_CVAR_SUPPRESS_ABORT_MESSAGE"  # MPICH: the line of who ends the run is ours
HEARD = 0.1  # seconds until the launcher has passed on what was written last
WORST = 1  # exit status of a rank that ends because others are gone


def import_mpi() -> Any:
    """Import mpi4py without initialising MPI. Raises BnfuseError where it, or its library, is not there."""
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        raise BnfuseError(
            f"ranks under mpirun exchange by MPI, and mpi4py does not load ({first_line(error)}): pip install "
            "'bnfuse[mpi]', and start them with the mpirun that it brings"
        ) from None
    return MPI


def library_of(mpi: Any) -> ctypes.CDLL:
    """Give MPI's own functions. Called through ctypes they leave Python's lock to others, where mpi4py's MPI_Init and
    MPI_Finalize keep it for as long as they wait."""
    return ctypes.CDLL(mpi.__file__)  # a name is looked for in what it was linked with, too


def initialize(mpi: Any, found: Launched, limit: float) -> None:
    """Initialise MPI, which waits for all ranks and knows no limit. A rank that has waited for so long ends the run."""
    given = ctypes.c_int()
    with ended_after(limit, unmet(limit), found.rank):
        error = library_of(mpi).MPI_Init_thread(None, None, int(mpi.THREAD_SERIALIZED), ctypes.byref(given))
    if error:
        raise BnfuseError(f"MPI does not start (error {error}): start the ranks with its own mpirun")
    for communicator in (mpi.COMM_SELF, mpi.COMM_WORLD):  # as mpi4py does where it initialises
        communicator.Set_errhandler(mpi.ERRORS_RETURN)


def unmet(limit: float) -> str:
    """Say that ranks did not come together."""
    return f"has waited {limit:g} s for the others to begin"


@contextlib.contextmanager
def ended_after(limit: float, what: str, rank: int) -> Iterator[None]:
    """End this process if the context takes longer than the limit; its launcher ends the others. `what` this rank then
    says, with the ranks of this machine that are stopped, and leaves to the ranks before it to say first."""

    def end() -> None:
        if what:
            stopped = "; ".join(stopped_beside()) or "a rank has ended, hangs, or is slower than that"
            os.write(2, f"bnfuse: rank {rank} {what}: {stopped}\n".encode())
        os._exit(WORST)

    timer = threading.Timer(min(limit + min(TURN * rank, LAST_TURN), threading.TIMEOUT_MAX), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class MpiWorld:
    """See `World`. With `deterministic` sums are taken in the order of ranks, whatever MPI would do."""

    name = "MPI"

    def __init__(self, found: Launched, limit: float, *, deterministic: bool = False) -> None:
        self._mpi = import_mpi()
        self.limit, self.deterministic = limit, deterministic
        if not self._mpi.Is_initialized():
            os.environ.setdefault(QUIET, "1")
            initialize(self._mpi, found, limit)
            atexit.register(self._leave)
        world = self._mpi.COMM_WORLD
        self.rank, self.size = int(world.rank), int(world.size)
        self.local_rank, self.local_size = found.local_rank, found.local_size
        check_same(found, self.rank, self.size, str(self._mpi.Get_library_version()))
        # ranks that disagree about what comes next meet nobody, where in one communicator they would meet any message
        with ended_after(limit, unmet(limit), self.rank):
            self._comm, self._second, self._small, self._last = (world.Dup() for _ in range(4))
        self._lock = threading.RLock()
        self._open: collections.deque[MpiRequest] = collections.deque()
        self._is_lost = False
        self._hook = sys.excepthook
        sys.excepthook = self._uncaught

    # -- exchanges ---------------------------------------------------------------------------------------------

    def start(self, exchange: Exchanged) -> Request:
        """Begin an exchange. Its arrays are neither read nor written until it is done."""
        arrays = exchange.arrays
        if exchange.kind == "gather":
            return self._begin(self._gathered(exchange), "gathering statistics")
        summed = self._summed_in_order if self.deterministic else self._summed
        return self._begin(summed(arrays), f"summing {sum(a.nbytes for a in arrays)} bytes")

    def _begin(self, stages: Stages, what: str) -> MpiRequest:
        with self._lock:
            request = MpiRequest(self, stages, what)
            self._open.append(request)
            try:
                request.go_on()
            except self._mpi.Exception as error:
                self._is_lost = True
                raise lost(self, f"has lost another one ({first_line(error)})") from None
        return request

    def _gathered(self, exchange: Exchanged) -> Stages:
        yield [self._comm.Iallgather(own, all_) for own, all_ in exchange.pairs]

    def _summed(self, arrays: tuple[np.ndarray, ...]) -> Stages:
        if is_small(arrays):
            message = packed(arrays)
            yield [self._comm.Iallreduce(self._mpi.IN_PLACE, message)]
            unpack(message, arrays)
        else:
            yield [self._comm.Iallreduce(self._mpi.IN_PLACE, array) for array in arrays]

    def _summed_in_order(self, arrays: tuple[np.ndarray, ...]) -> Stages:
        """Each rank sums a part of the message, which all others send it, and sends the sum to all."""
        message = packed(arrays, self.size)
        rows = np.empty((self.size, message.size // self.size), message.dtype)
        yield [self._comm.Ialltoall(message, rows)]
        part = sum_in_order(rows)
        yield [self._second.Iallgather(part, message)]
        unpack(message, arrays)

    def progress(self) -> None:
        """Bring forward what is under way. Second stages begin in the order in which exchanges began: all ranks must
        call MPI in one order."""
        with self._lock:
            if self._is_lost:
                raise lost(self, "has lost another one before")
            try:
                for request in list(self._open):
                    if not request.advance(self._mpi.Request.Testall):
                        break
            except self._mpi.Exception as error:
                self._is_lost = True
                raise lost(self, f"has lost another one ({first_line(error)})") from None
            while self._open and self._open[0].is_done:
                self._open.popleft()

    def wait_for(self, request: MpiRequest) -> None:
        """Wait until an exchange is done, no longer than the limit."""
        try:
            wait_until(request.test, self, request.what)
        except LostRankError:
            self._is_lost = True
            raise

    # -- small things ------------------------------------------------------------------------------------------

    def sum(self, array: np.ndarray) -> None:
        """Sum an array over the ranks, in place, and wait for it."""
        self.start(Exchanged("sum", (array,))).wait()

    def gather(self, data: bytes) -> list[bytes]:
        """Give every rank's bytes, in the order of ranks, on every rank."""
        counts = np.empty(self.size, np.int64)
        own = np.array([len(data)], np.int64)
        self._wait(lambda: self._small.Iallgather(own, counts), "gathering")
        found = np.empty(int(counts.sum()), np.uint8)
        sent = np.frombuffer(data, np.uint8)
        self._wait(lambda: self._small.Iallgatherv(sent, [found, counts.tolist()]), "gathering")
        ends = np.cumsum(counts).tolist()
        return [found[end - count : end].tobytes() for end, count in zip(ends, counts.tolist(), strict=True)]

    def broadcast(self, data: bytes) -> bytes:
        """Give rank 0's bytes on every rank."""
        count = np.array([len(data)], np.int64)
        self._wait(lambda: self._small.Ibcast(count, 0), "the first rank's state")
        found = np.frombuffer(bytearray(data) if self.rank == 0 else bytearray(int(count[0])), np.uint8)
        self._wait(lambda: self._small.Ibcast(found, 0), "the first rank's state")
        return found.tobytes()

    def _wait(self, begin: Callable[[], Any], what: str) -> None:
        def stages() -> Stages:
            yield [begin()]

        self._begin(stages(), what).wait()

    # -- the end -----------------------------------------------------------------------------------------------

    def end(self, message: str, status: int) -> NoReturn:
        """End the run on every rank with this exit status; `message` is written as one line, unless it is empty."""
        if message:
            os.write(2, f"{message}\n".encode())
        time.sleep(HEARD)
        self._mpi.COMM_WORLD.Abort(status)
        os._exit(status)

    def _uncaught(self, *error: Any) -> None:
        """End the run for an exception that nobody caught: the others would wait for this process."""
        self._hook(*error)
        self.end("", WORST)

    def _leave(self) -> None:
        """Leave together. Whoever waited in vain for the others ends them."""
        if self._mpi.Is_finalized():
            return
        try:
            self._wait(lambda: self._last.Ibarrier(), "the end of the run")
        except LostRankError:
            self.end("", WORST)
        with ended_after(self.limit, "", self.rank):
            library_of(self._mpi).MPI_Finalize()


class MpiRequest:
    """An exchange that is under way, in one or two stages."""

    def __init__(self, world: MpiWorld, stages: Stages, what: str) -> None:
        self._world, self._stages, self.what = world, stages, what
        self._requests: list[Any] = []
        self.is_done = False
        self._stage = 0

    def go_on(self) -> None:
        """Begin the next stage, or be done."""
        try:
            self._requests = next(self._stages)
            self._stage += 1
        except StopIteration:
            self.is_done, self._requests = True, []

    def advance(self, all_done: Callable[[list[Any]], bool]) -> bool:
        """Begin the next stage if the last one is done. Tells whether all that others may wait for has begun: where a
        second stage is to come, it must begin before that of a later exchange."""
        while not self.is_done and all_done(self._requests):
            self.go_on()
        return self.is_done or self._stage > int(self._world.deterministic)

    def test(self) -> bool:
        """Tell whether it is done, and bring it forward."""
        if not self.is_done:
            self._world.progress()
        return self.is_done

    def wait(self) -> None:
        """Wait until it is done. Raises LostRankError after the limit."""
        if not self.is_done:
            self._world.wait_for(self)


def check_same(found: Launched, rank: int, size: int, library: str) -> None:
    """Refuse a world of another size than the launcher's: it is another MPI's launcher."""
    if (found.launcher == "mpirun" and found.rank != rank) or found.size != size:
        name = first_line(BnfuseError(library.replace("\0", "")))
        raise BnfuseError(
            f"the launcher started rank {found.rank} of {found.size}, and MPI ({name}) says rank {rank} of {size}: "
            "start the ranks with that MPI's own mpirun"
        )
