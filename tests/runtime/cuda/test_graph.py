"""Graphs of tasks: which kernels wait for others themselves, and what is compiled for that."""

from __future__ import annotations

import cuda_kernels
import pytest
from cuda_structure import body_of
from fake_cuda import FakeCuda, FakeKernel, install

from bnfuse.runtime.backends.cuda.calls import Task
from bnfuse.runtime.backends.cuda.dependencies import Access
from bnfuse.runtime.backends.cuda.driver import Arguments, Call, open_driver
from bnfuse.runtime.backends.cuda.graph import Graph
from bnfuse.runtime.kernels.cuda import layout
from bnfuse.runtime.kernels.cuda.compile import cuda_source, symbol_of
from bnfuse.runtime.kernels.kernel import MapType
from bnfuse.runtime.program import program as p


def access(start: int, *, writes: bool) -> Access:
    return Access("arena", start, start + 8, reads=not writes, writes=writes)


@pytest.mark.parametrize("waits", [True, False])
def test_a_kernel_waits_itself_for_kernels_but_not_for_copies(monkeypatch, waits):
    fake = install(monkeypatch, FakeCuda())
    fake.kernels["k"] = FakeKernel((), lambda: None)
    driver = open_driver()
    with driver.active():
        function = driver.function(driver.load(b"code", "sm_90", "k"), "k", 0)
        blocks = [driver.allocate(8, "a block") for _ in range(2)]
        call = Call(function, (1, 1, 1), 32, 0, Arguments(()), waits)
        first = Task("forward", ((access(0, writes=True),),), (call,))
        copied = Task("forward", ((access(0, writes=False), access(8, writes=True)),), copy=(*blocks, 8))
        last = Task("forward", ((access(0, writes=True), access(16, writes=True)),), (call,))
        both = Task("forward", ((access(0, writes=False), access(8, writes=False)),), (call,))
        graph = Graph(driver, [first, first, copied, last, both])
        (nodes,) = fake.graphs.values()
        assert [node.after for node in nodes] == [[], [0], [1], [2], [3]]
        assert [node.early for node in nodes] == [[], [0] if waits else [], [], [], [3] if waits else []]
        graph.launch(0)
    assert fake.launched == ["k"] * 4


def test_none_comes_to_the_gpu_before_a_kernel_that_waits_for_other_ranks_is_done(monkeypatch):
    fake = install(monkeypatch, FakeCuda())
    fake.kernels["k"] = FakeKernel((), lambda: None)
    driver = open_driver()
    with driver.active():
        function = driver.function(driver.load(b"code", "sm_90", "k"), "k", 0)
        call = Call(function, (1, 1, 1), 32, 0, Arguments(()), True)
        box = Access(p.MAPPED, 0, 8, reads=True, writes=True)
        parts = [(access(0, writes=True),), (access(0, writes=True), box), (access(0, writes=False),)]
        graph = Graph(driver, [Task("forward", (part,), (call,)) for part in parts])
        (nodes,) = fake.graphs.values()
        assert [node.after for node in nodes] == [[], [0], [1]]
        assert [node.early for node in nodes] == [[], [0], []]
        graph.launch(0)


def test_kernels_that_wait_for_other_ranks_are_on_the_gpu_one_at_a_time(monkeypatch):
    """Of two branches one rank could have the first one's on all of its GPU, and another rank the second one's."""
    fake = install(monkeypatch, FakeCuda())
    fake.kernels["k"] = FakeKernel((), lambda: None)
    driver = open_driver()
    header = Access(p.MAPPED, 0, 64, reads=True, writes=False)
    boxes = [Access(p.MAPPED, start, start + 8, reads=True, writes=True) for start in (64, 128)]
    with driver.active():
        function = driver.function(driver.load(b"code", "sm_90", "k"), "k", 0)
        call = Call(function, (1, 1, 1), 32, 0, Arguments(()), True)
        graph = Graph(driver, [Task("forward", ((header, box),), (call,)) for box in boxes])
        (nodes,) = fake.graphs.values()
        assert [node.after for node in nodes] == [[], [0]]
        graph.launch(0)


def test_stages_wait_before_anything_else_where_the_architecture_can():
    kind = MapType(2, 3, 3, 16, 16, "bfloat16")
    for arch in ("sm_80", "sm_90", "sm_100"):
        kernel = layout.copy_map(kind, kind, cuda_kernels.gpu("bf16", arch), "bfloat16")
        stages = kernel.build()
        source = cuda_source(stages, arch)
        bodies = [body_of(source, symbol_of(stage)).split("\n") for stage in stages]
        starts = [[line.split('"')[1] if '"' in line else "" for line in body[:2]] for body in bodies]
        waiting = ["griddepcontrol.wait;", "griddepcontrol.launch_dependents;"]
        assert all((start == waiting) == (arch != "sm_80") for start in starts)
        assert source.count("griddepcontrol") == (0 if arch == "sm_80" else 2 * len(stages))
