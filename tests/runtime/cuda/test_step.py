"""A whole step on the host side of the GPU target: the CPU's kernels, run by a stand-in for the driver."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from cuda.bindings.driver import CUresult
from fake_cuda import FakeCuda, floats, install
from source_files import load

from bnfuse.core.errors import BnfuseError
from bnfuse.core.tensor_files import read_safetensors
from bnfuse.runtime import SGD, AdamW, Step, compile_step, load_step
from bnfuse.runtime.backends.cpu.library import Library
from bnfuse.runtime.backends.cuda import dlpack
from bnfuse.runtime.backends.cuda.array import DeviceArray
from bnfuse.runtime.backends.cuda.calls import merged
from bnfuse.runtime.backends.execution import Compiled
from bnfuse.runtime.kernels.cuda.container import Code, pack
from bnfuse.runtime.kernels.cuda.container import Stage as Part
from bnfuse.runtime.program import program as p
from bnfuse.runtime.targets.target import CudaTarget

nets = load(pathlib.Path(__file__).parents[1] / "test_session.py")

TARGET = CudaTarget("sm_90", 132)
TYPES = {"lr": "float32", "step": "int64", "seed": "int64"}


def parameters_of(launch: p.Launch) -> tuple[tuple[str, str], ...]:
    """Names and types as the header of a kernel's code has them."""

    def kind(argument: p.Argument) -> str:
        if isinstance(argument, p.Scalar):
            return TYPES[argument.name]
        return "buffer" if isinstance(argument, p.Buffer) else "int32"

    return tuple((f"a{i}", kind(argument)) for i, argument in enumerate(launch.arguments))


def contained(compiled: Compiled) -> Compiled:
    """The program with code for a GPU: a kernel for each launch, for some of the CPU's ask how long their buffers are.
    Each kernel has two stages; the first does nothing."""
    program, codes = compiled.program, []
    for index, launch in enumerate(program.launches):
        parameters = parameters_of(launch)
        names = tuple(name for name, _ in parameters)
        stages = (Part("first", (2, 1, 1), 64, 0, names[:1]), Part("second", (9, 1, 1), 256, 64 << 10, names))
        cubin = f"{index} of {len(program.launches)}".encode()
        codes.append(pack(Code(stages, parameters, "sm_90", cubin, waits=True)))
    launches = [dataclasses.replace(launch, kernel=index) for index, launch in enumerate(program.launches)]
    names = [program.kernels[launch.kernel] for launch in program.launches]
    takes = [p.given(launch, program.storages) for launch in launches]
    return Compiled(dataclasses.replace(program, kernels=names, launches=launches, works=[], takes=takes), codes)


def serve(fake: FakeCuda, compiled: Compiled, codes: Compiled) -> None:
    """Let the stand-in run the CPU's kernels on its memory."""
    library = Library(compiled.program.kernels, compiled.codes)

    def make(index: int, stage: int) -> Callable[..., None]:
        launch = compiled.program.launches[index]

        def call(*values: Any) -> None:
            arguments = []
            for argument, value in zip(launch.arguments, values, strict=True):
                if isinstance(argument, p.Buffer):
                    s = compiled.program.storages[argument.storage]
                    value = tvm.runtime.from_dlpack(floats(value, s.elements, s.dtype))
                arguments.append(value)
            library.functions[launch.kernel](*arguments)

        return call if stage else lambda _: None

    fake.serve(codes.codes, make)


def on_cpu(optimizer: Any = None, level: str = "icf") -> Step:
    return compile_step(nets.graph_of(nets.dense_net, level), optimizer=optimizer, threads=1)


def on_gpu(cpu: Step, fake: FakeCuda | None = None, target: CudaTarget = TARGET) -> Step:
    """The same step for a GPU, with the same state."""
    parts = [contained(part) for part in cpu.compiled]
    if fake is not None:
        for compiled, made in zip(cpu.compiled, parts, strict=True):
            serve(fake, compiled, made)
    step = Step(*parts, target=target, optimizer=cpu.optimizer, model=cpu.model)
    step.load_state_dict(cpu.state_dict())
    return step


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch, FakeCuda())


@pytest.fixture(scope="module")
def made() -> Step:
    return on_cpu(SGD(0.1, momentum=0.9))


