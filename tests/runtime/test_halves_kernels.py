"""Kernels of plain operators on a CPU take maps of 16 bits as they lie; results are those of the values in float32."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from halves import HALVES, ROUNDING, TARGET

from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.kernels.common.taps import TapsProblem
from bnfuse.runtime.kernels.cpu import group_norm, layer_norm, layout, norm, norm_baseline, norm_sampled, sum_maps, taps
from bnfuse.runtime.kernels.kernel import MapType

pytestmark = pytest.mark.usefixtures("optimized")

SINGLE = MapType(2, 3, 4, 19, 24)
EXTENT = (1, 2, 3)

KERNELS = {
    "statistics": lambda x, target: norm.batch_norm_statistics(x, target),
    "statistics in two sweeps": lambda x, target: norm.batch_norm_statistics(x, target, 2),
    "gradient sums": lambda x, target: norm.batch_norm_grad_reduce(x, x, target),
    "statistics of groups": lambda x, target: group_norm.group_norm_statistics(x, target),
    "gradient sums of groups": lambda x, target: group_norm.group_norm_grad_reduce(x, x, target),
    "layer norm": lambda x, target: layer_norm.layer_norm(x, x, target, 1e-3),
    "layer norm's gradient": lambda x, target: layer_norm.layer_norm_grad(x, x, x, target),
    "mean deviation": lambda x, target: norm_baseline.l1_statistics(x, target),
    "mean deviation's gradient": lambda x, target: norm_baseline.l1_grad_input(x, x, x, target),
    "range": lambda x, target: norm_baseline.range_statistics(x, target),
    "range's gradient": lambda x, target: norm_baseline.range_grad_input(x, x, x, target),
    "statistics of a box": lambda x, target: norm_sampled.sampled_statistics(x, EXTENT, target),
    "statistics of points": lambda x, target: norm_sampled.point_statistics(x, 3, target),
    "addition in a box": lambda x, target: norm_sampled.add_sampled(x, x, EXTENT, target),
    "addition at points": lambda x, target: norm_sampled.add_at_points(x, x, 3, target),
    "sum": lambda x, target: sum_maps.sum_maps((x, x, x), x, target),
    "copy": lambda x, target: layout.copy_map(x, x, target, x.dtype),
    "taps": lambda x, target: taps.taps(TapsProblem(x, x, "h", 1, True), target),
}


@pytest.mark.parametrize("name", KERNELS)
def test_maps_of_16_bits_are_read_and_written_in_place(name):
    half = dataclasses.replace(SINGLE, dtype="bfloat16")
    wide, narrow = (KERNELS[name](kind, target) for kind, target in ((SINGLE, TARGET), (half, HALVES)))
    given, rng = {}, np.random.default_rng(0)
    for param in wide.params:
        if param.is_map:  # outside of their channels as well: what is not written is the same then
            given[param.name] = rng.standard_normal(param.elements).astype(ml_dtypes.bfloat16).astype(np.float32)
        elif param.access != "out":
            is_place = np.dtype(param.dtype).kind == "i"
            given[param.name] = np.arange(param.elements) if is_place else rng.uniform(0.5, 1, param.elements)
    assert {p.dtype for p in narrow.params if p.is_map} == {"bfloat16"}
    expected, found = (execute.call(kernel, given) for kernel in (wide, narrow))
    for param in wide.params:
        bound = 1e-6 + (ROUNDING if param.is_map else 0)
        np.testing.assert_allclose(found[param.name], expected[param.name], rtol=bound, atol=1e-6, err_msg=param.name)
