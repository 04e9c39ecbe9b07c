"""From the stages of a CUDA kernel to a cubin: TVM writes the CUDA, NVRTC (or nvcc) compiles it. No GPU is needed."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import pathlib
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm.support import nvcc as compiler_of_tvm

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.kernels.cuda import container
from bnfuse.runtime.kernels.cuda.device import Stage
from bnfuse.runtime.kernels.kernel import Kernel, MapType
from bnfuse.runtime.targets.arch import compiled_as, waits
from bnfuse.runtime.targets.target import CudaTarget

REMEDY = "install bnfuse[cuda], or put nvcc on the PATH"

# what the beginning of TVM's sources takes from the C++ library. Reading that library is half of the time that NVRTC
# needs for a kernel, and no kernel uses more of it than the names of integers
HEADERS = {
    "cuda/std/cstdint": """
namespace cuda { namespace std {
using int8_t = signed char; using int16_t = short; using int32_t = int; using int64_t = long;
using uint8_t = unsigned char; using uint16_t = unsigned short; using uint32_t = unsigned int;
using uint64_t = unsigned long;
} }
""",
    "cuda/std/type_traits": """
namespace cuda { namespace std {
template <class A, class B> struct is_same { static constexpr bool value = false; };
template <class A> struct is_same<A, A> { static constexpr bool value = true; };
template <class A, class B> inline constexpr bool is_same_v = is_same<A, B>::value;
template <bool, class A, class B> struct conditional { using type = A; };
template <class A, class B> struct conditional<false, A, B> { using type = B; };
template <bool, class A = void> struct enable_if { using type = A; };
template <class A> struct enable_if<false, A> {};
template <class> struct is_integral;
template <class> struct is_signed;
template <class> struct is_unsigned;
template <class> struct is_floating_point;
} }
""",
}


# A stage begins by waiting for the launches before it, and then lets those behind it come to the GPU: not before, for
# they would hold room that the launches before still want
WAIT = """  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
"""


def compile_kernel(kernel: Kernel) -> bytes:
    """Compile a kernel to the code that is kept (container.py); BnfuseError as `compile_cuda`."""
    assert isinstance(kernel.target, CudaTarget)
    stages: Sequence[Stage] = kernel.build()
    arch = kernel.target.architecture
    source = cuda_source(stages, arch)
    cubin, log = compile_cuda(source, compiled_as(arch))
    parameters = [
        *((param.name, container.BUFFER) for param in kernel.params),
        *((f"{param.name}_offset", "int32") for param in kernel.params if param.is_map),
        *kernel.scalars,
    ]
    launches = [
        container.Stage(symbol_of(stage), stage.grid, stage.threads, stage.shared, tuple(signature(source, stage)))
        for stage in stages
    ]
    return container.pack(
        container.Code(tuple(launches), tuple(parameters), arch, cubin, slots_of(kernel), resources(log), waits(arch))
    )


def slots_of(kernel: Kernel) -> dict[str, tuple[int, int]]:
    """Give the maps that are slots of wider buffers, by name: their channels, and the buffer's."""
    maps = getattr(kernel.problem, "maps", ())
    named = {entry[0]: entry[1] for entry in maps if isinstance(entry, tuple) and isinstance(entry[1], MapType)}
    names = {param.name for param in kernel.params if param.is_map}
    return {name: (kind.c, kind.stride) for name, kind in named.items() if name in names and kind.stride != kind.c}


def symbol_of(stage: Stage) -> str:
    """Name the device function that TVM makes of a stage."""
    return f"{stage.name}_kernel"


@tvm_ffi.register_global_func("tvm_callback_cuda_compile", override=True)
def compile_for_tvm(code: str) -> bytes:
    """Compile for TVM, as it does without us; within `text_alone` give the text itself.

    Where a GPU is, TVM compiles what it writes, for the plain architecture: thrown away here, at the price of compiling
    each kernel twice, and an error for instructions that only sm_90a has.
    """
    return (
        str(code).encode()
        if getattr(_writing, "text_alone", False)
        else compiler_of_tvm.tvm_callback_cuda_compile(code)
    )


@contextlib.contextmanager
def text_alone() -> Iterator[None]:
    """Let TVM write CUDA in this thread without compiling it."""
    _writing.text_alone = True
    try:
        yield
    finally:
        _writing.text_alone = False


_writing = threading.local()


def cuda_source(stages: Sequence[Stage], arch: str) -> str:
    """Let TVM write the CUDA of some stages for `arch` (sm_XX), as one source."""
    # the host part is made too, as simply as can be, and thrown away: launches are data here
    target = tvm.target.Target(
        {
            "kind": "cuda",
            "arch": arch,
            "max_threads_per_block": 1024,
            "max_shared_memory_per_block": 232448,
            "thread_warp_size": 32,
        },
        host={"kind": "llvm", "opt-level": 0},
    )
    module = tvm.IRModule({stage.name: stage.function for stage in stages})
    with target, text_alone():
        executable = tvm.compile(module, target=target, tir_pipeline="tirx")
    source = str(executable.mod.imports[0].inspect_source())
    for stage in stages:
        if stage.may_alias:  # TVM takes device functions' parameters for distinct, whatever their attributes say
            source = re.sub(rf"\b{symbol_of(stage)}\([^)]*\)", lambda m: m[0].replace(" __restrict__", ""), source)
        if waits(arch):
            source, count = re.subn(rf"\b{symbol_of(stage)}\([^)]*\) {{\n", lambda m: m[0] + WAIT, source)
            assert count == 1, symbol_of(stage)
    return source