@pytest.fixture
def cpu(made: Step) -> Step:
    state = made.state_dict()
    made.reset_optimizer()
    made.lr = 0.1
    yield made
    made.load_state_dict(state)


class OnDevice:
    """An array in the stand-in's device memory, as another library would have it."""

    def __init__(self, array: np.ndarray, start: int = 0) -> None:
        raw = (ctypes.c_uint8 * (array.nbytes + 512))()
        self.skip = -ctypes.addressof(raw) % 256 + start
        self.array = np.frombuffer(raw, array.dtype, array.size, self.skip).reshape(array.shape)
        self.array[...] = array
        self.streams: list[int] = []

    @property
    def address(self) -> int:
        return self.array.ctypes.data

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, 0

    def __dlpack__(self, stream: int) -> Any:
        self.streams.append(stream)
        return dlpack.to_capsule(self.address, self.array.shape, self.array.dtype, 0, self)


def same_state(a: Step, b: Step) -> None:
    for name, value in a.state_dict().items():
        np.testing.assert_array_equal(b.state_dict()[name], value, err_msg=name)


@pytest.mark.parametrize("optimizer", [SGD(0.1, momentum=0.9, weight_decay=0.1), AdamW(0.01), None])
@pytest.mark.parametrize("seed", range(3))
def test_a_graph_in_any_order_that_its_edges_allow_does_what_the_cpu_does(monkeypatch, optimizer, seed):
    fake = install(monkeypatch, FakeCuda(seed=seed))
    cpu = on_cpu(optimizer)
    gpu = on_gpu(cpu, fake)
    for i in range(3):
        assert gpu(*nets.batch(i)) == cpu(*nets.batch(i))
    same_state(cpu, gpu)
    np.testing.assert_array_equal(gpu.evaluate(nets.batch()[0]), cpu.evaluate(nets.batch()[0]))
    for name, value in cpu.gradients().items():
        np.testing.assert_array_equal(gpu.gradients()[name], value)
    assert len(fake.executables) == 2 and fake.count("cuGraphLaunch") == 4 and "cuLaunchKernel" not in fake.log


def test_phases_by_themselves_and_profiles_do_the_same(fake, cpu):
    gpu = on_gpu(cpu, fake)
    a, b = nets.batch(0), nets.batch(1)
    assert gpu.forward(*a) == cpu.forward(*a)
    with pytest.raises(BnfuseError, match="update needs a backward"):
        gpu.update()
    gpu.forward(*a), gpu.backward(), gpu.update()
    cpu.backward(), cpu.update()
    times = gpu.profile(*b)
    assert [(t.phase, t.node, t.kernel) for t in times] == [(t.phase, t.node, t.kernel) for t in cpu.profile(*b)]
    assert all(t.seconds == 0.0005 for t in times)
    same_state(cpu, gpu)
    for name, value in cpu.outputs.items():
        np.testing.assert_array_equal(gpu.outputs[name], value)


def test_learning_rate_and_count_reach_their_nodes_and_nothing_else_is_updated(fake):
    cpu = on_cpu(AdamW(0.01))
    gpu = on_gpu(cpu, fake)
    for i in range(4):
        gpu.lr = cpu.lr = 0.01 / (i + 1)
        assert gpu(*nets.batch(i)) == cpu(*nets.batch(i))
    same_state(cpu, gpu)
    assert len(gpu.program.phase("update")) == 1
    assert fake.updates == ["second"] * 3


def test_arrays_on_the_device_are_read_where_they_lie(fake, cpu):
    gpu = on_gpu(cpu, fake)
    gpu(*nets.batch(9)), cpu(*nets.batch(9))
    copies = fake.count("cuMemcpyHtoDAsync")
    batches = [[OnDevice(array) for array in nets.batch(i)] for i in range(3)]
    losses = [gpu(*arrays) for arrays in batches]
    assert fake.count("cuMemcpyHtoDAsync") == copies
    assert batches[0][0].streams == [gpu.stream]
    assert all(isinstance(loss, DeviceArray) and loss.shape == () for loss in losses)
    assert [float(loss) for loss in losses] == [cpu(*nets.batch(i)) for i in range(3)]  # later steps left them alone
    assert gpu(*nets.batch(3)) == cpu(*nets.batch(3))  # from the host again
    same_state(cpu, gpu)
    logits = gpu.evaluate(batches[0][0])
    np.testing.assert_array_equal(logits.numpy(), cpu.evaluate(nets.batch(0)[0]))


