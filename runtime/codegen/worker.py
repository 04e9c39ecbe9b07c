"""A process that compiles kernels for another one, and ends with it: `python -m bnfuse.runtime.codegen.worker PARENT`.

It takes requests on its standard input, one a line, and answers on its standard output (build.py).
"""

from __future__ import annotations

import base64
import os
import pickle
import sys

from bnfuse.core.errors import first_line
from bnfuse.core.interpreter import end_with_parent


def serve() -> None:
    """One request a line in, one object a line out, until the input ends."""
    from bnfuse.runtime.targets.tvm import import_tvm

    import_tvm()
    from bnfuse.runtime.codegen.build import compile_kernel

    answers, sys.stdout = sys.stdout, sys.stderr  # nothing that is printed on the way may pass for an answer
    for line in sys.stdin.buffer:
        try:
            status, data = b"ok", compile_kernel(pickle.loads(base64.b64decode(line)).kernel())
        except Exception as error:
            status, data = b"failed", first_line(error).encode()
        answers.buffer.write(status + b" " + base64.b64encode(data) + b"\n")
        answers.buffer.flush()


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    try:
        serve()
    except (OSError, KeyboardInterrupt):  # nobody listens any more
        os._exit(1)
