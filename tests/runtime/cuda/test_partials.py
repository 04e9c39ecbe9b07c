"""Reductions in two stages: inside a tile, and over the tiles."""

import cuda_kernels
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import run
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda import partials
from bnfuse.runtime.kernels.kernel import Kernel, Param
from bnfuse.runtime.targets.target import CudaTarget

SIZES = {"tiles": st.sampled_from([1, 2, 7, 33, 200, 700]), "channels": st.sampled_from([1, 8, 13, 32])}
SETTINGS = settings(max_examples=8, derandomize=True, deadline=None, database=None)


def statistics(means, m2, counts):
    """Mean and biased variance in float64 of tiles [tiles][channels]."""
    n = counts[:, None] / counts.sum()
    mean = (n * means).sum(0)
    return mean, (m2.sum(0) / counts.sum()) + (n * (means - mean) ** 2).sum(0)


@SETTINGS
@given(**SIZES)
def test_sums_of_tiles(tiles, channels):
    rng = np.random.default_rng(tiles + channels)
    rows = rng.normal(size=(tiles, 2, channels)).astype(np.float32)
    params = [partials.partials_param(tiles, 2, channels, "in")]
    params += [Param(name, "out", channels) for name in ("dbeta", "dbeta_1", "dgamma")]
    stage = partials.sums_stage(
        "merge", params, tiles=tiles, channels=channels, results=[("dbeta", "dbeta_1"), "dgamma"]
    )
    found = {p.name: np.full(p.elements, np.nan, np.float32) for p in params} | {"partials": rows}
    run(stage.function, found)
    expected = rows.astype(np.float64).sum(0).astype(np.float32)
    np.testing.assert_allclose(found["dbeta"], expected[0], rtol=2e-7)
    np.testing.assert_array_equal(found["dbeta"], found["dbeta_1"])
    np.testing.assert_allclose(found["dgamma"], expected[1], rtol=2e-7)


@SETTINGS
@given(**SIZES, last=st.integers(1, 10), ratio=st.sampled_from([0, 1e3]))
def test_statistics_of_tiles(tiles, channels, last, ratio):
    rng = np.random.default_rng(tiles + channels)
    rows = rng.normal(size=(tiles, 2, channels)).astype(np.float32) + np.float32(ratio)
    rows[:, 1] = np.abs(rng.normal(size=(tiles, channels))) + (0.1 if tiles > 1 else 1)
    rows[:, :, 0] = (0.1, 0)  # a constant channel
    params = [partials.partials_param(tiles, 2, channels, "in")]
    params += [Param("mean", "out", channels), Param("variance", "out", channels)]
    total = 10 * (tiles - 1) + last
    stage = partials.statistics_stage("merge", params, tiles=tiles, rows=10, total=total, channels=channels)
    found = {p.name: np.full(p.elements, np.nan, np.float32) for p in params} | {"partials": rows}
    run(stage.function, found)
    counts = np.array([10.0] * (tiles - 1) + [last])
    mean, variance = statistics(rows[:, 0].astype(np.float64), rows[:, 1].astype(np.float64), counts)
    np.testing.assert_allclose(found["mean"], mean, rtol=2e-7)
    assert found["variance"][0] == 0
    np.testing.assert_allclose(found["variance"][1:], variance[1:], rtol=1e-6)


def tile_kernel(team, rows, channels):
    """One block: x [rows][channels] -> a row of sums, a row of mean and M2."""
    params = (
        Param("x", "in", rows * channels),
        Param("sums", "out", channels),
        Param("moments", "out", 2 * channels),
    )

    def build():
        shared = max(team.sums_bytes(1), team.statistics_bytes)
        with d.stage("tile", params, grid=(1, 1, 1), threads=team.threads, shared=shared) as block:
            view = d.shared_memory(shared).view("float32")
            sums, values = d.registers(team.width), d.registers(team.width)
            moments = partials.Moments(team)
            moments.clear()
            for j in range(team.width):
                d.put(sums, j, T.float32(0))
            channel = T.bind(team.vector(block.tid) * team.width)
            with T.serial(0, -(-rows // team.down)) as i:
                pixel = T.bind(i * team.down + team.lane(block.tid))

                def visit(pixel=pixel):
                    for j in range(team.width):
                        inside = T.bind(channel + j < channels)
                        index = T.Select(inside, pixel * channels + channel + j, 0)
                        d.put(values, j, T.Select(inside, block["x"][index], T.float32(0)))
                        d.put(sums, j, sums[j] + values[j])
                    moments.add(values)

                d.when(pixel < rows, visit)
            partials.join_sums(team, block.tid, view, sums, 1)
            made = moments.join(block.tid, view)

            def leave():
                aligned = channels % 4 == 0
                partials.write_row(
                    block["sums"], 0, 1, channels, channel, team.width, sums, channels - channel, aligned
                )
                partials.write_row(
                    block["moments"], 0, 2, channels, channel, team.width, made, channels - channel, aligned
                )

            d.when(team.lane(block.tid) == 0, leave)
        return (block.stage,)

    return Kernel("tile", None, CudaTarget("sm_80", 132), params, build)


@pytest.mark.parametrize(
    ("team", "rows", "channels"),
    [((3, 21, 8), 100, 22), ((16, 16, 8), 5, 128), ((5, 1, 4), 9, 20), ((1, 256, 4), 1000, 3)],
)
@pytest.mark.parametrize("ratio", [0, 1e3])
def test_the_threads_of_a_tile(team, rows, channels, ratio):
    x = (np.random.default_rng(0).normal(size=(rows, channels)) + ratio).astype(np.float32)
    x[:, 0] = 0.1
    found = {"x": x, "sums": np.full(channels, np.nan, np.float32), "moments": np.zeros(2 * channels, np.float32)}
    (stage,) = tile_kernel(partials.Team(*team), rows, channels).build()
    run(stage.function, found)
    exact = x.astype(np.float64)
    np.testing.assert_allclose(found["sums"], exact.sum(0), rtol=1e-6, atol=1e-5)
    mean, m2 = found["moments"].reshape(2, channels)
    np.testing.assert_allclose(mean, exact.mean(0), rtol=2e-7, atol=1e-6)
    assert m2[0] == 0
    np.testing.assert_allclose(m2[1:], ((exact - exact.mean(0)) ** 2).sum(0)[1:], rtol=1e-5)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_they_compile_without_spills(arch):
    params = [partials.partials_param(500, 2, 64, "in")]
    params += [Param("mean", "out", 64), Param("variance", "out", 64)]
    stage = partials.statistics_stage("merge", params, tiles=500, rows=10, total=5000, channels=64)
    kernel = Kernel("merge", None, CudaTarget(arch, 132), tuple(params), lambda: (stage,))
    cuda_kernels.assert_no_spills(kernel)