def test_the_same_array_again_costs_no_update(fake, cpu):
    gpu = on_gpu(cpu, fake)
    arrays = [OnDevice(array) for array in nets.batch()]
    gpu.lr = 0.0
    gpu(*arrays), gpu(*arrays)
    updates = len(fake.updates)
    gpu(*arrays)
    assert len(fake.updates) == updates
    gpu(*(OnDevice(array) for array in nets.batch()))
    assert len(fake.updates) > updates


def test_a_call_with_arrays_on_the_device_waits_for_nothing(fake, cpu):
    gpu = on_gpu(cpu, fake)
    arrays = [OnDevice(array) for array in nets.batch()]
    gpu(*arrays)
    before = len(fake.log)
    gpu(*arrays)
    assert not {"cuStreamSynchronize", "cuMemAlloc", "cuMemcpyDtoHAsync"} & set(fake.log[before:])


def test_strided_misaligned_and_foreign_types_are_copied(fake, cpu):
    gpu = on_gpu(cpu, fake)
    images, labels = nets.batch()
    wanted = cpu(images, labels)
    channels_last = OnDevice(np.ascontiguousarray(images.transpose(0, 2, 3, 1)))
    state = gpu.state_dict()

    class Turned(OnDevice):
        def __dlpack__(self, stream: int) -> Any:
            self.turned = channels_last.array.transpose(0, 3, 1, 2)
            return self.turned.__dlpack__()

    for given in (Turned(images), OnDevice(images, start=4), OnDevice(images.astype(np.float64))):
        gpu.load_state_dict(state)
        assert float(gpu(given, OnDevice(labels.astype(np.int32)))) == wanted


@pytest.mark.parametrize("place", [OnDevice, np.asarray])
def test_inputs_that_do_not_fit_are_one_line(fake, cpu, place):
    gpu = on_gpu(cpu, fake)
    images, labels = nets.batch()
    for given, message in (
        ((place(images[:3]), labels), r"'image' has the shape \[3, 3, 8, 8\], the graph takes"),
        ((place(images), place(labels.astype(np.float32))), "is float32, the graph takes int64"),
    ):
        with pytest.raises(BnfuseError, match=message) as caught:
            gpu(*given)
        assert "\n" not in str(caught.value)
    with pytest.raises(BnfuseError, match="takes 2 inputs"):
        gpu(place(images))
    with pytest.raises(BnfuseError, match="labels from 7 to 7"):
        gpu(nets.batch()[0], np.full(4, 7))


def test_another_gpu_s_arrays_are_refused(fake, cpu):
    class Elsewhere(OnDevice):
        def __dlpack__(self, stream: int) -> Any:
            return dlpack.to_capsule(self.address, self.array.shape, self.array.dtype, 3, self)

    with pytest.raises(BnfuseError, match="'image' is on GPU 3, the step on GPU 0"):
        on_gpu(cpu, fake)(Elsewhere(nets.batch()[0]), nets.batch()[1])


def test_an_array_that_runs_backwards_is_refused(fake, cpu):
    class Backwards(OnDevice):
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {**self.array[::-1].__array_interface__, "stream": None, "version": 3}

        __dlpack__ = __dlpack_device__ = property()  # type: ignore[assignment]

    with pytest.raises(BnfuseError, match="'image' runs backwards along an axis"):
        on_gpu(cpu, fake)(Backwards(nets.batch()[0]), nets.batch()[1])


