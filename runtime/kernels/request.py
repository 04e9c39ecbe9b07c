"""A kernel as the call that makes it."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from bnfuse.runtime.kernels.kernel import Kernel


@dataclasses.dataclass(frozen=True)
class Request:
    """A kernel as the call that makes it: `module:function` under bnfuse.runtime.kernels, and its arguments.

    A process can be sent this, which it cannot a `Kernel` (that holds a closure).
    """

    generator: str
    arguments: tuple[Any, ...]

    def kernel(self) -> Kernel:
        module, _, function = self.generator.partition(":")
        made = getattr(importlib.import_module(f"bnfuse.runtime.kernels.{module}"), function)(*self.arguments)
        assert isinstance(made, Kernel), self.generator
        return made
