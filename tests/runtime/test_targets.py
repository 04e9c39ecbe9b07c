"""Targets: the host, named processors, and what is refused."""

from __future__ import annotations

import os

import pytest

from bnfuse.errors import BnfuseError
from bnfuse.runtime import targets


def test_the_host_is_the_default_and_has_what_its_code_uses():
    target = targets.resolve()
    assert target == targets.resolve(f"cpu:{targets.host_cpu()}")
    assert target.threads == targets.physical_cores() >= 1
    assert targets.missing_features(targets.features_of(target.mcpu)) == ()


@pytest.mark.parametrize(("mcpu", "lanes"), [("znver4", 16), ("skylake-avx512", 16), ("haswell", 8), ("nehalem", 4)])
def test_lanes_follow_the_instruction_set(mcpu, lanes):
    assert targets.resolve(f"cpu:{mcpu}", threads=3) == targets.Target("llvm", mcpu, lanes, 3)


def test_a_missing_instruction_set_is_told():
    assert targets.missing_features(("imaginary",)) == ("imaginary",)


@pytest.mark.parametrize(
    ("spec", "threads", "message"),
    [("cuda", None, "'cuda' is not supported"), ("cpu:z80", None, "no CPU 'z80'"), ("cpu", 0, "0 threads")],
)
def test_what_cannot_be_is_refused_in_one_line(spec, threads, message):
    with pytest.raises(BnfuseError, match=message) as caught:
        targets.resolve(spec, threads)
    assert "\n" not in str(caught.value)


def test_a_step_of_one_thread_does_not_keep_later_ones_from_more(monkeypatch):
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    targets.start_threads(1)
    assert int(os.environ["TVM_NUM_THREADS"]) >= targets.physical_cores()
