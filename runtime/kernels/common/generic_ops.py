"""Every operator that has no kernel of its own, on dense float32 tensors (and indices, masks, ...) of any rank.

Parameters of a kernel are in0, in1, ... and out0, out1, ..., and then the scalars of `SCALARS`. `SUPPORTED` has the
operators' names; of those in `NESTED` there is one formula for all code generators.
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.kernels.common import generic_elementwise, generic_index, generic_moves, generic_scan
from bnfuse.runtime.kernels.common.generic import Buffers, Emit, GenericProblem, store
from bnfuse.runtime.kernels.common.generic_reduce import BY_ROWS, FOLDINGS
from bnfuse.runtime.kernels.common.params import INT32_LIMIT
from bnfuse.runtime.kernels.common.steps import Expr
from bnfuse.runtime.kernels.kernel import Param

# run-time scalars, int64, that follow the buffers
SCALARS: dict[str, tuple[str, ...]] = {"Dropout": ("seed", "step")}

# of attributes and inputs, those whose absence changes the result and that only a constant can give
REQUIRED: dict[str, tuple[str, ...]] = {
    "Slice": ("starts", "ends"),
    "Pad": ("pads",),
    "Tile": ("repeats",),
    "Range": ("start", "delta"),
    "DepthToSpace": ("blocksize",),
    "SpaceToDepth": ("blocksize",),
}


def generic_params(problem: GenericProblem) -> tuple[Param, ...]:
    """List in0, in1, ... and out0, out1, ..., dense.

    Raises BnfuseError for an operator or a dtype that is not supported, for what is not constant but has to be, and for
    tensors of more elements than int32 can index.
    """
    _check(problem)
    inputs = [Param(f"in{i}", "in", math.prod(shape), dtype) for i, (shape, dtype) in enumerate(problem.inputs)]
    outputs = [Param(f"out{i}", "out", math.prod(shape), dtype) for i, (shape, dtype) in enumerate(problem.outputs)]
    return (*inputs, *outputs)


def _check(problem: GenericProblem) -> None:
    op = problem.op_type
    if op not in SUPPORTED:
        raise BnfuseError(f"{op} is not among the supported operators: {', '.join(sorted(SUPPORTED))}")
    for name in REQUIRED.get(op, ()):
        if problem.attribute(name) is None:
            raise BnfuseError(f"{op}: '{name}' is not constant: give it as an initializer")
    for shape, dtype in (*problem.inputs, *problem.outputs):
        if math.prod(shape) >= INT32_LIMIT:
            raise BnfuseError(f"{op}: a tensor of shape {list(shape)} is more than int32 indexes: use a smaller batch")
        if op in FLOAT32_ONLY and dtype not in ("float32", "bool"):
            raise BnfuseError(f"{op}: {dtype} is not supported: cast to float32")


def dropout_key(problem: GenericProblem, seed: Expr, step: Expr) -> Expr:
    """Write what is hashed besides the element, where Dropout keeps one: uint32.

    y = x/(1 - ratio) where a hash of (seed, step, node, element) says so, else 0. Attributes: ratio, training_mode (1
    unless given), node (a number that no other Dropout of the graph has).
    """
    key = _u32(int(problem.attribute("node", 0)) % 2**32)
    for scalar in (seed, step):
        key = T.bind(mixed(key ^ tirx.Cast("uint32", scalar)) + _u32(0x9E3779B9))
    return key


def dropout_ratio(problem: GenericProblem) -> float:
    """Give the share of elements that become 0: 0 outside of training. Raises BnfuseError if not in [0, 1]."""
    ratio = float(problem.number("ratio", 0.5)) if problem.number("training_mode", 1) else 0.0
    if not 0 <= ratio <= 1:
        raise BnfuseError(f"Dropout: ratio {ratio} is not between 0 and 1")
    return ratio


def dropout_point(problem: GenericProblem, args: Buffers, key: Expr, at: Expr) -> None:
    """Write element `at` of y, and of the mask if there is one."""
    ratio = dropout_ratio(problem)
    scale = tirx.const(1 / (1 - ratio) if ratio < 1 else 0.0, "float32")
    # of 2**32 hashes, how many keep their element. An odd number: LLVM 22 compiles the comparison of a hash with one
    # whose low bits are all 0 (as of ratio 0.25) to false.
    limit = min(round((1 - ratio) * 2**32) | 1, 2**32 - 1)
    if ratio == 0:
        kept: Expr = tirx.const(True, "bool")
    elif ratio == 1:
        kept = tirx.const(False, "bool")
    else:
        kept = mixed(mixed(tirx.Cast("uint32", at)) ^ key) < _u32(limit)
    store(args, "out0", at, tirx.Select(kept, args["in0"][at] * scale, tirx.const(0.0, "float32")))
    if len(problem.outputs) > 1:
        store(args, "out1", at, kept)


def mixed(x: Expr) -> Expr:
    """Permute the 32-bit numbers: each bit of the result depends on every bit of x."""
    x = x ^ (x >> _u32(16))
    x = x * _u32(0x7FEB352D)
    x = x ^ (x >> _u32(15))
    x = x * _u32(0x846CA68B)
    return x ^ (x >> _u32(16))


def _u32(value: int) -> Expr:
    return tirx.const(value, "uint32")


NESTED: dict[str, Emit] = {**generic_elementwise.OPS, **generic_moves.OPS, **generic_index.OPS, **generic_scan.OPS}
SUPPORTED = frozenset({*NESTED, *FOLDINGS, *BY_ROWS, "Dropout"})
FLOAT32_ONLY = frozenset({"Dropout", "Softmax", "LogSoftmax"})
