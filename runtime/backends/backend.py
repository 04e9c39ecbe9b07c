"""What compiling, running, keeping and measuring ask of a kind of target, and the one place that tells the kinds apart.

A backend is imported when a target of its kind is met: a step for a GPU needs nothing of a CPU's, which has TVM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from bnfuse.parallel.world import World
from bnfuse.runtime.backends.execution import Compiled, Runner
from bnfuse.runtime.kernels.kernel import Kernel
from bnfuse.runtime.targets.target import CpuTarget, CudaTarget

Measure = Callable[[Sequence[Kernel], Sequence[bytes]], list[float]]  # of kernels and their code, the shortest seconds

Kind = TypeVar("Kind", CpuTarget, CudaTarget)


class Backend(Protocol[Kind]):
    """Everything that a target of this kind needs. Its kernels are in the folder of the same name."""

    def resolve(self, model: str = "", threads: int | None = None, precision: str | None = None) -> Kind:
        """Resolve the target of a processor, the one here if it has no name. Raises BnfuseError for what cannot be."""

    def require_compiler(self) -> None:
        """Raise BnfuseError where kernels cannot be compiled: one line before any work."""

    def compile(self, kernel: Kernel) -> bytes:
        """Compile a kernel to object code."""

    def versions(self, target: Kind) -> tuple[str, ...]:
        """Name what the code depends on beside the kernel and the sources that make it, as texts."""

    def features(self, target: Kind) -> tuple[str, ...]:
        """Name the instruction sets that the code uses, as a file of a step does."""

    def check(self, target: Kind, features: tuple[str, ...], threads: int | None) -> None:
        """Raise BnfuseError where code that was compiled elsewhere is not for this machine, nor for so many threads."""

    def runner(self, compiled: Compiled, target: Kind, beside: Any = None, world: World | None = None) -> Runner:
        """Load a program into memory.

        It shares what both have with the one `beside` it: state and working memory. What it exchanges, it exchanges
        with the ranks of `world`.
        """

    def measure(self, target: Kind) -> Measure:
        """Give what measures kernels on this machine. Raises BnfuseError where they do not run here."""


def backend_of(target: CpuTarget | CudaTarget) -> Backend[Any]:
    """Give the backend of a target."""
    return backend_named(target.backend)


def backend_named(name: str) -> Backend[Any]:
    """Give the backend of a kind: cpu, for which TVM is loaded, or cuda. Raises KeyError for another name."""
    if name == CudaTarget.backend:
        from bnfuse.runtime.backends.cuda.backend import CudaBackend

        return CudaBackend()
    if name == CpuTarget.backend:
        from bnfuse.runtime.targets.tvm import import_tvm

        import_tvm()
        from bnfuse.runtime.backends.cpu.backend import CpuBackend

        return CpuBackend()
    raise KeyError(name)