def signature(source: str, stage: Stage) -> list[str]:
    """List the names of a device function's parameters, in order."""
    found = re.search(rf"\b{symbol_of(stage)}\(([^)]*)\)", source)
    assert found, symbol_of(stage)
    names = [re.split(r"[\s*]+", part.strip())[-1] for part in found.group(1).split(",") if part.strip()]
    return [name.removesuffix("_ptr") for name in names]


@functools.cache
def include_folders() -> tuple[str, ...]:
    """Find the folders of NVIDIA's headers: those of its PyPI packages, then those of nvcc's installation."""
    spec = importlib.util.find_spec("nvidia")
    homes = [pathlib.Path(p) for p in (spec.submodule_search_locations if spec else None) or ()]
    found = [str(p) for home in homes for p in (*home.glob("cu*/include"), *home.glob("cuda_runtime/include"))]
    nvcc = shutil.which("nvcc")
    if nvcc:
        found.append(str(pathlib.Path(nvcc).resolve().parent.parent / "include"))
    return tuple(path for one in found for path in (one, f"{one}/cccl"))


@functools.cache
def compiler_version() -> str:
    """Say what `compile_cuda` compiles with, and its version; "none" where there is no compiler."""
    with contextlib.suppress(ImportError, RuntimeError):  # the package, the library
        from cuda.bindings import nvrtc

        if include_folders():
            return "nvrtc " + ".".join(map(str, nvrtc.nvrtcVersion()[1:]))
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return "none"
    told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    return f"nvcc {told.strip().splitlines()[-1] if told.strip() else ''}"


def compile_cuda(source: str, arch: str) -> tuple[bytes, str]:
    """Compile a source to a cubin for `arch` (sm_XX, or sm_90a), with what ptxas says about its resources.

    Raises BnfuseError where there is no compiler, or it does not compile the source.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        nvrtc = None
    if nvrtc is not None and include_folders():
        return _by_nvrtc(nvrtc, source, arch)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise BnfuseError(f"there is no CUDA compiler: {REMEDY}")
    return _by_nvcc(nvcc, source, arch)


def _by_nvrtc(nvrtc: Any, source: str, arch: str) -> tuple[bytes, str]:
    def check(result: tuple[Any, ...], log: str = "") -> Any:
        if int(result[0]) != 0:
            why = next((line for line in log.splitlines() if "error" in line), result[0].name)
            raise BnfuseError(f"NVRTC does not compile for {arch}: {why}")
        return result[1] if len(result) > 1 else None

    try:
        names, texts = [name.encode() for name in HEADERS], [text.encode() for text in HEADERS.values()]
        program = check(nvrtc.nvrtcCreateProgram(source.encode(), b"bnfuse.cu", len(names), texts, names))
    except RuntimeError as error:  # the library itself is missing
        raise BnfuseError(f"NVRTC cannot be loaded ({str(error).splitlines()[0]}): {REMEDY}") from None
    # kernels are kept by us; from a cache of its own it gives code without saying what ptxas said of it
    options = [f"--gpu-architecture={arch}", "--ptxas-options=-v", "--no-cache", "-default-device", "-w", "-std=c++17"]
    options += [f"-I{folder}" for folder in include_folders()]
    result = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    # what C writes to is never bytes: Python has one object for all bytes of length 1, such as an empty log's
    log = bytearray(check(nvrtc.nvrtcGetProgramLogSize(program)))
    check(nvrtc.nvrtcGetProgramLog(program, log))
    text = log.decode(errors="replace")
    check(result, text)
    cubin = bytearray(check(nvrtc.nvrtcGetCUBINSize(program)))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin), text


def _by_nvcc(nvcc: str, source: str, arch: str) -> tuple[bytes, str]:
    with tempfile.TemporaryDirectory(prefix="bnfuse-") as name:
        folder = pathlib.Path(name)
        (folder / "kernel.cu").write_text(source)
        command = [
            nvcc,
            "-cubin",
            f"-arch={arch}",
            "-Xptxas",
            "-v",
            "-w",
            "-std=c++17",
            "kernel.cu",
            "-o",
            "kernel.cubin",
        ]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            why = next((line for line in done.stderr.splitlines() if "error" in line), "it ended with an error")
            raise BnfuseError(f"nvcc does not compile for {arch}: {why}")
        return (folder / "kernel.cubin").read_bytes(), done.stderr


def resources(log: str) -> dict[str, dict[str, int]]:
    """Read the registers, spilled bytes and bytes of stack of each function from what ptxas says."""
    found: dict[str, dict[str, int]] = {}
    name = ""
    for line in log.splitlines():
        if match := re.search(r"entry function '(\w+)'", line):
            name = match.group(1)
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", line):
            found.setdefault(name, {}).update(stack=int(match.group(1)), spills=int(match.group(2)))
        elif match := re.search(r"Used (\d+) registers", line):
            found.setdefault(name, {})["registers"] = int(match.group(1))
    return found
