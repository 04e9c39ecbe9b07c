"""What TVM does with the CUDA that it writes for us, on machines with a GPU as well."""

from __future__ import annotations

import tvm_ffi
from tvm.support import nvcc

from bnfuse.runtime.kernels.cuda import compile as compiling


def test_tvm_compiles_for_others_and_not_what_it_writes_for_us(monkeypatch):
    monkeypatch.setattr(nvcc, "tvm_callback_cuda_compile", lambda code: f"compiled {code}".encode())
    compile_by_tvm = tvm_ffi.get_global_func("tvm_callback_cuda_compile")
    with compiling.text_alone():
        assert compile_by_tvm("text") == b"text"
    assert compile_by_tvm("text") == b"compiled text"


def test_sources_are_written_without_compiling(monkeypatch):
    during = []

    def compiled(*arguments: object, **options: object) -> object:
        during.append(tvm_ffi.get_global_func("tvm_callback_cuda_compile")("text"))
        raise InterruptedError

    monkeypatch.setattr(compiling.tvm, "compile", compiled)
    try:
        compiling.cuda_source([], "sm_90")
    except InterruptedError:
        assert during == [b"text"]
    else:
        raise AssertionError("TVM was not asked")
