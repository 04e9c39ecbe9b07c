"""`step.bnf`: written, read, run elsewhere; damage and foreign processors are one line."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import zipfile

import numpy as np
import onnx
import onnx.helper as h
import pytest

from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.training_graph import open_graph
from bnfuse.models import build_forward
from bnfuse.passes import rewrite
from bnfuse.runtime import SGD, Step, compile_step, load_step
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.compile import lower_graph
from bnfuse.runtime.program import program as p

BATCH, FEATURES, CLASSES = 4, 8, 3


def perceptron() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((CLASSES, FEATURES)), "b": np.zeros(CLASSES)}
    graph = h.make_graph(
        [
            h.make_node("Relu", ["x"], ["a"], name="relu"),
            h.make_node("Gemm", ["a", "w", "b"], ["y"], transB=1, name="fc"),
        ],
        "net",
        [h.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [BATCH, FEATURES])],
        [h.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [BATCH, CLASSES])],
        [onnx.numpy_helper.from_array(v.astype(np.float32), k) for k, v in weights.items()],
    )
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)


def batch(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((BATCH, FEATURES)).astype(np.float32), rng.integers(0, CLASSES, BATCH)


@pytest.fixture(scope="module")
def step() -> Step:
    return compile_step(build_training_graph(perceptron()), optimizer=SGD(0.5, momentum=0.9), threads=2)


@pytest.fixture
def exported(step, tmp_path) -> pathlib.Path:
    path = tmp_path / "step.bnf"
    step.export(path)
    return path


def rewritten(path: pathlib.Path, **changes: object) -> pathlib.Path:
    """The file with some keys of its manifest changed."""
    other = path.with_name("other.bnf")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(other, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name == "manifest.json":
                data = json.dumps({**json.loads(data), **changes}).encode()
            target.writestr(name, data)
    return other


def test_a_loaded_step_does_what_the_exported_one_does(step, exported):
    loaded = load_step(exported)
    assert loaded.optimizer == step.optimizer
    assert loaded.program == step.program or loaded.program.launches == step.program.launches
    for name, value in step.state_dict().items():
        np.testing.assert_array_equal(loaded.state_dict()[name], value)
    assert [loaded(*batch(i)) for i in range(4)] == [step(*batch(i)) for i in range(4)]
    np.testing.assert_array_equal(loaded.evaluate(batch()[0]), step.evaluate(batch()[0]))


def test_the_file_holds_data_and_code_and_no_pickle(exported):
    with zipfile.ZipFile(exported) as file:
        names = file.namelist()
        assert {"manifest.json", "state.safetensors", "initial.safetensors", "model.onnx"} < set(names)
        assert all(
            name.startswith("code/") and name.endswith(".o")
            for name in set(names) - {"manifest.json", "state.safetensors", "initial.safetensors", "model.onnx"}
        )
        onnx.checker.check_model(onnx.load_from_string(file.read("model.onnx")))
    assert [path.name for path in exported.parent.iterdir()] == ["step.bnf"]


def test_another_process_runs_it_without_tools_or_cache(exported, tmp_path):
    script = f"""
