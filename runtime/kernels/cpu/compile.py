"""From a kernel's PrimFunc to machine code: TVM's passes, those of them that it takes, and an entry of our own.

TVM's sequence has 46: for GPUs, for blocks of a schedule, for types of 8 bits, to verify. Left out besides: hoisting of
conditions and common subexpressions, which LLVM sees to itself; storage rewrite, which would turn `registers` into heap
memory; compaction, as buffers are made as large as they are used.

TVM's entry looks at each argument's type, shape, strides and place, twice: a third of the code, to say in each launch
what is seen to once where a program is lowered, and where a file is read. Ours takes tensors as they come.
"""

from __future__ import annotations

import functools
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.script.ir_builder import tirx as T
from tvm.tirx.stmt import Return

from bnfuse.runtime.kernels.cpu.rounding import rounding_of
from bnfuse.runtime.targets import cpus
from bnfuse.runtime.targets.target import CpuTarget

PACKED = 1  # tvm's CallingConv::kCPackedFunc
TENSOR = 24  # bytes from the beginning of an object to its DLTensor
DATA, SHAPE, TYPE, VALUE, ELEMENT = 1, 2, 13, 15, 17  # TVM's numbers of fields: of a DLTensor, an argument, an array
FLOAT = 3  # tvm_ffi's kTVMFFIFloat
CPU = 1  # DLPack's kDLCPU
ALIGNMENT = 64  # bytes, of all arrays (backends/memory.py)


def compile_function(function: Any, target: CpuTarget) -> Any:
    """Compile a PrimFunc to an executable, which takes tensors and offsets as they come."""
    llvm = cpus.llvm_target(target.mcpu, **{"kind": target.kind, "opt-level": 3})
    with rounding_of(function, target) as complete, tvm.transform.PassContext(opt_level=3), llvm:
        module = tvm.IRModule.from_expr(complete.with_attr("target", llvm))
        module = sequence()(module)
        return tvm.runtime.Executable(tvm.get_global_func("target.build.llvm")(module, llvm))


@functools.cache
def sequence() -> Any:
    """Give the passes."""
    return tvm.transform.Sequential(
        [
            s_tir.transform.StmtSimplify(),
            s_tir.transform.LowerOpaqueBlock(),
            tirx.transform.FlattenBuffer(),
            tirx.transform.VectorizeLoop(True),
            s_tir.transform.RenormalizeSplitPattern(),
            tirx.transform.StmtSimplify(),
            s_tir.transform.RewriteUnsafeSelect(),
            tvm.ir.transform.module_pass(with_entries, opt_level=0),
            tirx.transform.LowerTVMBuiltin(),
            tirx.transform.LowerIntrin(),
        ]
    )


def with_entries(module: Any, _context: Any) -> Any:
    """Make each function one of tvm_ffi's packed ones."""
    return tvm.IRModule({name: packed(function) for name, function in module.functions_items()})


def packed(function: Any) -> Any:
    """Give the function of TVM's calling convention that takes the arguments apart and computes."""
    arguments = tirx.Var("args", "handle")
    name = function.attrs["global_symbol"]
    body = tirx.AttrStmt(0, "compute_scope", tvm.ir.StringImm(f"{name}_compute_"), function.body)
    found: dict[Any, Any] = {}  # a statement for each variable
    for i, parameter in enumerate(function.params):
        if isinstance(parameter.ty, tirx.buffer.BufferType):
            tensor = T.handle_add_byte_offset(field(arguments, i, VALUE, "handle"), TENSOR)
            (length,) = parameter.ty.shape
            if isinstance(length, tirx.Var) and length not in found:
                shape = field(tensor, 0, SHAPE, "handle")
                found[length] = tirx.Bind(length, tirx.Cast("int32", field(shape, 0, ELEMENT, "int64")))
            data = T.reinterpret(parameter.data.ty, field(tensor, 0, DATA, "handle"))
            found[parameter] = tirx.DeclBuffer(parameter, data=data)
            body = tirx.AttrStmt(parameter, "storage_alignment", tirx.const(ALIGNMENT, "int32"), body)
        else:
            found[parameter] = tirx.Bind(parameter, number(arguments, i, str(parameter.ty)))
    for attribute, device in (("device_type", CPU), ("device_id", 0)):  # of workspaces
        body = tirx.AttrStmt("default", attribute, tirx.const(device, "int32"), body)
    return tirx.PrimFunc(
        [tirx.Var("self", "handle"), arguments, tirx.Var("count", "int32"), tirx.Var("result", "handle")],
        tirx.SeqStmt([*found.values(), body, Return(tirx.const(0, "int32"))]),
        tvm.ir.PrimType("int32"),
        function.attrs,
    ).with_attrs({"calling_conv": PACKED, "global_symbol": f"__tvm_ffi_{name}"})


def number(arguments: Any, place: int, dtype: str) -> Any:
    """Write a number among the arguments; one that is wanted as a float may come as an int."""
    found = field(arguments, place, VALUE, "int64")
    if dtype.startswith("float"):
        is_float = tirx.EQ(field(arguments, place, TYPE, "int32"), tirx.const(FLOAT, "int32"))
        found = T.if_then_else(is_float, field(arguments, place, VALUE, "float64"), tirx.Cast("float64", found))
    return tirx.Cast(dtype, found)


def field(structures: Any, place: int, number: int, dtype: str) -> Any:
    """Write a field of the structure at a place of an array of them."""
    return T.tvm_struct_get(structures, place, number, dtype)
