"""Rounding of float32 to bfloat16: an operator of ours, as TVM has none that may be vectorised and that LLVM sees.

    with avx512bf16     vcvtneps2bf16, one instruction for 16 values; it takes what is subnormal for zero
    elsewhere           arithmetic on the bits, nine instructions

What is no number stays none, of two equally near numbers the even one is taken. The operator is lowered where the
kernel is compiled, which is where the target is known: what stores bfloat16 does not know of it.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T
from tvm.tirx.op import register_intrin_lowering

from bnfuse.runtime.kernels.cpu.lanes import Expr, constant, lanes_of, like
from bnfuse.runtime.targets import cpus
from bnfuse.runtime.targets.target import CpuTarget

ROUNDED = "tirx.bnfuse_rounded"
FEATURE = "avx512bf16"
WIDEST = 64  # lanes of a vector that the instruction is written for
INSTRUCTION = """
define linkonce_odr {bits} @{name}({single} %value) alwaysinline nounwind {{
  %half = fptrunc {single} %value to {half}
  %bits = bitcast {half} %half to {bits}
  ret {bits} %bits
}}
"""

_instruction: contextvars.ContextVar[bool] = contextvars.ContextVar("instruction", default=False)


def rounded(value: Expr) -> Expr:
    """Write the bits (uint16) of a float32, or of a vector of them, as bfloat16."""
    value = T.bind(value)  # it is read more than once
    return tirx.call_intrin(like("uint16", value), ROUNDED, value)


@contextlib.contextmanager
def rounding_of(function: Any, target: CpuTarget) -> Iterator[Any]:
    """Give the function as it is to be compiled within the block."""
    has = target.precision == "bf16" and FEATURE in cpus.features_of(target.mcpu)
    token = _instruction.set(has)
    try:
        yield _with_instruction(function) if has else function
    finally:
        _instruction.reset(token)


def _with_instruction(function: Any) -> Any:
    text = "".join(_definition(lanes) for lanes in range(1, WIDEST + 1))
    return function.with_body(tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", text, function.body))


def _name(lanes: int) -> str:
    return f"bnfuse_rounded_{lanes}"


def _definition(lanes: int) -> str:
    single, half, bits = (kind if lanes == 1 else f"<{lanes} x {kind}>" for kind in ("float", "bfloat", "i16"))
    return INSTRUCTION.format(name=_name(lanes), single=single, half=half, bits=bits)


def _lower(call: Any) -> Expr:
    """Write what the operator comes to; a vector's, once loops are vectorised."""
    (value,) = call.args
    lanes = lanes_of(value)
    if _instruction.get() and lanes <= WIDEST:
        return tirx.call_extern(like("uint16", value), _name(lanes), value)
    return _arithmetic(value)


def _arithmetic(value: Expr) -> Expr:
    def of(number: int) -> Expr:
        return constant(number, "uint32", value)

    bits = tirx.reinterpret(like("uint32", value), value)
    upper = bits + (of(0x7FFF) + ((bits >> of(16)) & of(1)))  # in this order LLVM sees what is rounded already
    same = tirx.reinterpret(like("float32", value), bits)  # TVM takes x == x for true, LLVM takes this for x == x
    found = tirx.Select(value == same, upper >> of(16), of(0x7FC0))
    return tirx.Cast(like("uint16", value), found)


def _register() -> None:
    ops = tvm.ir._ffi_api
    ops.RegisterOp(ROUNDED, "The bits of a float32 as bfloat16.")
    ops.RegisterOpAttr(ROUNDED, "TVectorizable", True, 10)
    ops.RegisterOpAttr(ROUNDED, "TCallEffectKind", tirx.CallEffectKind.Pure.value, 10)
    register_intrin_lowering(ROUNDED, "llvm", f=_lower)


_register()
