"""What the host reaches: the cache from chains of growing working sets, and what is remembered of a machine."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from bnfuse.core import processors
from bnfuse.estimating import probe
from bnfuse.estimating.estimate import estimate
from bnfuse.estimating.hardware import HOST, MIB, Hardware
from bnfuse.estimating.workload import Access, Layer, Tensor, Workload
from bnfuse.measuring import idle, limits
from bnfuse.measuring.idle import Quiet
from bnfuse.measuring.limits import Limits

GB = 1e9
CURVE = ((1, 160), (2, 180), (4, 100), (8, 56), (16, 54), (32, 55), (64, 54), (128, 30), (256, 25), (512, 25))


def sets(*curve):
    return tuple((size * MIB, rate * GB) for size, rate in curve)


def test_the_cache_is_the_largest_working_set_that_is_faster_than_memory():
    assert probe.effective_cache(sets(*CURVE)) == (64 * MIB, 54.5 * GB)  # 128 MiB are 1.2 times as fast: noise


def test_a_gap_within_the_cache_does_not_end_it():
    curve = [(size, 26 if size == 16 else rate) for size, rate in CURVE]
    assert probe.effective_cache(sets(*curve))[0] == 64 * MIB


def test_a_machine_whose_copies_are_all_alike_has_a_cache_of_unknown_bandwidth():
    assert probe.effective_cache(sets((1, 20), (8, 21), (512, 20))) == (MIB, None)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine that counts how often it is measured."""
    calls = []

    def measured_limits(threads, working_sets=()):
        calls.append((threads, tuple(working_sets)))
        rates = dict(sets(*CURVE))
        return Limits({"numpy": 300e9, "torch": 350e9}, 25 * GB, tuple((size, rates[size]) for size in working_sets))

    monkeypatch.setenv("BNFUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(limits, "measured_limits", measured_limits)
    monkeypatch.setattr(idle, "wait_for_idle", lambda *_: Quiet(0.0, 1.0))
    return calls


def test_the_host_is_measured_once_and_again_when_asked(machine):
    said = []
    first = probe.host(progress=said.append)
    assert (first.name, first.flops, first.bandwidth) == (HOST, 350e9, 25 * GB)
    assert (first.cache, first.cache_bandwidth) == (64 * MIB, 54.5 * GB)
    assert probe.host() == first and len(machine) == 1 and said
    assert probe.host(fresh=True) == first and len(machine) == 2
    assert machine[0] == (probe.describe(None)["threads"], probe.WORKING_SETS)


def test_other_threads_are_another_machine(machine, monkeypatch):
    monkeypatch.setattr(processors, "usable_cpus", lambda: 4)
    assert probe.host(threads=1).about != probe.host(threads=3).about
    assert [threads for threads, _ in machine] == [1, 3]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: json.dumps({**json.loads(text), "flops_by": {"numpy": math.nan}}),
        lambda text: json.dumps({**json.loads(text), "by_working_set": []}),
        lambda text: json.dumps({**json.loads(text), "others": "many"}),
        lambda text: json.dumps({**json.loads(text), "machine": {}}),
    ],
)
def test_what_is_damaged_is_measured_anew(machine, damage):
    expected = probe.host()
    path = probe.remembered(probe.describe(None))
    path.write_text(damage(path.read_text()))
    assert probe.host() == expected and len(machine) == 2
    assert probe.host() == expected and len(machine) == 2


def test_a_folder_that_cannot_be_written_is_no_error(machine, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BNFUSE_CACHE", str(tmp_path / "file" / "below"))
    assert probe.host() == probe.host() and len(machine) == 2


def test_a_machine_that_was_busy_says_so(machine, monkeypatch):
    monkeypatch.setattr(idle, "wait_for_idle", lambda *_: Quiet(1.5, 5.0))
    assert "others used 1.5 cores" in probe.host().about
    assert "others" not in probe.Measured({"numpy": 1e9}, sets(*CURVE), None).hardware("a machine").about


def test_the_identity_of_a_processor_does_not_move():
    assert probe.identity() == probe.identity() and len(probe.identity()) == 16


def test_a_child_measures_the_working_sets_that_it_is_asked_for(monkeypatch):
    """The real chains, over little memory."""
    from bnfuse.runtime.codegen import limits as own

    monkeypatch.setattr(own, "gemm_rates", lambda threads: {"own": 1.0 * threads})
    monkeypatch.setattr(own, "copy_rate", lambda threads: 4.0)
    monkeypatch.setattr(own, "CHAIN", 1 << 20)
    monkeypatch.setattr(limits, "numpy_rate", lambda: 2.0)
    monkeypatch.setattr(limits, "torch_rate", lambda threads: 3.0)
    found = limits.measure({"threads": 1, "working_sets": [1 << 16, 1 << 18]})
    assert len(found["chains"]) == 2 and all(rate > 0 for rate in found["chains"])
    assert found["flops_by"] == {"numpy": 2.0, "torch": 3.0, "own": 1.0} and found["bytes_per_s"] == 4.0


def test_a_chain_hands_every_buffer_on(monkeypatch):
    """What lies in the first buffer is in all of them afterwards."""
    from bnfuse.runtime.codegen import limits as own

    memory = own.aligned(1 << 14).view(np.float32)
    memory[:] = 0
    memory[:1024] = np.arange(1024)
    monkeypatch.setattr(own, "CHAIN", memory.nbytes)
    monkeypatch.setattr(own, "aligned", lambda size: Keeping(memory))
    own.chain_rates(1, [4096])
    assert (memory.reshape(4, 1024) == np.arange(1024)).all()


class Keeping:
    """An array that is not overwritten when it is filled."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory

    def view(self, dtype: str) -> Keeping:
        return self

    def __setitem__(self, key: slice, value: float) -> None: ...

    def __getitem__(self, key: slice) -> np.ndarray:
        return self.memory[key]


def test_a_host_adds_computing_and_moving_and_counts_no_byte_twice():
    """A layer that computes for 1 s and streams for 2 s, on a machine whose cache is four times as fast as memory."""
    tensors = (Tensor("x", 1000, "map", given=True), Tensor("y", 1000, "map", kept=True))
    layer = Layer("conv", "Conv2D", "forward", 100, (Access(0, 1000),), (Access(1, 1000),))
    machine = Hardware("machine", "", 100.0, 1000.0, 10, 4000.0)
    found = estimate(Workload("graph", 1, tensors, (layer,)), machine, probe.ASSUMPTIONS)
    assert found.time_s == pytest.approx(3.0)
    within = dataclasses.replace(machine, cache=10_000, cache_bandwidth=500.0)  # held whole: 4 s within the cache
    assert estimate(Workload("graph", 1, tensors, (layer,)), within, probe.ASSUMPTIONS).compute_s == pytest.approx(4.0)
