"""One thread at a time in a step, and none in the middle of it while the process forks."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from bnfuse.runtime.backends.launching import ENTRANCE

Method = TypeVar("Method", bound=Callable[..., Any])


class Exclusive:
    """What has methods of which one at a time may run, those marked `alone`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _all.add(self)


def alone(method: Method) -> Method:
    """Make a method wait until no other thread is in one of the object's."""

    @functools.wraps(method)
    def guarded(self: Exclusive, *arguments: Any, **named: Any) -> Any:
        with ENTRANCE, self._lock:
            return method(self, *arguments, **named)

    return guarded  # type: ignore[return-value]


_all: weakref.WeakSet[Exclusive] = weakref.WeakSet()


def _in_child() -> None:
    """Give the child locks of its own: a thread that would not leave in time (launching.py) does not exist in it."""
    for one in list(_all):
        one._lock = threading.RLock()


os.register_at_fork(after_in_child=_in_child)
