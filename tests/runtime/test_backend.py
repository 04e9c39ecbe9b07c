"""Backends: each for its kind of target; a torch that is installed but does not work is named as that."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.core.interpreter import import_root
from bnfuse.runtime.backends.backend import backend_named, backend_of
from bnfuse.runtime.targets.target import CpuTarget, CudaTarget


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('raise RuntimeError("libtorch_cpu.so: file too short")', "libtorch_cpu.so: file too short"),
        ("import no_such_part_of_torch", "No module named 'no_such_part_of_torch'"),
        ("", "lacks torch.Tensor"),
    ],
)
def test_a_half_installed_torch_is_named(tmp_path, text, said):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(text)
    code = """
import sys, bnfuse
try:
    from bnfuse.runtime import compile_step
    from bnfuse.runtime.backends.resolve import resolve
    resolve("cpu")
    print("loads")
except bnfuse.BnfuseError as error:
    print(error)
"""
    places = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
    )
    line = done.stdout.strip()
    assert "\n" not in line
    # TVM takes a torch that lacks a module for one that is not installed
    assert line == "loads" or (line.startswith("torch is installed but does not work") and said in line), line
    assert line != "loads" or said.startswith("No module")


TARGETS = [CpuTarget("x86-64", 4, 2), CudaTarget("sm_90", 132, "bf16")]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.backend)
def test_each_kind_of_target_has_a_backend_that_knows_its_own(target):
    backend = backend_of(target)
    assert type(backend) is type(backend_named(target.backend))
    spec = getattr(target, "mcpu", None) or target.architecture
    threads = getattr(target, "threads", None)
    assert backend.resolve(spec, threads, target.precision) == target
    assert backend.versions(target) and all(isinstance(text, str) for text in backend.versions(target))


def test_there_is_no_backend_of_another_name():
    with pytest.raises(KeyError, match="abacus"):
        backend_named("abacus")


def test_a_step_for_a_gpu_takes_no_number_of_threads():
    gpu = CudaTarget("sm_90", 132)
    backend_of(gpu).check(gpu, (), None)
    with pytest.raises(BnfuseError, match="takes no number of threads"):
        backend_of(gpu).check(gpu, (), 2)


def test_the_backend_of_a_gpu_loads_nothing_of_a_cpu_s():
    code = """
import sys
sys.modules["tvm"] = None
from bnfuse.runtime.backends.backend import backend_of
from bnfuse.runtime.targets.target import CudaTarget
backend_of(CudaTarget("sm_90", 132)).features(CudaTarget("sm_90", 132))
import bnfuse.runtime.backends.cuda.runner
print([name for name in sys.modules if name.startswith("bnfuse.runtime.backends.cpu")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=import_root())
    assert done.stdout.strip() == "[]"
