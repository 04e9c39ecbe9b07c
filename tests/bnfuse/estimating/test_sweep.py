"""Sizes and rates as people write them; sweeps."""

from __future__ import annotations

import csv
import io
import json
import time

import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.estimating.assumptions import Assumptions
from bnfuse.estimating.estimate import estimate
from bnfuse.estimating.hardware import MIB, profile
from bnfuse.estimating.layerwise import forward_workload
from bnfuse.estimating.quantities import cache_text, parse_bandwidth, parse_bytes, parse_flops
from bnfuse.estimating.sweep import Range, parse_sweep, sweep
from bnfuse.models import build_graph

HARDWARE = profile("rtx2080ti")


@pytest.fixture(scope="module")
def net():
    return forward_workload(build_graph("resnet20", batch=4))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24MB", 24 * 2**20),
        ("24 MiB", 24 * 2**20),
        ("5.5mb", 11 * 2**19),
        ("1GB", 2**30),
        ("64K", 2**16),
        ("512B", 512),
        ("1048576", 2**20),
    ],
)
def test_bytes_of_a_cache_are_binary(text, count):
    assert parse_bytes(text) == count


def test_rates_are_decimal():
    assert [parse_bandwidth(t) for t in ("616GB/s", "616 GB/S", "616G", "6.16e11", "0.616TB/s")] == [616e9] * 5
    assert parse_bandwidth("1GiB/s") == 2**30
    assert [parse_flops(t) for t in ("13.45TFLOP/s", "13.45 TFLOPS", "13.45T", "13450GFLOP/s", "13.45e12")] == [
        pytest.approx(13.45e12)
    ] * 5


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_bytes, "24MB/s", "no size"),
        (parse_bytes, "MB", "not a size"),
        (parse_bytes, "-4MB", "not a size"),
        (parse_bytes, "0MB", "at least 1"),
        (parse_bytes, "3iB", "no size"),
        (parse_bandwidth, "616TFLOP/s", "no bandwidth"),
        (parse_bytes, "1e400", "at most 1024 PB"),
        (parse_bytes, "1025PB", "at most 1024 PB"),
        (parse_bandwidth, "0GB/s", "from 1 to"),
        (parse_bandwidth, "6Gb/s", "bits or bytes"),
        (parse_bandwidth, "100 Gbps", "bits or bytes"),
        (parse_bandwidth, "1e400", "from 1 to"),
        (parse_flops, "1e-300", "from 1 to"),
        (parse_flops, "1e308T", "from 1 to"),
        (parse_flops, "13GB/s", "no rate of computing"),
    ],
)
def test_what_is_no_quantity_is_refused_in_one_line(parse, text, message):
    with pytest.raises(BnfuseError, match=message) as caught:
        parse(text)
    assert "\n" not in str(caught.value) and text in str(caught.value)


def test_cache_sizes_are_shown_as_they_are_read():
    for text in ("24 MB", "5.5 MB", "1 GB", "512 B", "64 KB"):
        assert cache_text(parse_bytes(text)) == text


def test_a_range_has_its_end():
    found = parse_sweep("cache=24MB:1000MB:2MB")
    assert found.axis == "cache" and len(found.values) == 489
    assert (found.values[0], found.values[1], found.values[-1]) == (24 * MIB, 26 * MIB, 1000 * MIB)
    assert parse_sweep("flops=1T:2T:0.25T") == Range("flops", (1e12, 1.25e12, 1.5e12, 1.75e12, 2e12))
    assert parse_sweep("bandwidth=616GB/s,1555GB/s").values == (616e9, 1555e9)
    assert parse_sweep("batch=8:20:8").values == (8, 16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cache", "AXIS=FROM:TO:STEP"),
        ("size=1MB:2MB:1MB", "no axis 'size'"),
        ("cache=1MB:2MB", "a range is FROM:TO:STEP"),
        ("cache=2MB:1MB:1MB", "ends before it begins"),
        ("cache=1MB:1000MB:1KB", "larger step"),
        ("flops=1e10:1e24:1", "larger step"),
        ("flops=1e10:1e300:1", "from 1 to"),
        ("batch=٣", "no whole number"),
        ("batch=1.5", "no whole number"),
        ("batch=0", "at least 1"),
    ],
)
def test_a_bad_sweep_is_one_line(text, message):
    with pytest.raises(BnfuseError, match=message) as caught:
        parse_sweep(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("axis", "values"), [("cache", [MIB, 9 * MIB]), ("bandwidth", [1e11, 2e11]), ("flops", [1e12, 4e12])]
)
def test_each_point_is_the_estimate_at_its_value(net, axis, values):
    import dataclasses

    assumptions = Assumptions(prefetch="next")
    found = sweep(net, HARDWARE, axis, values, assumptions=assumptions)
    for point, value in zip(found.points, values, strict=True):
        alone = estimate(net, dataclasses.replace(HARDWARE, **{axis: value}), assumptions)
        assert point.value == value and point.by_type == alone.by_type
        for field in (
            "time_s",
            "stall_s",
            "traffic_in_bytes",
            "traffic_out_bytes",
            "average_bandwidth",
            "samples_per_s",
        ):
            assert getattr(point, field) == getattr(alone, field)
    assert found.at(values[1]) is found.points[1]


def test_the_batch_is_swept_by_making_the_workload(net):
    found = sweep(lambda batch: forward_workload(build_graph("resnet20", batch=batch)), HARDWARE, "batch", [2, 4])
    assert [point.batch for point in found.points] == [2, 4]
    assert found.points[1].time_s == estimate(net, HARDWARE).time_s
    with pytest.raises(BnfuseError, match="its batch is fixed"):
        sweep(net, HARDWARE, "batch", [2])


def test_a_sweep_reports_progress_and_repeats_itself(net):
    seen = []
    values = [MIB, 2 * MIB, 3 * MIB]
    first = sweep(net, HARDWARE, "cache", values, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert sweep(net, HARDWARE, "cache", values) == first
    with pytest.raises(BnfuseError, match="nothing to sweep"):
        sweep(net, HARDWARE, "cache", [])


def test_a_sweep_as_json_csv_and_text(net):
    found = sweep(net, HARDWARE, "cache", [index * MIB for index in range(1, 41)])
    data = json.loads(json.dumps(found.to_json()))
    assert (data["axis"], data["unit"], len(data["points"])) == ("cache", "B", 40)
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [int(row["cache"]) for row in rows] == found.values
    assert float(rows[3]["time_s:Conv2D"]) == found.points[3].by_type["Conv2D"]
    (section,) = found.sections()
    assert "16 of 40 points" in section.title and section.rows[0][0] == "1 MB" and section.rows[-1][0] == "40 MB"


@pytest.mark.timeout(120)
def test_500_points_of_a_large_network_take_less_than_a_minute():
    large = forward_workload(build_graph("densenet121", batch=32))
    start = time.process_time()  # of this process, whatever else the machine does
    found = sweep(large, HARDWARE, "cache", [(24 + 40 * index) * MIB for index in range(25)])
    assert len(large.layers) > 800
    assert (time.process_time() - start) * 500 / len(found.points) < 60
