"""benchmarks/parallel*.py without ranks: what is compiled for a run, traces, tables and fits of what a run wrote."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest

from bnfuse.estimating.parallel.scaling import Network
from bnfuse.estimating.parallel.schedule import Exchange, Schedule
from bnfuse.estimating.parallel.simulation import simulate

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        names = ("parallel", "parallel_cases", "parallel_show", "parallel_trace")
        yield type("Scripts", (), {name: importlib.import_module(name) for name in names})


def test_every_way_of_several_ranks_has_one_of_one_rank_beside_it(scripts):
    found = scripts.parallel_cases.ways(["icf"], [4, 16], 2, gpus=False, sync=True, wire=True)
    assert [way.name for way in found] == ["icf alone", "icf", "icf+16MB", "icf+sync", "icf+bf16"]
    assert len({way.file for way in found}) == len(found)
    gpus = scripts.parallel_cases.ways(["icf"], [4, 16], 2, gpus=True, sync=True, wire=True)
    assert [way.name for way in gpus if way not in found] == ["icf+sync+nccl"]
    alone = {way.name for way in found if way.ranks == 1}
    assert {scripts.parallel.base_of(way.name) for way in found if way.ranks > 1} == alone
    assert scripts.parallel.base_of("ddp-compile-sync") == "torch-compile"


def test_what_is_hidden_of_exchanges(scripts):
    """Exchanges from 2 to 5 and from 5 to 6, kernels from 0 to 3 and from 4 to 5: two of four microseconds."""
    events = [
        {"name": "conv", "cat": "kernel", "ts": 0, "dur": 3, "tid": 7},
        {"name": "ncclDevKernel_AllReduce", "cat": "kernel", "ts": 2, "dur": 3, "tid": 9},
        {"name": "conv", "cat": "kernel", "ts": 4, "dur": 1, "tid": 7},
        {"name": "ncclDevKernel_AllGather", "cat": "kernel", "ts": 5, "dur": 1, "tid": 9},
    ]
    assert scripts.parallel_trace.hidden(events) == pytest.approx((4e-6, 2e-6))
    shifted = [{**event, "ts": event["ts"] + 10 * turn} for turn in range(3) for event in events]
    assert scripts.parallel_trace.last_step(shifted) == shifted[-4:]


def test_a_trace_is_drawn(scripts, tmp_path):
    path = tmp_path / "trace.json"
    launches = [("forward: a", 0.0, 1.0), ("backward: b", 1.0, 3.0)]
    events = scripts.parallel_trace.of_spans(launches, [("sum", 1.5, 2.0)], path)
    assert scripts.parallel_trace.read(path) == events and [e["ts"] for e in events] == [0, 1e6, 1.5e6]
    scripts.parallel_trace.draw(events, tmp_path / "trace.svg", "a step")
    assert "100 % of it beside computing" in (tmp_path / "trace.svg").read_text()


def test_results_become_tables_and_a_fit(scripts, tmp_path):
    network = Network(2e9, 1e-5)
    lines = []
    for case, size in (("a-8", 40e6), ("b-8", 4e6)):
        exchanges = (Exchange("gradients", int(size), 3, 4), Exchange("gradients", int(size / 4), 4, 4))
        schedule = Schedule(case, 8, (0.01, 0.01, 0.02, 0.01, 0.001), exchanges, 4)
        for ranks in (2, 4):
            both = simulate(schedule, ranks, network).step_s
            about = {"case": case, "candidate": "icf", "ranks": ranks, "world": "MPI", "batch": 8}
            exposed = both - schedule.compute_s
            step = {"kind": "together", "min_s": both, "median_s": both, "images_per_s": 8 * ranks / both}
            lines.append({"what": "step", **about, **step})
            efficiency = dict.fromkeys(("efficiency_min", "efficiency_median"), schedule.compute_s / both)
            seen = {"exposed_median_s": exposed, "exposed_median": exposed / schedule.compute_s}
            lines.append({"what": "scaling", **about, **efficiency, **seen})
            parts = {"seconds": schedule.seconds, "exchanges": [dataclasses.astuple(e) for e in exchanges], "update": 4}
            lines.append({"what": "schedule", **about, **parts})
    (tmp_path / "parallel.jsonl").write_text("\n".join(map(json.dumps, lines)))
    read = scripts.parallel_show.read(tmp_path)
    found = scripts.parallel_show.fits(read)["MPI"]
    assert found.network.bandwidth == pytest.approx(2e9, rel=0.01) and found.error < 1e-3
    text = "\n".join(map(str, scripts.parallel_show.sections(read)))
    assert "a-8, 2 ranks" in text and "efficiency, shortest" in text
