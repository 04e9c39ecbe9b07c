"""The parameters of kernels."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.kernels.kernel import Access, Param, Problem
from bnfuse.runtime.targets.target import Target

INT32_LIMIT = 2**31


def unique_name(op: str, problem: Any, target: Target) -> str:
    """A name no other kernel has, so that many kernels can be loaded into one module."""
    digest = hashlib.sha1(f"{problem!r} {target!r}".encode(), usedforsecurity=False).hexdigest()
    return f"{op[:60]}_{digest[:12]}"


def map_params(
    problem: Problem, vector_elements: Callable[[str], int], dtypes: Mapping[str, str] | None = None
) -> tuple[Param, ...]:
    """The parameters that the contract of kernel.py gives this operator."""
    spec, maps, params = problem.spec, dict(problem.maps), []
    names = [(name, "in") for name in spec.operands if name != "acc"] + [(name, "out") for name in spec.results]
    for name, access in names:
        if name == "dx" and "Accumulate" in spec.epilogue:
            access = "inout"
        elements = maps[name].elements if name in maps else vector_elements(name)
        if elements >= INT32_LIMIT:
            raise BnfuseError(
                f"{problem.op}: {name} has {elements} elements, more than int32 can index: use a smaller batch"
            )
        params.append(Param(name, access, elements, (dtypes or {}).get(name, "float32"), name in maps))  # type: ignore[arg-type]
    return tuple(params)


INT32_LIMIT = 2**31


def forward_params(problem: Problem) -> tuple[Param, ...]:
    """The parameters of a forward operator's kernel. Coefficients of the prologue have x's channels, others y's."""
    spec, maps = problem.spec, dict(problem.maps)
    params = []
    sides: tuple[tuple[Access, tuple[str, ...]], ...] = (("in", spec.operands), ("out", spec.results))
    for access, names in sides:
        for name in names:
            if name in maps:
                dtype = "int32" if name == "indices" else "float32"
                params.append(Param(name, access, maps[name].elements, dtype, is_map=True))
            elif name == "weight":
                params.append(Param(name, access, math.prod(problem.weight)))
            else:
                channels = maps["y" if name in ("bias", "mean", "variance") else "x"].c
                params.append(Param(name, access, channels))
    for param in params:
        if param.elements >= INT32_LIMIT:
            what = f"{param.name} has {param.elements} elements, more than int32 can index"
            raise BnfuseError(f"{problem.op}: {what}: use a smaller batch")
    return tuple(params)


GRADIENT_CHANNELS = ("grad_p", "grad_q", "grad_w", "dbias")


def parameters(problem: Problem) -> tuple[Param, ...]:
    """Operands, then results; under Accumulate dx is both, and `acc` is neither."""
    spec = problem.spec
    accumulates = "Accumulate" in spec.epilogue
    maps = dict(problem.maps)
    params = []
    for name in (*(name for name in spec.operands if name != "acc"), *spec.results):
        access: Access = "in" if name in spec.operands else "inout" if name == "dx" and accumulates else "out"
        params.append(Param(name, access, _elements(problem, name), is_map=name in maps))
    return tuple(params)


def _elements(problem: Problem, name: str) -> int:
    out, cin, *kernel = problem.weight
    if name in ("weight", "dweight"):
        return out * cin * kernel[0] * kernel[1]
    if name in dict(problem.maps):
        return problem.map(name).elements
    return problem.map("dy" if name in GRADIENT_CHANNELS else "x").c
