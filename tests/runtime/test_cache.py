"""The kernel cache: keys, damage, several processes, and loading without any tool on the PATH."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import pickle
import subprocess
import sys

import numpy as np
import pytest
import tvm

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.backends.cpu.library import Library
from bnfuse.runtime.backends.launching import launch
from bnfuse.runtime.backends.memory import aligned
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.codegen import cache as cache_module
from bnfuse.runtime.codegen.build import compile_kernel, objects
from bnfuse.runtime.codegen.cache import Cache, content_key, default_folder
from bnfuse.runtime.kernels.kernel import MapType, Problem
from bnfuse.runtime.kernels.registry import POINTWISE_FORWARD
from bnfuse.runtime.kernels.request import Request
from bnfuse.runtime.targets.cpus import LEVEL, LEVELS

TARGET = resolve("cpu", 1)
START = {"x": 0, "y": 0}


def relu(channels: int, target=TARGET) -> Request:
    kind = MapType(1, 2, 2, channels, channels)
    return Request(POINTWISE_FORWARD, (Problem("ReluPointwise", (("x", kind), ("y", kind))), target))


def key_of(request: Request) -> str:
    return content_key(request.kernel(), request.kind)


def run(request: Request, code: bytes) -> None:
    kernel = request.kernel()
    (function,) = (library := Library([kernel.name], [code])).functions
    size = kernel.params[0].elements
    x, y = (aligned(size * 4).view(np.float32) for _ in range(2))
    x[:] = np.arange(size) - size / 2
    views = [tvm.runtime.from_dlpack(array) for array in (x, y)]
    launch(1, lambda: function(*views, 0, 0))
    del library
    np.testing.assert_array_equal(y, np.maximum(x, 0))


@pytest.fixture
def compiled(monkeypatch):
    """Names of the kernels that were compiled."""
    names: list[str] = []
    from bnfuse.runtime.codegen import build

    compile_kernel = build.compile_kernel
    monkeypatch.setattr(build, "compile_kernel", lambda kernel: (names.append(kernel.name), compile_kernel(kernel))[1])
    return names


def test_a_second_build_compiles_nothing_and_runs(tmp_path, compiled):
    request = relu(4)
    (first,) = objects([request], Cache(tmp_path))
    (second,) = objects([request], Cache(tmp_path))
    assert first == second
    assert len(compiled) == 1
    run(request, second)


def test_equal_problems_are_compiled_once(tmp_path, compiled):
    codes = objects([relu(4), relu(8), relu(4)], Cache(tmp_path))
    assert len(compiled) == 2
    assert codes[0] == codes[2] != codes[1]


def test_a_damaged_entry_is_built_anew(tmp_path, compiled):
    request = relu(4)
    objects([request], Cache(tmp_path))
    (entry,) = tmp_path.rglob("*.kernel")
    whole = entry.read_bytes()
    for damage in (whole[:-100], b"", whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]):
        entry.write_bytes(damage)
        (code,) = objects([request], Cache(tmp_path))
    assert len(compiled) == 4
    run(request, code)


def test_progress_counts_what_is_compiled(tmp_path):
    seen: list[tuple[int, int]] = []
    objects([relu(4), relu(8)], Cache(tmp_path), progress=lambda done, total, name: seen.append((done, total)))
    objects([relu(4), relu(8)], Cache(tmp_path), progress=lambda done, total, name: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


def test_the_key_knows_the_problem_the_target_and_the_sources(monkeypatch):
    key = key_of(relu(4))
    assert key == key_of(relu(4))
    assert key != key_of(relu(8))
    assert key != key_of(relu(4, dataclasses.replace(TARGET, threads=2)))
    with monkeypatch.context() as other:
        other.setenv(LEVEL, "2")
        assert key != key_of(relu(4))
    monkeypatch.setattr(cache_module, "sources_hash", lambda *_: "another generator")
    assert key != key_of(relu(4))


def test_code_is_optimised_as_far_as_the_environment_says(monkeypatch):
    code = {}
    for level in LEVELS:
        monkeypatch.setenv(LEVEL, level)
        code[level] = compile_kernel(relu(20).kernel())
    monkeypatch.delenv(LEVEL)
    assert compile_kernel(relu(20).kernel()) == code["3"]
    assert len(code["0"]) > len(code["1"])


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("BNFUSE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "bnfuse"
    monkeypatch.setenv("BNFUSE_CACHE", str(tmp_path / "here"))
    assert default_folder() == tmp_path / "here"


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def home() -> pathlib.Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("BNFUSE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pathlib.Path, "home", home)
    assert default_folder() is None


def test_a_folder_that_cannot_be_written_does_not_stop_the_build(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    (code,) = objects([relu(4)], Cache(blocked))
    run(relu(4), code)


SCRIPT = """
import sys, pathlib
sys.modules["torch"] = None  # the tests' import of TVM would load it
sys.path.insert(0, {tests!r})
import test_cache as t
code, = t.objects([t.relu(4)], t.Cache(pathlib.Path({folder!r})), progress=lambda *_: print("compiled"))
t.run(t.relu(4), code)
"""


def start(folder: pathlib.Path, path: str) -> subprocess.Popen:
    script = SCRIPT.format(tests=str(pathlib.Path(__file__).parent), folder=str(folder))
    environment = {**os.environ, "PATH": path, "BNFUSE_CACHE": str(folder)}
    environment.pop("CXX", None)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", script], env=environment, **pipes)


def test_processes_share_a_folder_and_need_no_tool_on_the_path(tmp_path):
    both = [start(tmp_path, ""), start(tmp_path, "")]
    for process in both:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    later = start(tmp_path, "")
    printed, errors = later.communicate(timeout=120)
    assert (later.returncode, printed) == (0, ""), errors
    assert len(list(tmp_path.rglob("*"))) == 2  # one folder, one entry, no temporary file left


def test_a_kernel_that_cannot_be_compiled_is_named_by_a_worker_too():
    from bnfuse.runtime.codegen import build

    broken = relu(4, dataclasses.replace(TARGET, lanes=0))
    name = broken.kernel().name
    with pytest.raises(BnfuseError, match=name) as caught:
        build._result(_of_worker(broken, name))
    assert "\n" not in str(caught.value)


def test_a_worker_that_is_killed_says_so():
    from bnfuse.runtime.codegen import build

    with pytest.raises(BnfuseError, match="kernel 'k': its compiler process was killed, as systems do that are short"):
        build._result(_of_worker(relu(4), "k", lambda worker: worker._process.kill()))
    with pytest.raises(BnfuseError, match="kernel 'k': its compiler process ended by SIGTERM"):
        build._result(_of_worker(relu(4), "k", lambda worker: worker._process.terminate()))


def _of_worker(request: Request, name: str, meanwhile=lambda worker: None):
    """What a worker process answers to one request; `meanwhile` something happens to it."""
    import queue

    from bnfuse.runtime.codegen import build

    waiting, finished = queue.SimpleQueue(), queue.SimpleQueue()
    waiting.put(("key", request, name))
    worker = build._Worker(waiting, finished)
    meanwhile(worker)
    try:
        return finished.get(timeout=100)
    finally:
        worker.stop()


def test_a_worker_process_compiles_the_same_code(tmp_path, monkeypatch):
    from bnfuse.runtime.codegen import build

    requests = [relu(c) for c in (4, 8, 12, 16)]
    monkeypatch.setattr(build, "KERNELS_PER_WORKER", 2)
    codes = objects(requests, Cache(tmp_path), workers=2)
    for request, code in zip(requests, codes, strict=True):
        run(request, code)


def test_a_request_makes_its_kernel_once_and_is_sent_without_it():
    request = relu(4)
    assert request.kernel() is request.kernel()
    sent = pickle.loads(pickle.dumps(request))
    assert sent == request
    assert sent.kernel().key == request.kernel().key