import numpy as np
from bnfuse.runtime import load_step
step = load_step({str(exported)!r})
rng = np.random.default_rng(0)
x, y = rng.standard_normal(({BATCH}, {FEATURES})).astype(np.float32), rng.integers(0, {CLASSES}, {BATCH})
losses = [step(x, y) for _ in range(5)]
assert losses[-1] < losses[0], losses
"""
    environment = {**os.environ, "PATH": "", "BNFUSE_CACHE": str(tmp_path / "unused")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "unused").exists()


def one_line(path: pathlib.Path) -> str:
    with pytest.raises(BnfuseError) as caught:
        load_step(path)
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)
    return str(caught.value)


def test_a_truncated_file_is_refused(exported):
    data = exported.read_bytes()
    for size in (0, 100, len(data) // 2, len(data) - 1):
        exported.write_bytes(data[:size])
        one_line(exported)


def test_a_foreign_file_is_refused(tmp_path):
    text, archive = tmp_path / "text.bnf", tmp_path / "zip.bnf"
    text.write_text("hello")
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("manifest.json", '{"format": "something else"}')
    assert "compile the model again" in one_line(text)
    assert "not a compiled step" in one_line(archive)
    assert "no such file" in one_line(tmp_path / "missing.bnf")
    assert one_line(tmp_path) == f"{tmp_path}: cannot be read: Is a directory"


def test_a_flipped_bit_anywhere_is_one_line_or_harmless(exported):
    data, rng = exported.read_bytes(), np.random.default_rng(0)
    for position in rng.integers(0, len(data), 60):
        exported.write_bytes(data[:position] + bytes([data[position] ^ (1 << position % 8)]) + data[position + 1 :])
        try:
            load_step(exported)
        except BnfuseError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    "change",
    [
        lambda program: program["regions"].update(arena=10**15),
        lambda program: program["regions"].update(arena=-5),
        lambda program: program["launches"][0].__setitem__(1, 999),
        lambda program: program["launches"][0].__setitem__(0, "sideways"),
        lambda program: program["launches"][0][3].__setitem__(0, [9999, "in"]),
        lambda program: program["storages"][0].__setitem__(1, 10**9),
        lambda program: [storage.__setitem__(1, 4) for storage in program["storages"] if storage[2] > 1],
    ],
    ids=["huge", "negative", "kernel", "phase", "storage", "outside", "unaligned"],
)
def test_a_program_that_does_not_hold_together_is_refused(exported, change):
    with zipfile.ZipFile(exported) as file:
        programs = json.loads(file.read("manifest.json"))["programs"]
    program = json.loads(programs["training"])
    change(program)
    one_line(rewritten(exported, programs={**programs, "training": json.dumps(program)}))


@pytest.mark.parametrize(
    "change",
    [
        lambda arguments: arguments.reverse(),
        lambda arguments: arguments.pop(),
        lambda arguments: arguments.append(0),
        lambda arguments: arguments.__setitem__(0, "lr"),
        lambda arguments: arguments.__setitem__(0, 0),
    ],
    ids=["order", "fewer", "more", "scalar", "offset"],
)
def test_a_kernel_that_gets_other_arguments_is_refused(exported, change):
    with zipfile.ZipFile(exported) as file:
        programs = json.loads(file.read("manifest.json"))["programs"]
    program = json.loads(programs["training"])
    change(max((launch[3] for launch in program["launches"]), key=len))
    message = one_line(rewritten(exported, programs={**programs, "training": json.dumps(program)}))
    assert "other arguments than it takes" in message


def test_a_storage_of_another_size_is_refused(exported):
    with zipfile.ZipFile(exported) as file:
        programs = json.loads(file.read("manifest.json"))["programs"]
    program = json.loads(programs["training"])
    taken = next(a[0] for _, _, _, arguments in program["launches"] for a in arguments if isinstance(a, list))
    program["storages"][taken][2] -= 1
    message = one_line(rewritten(exported, programs={**programs, "training": json.dumps(program)}))
    assert "other arguments than it takes" in message


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90"])
def test_one_kernel_serves_layers_of_any_width(target):
    """A CPU's kernels of coefficients have no length; what they are given has one."""
    graph = build_training_graph(build_forward("densenet40", batch=2, image=8, depth=2, growth=4))
    found = rewrite(open_graph(graph).model, level="icf").model
    program = lower_graph(open_graph(found), resolve(target, precision="bf16"), SGD(0.1))[0].program
    text = p.to_json(program)
    p.from_json(text, program.initial)
    finalize = [launch for launch in program.launches if "finalize" in launch.node]
    assert len({p.given(launch, program.storages) for launch in finalize}) > 2
    if target == "cpu":
        assert len({launch.kernel for launch in finalize if launch.phase == "forward"}) == 1
    data = json.loads(text)
    first = data["storages"][finalize[0].buffers[0].storage]
    first[2] += 8
    with pytest.raises(BnfuseError, match="other arguments than it takes"):
        p.from_json(json.dumps(data), program.initial)


def test_the_code_of_another_kernel_is_one_line(exported):
    """Each kernel is found by a name of its own."""
    with zipfile.ZipFile(exported) as file:
        kernels = json.loads(file.read("manifest.json"))["kernels"]
    turned = {part: codes[1:] + codes[:1] for part, codes in kernels.items()}
    assert "does not load" in one_line(rewritten(exported, kernels=turned))


def test_a_target_of_another_kind_is_refused(exported):
    with zipfile.ZipFile(exported) as file:
        target = json.loads(file.read("manifest.json"))["target"]
    assert "its target is 'abacus'" in one_line(rewritten(exported, target={**target, "kind": "abacus"}))


def test_an_inflated_manifest_is_not_read(tmp_path):
    path = tmp_path / "bomb.bnf"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file, file.open("manifest.json", "w") as stream:
        for _ in range(65):
            stream.write(bytes(1 << 20))
    assert "manifest is too large" in one_line(path)


def test_no_machine_has_a_million_threads(exported):
    with zipfile.ZipFile(exported) as file:
        target = json.loads(file.read("manifest.json"))["target"]
    assert "1000000 threads" in one_line(rewritten(exported, target={**target, "threads": 10**6}))


def test_a_place_that_cannot_be_written_is_one_line(step, tmp_path):
    for write in (step.export, step.save):
        with pytest.raises(BnfuseError, match="cannot be written"):
            write(tmp_path / "missing" / "file")


def test_damaged_code_is_never_loaded(exported):
    other = exported.with_name("other.bnf")
    with zipfile.ZipFile(exported) as source, zipfile.ZipFile(other, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, data[:-1] + bytes([data[-1] ^ 1]) if name.startswith("code/") else data)
    assert "damaged" in one_line(other)


def test_code_for_another_processor_is_refused_before_it_runs(exported):
    other = rewritten(exported, features=["avx2", "avx512imaginary"])
    assert "lacks avx512imaginary" in one_line(other) or "lacks avx2" in one_line(other)


def test_another_version_says_so(exported):
    assert "format version 99" in one_line(rewritten(exported, version=99))


def test_another_number_of_threads_is_refused(exported):
    with pytest.raises(BnfuseError, match="2 threads, not 1"):
        load_step(exported, threads=1)
