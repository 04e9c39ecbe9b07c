"""The command line's entry: run a command, and turn whatever goes wrong into one line and an exit status.

0 done; 1 the check that was asked for says no; 2 bad use or bad input; 130 interrupted.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence

from bnfuse.errors import BnfuseError, one_line

INTERRUPTED = 130


class Interrupts:
    """Counts Ctrl-C: where it falls into a callback of TVM, what comes out is an error of another kind."""

    count = 0

    def watch(self) -> None:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            with contextlib.suppress(ValueError):  # not in the main thread, which alone is interrupted
                signal.signal(signal.SIGINT, self)

    def __call__(self, *_: object) -> None:
        self.count += 1
        raise KeyboardInterrupt


interrupts = Interrupts()


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of `bnfuse ARGUMENTS` (those of the process by default)."""
    write_utf8()
    logging.getLogger("onnx_ir").setLevel(logging.CRITICAL)  # what it warns of is refused, or of no consequence
    try:
        status = run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def write_utf8() -> None:
    """JSON and pages are UTF-8 wherever they go; a terminal with another encoding shows what it can."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(encoding=stream.encoding if stream.isatty() else "utf-8", errors="replace")


def run(arguments: list[str]) -> int:
    from bnfuse.commands import make_command, usage_line

    command = make_command()
    before = interrupts.count
    interrupts.watch()
    try:
        status = command.main(args=arguments or ["--help"], prog_name="bnfuse", standalone_mode=False) or 0
        return fail("interrupted", INTERRUPTED) if status == INTERRUPTED else status
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        return fail("interrupted", INTERRUPTED)
    except BnfuseError as error:
        return fail("interrupted", INTERRUPTED) if interrupts.count > before else fail(str(error))
    except MemoryError:
        return fail("not enough memory. Pass a smaller --batch.")
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
    except Exception as error:
        if line := usage_line(error):
            return fail(line)
        if type(error).__name__ == "Abort":
            return fail("interrupted", INTERRUPTED)
        if os.environ.get("BNFUSE_DEBUG"):
            raise
        return fail(f"internal error, please report it: {type(error).__name__}: {error} (BNFUSE_DEBUG=1 shows where)")


def fail(message: str, status: int = 2) -> int:
    """One line on stderr, whatever the message holds."""
    start = "\r\x1b[K" if sys.stderr.isatty() else ""  # a bar may be there still
    print(f"{start}bnfuse: {one_line(message)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
