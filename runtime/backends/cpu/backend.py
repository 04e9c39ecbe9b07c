"""CPUs: TVM and LLVM compile, the code is loaded into this process."""

from __future__ import annotations

import pathlib
import tempfile
from typing import TYPE_CHECKING

from bnfuse.core.errors import BnfuseError
from bnfuse.core.processors import bounded_threads, check_threads, physical_cores
from bnfuse.runtime.backends.cpu import permission
from bnfuse.runtime.backends.execution import Compiled
from bnfuse.runtime.kernels.kernel import Kernel
from bnfuse.runtime.targets import cpus
from bnfuse.runtime.targets.arch import CPU_PRECISIONS, PRECISIONS
from bnfuse.runtime.targets.target import CpuTarget

if TYPE_CHECKING:
    from bnfuse.parallel.world import World
    from bnfuse.runtime.backends.backend import Measure
    from bnfuse.runtime.backends.cpu.runner import CpuRunner


class CpuBackend:
    """See `Backend`."""

    def resolve(self, model: str = "", threads: int | None = None, precision: str | None = None) -> CpuTarget:
        """Threads default to the physical cores; for this machine they are no more than its processors."""
        if precision not in (None, *PRECISIONS):
            raise BnfuseError(f"precision '{precision}' is unknown: it is one of {', '.join(PRECISIONS)}")
        if precision not in (None, *CPU_PRECISIONS):
            raise BnfuseError(
                f"precision {precision} is for a GPU, a CPU has {' and '.join(CPU_PRECISIONS)}: leave it out, or "
                f"compile for cuda"
            )
        if threads is not None:
            check_threads(threads)
        wanted = threads if model else bounded_threads(threads)  # a CPU that is named may be another machine's
        mcpu = model or cpus.host_cpu()
        if not cpus.known_cpu(mcpu):
            name = f"cpu:{model}" if model else "cpu"
            raise BnfuseError(
                f"target '{name}': LLVM knows no 64-bit x86 or Arm CPU '{mcpu}'; use cpu for the host itself"
            )
        lanes = cpus.lanes_of(cpus.features_of(mcpu))
        halves = precision == "bf16" and cpus.has_amx(mcpu)
        amx = halves and (bool(model) or (not cpus.missing_features(cpus.AMX) and permission.is_granted()))
        return CpuTarget(mcpu, lanes, wanted or physical_cores(), precision or CpuTarget.precision, amx)

    def require_compiler(self) -> None:
        """TVM brings its own."""

    def compile(self, kernel: Kernel) -> bytes:
        """Compile an object file, whose symbol is the kernel's name."""
        from bnfuse.runtime.kernels.cpu.tir import compile_function

        assert isinstance(kernel.target, CpuTarget)
        executable = compile_function(kernel.build(), kernel.target, cpus.llvm_level())
        with tempfile.TemporaryDirectory(prefix="bnfuse-") as folder:
            path = pathlib.Path(folder) / "kernel.o"
            executable.mod.write_to_file(str(path), "o")
            return path.read_bytes()

    def versions(self, target: CpuTarget) -> tuple[str, ...]:
        """Name the LLVM triple, the level of optimisation and the instruction sets of the code."""
        return cpus.triple_of(target.mcpu), f"O{cpus.llvm_level()}", *cpus.required_features(target)

    def features(self, target: CpuTarget) -> tuple[str, ...]:
        """Name the instruction sets that the code uses."""
        return cpus.required_features(target)

    def check(self, target: CpuTarget, features: tuple[str, ...], threads: int | None) -> None:
        """Raise BnfuseError unless this processor has what the code uses, and the work is cut up for these threads."""
        if missing := cpus.missing_features(features):
            raise BnfuseError(
                f"was compiled for {target.mcpu}; this CPU lacks {', '.join(missing[:4])}: compile the model here"
            )
        if threads is not None and target.threads not in (threads, bounded_threads(threads)):
            raise BnfuseError(f"was compiled for {target.threads} threads, not {threads}: compile the model again")
        permission.require(target)

    def runner(
        self, compiled: Compiled, target: CpuTarget, beside: CpuRunner | None = None, world: World | None = None
    ) -> CpuRunner:
        """Load a program into memory, with what it shares with the one `beside` it. It exchanges with a `world`."""
        from bnfuse.runtime.backends.cpu.runner import CpuRunner

        return CpuRunner(compiled, target, beside, world)

    def measure(self, target: CpuTarget) -> Measure:
        """Give what measures kernels here. Raises BnfuseError where this CPU lacks an instruction set of theirs."""
        if missing := cpus.missing_features(cpus.required_features(target)):
            raise BnfuseError(
                f"cannot tune for {target.mcpu}: this CPU lacks {', '.join(missing[:4])}: tune on one of those"
            )
        permission.require(target)
        from bnfuse.runtime.backends.cpu import measure

        return measure.fastest_times
