"""A process that makes images: `python -m bnfuse.data.worker PARENT MEMORY`, started by processes.py alone.

On its standard input come pickles of its parent: first what makes images, the shape of the memory and where the parent
works, then which images are wanted. It writes them into the memory, a file descriptor, and answers None, or a line that
says what is wrong.
"""

from __future__ import annotations

import mmap
import os
import sys

import numpy as np

from bnfuse.core.errors import BnfuseError, first_line
from bnfuse.core.interpreter import end_with_parent

from .processes import read, write


def main(parent: int, memory: int) -> None:
    """Make what is asked for until the other end is closed."""
    end_with_parent(parent)
    stream, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # nothing that is printed on the way may pass for an answer
    maker, shape, folder = read(stream)
    os.chdir(folder)  # paths may begin there
    images = np.frombuffer(mmap.mmap(memory, 4 * int(np.prod(shape))), np.float32).reshape(shape)
    while True:
        chosen, epoch = read(stream)
        said = None
        try:
            images[: len(chosen)] = maker.made(chosen, epoch)
        except BnfuseError as error:
            said = str(error)
        except Exception as error:
            said = f"a process that decodes images failed: {first_line(error)}"
        write(answers, said)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
    except (EOFError, BrokenPipeError):
        sys.exit(0)