def test_results_stay_on_the_device_for_whoever_wants_them(fake, cpu):
    gpu = on_gpu(cpu, fake)
    assert gpu(*nets.batch()) == cpu(*nets.batch())
    logits, gradient = cpu.program.signature["logits"], next(iter(cpu.program.gradients))
    for find, wanted in (
        (lambda: gpu.device_output(logits), lambda: cpu.outputs[logits]),
        (lambda: gpu.device_gradient(gradient), lambda: cpu.gradients()[gradient]),
        (lambda: gpu.device_state(gradient), lambda: cpu.state_dict()[gradient]),
    ):
        mine, theirs = find(), wanted()
        np.testing.assert_array_equal(np.asarray(mine), theirs)
        assert (mine.shape, mine.dtype, mine.__dlpack_device__()) == (theirs.shape, theirs.dtype, (dlpack.CUDA, 0))
        fake.waits.clear()
        view = dlpack.from_capsule(mine.__dlpack__(stream=55))
        assert fake.waits == [(55, gpu.stream)]  # the consumer waits for us,
        np.testing.assert_array_equal(floats(view.address, mine.numpy().size).reshape(mine.shape), theirs)
        fake.waits.clear()
        assert gpu(*nets.batch()) == cpu(*nets.batch())
        assert (gpu.stream, 55) in fake.waits  # and the next step for the consumer
        interface = mine.__cuda_array_interface__
        assert interface["data"][0] == mine.address and interface["stream"] == gpu.stream
        fake.waits.clear()
        gpu(*nets.batch())
        cpu(*nets.batch())
        assert (gpu.stream, 0) in fake.waits  # that interface names no reader: the default stream stands for all
    with pytest.raises(BnfuseError, match="no gradient of a parameter 'nobody'"):
        gpu.device_gradient("nobody")
    with pytest.raises(BufferError):
        gpu.device_output(logits).__dlpack__(dl_device=(dlpack.CPU, 0))
    with pytest.raises(BnfuseError, match="compile it for cuda"):
        cpu.device_output(logits)


def test_memory_of_results_is_used_again_behind_their_readers(fake, cpu):
    gpu = on_gpu(cpu, fake)
    arrays = [OnDevice(array) for array in nets.batch()]
    loss = gpu(*arrays)
    address = loss.address
    view = dlpack.from_capsule(loss.__dlpack__(stream=55))
    del loss
    gc.collect()
    assert gpu(*arrays).address != address  # somebody has it
    fake.waits.clear()
    del view
    gc.collect()
    assert fake.waits == [(gpu.stream, 55)]
    assert gpu(*arrays).address == address or gpu(*arrays).address == address


def test_another_stream_goes_on_where_the_first_one_is(fake, cpu):
    gpu = on_gpu(cpu, fake)
    gpu(*nets.batch())
    own, given = gpu.stream, OnDevice(nets.batch()[0])
    fake.waits.clear()
    gpu.stream = 4242
    assert gpu.stream == 4242 and fake.waits == [(4242, own)]
    gpu(given, nets.batch()[1])
    assert given.streams == [4242]

    class Torch:
        cuda_stream = 77

    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 88

    for stream, address in ((Torch(), 77), (Protocol(), 88), (1, 0)):
        gpu.stream = stream
        assert gpu.stream == address
    for stream in (None, "x", object()):
        with pytest.raises(BnfuseError, match="no CUDA stream"):
            gpu.stream = stream
    with pytest.raises(BnfuseError, match="compile it for cuda"):
        cpu.stream = 3


def test_state_goes_to_files_and_back(fake, cpu, tmp_path):
    gpu = on_gpu(cpu, fake)
    for i in range(2):
        gpu(*nets.batch(i)), cpu(*nets.batch(i))
    gpu.save(tmp_path / "gpu.safetensors")
    cpu.save(tmp_path / "cpu.safetensors")
    mine, theirs = (read_safetensors(tmp_path / f"{name}.safetensors") for name in ("gpu", "cpu"))
    assert mine[1] == theirs[1] and mine[0].keys() == theirs[0].keys()
    assert all(np.array_equal(mine[0][name], value) for name, value in theirs[0].items())
    other = on_gpu(cpu, fake)
    other.load(tmp_path / "cpu.safetensors")
    assert other.steps == 2 and other(*nets.batch(5)) == cpu(*nets.batch(5))
    assert other(*nets.batch(6)) == cpu(*nets.batch(6))
    gpu.load_state_dict({name: OnDevice(value) for name, value in cpu.state_dict().items()})
    same_state(cpu, gpu)


def test_memory_is_one_block_a_region_and_is_given_back(fake, cpu):
    gpu = on_gpu(cpu, fake)
    assert not fake.blocks  # nothing is taken before something runs
    gpu(*nets.batch()), gpu.evaluate(nets.batch()[0])
    codes = sum({code: len(code) for part in gpu.compiled for code in part.codes}.values())
    assert abs(fake.used - (gpu.device_bytes - codes)) < 64  # an empty region takes a byte
    del gpu
    gc.collect()
    assert not fake.blocks and not fake.host_blocks and not fake.executables and not fake.graphs


