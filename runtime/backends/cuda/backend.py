"""NVIDIA GPUs: TVM writes CUDA, NVRTC (or nvcc) compiles it, the driver runs it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.backends.execution import Compiled
from bnfuse.runtime.kernels.kernel import Kernel
from bnfuse.runtime.targets import arch
from bnfuse.runtime.targets.target import CudaTarget

if TYPE_CHECKING:
    from bnfuse.parallel.world import World
    from bnfuse.runtime.backends.backend import Measure
    from bnfuse.runtime.backends.cuda.runner import CudaRunner


class CudaBackend:
    """See `Backend`."""

    def resolve(self, model: str = "", threads: int | None = None, precision: str | None = None) -> CudaTarget:
        """Without a name the architecture of the GPU here, and where there is none the default. Precision defaults to
        fp32."""
        precision = precision or arch.PRECISIONS[0]
        if precision not in arch.PRECISIONS:
            raise BnfuseError(f"precision '{precision}' is unknown: it is one of {', '.join(arch.PRECISIONS)}")
        if threads is not None:
            raise BnfuseError(f"{threads} threads are of a CPU; a GPU takes all of its own: leave them out")
        if not model:
            from bnfuse.runtime.backends.cuda.driver import device_architecture

            found = device_architecture()
            model = arch.best_for(found) if found else arch.DEFAULT
        arch.check(model)
        return CudaTarget(model, arch.MULTIPROCESSORS[model], precision)

    def require_compiler(self) -> None:
        """In the place of a message that names the first kernel."""
        from bnfuse.runtime.kernels.cuda.compile import REMEDY, compiler_version

        if compiler_version() == "none":
            raise BnfuseError(f"there is no CUDA compiler: {REMEDY}")

    def compile(self, kernel: Kernel) -> bytes:
        """Compile a header and a cubin (kernels/cuda/container.py)."""
        from bnfuse.runtime.kernels.cuda.compile import compile_kernel

        return compile_kernel(kernel)

    def versions(self, target: CudaTarget) -> tuple[str, ...]:
        """Name the compiler's version, as far as there is one: what is cached can be used without."""
        return (compiler(),)

    def features(self, target: CudaTarget) -> tuple[str, ...]:
        """Name no features: a cubin is of its architecture, and that says all."""
        return ()

    def check(self, target: CudaTarget, features: tuple[str, ...], threads: int | None) -> None:
        """Accept code for any GPU: it loads everywhere, and is refused where it is to run and there is no such GPU."""
        if threads is not None:
            raise BnfuseError("was compiled for a GPU, which takes no number of threads: leave it out")

    def runner(
        self, compiled: Compiled, target: CudaTarget, beside: CudaRunner | None = None, world: World | None = None
    ) -> CudaRunner:
        """Load a program, with what it shares with the one `beside` it. It takes the GPU's memory when it runs, and
        exchanges with a `world` of GPUs."""
        from bnfuse.runtime.backends.cuda.runner import CudaRunner

        return CudaRunner(compiled, target, beside, world)

    def measure(self, target: CudaTarget) -> Measure:
        """Give what measures kernels on the GPU here. Raises BnfuseError where there is none of the architecture."""
        from bnfuse.runtime.backends.cuda import driver, measure

        wanted = target.architecture
        try:
            gpu = driver.open_driver()
        except BnfuseError as error:
            raise BnfuseError(f"cannot tune for {wanted}: {error}") from None
        if not arch.runs_on(wanted, gpu.architecture):
            here = f"the GPU here ({gpu.name}) is {gpu.architecture}"
            raise BnfuseError(f"cannot tune for {wanted}: {here}: tune on one of those")
        return measure.fastest_times


@functools.cache
def compiler() -> str:
    """Name the version of what compiles CUDA."""
    from bnfuse.runtime.kernels.cuda.compile import compiler_version

    return compiler_version()
