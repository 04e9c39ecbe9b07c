"""The target that a text names, and what this machine has."""

from __future__ import annotations

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.backends.backend import backend_named
from bnfuse.runtime.targets.target import Target


def resolve(spec: str | Target = "cpu", threads: int | None = None, precision: str | None = None) -> Target:
    """Resolve `cpu`, `cpu:MCPU` (an LLVM CPU name), `cuda` or `cuda:ARCHITECTURE` to a target.

    Threads are of a CPU and default to the physical cores; for this machine they are no more than its processors. The
    precision defaults to fp32.
    """
    if isinstance(spec, Target):
        return spec
    if not isinstance(spec, str):
        raise BnfuseError(f'target is a {type(spec).__name__}: write it as text, "cpu" or "cuda"')
    kind, _, model = spec.partition(":")
    try:
        backend = backend_named(kind)
    except KeyError:
        raise BnfuseError(
            f"target '{spec}' is not supported: use cpu, cpu:MCPU with an LLVM CPU name, cuda, or cuda:sm_90"
        ) from None
    found: Target = backend.resolve(model, threads, precision)
    return found
