"""What TVM does with the CUDA that it writes for us, on machines with a GPU as well."""

from __future__ import annotations

import pytest
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


class Nvrtc:
    """Writes as C does, to what it is given: an empty log is one byte, 0."""

    CUBIN = b"\x7fELF"

    def __init__(self) -> None:
        self.options: list[bytes] = []

    def nvrtcCreateProgram(self, *arguments: object) -> tuple[int, str]:
        return 0, "program"

    def nvrtcCompileProgram(self, program: str, count: int, options: list[bytes]) -> tuple[int]:
        self.options = options
        return (0,)

    def nvrtcGetProgramLogSize(self, program: str) -> tuple[int, int]:
        return 0, 1

    def nvrtcGetProgramLog(self, program: str, log: bytearray) -> tuple[int]:
        log[:] = b"\0"
        return (0,)

    def nvrtcGetCUBINSize(self, program: str) -> tuple[int, int]:
        return 0, len(self.CUBIN)

    def nvrtcGetCUBIN(self, program: str, cubin: bytearray) -> tuple[int]:
        cubin[:] = self.CUBIN
        return (0,)

    def nvrtcDestroyProgram(self, program: str) -> tuple[int]:
        return (0,)


def test_the_compiler_writes_to_nothing_that_python_shares():
    nvrtc = Nvrtc()
    assert compiling._by_nvrtc(nvrtc, "source", "sm_90a") == (Nvrtc.CUBIN, "\0")
    assert b"--no-cache" in nvrtc.options  # of which a hit says nothing about resources


@pytest.mark.skipif(not compiling.compiler_version().startswith("nvrtc"), reason="needs NVRTC")
def test_every_compilation_says_what_a_kernel_takes():
    source = 'extern "C" __global__ void k(float* a) { a[threadIdx.x] *= 2.0f; }'
    logs = [compiling.compile_cuda(source, "sm_90a")[1] for _ in range(2)]
    assert all(compiling.resources(log)["k"]["registers"] > 0 for log in logs)
