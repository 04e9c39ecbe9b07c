"""The stream that a step's work goes to, in order with what others do on theirs."""

from __future__ import annotations

import collections
import contextlib
import weakref
from typing import Any

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.backends.cuda.dlpack import LEGACY_STREAM
from bnfuse.runtime.backends.cuda.driver import Driver, Handle, Stream

MOST_IN_FLIGHT = 16  # steps that the host may be ahead of the GPU: their inputs are kept alive


class Queue:
    """One stream. `readers` are streams on which others read what the next step writes over."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        with driver.active():
            self._own = driver.new_stream()
        self.stream: Stream = self._own
        self._side: Stream | None = None
        self.readers: set[Stream] = set()
        self._held: collections.deque[tuple[Handle, Any]] = collections.deque()
        weakref.finalize(self, release_stream, driver, self._own)

    @property
    def side(self) -> Stream:
        """Give a stream that nothing runs on: exchanges between ranks are captured on it. Wants the driver active."""
        if self._side is None:
            self._side = self.driver.new_urgent_stream()
            weakref.finalize(self, release_stream, self.driver, self._side)
        return self._side

    def use(self, stream: Any) -> None:
        """Go on with another stream, behind what was begun on this one."""
        chosen = address_of(stream)
        if chosen == self.stream:
            return
        with self.driver.active():
            if not self.driver.is_capturing(chosen):  # what is captured does not run now
                self.driver.order(self.stream, chosen)
        self.stream = chosen

    def is_capturing(self) -> bool:
        """Tell whether what comes now is captured into somebody's graph. Wants the driver to be active."""
        return self.driver.is_capturing(self.stream)

    def wait_for_readers(self) -> None:
        """Let what comes now wait for those who were handed results. What is captured runs later, and cannot."""
        if self.is_capturing():
            return
        for stream in self.readers:
            self.driver.order(stream, self.stream)
        self.readers.clear()

    def hold(self, inputs: Any) -> None:
        """Keep the caller's arrays until what was enqueued so far is done."""
        event = self.driver.new_event()
        self.driver.record(event, self.stream)
        self._held.append((event, inputs))
        while self._held and (len(self._held) > MOST_IN_FLIGHT or self.driver.is_done(self._held[0][0])):
            first, _ = self._held.popleft()
            self.driver.wait_for(first)
            self.driver.destroy_event(first)


def address_of(stream: Any) -> Stream:
    """Give the address of a stream in any form; torch, cupy and CUDA's own packages each have their attribute."""
    if isinstance(stream, bool) or stream is None:
        raise BnfuseError(f"{stream} is no CUDA stream: give its address, or a stream of torch or cupy")
    found = stream
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        found = (protocol() if callable(protocol) else protocol)[1]
    else:
        found = next((getattr(stream, name) for name in ("cuda_stream", "ptr") if hasattr(stream, name)), stream)
    try:
        address = int(found)
    except (TypeError, ValueError):
        raise BnfuseError(
            f"{type(stream).__name__} is no CUDA stream: give its address, or a stream of torch or cupy"
        ) from None
    return 0 if address == LEGACY_STREAM else address


def release_stream(driver: Driver, stream: Stream) -> None:
    """Destroy a stream once it is done, in whatever thread the last reference goes."""
    with contextlib.suppress(BnfuseError), driver.active():
        driver.synchronize(stream)
        driver.destroy_stream(stream)
