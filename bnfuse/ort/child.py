"""The process that onnxruntime runs in (`python -m bnfuse.ort.child`): one session at a time, and checkpoints.

It ends with the process that started it, leaves Ctrl-C to it, and may take no more memory than the machine has left.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.ort.frames import Arrays, read_frame, write_frame
from bnfuse.ort.library import onnxruntime, open_session, training_library

POLL = 0.2  # seconds between two looks at who our parent is

Result = tuple[dict[str, Any], Arrays]


class Server:
    """The requests, each a method of that name: fields and arrays in, fields and arrays out."""

    def __init__(self) -> None:
        self.session: Any = None

    def open(self, arrays: Arrays, *, threads: int | None, optimize: bool, config: Mapping[str, str]) -> Result:
        """Load a model."""
        self.session = None  # before the next one takes memory
        model = arrays["model"].tobytes()
        self.session = open_session(onnxruntime(), model, threads=threads, optimize=optimize, config=config)
        return {}, {}

    def run(self, arrays: Arrays, *, outputs: Sequence[str]) -> Result:
        """Give the outputs of the session's model."""
        return {}, dict(zip(outputs, self.session.run(list(outputs), arrays), strict=True))

    def close(self, arrays: Arrays) -> Result:
        """Give the session's memory back."""
        self.session = None
        return {}, {}

    def checkpoint(self, arrays: Arrays, *, path: str, names: Sequence[str]) -> Result:
        """Give the values that a checkpoint has of parameters of these names."""
        state, found = training_library("reading it").load_checkpoint(path), {}
        for name in names:
            try:
                found[name] = np.array(state.get_parameter(name).data.numpy())
            except Exception:  # it has none of that name
                continue
        return {}, found


def limit_memory() -> None:
    """Refuse to take more than is free now, rather than have the machine kill some process for it. Linux only."""
    try:
        import resource

        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
        own = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (own + free, resource.RLIM_INFINITY))
    except (ImportError, OSError, KeyError, ValueError):
        return


def end_with(parent: int) -> None:
    """Watch the parent from a thread: an operator can compute for minutes, and hears nothing.

    The signal that the workers of compile ask for (interpreter.py) comes when the thread ends that started them, and
    the thread that started this process may be gone while others go on with it.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def serve(parent: int) -> None:
    """Answer requests on stdin until it ends; the process `parent` is watched, for this one must not outlive it."""
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what onnxruntime prints is no reply
    server = Server()
    while True:
        try:
            fields, arrays = read_frame(sys.stdin.buffer)
        except EOFError:
            os._exit(0)  # nothing is worth the time that onnxruntime takes to end
        limit_memory()
        method: Callable[..., Result] = getattr(server, fields.pop("method"))
        try:
            write_frame(replies, *method(arrays, **fields))
        except Exception as error:  # onnxruntime has a class per status and no common one of its own
            write_frame(
                replies, {"error": str(error) or type(error).__name__, "ours": isinstance(error, BnfuseError)}, {}
            )


if __name__ == "__main__":
    serve(int(sys.argv[1]))
