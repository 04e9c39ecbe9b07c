"""The command line's entry: run a command, and turn whatever goes wrong into one line and an exit status.

0 done; 1 the check that was asked for says no; 2 bad use or bad input; 130 interrupted, 143 terminated; 141 ended
early, for nobody reads its output any more.
"""

from __future__ import annotations

import codecs
import io
import logging
import os
import sys
from collections.abc import Sequence

from bnfuse.core.errors import BnfuseError, one_line
from bnfuse.core.interrupts import interrupts

INTERRUPTED = 130  # as typer says it
UNREAD = 141  # as a shell says of SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Give the exit status of `bnfuse ARGUMENTS` (those of the process by default)."""
    try:
        interrupts.begin()
        open_streams()
        write_utf8()
        logging.getLogger("onnx_ir").setLevel(logging.CRITICAL)  # what it warns of is refused, or of no consequence
        status = UNREAD
        status = run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        status = stopped()
    interrupts.end()
    return status


def open_streams() -> None:
    """Open the streams of a process that was started without some of them (`>&-`): files that it opens must not take
    their places."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115, PTH123


def write_utf8() -> None:
    """Let JSON and pages be UTF-8 wherever they go; a terminal with another encoding shows what it can."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(encoding=stream.encoding if stream.isatty() else "utf-8", errors="replace")


def run(arguments: list[str]) -> int:
    """Run a command. Gives its exit status, and prints one line where it fails."""
    try:
        from bnfuse.commands import make_command, usage_line

        status = make_command().main(args=arguments or ["--help"], prog_name="bnfuse", standalone_mode=False) or 0
        return stopped() if status == INTERRUPTED else status
    except BrokenPipeError:
        raise
    except SystemExit:  # click's way to take a broken pipe; whatever else ends a command is returned
        raise BrokenPipeError from None
    except KeyboardInterrupt:
        return stopped()
    except Exception as error:
        if interrupts.number or type(error).__name__ == "Abort":  # an interruption may come out as another error
            return stopped()
        if isinstance(error, BnfuseError):
            return fail(str(error), error=error)
        if isinstance(error, MemoryError):
            return fail("not enough memory. Pass a smaller --batch.")
        if isinstance(error, OSError):
            return fail(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
        if line := usage_line(error):
            return fail(line, error=error)
        if os.environ.get("BNFUSE_DEBUG"):
            raise
        return fail(f"internal error, please report it: {type(error).__name__}: {error} (BNFUSE_DEBUG=1 shows where)")


def stopped() -> int:
    """Give the line and the status of an interruption."""
    return fail(interrupts.name, interrupts.status) if interrupts.number else fail("interrupted", INTERRUPTED)


def fail(message: str, status: int = 2, error: Exception | None = None) -> int:
    """Print one line on stderr, whatever the message holds; of several ranks one prints it. Gives the status."""
    ranks = sys.modules.get("bnfuse.commands.worlds")  # not there where the commands themselves do not import
    if ranks is not None and not (message := ranks.here.ending(one_line(message), status, error)):
        return status
    start = "\r\x1b[K" if sys.stderr.isatty() else ""  # a bar may be there still
    print(f"{start}bnfuse: {one_line(message)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
