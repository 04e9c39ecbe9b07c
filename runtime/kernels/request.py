"""A kernel as the call that makes it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from bnfuse.runtime.kernels.kernel import Choice, Kernel
from bnfuse.runtime.kernels.registry import Kind
from bnfuse.runtime.targets.target import Target


@dataclasses.dataclass(frozen=True)
class Request:
    """A kernel as the call that makes it: its kind, and the arguments of the kind's generator, the target among them.

    A process can be sent this, which it cannot a `Kernel` (that holds a closure).
    """

    kind: Kind
    arguments: tuple[Any, ...]

    @property
    def target(self) -> Target:
        """Find the target among the arguments."""
        return next(argument for argument in self.arguments if isinstance(argument, Target))

    def kernel(self) -> Kernel:
        """Call the kind's generator, once; the kernel's code is made only by its `build`."""
        return self._kernel

    def __reduce__(self) -> tuple[Any, ...]:
        return Request, (self.kind, self.arguments)  # without the kernel: it holds a closure

    @functools.cached_property
    def _kernel(self) -> Kernel:
        made = self.kind.generator(self.target.backend)(*self.arguments)
        assert isinstance(made, Kernel), self.kind
        return made

    def choices(self) -> tuple[Choice, ...]:
        """List all ways to make the kernel, that of the rule first; none where its generator knows one only."""
        find = self.kind.choices(self.target.backend)
        return find(*self.arguments) if find is not None else ()

    def by(self, choice: Choice) -> Request:
        """Give the request for one of the ways."""
        return Request(self.kind, (*self.arguments, choice.algorithm, choice.plan))
