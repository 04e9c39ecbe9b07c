"""Ctrl-C and SIGTERM on the command line: one line at most and 130 or 143, from the first import to the last clean-up.

While a command runs, both are a KeyboardInterrupt, so that it cleans up behind itself; whoever cannot wait asks again.
Before and after that there is nothing to clean up, and the process ends at once. The signals of a process that only
imports the package are left alone.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

NAMES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Interrupts:
    """The handler of both signals."""

    def __init__(self) -> None:
        self.number = 0  # of the signal that came
        self.is_working = False
        self._before: dict[signal.Signals, Any] = {}

    @property
    def status(self) -> int:
        """The exit status that shells give a process which this signal ended."""
        return 128 + self.number

    @property
    def name(self) -> str:
        """What the signal is called in a message."""
        return NAMES[signal.Signals(self.number)]

    def watch(self) -> None:
        """Handle the signals that nobody else does."""
        for number, default in DEFAULTS.items():
            if signal.getsignal(number) is default:
                try:
                    signal.signal(number, self)
                except ValueError:  # not in the main thread, which alone is interrupted
                    return
                self._before[number] = default

    def begin(self) -> None:
        """Take the signals over: a command begins."""
        self.number = 0
        self.watch()
        if is_command_line():
            sys.unraisablehook = self._unraisable
        self.is_working = True

    def end(self) -> None:
        """Give the signals back: the command has ended, and in somebody else's process they are theirs again."""
        self.is_working = False
        if not is_command_line():
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before.clear()

    def __call__(self, number: int, _: object) -> None:
        """Handle a signal: the first interrupts the work, a second one ends the process at once."""
        again, self.number = self.number, number
        if self.is_working and not again:
            raise KeyboardInterrupt
        self._leave(silently=bool(again))

    def _unraisable(self, what: Any) -> None:
        """Where an exception cannot go on, in a callback or a clean-up, the interruption would be lost."""
        if self.number and issubclass(what.exc_type, KeyboardInterrupt):
            self._leave()
        sys.__unraisablehook__(what)

    def _leave(self, silently: bool = False) -> None:
        if not silently:
            os.write(2, f"bnfuse: {self.name}\n".encode())
        os._exit(self.status)


def is_command_line() -> bool:
    """Tell whether this process is `bnfuse` or `python -m bnfuse`."""
    script = sys.argv[0] if getattr(sys, "argv", None) else ""
    return os.path.basename(script) == "bnfuse" or script.endswith(os.path.join("bnfuse", "__main__.py"))  # noqa: PTH118, PTH119


interrupts = Interrupts()
if is_command_line():
    interrupts.watch()
