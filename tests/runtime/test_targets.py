"""Targets: the host, named processors of both architectures, and what is refused."""

from __future__ import annotations

import os

import pytest

from bnfuse.core import processors
from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.backends import launching
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.targets import cpus
from bnfuse.runtime.targets.target import CpuTarget


def test_the_host_is_the_default_and_has_what_its_code_uses():
    target = resolve()
    assert target == resolve(f"cpu:{cpus.host_cpu()}")
    assert target.threads == processors.physical_cores() >= 1
    assert cpus.missing_features(cpus.features_of(target.mcpu)) == ()
    assert cpus.triple_of(target.mcpu) == ""


@pytest.mark.parametrize(
    ("mcpu", "lanes", "registers"),
    [
        ("znver4", 16, 32),
        ("skylake-avx512", 16, 32),
        ("haswell", 8, 16),
        ("core-avx2", 8, 16),
        ("nehalem", 4, 16),
        ("x86-64", 4, 16),
        ("cortex-a72", 4, 32),
        ("neoverse-n1", 4, 32),
        ("apple-m1", 4, 32),
    ],
)
def test_lanes_and_registers_follow_the_instruction_set(mcpu, lanes, registers):
    target = resolve(f"cpu:{mcpu}", threads=3)
    assert target == CpuTarget(mcpu, lanes, 3)
    assert cpus.vector_registers(target) == registers


@pytest.mark.parametrize(("mcpu", "triple"), [("neoverse-n1", "aarch64"), ("haswell", "x86_64")])
def test_a_cpu_of_another_architecture_has_a_triple_and_lacks_instructions_here(mcpu, triple):
    is_foreign = cpus.is_arm(cpus.host_cpu()) != cpus.is_arm(mcpu)
    assert cpus.triple_of(mcpu).startswith(triple) == is_foreign
    assert bool(cpus.missing_features(cpus.features_of(mcpu))) or not is_foreign


def test_a_missing_instruction_set_is_told():
    assert cpus.missing_features(("imaginary",)) == ("imaginary",)


def test_the_environment_says_how_far_llvm_optimises(monkeypatch):
    monkeypatch.delenv(cpus.LEVEL)
    assert cpus.llvm_level() == 3
    monkeypatch.setenv(cpus.LEVEL, "1")
    assert cpus.llvm_level() == 1
    monkeypatch.setenv(cpus.LEVEL, "")
    assert cpus.llvm_level() == 3
    monkeypatch.setenv(cpus.LEVEL, "-O2")
    with pytest.raises(BnfuseError, match="LEVEL='-O2' is no level of LLVM: it is one of 3, 2, 1, 0"):
        cpus.llvm_level()


@pytest.mark.parametrize(
    ("spec", "threads", "message"),
    [
        ("rocm", None, "'rocm' is not supported"),
        ("cpu:z80", None, "no 64-bit x86 or Arm CPU 'z80'"),
        ("cpu:i486", None, "no 64-bit x86 or Arm CPU 'i486'"),  # LLVM would end the process
        ("cpu", 0, "0 threads"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(spec, threads, message):
    with pytest.raises(BnfuseError, match=message) as caught:
        resolve(spec, threads)
    assert "\n" not in str(caught.value)


def test_a_step_of_one_thread_does_not_keep_later_ones_from_more(monkeypatch):
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    launching.start_threads(1)
    assert int(os.environ["TVM_NUM_THREADS"]) >= processors.physical_cores()
