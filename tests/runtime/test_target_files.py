"""Targets as a file of a step names them."""

from __future__ import annotations

import json

import pytest

from bnfuse.runtime.targets.target import CpuTarget, CudaTarget, target_of

CPU = {"kind": "llvm", "mcpu": "znver4", "lanes": 16, "threads": 8, "precision": "fp32"}
TILES = {"kind": "llvm", "mcpu": "sapphirerapids", "lanes": 16, "threads": 8, "precision": "bf16", "amx": True}
GPU = {"kind": "cuda", "mcpu": "sm_90", "lanes": 32, "threads": 132, "precision": "bf16"}


@pytest.mark.parametrize(
    ("target", "data"),
    [
        (CpuTarget("znver4", 16, 8), CPU),
        (CpuTarget("sapphirerapids", 16, 8, "bf16", amx=True), TILES),
        (CudaTarget("sm_90", 132, "bf16"), GPU),
    ],
)
def test_a_target_is_written_as_version_1_has_it_and_read_back(target, data):
    assert target.to_data() == data
    assert target_of(json.loads(json.dumps(data))) == target


def test_a_kind_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="its target is 'abacus'"):
        target_of({**GPU, "kind": "abacus"})


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", "float32"), ("tf32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")]
)
def test_maps_are_stored_in_the_type_of_the_precision(precision, dtype):
    assert CudaTarget("sm_90", 132, precision).map_dtype == dtype


def test_targets_are_described_in_a_few_words():
    cpu, gpu = CpuTarget("znver4", 16, 8), CudaTarget("sm_90", 132, "bf16")
    assert (str(cpu), cpu.machine, cpu.place) == ("llvm znver4, 8 threads", "znver4, 8 threads", "8 threads")
    assert (str(gpu), gpu.machine, gpu.place) == ("cuda sm_90, bf16", "sm_90", "GPU sm_90")
