"""The machine that kernels are made for.

TVM is asked about CPUs, and only when something is asked: a step for a GPU runs where TVM is not.
"""

from __future__ import annotations

import functools
import os
import re
from typing import TYPE_CHECKING, Any

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.targets.target import CpuTarget
from bnfuse.runtime.targets.tvm import import_tvm

if TYPE_CHECKING:
    import tvm

LANES = ((16, "avx512f"), (8, "avx2"), (4, "neon"), (4, "sse2"))

CROSS_TRIPLES = ("x86_64-linux-gnu", "aarch64-linux-gnu")  # what kernels can be made for on any host

ALIASES = {"apple-m1": "apple-a14", "apple-m2": "apple-a15", "apple-m3": "apple-a16", "grace": "neoverse-v2"}

# of the names that LLVM lists for a CPU, those of instructions that compiled arithmetic may contain; the rest is
# tuning (`prefer-256-bit`) or for operating systems (`pku`)
COMPUTING = re.compile(
    r"(avx|sse|ssse|fma|bmi|f16c|popcnt|lzcnt|movbe|adx|gfni|sha|aes|vaes|v?pclmul|neon|fullfp16|dotprod|complxnum|sve)"
)


def _ask(name: str) -> Any:
    """Get a function of TVM's."""
    return import_tvm().get_global_func(name)


LEVEL = "BNFUSE_LLVM_LEVEL"
LEVELS = ("3", "2", "1", "0")  # the first one unless the environment says otherwise

AMX = ("amx-bf16", "amx-tile")  # asked for by the kernels that use it alone: it takes more than the processor


@functools.cache
def host_cpu() -> str:
    """LLVM's name of the processor that we run on."""
    return str(_ask("target.llvm_get_system_cpu")())


def known_cpu(mcpu: str) -> bool:
    """Whether LLVM can make code for this CPU. It ends the process when asked for code of a 32-bit one."""
    if not any(mcpu in cpus_of(triple) for triple in ("", *CROSS_TRIPLES)):
        return False
    return bool({"64bit", "neon"} & _all_features(mcpu))


@functools.cache
def cpus_of(triple: str) -> frozenset[str]:
    """LLVM's names of an architecture's CPUs; "" is the host's architecture."""
    found = map(str, _ask("target.llvm_get_cpu_archlist")(_llvm(triple)))
    known = frozenset(found)
    return known | {name for name, same in ALIASES.items() if same in known}


@functools.cache
def triple_of(mcpu: str) -> str:
    """Name the LLVM triple of code for this CPU: "" (the host's own) where the host's architecture has it."""
    return next((triple for triple in ("", *CROSS_TRIPLES) if mcpu in cpus_of(triple)), "")


def llvm_target(mcpu: str, **options: object) -> tvm.target.Target:
    """TVM's target of this CPU, whatever its architecture is."""
    return _llvm(triple_of(mcpu), mcpu=mcpu, **options)


def _llvm(triple: str, **options: object) -> tvm.target.Target:
    return import_tvm().target.Target({"kind": "llvm", **({"mtriple": triple} if triple else {}), **options})


def llvm_level() -> int:
    """Give the level at which LLVM optimises: less compiles sooner and runs slower. Raises BnfuseError for no level."""
    found = os.environ.get(LEVEL) or LEVELS[0]  # empty is unset, as of BNFUSE_CACHE
    if found not in LEVELS:
        raise BnfuseError(f"{LEVEL}={found!r} is no level of LLVM: it is one of {', '.join(LEVELS)}")
    return int(found)


@functools.cache
def features_of(mcpu: str) -> tuple[str, ...]:
    """Name the instruction sets (of the computing kind) that LLVM uses for this CPU."""
    return tuple(sorted(name for name in _all_features(mcpu) if COMPUTING.match(name)))


@functools.cache
def _all_features(mcpu: str) -> frozenset[str]:
    return frozenset(map(str, _ask("target.llvm_get_cpu_features")(llvm_target(mcpu))))


@functools.cache
def host_features() -> frozenset[str]:
    """Name what the processor that we run on really has, as LLVM does.

    Of an Arm processor LLVM asks the operating system, which does not name everything that its model is known to have.
    """
    found = _ask("tvm.codegen.llvm.GetHostCPUFeatures")()
    present = frozenset(str(name) for name, has in found.items() if bool(has))
    return present | frozenset(features_of(host_cpu())) if is_arm(host_cpu()) else present


def missing_features(required: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the required instruction sets that this processor lacks."""
    return tuple(name for name in required if name not in host_features())


def required_features(target: CpuTarget) -> tuple[str, ...]:
    """Name the instruction sets that the kernels of a target use."""
    return (*features_of(target.mcpu), *(AMX if target.amx else ()))


def has_amx(mcpu: str) -> bool:
    """Tell whether LLVM knows a CPU to have AMX's products of bfloat16."""
    return {*AMX} <= _all_features(mcpu)


def lanes_of(features: tuple[str, ...]) -> int:
    """float32 lanes of the widest vector."""
    return next((lanes for lanes, name in LANES if name in features), 4)


def is_arm(mcpu: str) -> bool:
    """Tell whether a CPU is an Arm one."""
    return "neon" in features_of(mcpu)


def vector_registers(target: CpuTarget) -> int:
    """32 with AVX-512 and on 64-bit Arm, 16 with older x86."""
    return 32 if target.lanes >= 16 or is_arm(target.mcpu) else 16
