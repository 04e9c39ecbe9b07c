"""Processes that make images, where there are more workers than threads can be.

Decoding and resizing need no lock of Python's, but opening a picture and handing it on do, a third of the time: more
than three threads wait for each other. So that many workers are threads, and more are processes: each answers one
thread of ours, and writes the images that it made into memory that both have. A process ends when its pipe is closed,
and with the thread that started it, whatever ends that.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.core.interpreter import import_root

from .making import Maker
from .streamed import StreamedImages

MOST_THREADS = 3
Make = Callable[[np.ndarray, int], np.ndarray]  # places in the data set, epoch


def makers(maker: Maker, workers: int, most: int) -> tuple[Make, Callable[[], None]]:
    """Give what makes up to `most` images at a time for each of so many threads, and what ends it."""
    if not by_processes(maker, workers):
        return maker.made, lambda: None
    processes = Processes(maker, workers, most)
    return processes.made, processes.close


def by_processes(maker: Maker, workers: int) -> bool:
    """Tell whether processes make the images. What lies in memory is not copied into each of them."""
    return workers > MOST_THREADS and isinstance(maker.images, StreamedImages)


class Processes:
    """As many processes as threads of the caller ask at the same time."""

    def __init__(self, maker: Maker, count: int, most: int) -> None:
        self._all = [Process(maker, most) for _ in range(count)]
        self._idle: queue.SimpleQueue[Process] = queue.SimpleQueue()
        for process in self._all:
            self._idle.put(process)

    def made(self, chosen: np.ndarray, epoch: int) -> np.ndarray:
        """Make images as `Maker.made` does, by a process that has nothing to do."""
        process = self._idle.get()
        try:
            return process.made(chosen, epoch)
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """End all of them."""
        for process in self._all:
            process.close()


class Process:
    """One of them. It is told what to make by pickles on its standard input, and answers so."""

    def __init__(self, maker: Maker, most: int) -> None:
        self._shape = (most, *maker.images.shape[1:])
        size = 4 * int(np.prod(self._shape))
        memory = os.memfd_create("bnfuse-images")
        try:
            os.ftruncate(memory, size)
            self._images = np.frombuffer(mmap.mmap(memory, size), np.float32).reshape(self._shape)
            self._child = subprocess.Popen(
                [sys.executable, "-m", "bnfuse.data.worker", str(os.getpid()), str(memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=import_root(),
                pass_fds=(memory,),
                start_new_session=True,  # Ctrl-C on a terminal is for us, who end it
            )
        except OSError as error:
            raise BnfuseError(
                f"no process that decodes images could be started: {error.strerror or error}. Use fewer --workers."
            ) from None
        finally:
            os.close(memory)
        with contextlib.suppress(OSError):  # it is told when it is asked
            self._send((maker, self._shape, str(Path.cwd())))

    def made(self, chosen: np.ndarray, epoch: int) -> np.ndarray:
        """Have it make images. Raises BnfuseError where it cannot, or has ended."""
        try:
            self._send((chosen, epoch))
            assert self._child.stdout is not None
            said = read(self._child.stdout)
        except (OSError, EOFError):
            raise BnfuseError(
                "a process that decodes images has ended, as systems end them that are short of memory: use fewer "
                "--workers"
            ) from None
        if said is not None:
            raise BnfuseError(said)
        found: np.ndarray = self._images[: len(chosen)].copy()
        return found

    def _send(self, what: Any) -> None:
        assert self._child.stdin is not None
        write(self._child.stdin, what)

    def close(self) -> None:
        """End it: it holds nothing that would have to be written."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


def write(stream: IO[bytes], what: Any) -> None:
    """Write a pickle, with its length in front."""
    content = pickle.dumps(what, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(len(content).to_bytes(8, "little") + content)
    stream.flush()


def read(stream: IO[bytes]) -> Any:
    """Read what `write` wrote, of our own process alone. Raises EOFError where the other end is closed."""
    head = stream.read(8)
    content = stream.read(int.from_bytes(head, "little")) if len(head) == 8 else b""
    if not content:
        raise EOFError
    return pickle.loads(content)
