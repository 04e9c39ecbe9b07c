"""Our end of onnxruntime's process.

    with borrowed() as ort:
        fields, arrays = ort.ask("open", {...}, {"model": ...})

A process that did its work is kept for the next one who asks; one that died is replaced.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.core.interpreter import import_root
from bnfuse.ort.frames import Arrays, read_frame, write_frame

SIGNALS = {
    signal.SIGSEGV: "it read memory that is not its own",
    signal.SIGFPE: "it divided by zero",
    signal.SIGABRT: "it gave up, as it does where memory runs out",
    signal.SIGKILL: "it was killed, as the system does where memory runs out",
}


class OrtError(Exception):
    """What onnxruntime said of a request, in its words."""


class OrtCrash(OrtError):
    """onnxruntime ended instead of answering."""


class OrtProcess:
    """One process. Requests of several threads wait for each other."""

    def __init__(self) -> None:
        self.owner, self.lock = os.getpid(), threading.Lock()
        command = [sys.executable, "-m", "bnfuse.ort.child", str(self.owner)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:
            self.child = subprocess.Popen(command, cwd=import_root(), **pipes)  # type: ignore[call-overload]
        except OSError as error:
            raise BnfuseError(f"no process for onnxruntime could be started: {error.strerror or error}") from None
        self.end = weakref.finalize(self, _end, self.child, self.owner)

    def ask(
        self, method: str, fields: Mapping[str, Any] | None = None, arrays: Mapping[str, np.ndarray] | None = None
    ) -> tuple[dict[str, Any], Arrays]:
        """Give the answer of child.Server. Raises OrtError, OrtCrash, and BnfuseError where onnxruntime is not
        installed."""
        with self.lock:
            try:
                write_frame(self.child.stdin, {**(fields or {}), "method": method}, arrays or {})
                found, results = read_frame(self.child.stdout)
            except (EOFError, OSError):
                raise OrtCrash(self._how_it_ended()) from None
            except TypeError as error:
                raise OrtError(str(error)) from None
            except BaseException:  # Ctrl-C: half a frame may be under way
                self.end()
                raise
        if "error" in found:
            raise BnfuseError(found["error"]) if found["ours"] else OrtError(found["error"])
        return found, results

    @property
    def usable(self) -> bool:
        """Whether it is alive, and this process's own and not of the one that this was forked from."""
        return self.owner == os.getpid() and self.end.alive and self.child.poll() is None

    def _how_it_ended(self) -> str:
        status = self.child.wait()
        if status >= 0:
            return f"onnxruntime ended with status {status}"
        name = signal.Signals(-status).name
        why = SIGNALS.get(signal.Signals(-status))
        return f"onnxruntime crashed ({name}{f': {why}' if why else ''})"


def _end(child: subprocess.Popen[bytes], owner: int) -> None:
    """Kill it: it holds nothing that would have to be written."""
    if owner == os.getpid():
        child.kill()
        child.wait()
    for pipe in (child.stdin, child.stdout):
        with contextlib.suppress(OSError):
            pipe.close()  # type: ignore[union-attr]


_idle: list[OrtProcess] = []  # at most one


def take() -> OrtProcess:
    """Give a process that nobody else uses."""
    while _idle:
        with contextlib.suppress(IndexError):  # another thread was quicker
            process = _idle.pop()
            if process.usable:
                return process
    return OrtProcess()


def give_back(process: OrtProcess) -> None:
    """Keep it for the next who takes one, or end it."""
    if process.usable and not _idle:
        _idle.append(process)
    else:
        process.end()


@contextlib.contextmanager
def borrowed() -> Iterator[OrtProcess]:
    """Lend a process that nobody else uses, and take it back."""
    process = take()
    try:
        yield process
    finally:
        give_back(process)
