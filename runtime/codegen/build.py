"""From kernels to object code, several at a time, and from object code to functions. Needs neither compiler nor linker.

Making and compiling a kernel takes 0.2 to 0.5 s, most of it in the interpreter, so workers are processes (worker.py),
which take requests on their standard input and answer on their standard output. A worker needs some seconds to import
TVM; for a handful of kernels none is started.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bnfuse.core.errors import BnfuseError, first_line
from bnfuse.core.interpreter import import_root
from bnfuse.core.processors import usable_cpus
from bnfuse.runtime.backends.backend import backend_of
from bnfuse.runtime.backends.launching import ENTRANCE
from bnfuse.runtime.codegen.cache import Cache, content_key
from bnfuse.runtime.kernels.kernel import Kernel
from bnfuse.runtime.kernels.request import Request

KERNELS_PER_WORKER = 12  # fewer are compiled sooner than a further worker has started

Progress = Callable[[int, int, str], None]  # done, total, kernel


def objects(
    requests: Sequence[Request], cache: Cache, *, workers: int | None = None, progress: Progress | None = None
) -> list[bytes]:
    """Object code of each request, from the cache or compiled now. Equal kernels are compiled once."""
    kernels = [request.kernel() for request in requests]
    keys = [content_key(kernel, request.kind) for kernel, request in zip(kernels, requests, strict=True)]
    found: dict[str, bytes | None] = {key: cache.read(key) for key in keys}
    missing = {key: i for i, key in enumerate(keys) if found[key] is None}
    tasks = [(key, requests[i], kernels[i].name) for key, i in missing.items()]
    for target in {kernels[i].target for i in missing.values()}:
        backend_of(target).require_compiler()
    for done, (key, name, made) in enumerate(_compile_all(tasks, workers or usable_cpus()), 1):
        found[key] = made
        cache.write(key, made)
        if progress:
            progress(done, len(tasks), name)
    return [code for key in keys if (code := found[key]) is not None]


def compile_kernel(kernel: Kernel) -> bytes:
    """Compile one kernel to object code. Raises BnfuseError, which names the kernel and its problem."""
    try:
        with ENTRANCE:
            return backend_of(kernel.target).compile(kernel)
    except Exception as error:
        what = first_line(error)
        raise BnfuseError(f"kernel {kernel.name} does not compile: {what} ({kernel.problem!r})") from error


Task = tuple[str, Request, str]  # key, request, name


def _compile_all(tasks: Sequence[Task], cores: int) -> Iterable[tuple[str, str, bytes]]:
    """Key, name and object code of each task, as they are done. This process takes its share of the work."""
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    finished: queue.SimpleQueue[tuple[str, str, bytes] | Exception] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    helpers = [_Worker(waiting, finished) for _ in range(min(cores, len(tasks) // KERNELS_PER_WORKER) - 1)]
    try:
        for _ in tasks:
            yield _next_result(waiting, finished)
    finally:
        for helper in helpers:
            helper.stop()


def _next_result(
    waiting: queue.SimpleQueue[Task], finished: queue.SimpleQueue[tuple[str, str, bytes] | Exception]
) -> tuple[str, str, bytes]:
    """Give what a worker has finished; else compile a task that waits; where none does, wait for a worker."""
    with contextlib.suppress(queue.Empty):
        return _result(finished.get_nowait())
    try:
        key, request, name = waiting.get_nowait()
    except queue.Empty:
        return _result(finished.get())
    return key, name, compile_kernel(request.kernel())


def _result(found: tuple[str, str, bytes] | Exception) -> tuple[str, str, bytes]:
    if isinstance(found, Exception):
        raise BnfuseError(str(found)) from found
    return found


def _end_of(process: subprocess.Popen[bytes]) -> str:
    """Say how a worker ended that gave no answer."""
    status = process.wait()
    if status == -signal.SIGKILL:
        return "its compiler process was killed, as systems do that are short of memory: run less beside it"
    ended = f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return f"its compiler process {ended}"


class _Worker:
    """A process that compiles what it finds in the queue, and the thread that talks to it."""

    def __init__(self, waiting: queue.SimpleQueue[Task], finished: queue.SimpleQueue[Any]) -> None:
        self._waiting, self._finished = waiting, finished
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bnfuse.runtime.codegen.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=import_root(),
            start_new_session=True,  # Ctrl-C on a terminal is for us, who stop it
        )
        threading.Thread(target=self._feed, daemon=True).start()

    def _answer(self, request: bytes) -> bytes:
        """Give what the process answers; nothing where it has ended."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(request + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return b""
        return self._process.stdout.readline()

    def _feed(self) -> None:
        while True:
            try:
                key, request, name = self._waiting.get_nowait()
            except queue.Empty:
                return
            try:
                status, _, text = self._answer(base64.b64encode(pickle.dumps(request))).partition(b" ")
                code = base64.b64decode(text)
                if status != b"ok":
                    raise RuntimeError(f"kernel '{name}': {code.decode() or _end_of(self._process)}")
                self._finished.put((key, name, code))
            except Exception as error:
                self._finished.put(error)
                return

    def stop(self) -> None:
        assert self._process.stdin
        self._process.kill()
        self._process.wait()
