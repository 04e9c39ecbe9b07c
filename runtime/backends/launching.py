"""Where kernels are launched: on threads that belong to the runtime, whichever thread of the host process asks.

TVM keeps a pool of threads for each thread that launches kernels, for as long as that thread lives. A pool of the
caller's would come and go with every short-lived thread of a host process, and a forked child would inherit one whose
threads do not exist: it hangs when a kernel runs, or when the child ends. So a caller hands its work to a `Launcher`, a
thread with a pool that stays, and waits; that costs about 10 microseconds. There are as many launchers as callers that
ever ran at the same time. A forked child has none and makes its own.

    with ENTRANCE:                      # nobody forks, and the process does not end, in the middle of it
        result = launch(threads, work)
"""

from __future__ import annotations

import _thread
import atexit
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from bnfuse.core.errors import BnfuseError, first_line
from bnfuse.core.processors import check_threads, usable_cpus
from bnfuse.runtime.targets.tvm import import_tvm

PATIENCE = 30.0  # seconds that a fork or the end of the process waits for work that is under way

# yields of an idle thread of TVM's pool before it sleeps: some milliseconds, longer than from one kernel to the next.
# TVM's 300,000 keep a processor busy for 0.1 s, and as long the end of a thread
SPINS = 10_000


class Entrance:
    """Lets many threads in at a time, but none while the process forks or ends.

    A child of a fork has the memory of its parent without its threads: what one of them was in the middle of would stay
    so for ever, and the locks it held would never be free. So whoever forks waits until the others are out.
    """

    def __init__(self) -> None:
        self.reopen()

    def reopen(self) -> None:
        """As new. In a child of a fork nobody is inside but the thread that forked, if it was."""
        me, inside = threading.get_ident(), getattr(self, "_inside", {})
        self._changed = threading.Condition(threading.Lock())
        self._inside: dict[int, int] = {me: inside[me]} if me in inside else {}  # thread -> how often
        self._closed_by: int | None = None

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            while self._closed_by not in (None, me) and me not in self._inside:
                self._changed.wait()
            self._inside[me] = self._inside.get(me, 0) + 1

    def __exit__(self, *_: object) -> None:
        me = threading.get_ident()
        with self._changed:
            left = self._inside.get(me, 1) - 1
            if left:
                self._inside[me] = left
            else:
                self._inside.pop(me, None)
                if self._closed_by is not None:
                    self._changed.notify_all()

    def close(self) -> None:
        """Let no other thread in, and wait until all others are out, but not for ever."""
        me, end = threading.get_ident(), time.monotonic() + PATIENCE
        with self._changed:
            self._changed.wait_for(lambda: self._closed_by in (None, me), end - time.monotonic())
            self._closed_by = me
            self._changed.wait_for(lambda: self._inside.keys() <= {me}, end - time.monotonic())

    def open(self) -> None:
        """Let threads in again."""
        with self._changed:
            self._closed_by = None
            self._changed.notify_all()


ENTRANCE = Entrance()


class Job:
    """Work for a launcher, and how it ended."""

    def __init__(self, threads: int, work: Callable[[], Any]) -> None:
        self.threads, self.work = threads, work
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = False
        self.done = _thread.allocate_lock()
        self.done.acquire()

    def run(self) -> None:
        """Do the work and keep its result, or its error."""
        try:
            self.result = self.work()
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        """Let the one that waits go on."""
        self.is_done = True
        self.done.release()

    def wait(self) -> Any:
        """Wait for the result, or its error. Ctrl-C is heeded when the work is done: it cannot be left half done."""
        interrupted: BaseException | None = None
        while not self.is_done:
            try:
                self.done.acquire()
            except BaseException as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted
        if self.error is not None:
            raise self.error
        return self.result


class Launcher:
    """A thread that launches kernels, and TVM's pool of threads beside it."""

    def __init__(self) -> None:
        self._wake = _thread.allocate_lock()
        self._wake.acquire()
        self._job: Job | None = None
        threading.Thread(target=self._serve, name="bnfuse-launcher", daemon=True).start()

    def give(self, job: Job) -> None:
        """Hand the thread a job."""
        self._job = job
        self._wake.release()

    def _serve(self) -> None:
        threads = 0
        while True:
            self._wake.acquire()
            job, self._job = self._job, None
            assert job is not None
            if job.threads != threads:
                try:
                    start_threads(job.threads)
                except Exception as error:
                    job.work = failing(error)
                else:
                    threads = job.threads
            job.run()
            _idle.append(self)  # before the caller goes on: its next call shall find this launcher
            job.end()
            del job


def failing(error: Exception) -> Callable[[], Any]:
    """Make work that raises BnfuseError: the threads of a step could not be started."""

    def work() -> Any:
        raise BnfuseError(
            f"the threads of a step cannot be started ({first_line(error)}): compile it for fewer, or allow this "
            "process more (ulimit -u)"
        ) from error

    return work


_idle: list[Launcher] = []


def launch(threads: int, work: Callable[[], Any]) -> Any:
    """Run `work` on a launcher whose kernels run on so many threads; gives what it gives, raises what it raises."""
    job = Job(threads, work)
    try:
        launcher = _idle.pop()
    except IndexError:
        try:
            launcher = Launcher()
        except RuntimeError as error:  # the process may have no more threads
            failing(error)()
    launcher.give(job)
    return job.wait()


def start_threads(threads: int) -> None:
    """Let the kernels that this thread launches run on this many threads, or on as many as there are processors.

    TVM makes the pool of a thread when it first launches a kernel, and the pool never grows: it is given a thread for
    each processor, of which as many are used as are asked for.
    """
    check_threads(threads)
    usable = usable_cpus()
    os.environ.setdefault("TVM_BIND_THREADS", "0")  # binding widens the spread on a busy machine
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", str(SPINS))
    os.environ["TVM_NUM_THREADS"] = str(usable)
    import_tvm().get_global_func("runtime.config_threadpool")(1, min(threads, usable))


def _in_child() -> None:
    _idle.clear()
    ENTRANCE.reopen()


os.register_at_fork(before=ENTRANCE.close, after_in_parent=ENTRANCE.open, after_in_child=_in_child)
atexit.register(ENTRANCE.close)
