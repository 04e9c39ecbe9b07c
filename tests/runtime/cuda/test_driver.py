"""The driver's wrapper: one line for each way to fail, contexts, arguments."""

from __future__ import annotations

import sys

import pytest
from cuda.bindings.driver import CUresult
from fake_cuda import FakeCuda, FakeKernel, install

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.backends.cuda import driver
from bnfuse.runtime.backends.cuda.driver import Arguments, Driver
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.targets.target import CudaTarget


def one_line(call, *arguments, match: str) -> None:
    with pytest.raises(BnfuseError, match=match) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)


class Missing:
    """Bindings that find no library, or an old one."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __getattr__(self, name: str):
        def call(*arguments: object):
            raise RuntimeError(self.message)

        return call


def test_no_package_no_driver_no_gpu_and_an_old_driver_are_one_line_each(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cuda.bindings.driver", None)
        driver.bindings.cache_clear()
        one_line(driver.open_driver, match=r"needs the package cuda-bindings .*install bnfuse\[cuda\]")
        driver.bindings.cache_clear()
    install(monkeypatch, Missing("Failed to dlopen libcuda.so.1"))
    one_line(driver.open_driver, match="there is no NVIDIA driver here")
    assert driver.device_architecture() is None
    install(monkeypatch, Missing('Function "cuGraphAddKernelNode_v2" not found'))
    one_line(driver.open_driver, match="driver is too old for this cuda-bindings .*update the driver")
    fake = install(monkeypatch, FakeCuda())
    fake.fail["cuInit"] = CUresult.CUDA_ERROR_NO_DEVICE
    one_line(driver.open_driver, match="no NVIDIA GPU here")
    fake.fail["cuInit"] = CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
    one_line(driver.open_driver, match="does not start .CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")


def test_a_plain_target_is_the_gpu_that_is_there(monkeypatch):
    install(monkeypatch, FakeCuda("sm_87"))
    assert resolve("cuda", precision="bf16") == CudaTarget("sm_86", 84, "bf16")
    install(monkeypatch, FakeCuda("sm_75"))
    one_line(resolve, "cuda", match="the GPU is sm_75")
    install(monkeypatch, Missing("Failed to dlopen libcuda.so.1"))
    assert resolve("cuda") == CudaTarget("sm_90", 132, "fp32")


def test_the_device_is_that_of_the_current_context(monkeypatch):
    fake = install(monkeypatch, FakeCuda())
    assert driver.open_driver().ordinal == 0
    fake.contexts.append(7 + 1)
    assert driver.open_driver().ordinal == 1
    assert driver.open_driver() is driver.open_driver()
    with driver.open_driver().active():
        assert fake.contexts == [8, 8]
    assert fake.contexts == [8]


def test_out_of_memory_names_the_sizes():
    gpu = Driver(FakeCuda(memory=10_000_000))
    gpu.allocate(4_000_000, "the arena")
    one_line(gpu.allocate, 8_000_000, "the arena", match="the arena takes 8 MB, 6 MB of 10 MB are free: use a smaller")


def test_code_that_does_not_load_says_why():
    fake = FakeCuda("sm_80")
    gpu = Driver(fake)
    one_line(gpu.load, b"cubin", "sm_90", "k", match="compiled for sm_90; the GPU here .Fake GPU. is sm_80")
    assert gpu.load(b"cubin", "sm_80", "k")
    fake.fail["cuModuleLoadData"] = CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU
    one_line(gpu.load, b"cubin", "sm_80", "k", match="'k' does not load on the GPU .CUDA_ERROR_NO_BINARY_FOR_GPU")
    fake.fail["cuModuleLoadData"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    one_line(gpu.load, b"cubin", "sm_80", "k", match="memory does not suffice for the code of kernel 'k'")


def test_shared_memory_beyond_48_kib_is_asked_for():
    fake = FakeCuda()
    gpu = Driver(fake)
    fake.kernels = {"small": FakeKernel((), lambda: None), "large": FakeKernel((), lambda: None)}
    gpu.function(1, "small", 48 << 10)
    gpu.function(1, "large", 100_000)
    assert fake.shared == {"large": 100_000}
    one_line(gpu.function, 1, "large", 300_000, match="needs 300000 bytes of shared memory, the GPU .* has 232448")
    one_line(gpu.function, 1, "absent", 0, match="no device kernel 'absent'")


def test_a_failing_call_names_itself_and_the_error():
    fake = FakeCuda()
    gpu = Driver(fake)
    fake.fail["cuStreamSynchronize"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    one_line(gpu.synchronize, 1, match="Fake GPU. fails in cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS")


def test_arguments_know_when_they_changed():
    arguments = Arguments(["buffer", "float32", "int64"])
    arguments.set(0, 1 << 60)
    arguments.set(1, 0.1)
    arguments.set(2, -5)
    version = arguments.version
    arguments.set(1, 0.1)
    assert arguments.version == version
    arguments.set(1, 0.2)
    assert arguments.version == version + 1
    assert (arguments[0], arguments[2]) == (1 << 60, -5)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("cuda:sm_75", {}, "'cuda:sm_75' needs sm_80 or newer: use one of sm_80"),
        ("cuda:sm_91", {}, "not among those it is made for"),
        ("cuda:hopper", {}, "'hopper' is no GPU architecture"),
        ("cuda:sm_90", {"threads": 4}, "4 threads are of a CPU"),
        ("cuda:sm_90", {"precision": "int8"}, "precision 'int8' is unknown: it is one of fp32, tf32, bf16, fp16"),
        ("cpu", {"precision": "fp16"}, "precision fp16 is for a GPU"),
        ("cpu", {"precision": "int8"}, "precision 'int8' is unknown: it is one of fp32, tf32, bf16, fp16"),
    ],
)
def test_targets_that_cannot_be_are_one_line(spec, options, message):
    with pytest.raises(BnfuseError, match=message) as caught:
        resolve(spec, **options)
    assert "\n" not in str(caught.value)


def test_targets_of_architectures():
    assert resolve("cuda:sm_80", precision="tf32") == CudaTarget("sm_80", 108, "tf32")
    assert resolve("cpu", 2, "fp32").kind == "llvm"
