"""Backends: each for its kind of target; TVM loads without torch, and one that is loaded but not whole is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.core.interpreter import import_root
from bnfuse.runtime.backends.backend import backend_named, backend_of
from bnfuse.runtime.targets.target import CpuTarget, CudaTarget

LOADED = """
import sys
{before}
import bnfuse
try:
    from bnfuse.runtime import compile_step
    from bnfuse.runtime.backends.resolve import resolve
    resolve("cpu")
    print("loads", "torch" in sys.modules)
except bnfuse.BnfuseError as error:
    print(error)
"""


def said_of(torch: str, folder: Path, before: str = "") -> str:
    """What a process says that loads TVM, with a package of this text in torch's place."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(torch)
    places = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(before=before)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONPATH": places},
    )
    return done.stdout.strip()


def test_tvm_loads_without_torch_which_need_not_work(tmp_path):
    assert said_of('raise RuntimeError("libtorch_cpu.so: file too short")', tmp_path) == "loads False"


def test_a_loaded_torch_that_is_not_whole_is_named(tmp_path):
    line = said_of("", tmp_path, before="import torch")
    assert line.startswith("torch is loaded but does not work") and "lacks torch.Tensor" in line and "\n" not in line


@pytest.mark.torch
def test_torch_is_found_by_who_imports_it_after_tvm():
    code = (
        LOADED.format(before="")
        + "import torch\nprint(float(torch.nn.functional.conv2d(*[torch.ones(1, 2, 3, 3)] * 2)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["loads", "False", "18.0"]


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