def test_too_little_memory_is_one_line_and_loses_no_state(monkeypatch, cpu):
    fake = install(monkeypatch, FakeCuda(memory=50_000))
    gpu = on_gpu(cpu, fake)
    with pytest.raises(BnfuseError, match=r"the GPU's memory does not suffice: the step's .* takes .* are free"):
        gpu(*nets.batch())
    same_state(cpu, gpu)
    gc.collect()
    fake.memory = 1 << 30
    assert gpu(*nets.batch()) == cpu(*nets.batch())


def test_a_wrong_architecture_and_no_gpu_show_when_it_runs(monkeypatch, cpu, tmp_path):
    gpu = on_gpu(cpu, install(monkeypatch, FakeCuda("sm_80")))
    with pytest.raises(BnfuseError, match=r"compiled for sm_90; the GPU here .Fake GPU. is sm_80"):
        gpu(*nets.batch())
    fake = install(monkeypatch, FakeCuda())
    fake.fail["cuInit"] = CUresult.CUDA_ERROR_NO_DEVICE
    with pytest.raises(BnfuseError, match="no NVIDIA GPU here"):
        gpu(*nets.batch())
    gpu.export(tmp_path / "step.bnf")
    gpu.synchronize()
    same_state(cpu, load_step(tmp_path / "step.bnf"))


def test_code_that_does_not_fit_its_launches_is_refused(cpu):
    parts = [contained(part) for part in cpu.compiled]
    codes = list(parts[0].codes)
    header, _, cubin = codes[0].partition(b"\n")
    data = json.loads(header)
    data["parameters"].append(["more", "int32"])
    codes[0] = json.dumps(data).encode() + b"\n" + cubin
    with pytest.raises(BnfuseError, match="arguments are not those of kernel"):
        Step(Compiled(parts[0].program, codes), parts[1], target=TARGET)


def test_float16_scales_its_loss_and_others_do_not(cpu):
    assert on_gpu(cpu).loss_scale == 1.0
    step = on_gpu(cpu, target=CudaTarget("sm_90", 132, "fp16"))
    assert step.loss_scale > 1.0 and not step.skipped
    step.loss_scale = 64.0
    with pytest.raises(BnfuseError, match="a number above 0"):
        step.loss_scale = 0.0
    with pytest.raises(BnfuseError, match="has no loss scale"):
        cpu.loss_scale = 64.0


def test_an_artifact_runs_without_tvm(cpu, tmp_path):
    """It is loaded, looked at and saved; running it tells that there is no GPU, or no driver."""
    path = tmp_path / "step.bnf"
    on_gpu(cpu).export(path)
    script = f"""
import sys
for name in ("tvm", "tvm_ffi", "tvm_ffi_orcjit", "onnxruntime", "torch"):
    sys.modules[name] = None
import numpy as np
from bnfuse.runtime import load_step
from bnfuse.core.errors import BnfuseError
import bnfuse.runtime.backends.cuda.runner
step = load_step({str(path)!r})
step.save({str(tmp_path / "state.safetensors")!r})
assert step.report.launches and step.device_bytes and step.state_dict()
import bnfuse.runtime.backends.cuda.driver as driver
driver.bindings = lambda: (_ for _ in ()).throw(BnfuseError("nothing to drive"))
try:
    step(np.zeros((4, 3, 8, 8), np.float32), np.zeros(4, np.int64))
except BnfuseError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "nothing to drive\n"
    with pytest.raises(BnfuseError, match="takes no number of threads"):
        load_step(path, threads=2)


def test_running_statistics_are_copied_in_as_few_pieces_as_there_can_be():
    assert merged([(0, 0, 64), (64, 64, 4), (128, 128, 4)]) == [(0, 0, 132)]
    assert merged([(128, 64, 64), (0, 0, 64)]) == [(0, 0, 64), (128, 64, 64)]
    assert merged([(0, 0, 4), (4, 4, 4)]) == [(0, 0, 4), (4, 4, 4)] and merged([]) == []


def test_a_forked_process_is_told_that_it_cannot_use_the_gpu(fake, cpu):
    step = on_gpu(cpu, fake)
    step(*nets.batch())
    device = step._train.device
    device.driver.process = -1  # as if another one had opened it
    with pytest.raises(BnfuseError, match=r"forked process cannot use the GPU.*spawn"):
        step(*nets.batch())
    device.driver.process = os.getpid()
