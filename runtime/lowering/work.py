"""The work of a kernel, counted from its problem and its parameters: what a profile divides times into.

FLOPs are those of convolutions (2 x pixels of the output x elements of the weight, once for each gradient) and matrix
products; what is elementwise counts as none. Bytes are what one launch cannot but move: every operand read once, every
result written once, one updated in place both, each in the type in which it is stored. Of a map only its own channels
count, not the wider buffer that they lie in, and of one that is sampled only the sample; a strided 1x1 convolution
counts the whole of a map that it reads a part of.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from bnfuse.opset.spec import CONV_GRADS
from bnfuse.runtime.kernels.common.dense import GemmProblem
from bnfuse.runtime.kernels.common.loss import LossGradProblem, LossProblem
from bnfuse.runtime.kernels.common.maps import CopyProblem
from bnfuse.runtime.kernels.common.optim import FlatProblem, UpdateProblem
from bnfuse.runtime.kernels.common.sides import sides
from bnfuse.runtime.kernels.common.taps import TapsProblem
from bnfuse.runtime.kernels.cuda.weights import PackProblem
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Param, Problem
from bnfuse.runtime.lowering.steps import unread_operands
from bnfuse.runtime.program.program import Work

SCRATCH = ("found", "sums")
NAMES = (
    (GemmProblem, "Gemm"),
    (TapsProblem, "taps"),
    (LossProblem, "loss"),
    (LossGradProblem, "loss"),
    (UpdateProblem, "update"),
    (FlatProblem, "update"),
    (CopyProblem, "copy"),
    (PackProblem, "weights"),
)
TIMES = {"in": 1, "out": 1, "inout": 2}


def work_of(kernel: Kernel) -> Work:
    """Count what one launch of a kernel does."""
    problem = kernel.problem
    kind, op = kind_of(problem), op_of(kernel)
    maps = maps_of(problem)
    unread = {"x"} if isinstance(problem, Problem) and only_shape_of_x(problem) else set()
    pixels = sampled_pixels(problem)
    moved = sum(
        bytes_of(param, maps, pixels) for param in kernel.params if param.name not in unread and not is_scratch(param)
    )
    return Work(kind, op, shape_of(problem, kernel), flops_of(problem), moved, sweeps_of(problem))


def maps_of(problem: Any) -> dict[str, MapType]:
    """Find the feature maps of a problem by the names of its kernel's parameters."""
    if isinstance(maps := getattr(problem, "maps", None), tuple):
        return dict(maps)
    found = {}
    for field in dataclasses.fields(problem) if dataclasses.is_dataclass(problem) else ():
        value = getattr(problem, field.name)
        if isinstance(value, MapType):
            found[field.name] = value
        elif isinstance(value, tuple) and value and all(isinstance(item, MapType) for item in value):
            found |= {f"{field.name.removesuffix('s')}{i}": item for i, item in enumerate(value)}
    return found


def is_scratch(param: Param) -> bool:
    """Whether it is memory that the stages of a GPU's kernel hand results on in."""
    return param.name in SCRATCH or param.name.endswith("partials")


def sampled_pixels(problem: Any) -> int | None:
    """How many pixels of its maps a kernel touches that works on a sample; None for all of them."""
    constants = constants_of(problem)
    return math.prod(constants["extent"]) if "extent" in constants else constants.get("count")


def sweeps_of(problem: Any) -> int:
    """Two for the statistics of a BatchNorm that no pass has touched: mean, then variance."""
    return int(constants_of(problem).get("sweeps", 1))


def constants_of(problem: Any) -> dict[str, Any]:
    """Give the constants of a problem by name; none where it has no such field."""
    return dict(found) if isinstance(found := getattr(problem, "constants", None), tuple) else {}


def bytes_of(param: Param, maps: dict[str, MapType], sampled: int | None = None) -> int:
    """Count the bytes that a launch moves for one parameter; of a map `sampled` pixels, where that is given."""
    kind = maps.get(param.name) if param.is_map else None
    elements = (sampled or kind.pixels) * kind.c if kind else param.elements
    return TIMES[param.access] * elements * np.dtype(param.dtype).itemsize


def only_shape_of_x(problem: Problem) -> bool:
    """Whether x is an operand for its shape alone: a gradient of the input that neither masks nor reduces."""
    return "x" in unread_operands(problem.spec)


def flops_of(problem: Any) -> int:
    """Count the floating point operations: of products and convolutions, none of what is elementwise."""
    if isinstance(problem, GemmProblem):
        return 2 * problem.count * problem.m * problem.n * problem.k
    if isinstance(problem, Problem) and problem.weight:
        spec = problem.spec
        output = problem.map(sides(spec)[1])
        products = len({"dx", "dweight"} & {*spec.results}) if spec.core in CONV_GRADS else 1
        return 2 * products * output.pixels * math.prod(problem.weight)
    return 0


def kind_of(problem: Any) -> str:
    """Name the family of kernels: a convolution with its window, else the core, else what the problem is of."""
    if isinstance(problem, Problem):
        core = problem.spec.core
        if not problem.weight:
            return core
        _, per_group, *window = problem.weight
        groups = problem.attribute("group")
        form = "depthwise " if groups > 1 and per_group == 1 else "grouped " if groups > 1 else ""
        return f"{core} {form}{'x'.join(map(str, window))}"
    return next((name for kind, name in NAMES if isinstance(problem, kind)), None) or (
        "generic" if hasattr(problem, "op_type") else "BatchNorm halves" if maps_of(problem) else "coefficients"
    )


def op_of(kernel: Kernel) -> str:
    """Name the operator that a kernel computes."""
    problem = kernel.problem
    for name in ("op", "op_type"):
        if isinstance(found := getattr(problem, name, None), str):
            return found
    return type(problem).__name__.removesuffix("Problem")


def shape_of(problem: Any, kernel: Kernel) -> str:
    """16x56x56x64 -> 128, stride 2: batch, height, width, channels, and what a convolution makes of them."""
    if isinstance(problem, GemmProblem):
        times = f"{problem.count} of " if problem.batch else ""
        return f"{times}{problem.m}x{problem.k} by {problem.k}x{problem.n}"
    maps = maps_of(problem)
    kind = next((maps[name] for name in ("x", "dx", "dy", "y", "dz") if name in maps), None) or next(
        iter(maps.values()), None
    )
    if kind is None:
        return "x".join(str(n) for n in [max((param.elements for param in kernel.params), default=0)])
    text = "x".join(map(str, (kind.n, kind.h, kind.w, kind.c)))
    if not isinstance(problem, Problem):
        return text
    if problem.weight:
        outputs, per_group, *_ = problem.weight
        text += f" -> {per_group * problem.attribute('group') if problem.spec.is_transposed else outputs}"
    strides = dict(problem.attributes).get("strides", ())
    return text + (f", stride {strides[0]}" if any(s != 1 for s in strides) else "")
