"""The target that a text names, and what this machine has."""

from __future__ import annotations

from bnfuse.core.errors import BnfuseError
from bnfuse.core.processors import bounded_threads, check_threads, physical_cores
from bnfuse.runtime.targets import arch
from bnfuse.runtime.targets.cpus import features_of, host_cpu, known_cpu, lanes_of
from bnfuse.runtime.targets.target import CpuTarget, CudaTarget, Target


def resolve(spec: str | Target = "cpu", threads: int | None = None, precision: str | None = None) -> Target:
    """The target of `cpu`, `cpu:MCPU` (an LLVM CPU name), `cuda` or `cuda:ARCHITECTURE`.

    Threads are of a CPU and default to the physical cores; for this machine they are no more than its processors. The
    precision is of a GPU and defaults to fp32.
    """
    if isinstance(spec, Target):
        return spec
    kind, _, model = spec.partition(":")
    if kind == "cuda":
        return gpu(model, threads, precision)
    if kind == "cpu":
        return cpu(model, threads, precision)
    raise BnfuseError(f"target '{spec}' is not supported: use cpu, cpu:MCPU with an LLVM CPU name, cuda, or cuda:sm_90")


def cpu(model: str = "", threads: int | None = None, precision: str | None = None) -> CpuTarget:
    """The target of a CPU; without a name that of this machine's."""
    if precision not in (None, "fp32"):
        raise BnfuseError(
            f"precision {precision} is for a GPU, a CPU computes in fp32: leave it out, or compile for cuda"
        )
    if threads is not None:
        check_threads(threads)
    wanted = threads if model else bounded_threads(threads)  # a CPU that is named may be another machine's
    mcpu = model or host_cpu()
    if not known_cpu(mcpu):
        name = f"cpu:{model}" if model else "cpu"
        raise BnfuseError(f"target '{name}': LLVM knows no 64-bit x86 or Arm CPU '{mcpu}'; use cpu for the host itself")
    return CpuTarget(mcpu, lanes_of(features_of(mcpu)), wanted or physical_cores())


def gpu(model: str = "", threads: int | None = None, precision: str | None = None) -> CudaTarget:
    """The target of an architecture; without one that of the GPU here, and where there is none the default."""
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
