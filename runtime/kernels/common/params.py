"""The parameters of kernels: one list for all that an operator of steps may have."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from typing import Any

from bnfuse.core.errors import BnfuseError
from bnfuse.opset.spec import INTEGERS, OpSpec, is_of_images
from bnfuse.runtime.kernels.common.windows import index_dtype
from bnfuse.runtime.kernels.kernel import Access, Param, Problem
from bnfuse.runtime.targets.target import Target

INT32_LIMIT = 2**31

# per-channel operands and results that have the channels of the core's output; all others have those of its input
OF_OUTPUT = ("bias", "mean", "variance")
OF_OUTPUT_GRADIENT = ("grad_a", "grad_b", "grad_p", "grad_q", "grad_w", "dbias")


def unique_name(op: str, problem: Any, target: Target) -> str:
    """Make a name no other kernel has, so that many kernels can be loaded into one module."""
    digest = hashlib.sha1(f"{problem!r} {target!r}".encode(), usedforsecurity=False).hexdigest()
    return f"{op[:60]}_{digest[:12]}"


def operator_params(
    problem: Problem, *, weight: tuple[int, str] | None = None, unread: Collection[str] = ()
) -> tuple[Param, ...]:
    """List the parameters that the contract of kernel.py gives an operator of steps: operands, then results.

    Under Accumulate dx is both, and `acc` is neither. `weight` are the elements and the dtype of a weight that is not
    taken as it lies in the file (float32 OIHW). Operands named in `unread` are none of this kernel's. Raises
    BnfuseError where a parameter has more elements than int32 can index.
    """
    spec, params = problem.spec, []
    for name in (*(name for name in spec.operands if name != "acc" and name not in unread), *spec.results):
        elements, dtype = _extent(problem, name, weight)
        if elements >= INT32_LIMIT:
            what = f"{name} has {elements} elements, more than int32 can index"
            raise BnfuseError(f"{problem.op}: {what}: use a smaller batch")
        params.append(Param(name, _access(spec, name), elements, dtype, is_map=name in dict(problem.maps)))
    return tuple(params)


def _access(spec: OpSpec, name: str) -> Access:
    if name == "dx" and "Accumulate" in spec.epilogue:
        return "inout"
    return "in" if name in spec.operands else "out"


def _extent(problem: Problem, name: str, weight: tuple[int, str] | None) -> tuple[int, str]:
    """Give elements and dtype of a parameter."""
    maps = dict(problem.maps)
    if name in INTEGERS:
        return maps[name].elements, index_dtype(problem.attribute("kernel_shape"))
    if name in maps:
        return maps[name].elements, maps[name].dtype
    if name == "weight" and weight is not None:
        return weight
    if name in ("weight", "dweight"):
        return math.prod(problem.weight), "float32"
    if is_of_images(name):
        made = maps["dx" if problem.spec.is_gradient else "y"]
        return made.n * made.c, "float32"
    of_output = name in (OF_OUTPUT_GRADIENT if problem.spec.is_gradient else OF_OUTPUT)
    sides = ("dy", "y", "dx", "x") if of_output else ("x", "dx", "y")
    return next(maps[side].c for side in sides if side in maps), "float32"
