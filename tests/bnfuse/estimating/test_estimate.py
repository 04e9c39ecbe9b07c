"""Times of small iterations by hand, what must hold of any, and the figures of [Tsai21]."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_workloads import machine, step, workload

from bnfuse.core.errors import BnfuseError
from bnfuse.estimating.assumptions import PAPER, Assumptions
from bnfuse.estimating.estimate import estimate
from bnfuse.estimating.hardware import MIB, profile
from bnfuse.estimating.layerwise import Passes, forward_workload
from bnfuse.estimating.workload import Workload
from bnfuse.models import build_graph


def times(work: Workload, cache: int, **how) -> list[float]:
    found = estimate(work, machine(cache), Assumptions(**how))
    return [round(layer.time_s, 9) for layer in found.layers]


def figure_4_1() -> Workload:
    """The last layer's weight takes 8 s to come, more than the short layer before it computes."""
    steps = [step("first", 10), step("heavy", 10), step("short", 1), step("last", 1, "w")]
    return workload({"w": 8}, steps, weights="w")


def test_a_load_is_issued_where_computing_covers_it():
    assert times(figure_4_1(), 100) == [10, 10, 1, 1]


def test_issued_one_layer_ahead_it_comes_too_late():
    assert times(figure_4_1(), 100, prefetch="next") == [10, 10, 1, 8]


def test_loaded_when_needed_it_holds_its_layer_up():
    assert times(figure_4_1(), 100, prefetch="none") == [10, 10, 1, 9]


def test_a_load_without_room_is_put_off_to_the_layer_from_which_there_is():
    steps = [step("first", 10, "", "x"), step("heavy", 10, "x"), step("short", 2), step("last", 1, "w")]
    work = workload({"w": 8, "x": 4}, steps, weights="w")
    assert times(work, 12) == [10, 10, 2, 1]
    assert times(work, 11) == [10, 10, 2, 7]


def test_a_load_that_would_not_stay_is_not_issued():
    steps = [step("first", 10, "", "x"), step("heavy", 10, "x"), step("short", 2, "", "y"), step("last", 1, "w")]
    work = workload({"w": 8, "x": 1, "y": 4}, steps, weights="w")
    assert times(work, 11) == [10, 10, 2, 9]


def figure_4_2() -> Workload:
    """`a` is needed again at the end only, and there is no room for it beside `d`."""
    steps = [
        step("1f", 1, "", "a b"),
        step("2f", 20, "b", "c"),
        step("3f", 1, "c", "d"),
        step("1b", 100, "a d"),
    ]
    return workload({"a": 10, "b": 2, "c": 2, "d": 10}, steps)


def test_what_cannot_stay_leaves_at_once_behind_the_next_layer():
    assert times(figure_4_2(), 14) == [1, 20, 1, 100]


def test_without_looking_ahead_a_layer_waits_for_its_space():
    assert times(figure_4_2(), 14, look_ahead=False) == [1, 20, 9, 100]  # 2 bytes are free: 8 must leave
    assert times(figure_4_2(), 14, look_ahead=False, leaving_holds_space=False) == [1, 20, 1, 100]


def test_what_streams_takes_the_longer_of_computing_and_moving():
    work = workload({"x": 20, "y": 20, "z": 1}, [step("norm", 5, "x", "y"), step("conv", 50, "y", "z")], kept="z")
    assert times(work, 8) == [40, 51]  # the second also waits for z to be written out
    assert times(work, 8, streams_overlap=False) == [45, 71]


def test_what_waits_for_an_idle_bus_waits_for_what_streams():
    steps = [step("make", 1, "", "a"), step("norm", 5, "x"), step("last", 1)]
    assert times(workload({"a": 10, "x": 20}, steps, kept="a"), 12) == [1, 20, 10]


def test_a_layer_may_compute_on_what_has_come_of_its_operands():
    work = workload({"x": 20}, [step("conv", 50, "x")])
    assert times(work, 100) == [70]
    assert times(work, 100, loads_overlap=True) == [50]


def test_what_is_waited_for_overtakes_what_was_issued_before():
    steps = [step("make", 1, "", "x"), step("wait", 1, "w"), step("long", 50), step("use", 1, "x")]
    work = workload({"x": 8, "w": 8}, steps, weights="w")
    assert times(work, 15, leaving_holds_space=False)[:2] == [1, 9]  # w comes before x goes
    assert times(work, 15, leaving_holds_space=False, demand_first=False)[:2] == [1, 17]


def test_space_that_is_needed_is_made_before_loads_go_on():
    steps = [step("make", 1, "", "a"), step("next", 5, "", "y"), step("use", 1, "w")]
    work = workload({"a": 10, "y": 6, "w": 20}, steps, kept="a", weights="w")
    # w begins to come at once; y waits until 6 bytes of a have left; then 14 of w, then 4 of a, 1 while computing
    assert times(work, 30) == [1, 6 + 5, 14 + 4]
    assert times(work, 30, demand_first=False) == [1, 19 + 6 + 5, 1]  # all of w comes before a leaves


def test_the_iteration_ends_when_memory_has_what_it_must():
    work = workload({"w": 8}, [step("last", 3, "", "w")], kept="w")
    found = estimate(work, machine(100))
    assert (found.time_s, found.compute_s, found.stall_s) == (11, 3, 8)
    assert (found.traffic_in_bytes, found.traffic_out_bytes) == (0, 8)


def test_a_dense_layer_counts_multiply_adds_as_asked():
    work = workload({"x": 1, "y": 1}, [step("conv", 20, type="Conv2D"), step("relu", 20, type="Activation")])
    assert times(work, 100) == [20, 20]
    assert times(work, 100, mac_operations=1) == [10, 20]
    assert estimate(work, machine(100)).compute_utilization == 1


def test_the_bandwidth_of_the_cache_bounds_a_layer_where_it_is_known():
    work = workload({"x": 8, "y": 8}, [step("make", 1, "", "x"), step("relu", 1, "x", "y", sweeps=2)])
    found = estimate(work, machine(100, cache_bandwidth=2.0))
    assert [layer.compute_s for layer in found.layers] == [4, 12]


def test_bytes_belong_to_the_layer_of_their_tensor_and_bandwidth_to_when_they_moved():
    rows = estimate(figure_4_1(), machine(100)).layers
    assert [row.in_bytes for row in rows] == [0, 0, 0, 8]
    assert [row.moved_bytes for row in rows] == [0, 8, 0, 0]
    assert rows[1].average_bandwidth == 0.8


sizes = st.integers(1, 9)


@st.composite
def iterations(draw) -> Workload:
    names = {f"t{i}": draw(sizes) for i in range(draw(st.integers(1, 7)))}
    some = st.lists(st.sampled_from([*names]), max_size=3, unique=True).map(" ".join)
    types = st.sampled_from(("Conv2D", "Activation"))
    steps = [
        step(f"l{i}", draw(st.integers(0, 30)), draw(some), draw(some), draw(types), draw(st.integers(1, 2)))
        for i in range(draw(st.integers(1, 12)))
    ]
    return workload(names, steps, kept=draw(some), weights=draw(some))


any_assumptions = st.builds(
    Assumptions,
    mac_operations=st.sampled_from((1, 2)),
    prefetch=st.sampled_from(("latency", "next", "none")),
    look_ahead=st.booleans(),
    demand_first=st.booleans(),
    streams_overlap=st.booleans(),
    loads_overlap=st.booleans(),
    leaving_holds_space=st.booleans(),
)
caches = st.integers(1, 60)


@settings(deadline=None, max_examples=200)
@given(iterations(), caches, any_assumptions)
def test_an_iteration_takes_at_least_its_computing_and_its_traffic(work, cache, assumptions):
    found = estimate(work, machine(cache, bandwidth=2.0), assumptions)
    assert found.time_s >= max(found.flops, found.traffic_bytes / 2.0) - 1e-9
    assert found.time_s == pytest.approx(found.compute_s + found.stall_s)
    assert all(layer.stall_s >= 0 for layer in found.layers)
    assert sum(layer.moved_bytes for layer in found.layers) == pytest.approx(found.traffic_bytes)
    assert all(layer.moved_bytes <= 2.0 * layer.time_s + 1e-9 for layer in found.layers)
    assert found.active_time <= 1 + 1e-9 and found.compute_utilization <= 1 + 1e-9


@settings(deadline=None)
@given(iterations(), caches, any_assumptions, st.sampled_from((1e15, float("inf"))))
def test_nothing_stalls_where_memory_is_infinitely_fast(work, cache, assumptions, bandwidth):
    found = estimate(work, machine(cache, bandwidth=bandwidth), assumptions)
    assert found.stall_s == pytest.approx(0, abs=1e-9)
    assert found.time_s == pytest.approx(found.flops)


@settings(deadline=None)
@given(iterations(), caches, any_assumptions)
def test_rows_add_up_to_the_totals(work, cache, assumptions):
    found = estimate(work, machine(cache), assumptions)
    assert len(found.layers) == len(work.layers)
    assert sum(found.by_type.values()) == pytest.approx(found.time_s)
    assert sum(found.by_phase.values()) == pytest.approx(found.time_s)
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [row["name"] for row in rows] == [layer.name for layer in work.layers]
    assert sum(int(row["in_bytes"]) + int(row["out_bytes"]) for row in rows) == found.traffic_bytes


@settings(deadline=None)
@given(iterations(), caches, st.booleans(), st.booleans())
def test_traffic_does_not_depend_on_rate_and_bandwidth(work, cache, demand_first, look_ahead):
    assumptions = Assumptions(demand_first=demand_first, look_ahead=look_ahead)
    found = [estimate(work, machine(cache, flops=f, bandwidth=b), assumptions) for f, b in ((1, 1), (9, 1), (1, 9))]
    assert len({(each.traffic_in_bytes, each.traffic_out_bytes) for each in found}) == 1


@settings(deadline=None)
@given(iterations(), st.booleans())
def test_on_a_cache_for_everything_only_the_first_loads_and_the_last_stores_are_waited_for(work, demand_first):
    everything = sum(tensor.bytes for tensor in work.tensors)
    found = estimate(work, machine(everything), Assumptions(demand_first=demand_first))
    assert found.stall_s <= found.traffic_bytes + 1e-9


def test_the_json_has_the_documented_keys():
    found = json.loads(json.dumps(estimate(figure_4_2(), machine(14)).to_json()))
    keys = {"time_s", "stall_s", "traffic_in_bytes", "traffic_out_bytes", "average_bandwidth", "compute_utilization"}
    assert {*keys, "by_type", "active_time", "layers", "assumptions", "hardware"} <= {*found}
    assert found["time_s"] == 122 and found["by_type"] == {"Other": 122}
    assert found["traffic_in_bytes"] == 10 and found["traffic_out_bytes"] == 10
    assert found["average_bandwidth"] == 20 / 122 == found["active_time"]
    assert [layer["name"] for layer in found["layers"]] == ["1f", "2f", "3f", "1b"]


def test_the_text_names_totals_types_and_the_longest_layers():
    found = estimate(forward_workload(build_graph("resnet18", batch=2, image=64)), profile("a100"))
    text = str(found)
    longest = max(found.layers, key=lambda layer: layer.time_s).name
    for wanted in ("resnet18, batch 2, on a100", "stalled", "BatchNorm", longest, "The longest 10 layers"):
        assert wanted in text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Assumptions(mac_operations=0), "mac_operations=0 is out of range"),
        (lambda: Assumptions(prefetch="soon"), "prefetch=soon is unknown: it is latency or next or none"),  # type: ignore[union-attr, arg-type]
        (lambda: Passes(sums="later"), "sums=later is unknown: it is consumer or layer"),  # type: ignore[union-attr, arg-type]
        (lambda: Passes(norm_sweeps=0), "norm_sweeps=0 is out of range"),
    ],
)
def test_an_assumption_that_there_is_not_is_refused(make, message):
    with pytest.raises(BnfuseError, match=message):
        make()


POINTWISE = {"BatchNorm", "Activation", "Add"}  # of ResNet-50, as observation 12 lists them


def on(work: Workload, megabytes: int, **how):
    """On the RTX 2080 Ti of table 5.2 with another cache; MB of 2^20 bytes."""
    return estimate(work, dataclasses.replace(profile("rtx2080ti"), cache=megabytes * MIB, **how), PAPER)


@pytest.fixture(scope="module")
def resnet50() -> Workload:
    return forward_workload(build_graph("resnet50", batch=32))


@pytest.fixture(scope="module")
def mobilenetv2() -> Workload:
    return forward_workload(build_graph("mobilenetv2", batch=32))


def fall(before: float, after: float) -> float:
    return 100 * (1 - after / before)


def test_resnet50_comes_out_as_in_papers_004(resnet50):
    small, large, faster = on(resnet50, 24), on(resnet50, 500), on(resnet50, 24, flops=23.04e12)
    assert 100 * small.share(POINTWISE) == pytest.approx(46.15, abs=0.6)  # observation 12
    assert fall(small.time_s, large.time_s) == pytest.approx(48.1, abs=1.5)  # observation 8
    assert 100 * (small.time_s / faster.time_s - 1) == pytest.approx(20, abs=2.5)  # observation 5
    assert fall(small.traffic_bytes, on(resnet50, 296).traffic_bytes) == pytest.approx(70, abs=5)  # observation 3


def test_mobilenetv2_comes_out_as_in_papers_004(mobilenetv2):
    small, large = on(mobilenetv2, 24), on(mobilenetv2, 500)
    assert fall(small.time_s, large.time_s) == pytest.approx(69.6, abs=2)
    assert fall(small.traffic_bytes, on(mobilenetv2, 442).traffic_bytes) == pytest.approx(70, abs=5)
    faster = on(mobilenetv2, 24, flops=23.04e12)
    assert 100 * (small.time_s / faster.time_s - 1) < 10  # observation 9


def test_a_transformer_comes_out_as_in_papers_004():
    """Its maps are nearly all of one size there (observation 3), so that its feed-forward layers are not wider."""
    how = {"vocabulary": 0, "feed_forward": 1024, "projection_relu": True, "attention_output": False}
    work = forward_workload(build_graph("transformer", batch=128, **how))
    small, faster = on(work, 24), on(work, 24, flops=23.04e12)
    assert fall(small.traffic_bytes, on(work, 128).traffic_bytes) == pytest.approx(67, abs=2)
    assert fall(small.time_s, on(work, 500).time_s) == pytest.approx(26.5, abs=2)
    assert 100 * (small.time_s / faster.time_s - 1) == pytest.approx(40, abs=2)
    assert 100 * small.share({*POINTWISE, "LayerNorm", "Dropout"}) == pytest.approx(26.69, abs=5)


def test_gnmt_comes_out_as_in_papers_004():
    """With fewer layers and steps, which changes little: each layer's weights are read in each step."""
    work = forward_workload(build_graph("gnmt", batch=32, vocabulary=0, layers=3, steps=25))
    small, large = on(work, 24), on(work, 500)
    assert fall(small.traffic_bytes, large.traffic_bytes) == pytest.approx(96.6, abs=1.5)
    assert fall(small.time_s, large.time_s) == pytest.approx(81.1, abs=4)
    assert 100 * (small.time_s / on(work, 24, flops=23.04e12).time_s - 1) < 10


@pytest.mark.parametrize(("network", "megabytes"), [("resnet50", 296), ("mobilenetv2", 442)])
def test_traffic_falls_where_papers_004_says(network, megabytes, request):
    """At 296 and 442 MB three of the largest maps fit; 2 MB is the paper's step, 4 MB below they do not."""
    work = request.getfixturevalue(network)
    steps = [on(work, megabytes + more).traffic_bytes for more in (-4, 0, 4)]
    assert steps[0] - steps[1] > 20 * abs(steps[1] - steps[2])


def test_a_sweep_of_500_caches_takes_less_than_a_minute():
    """A tenth of a second each; measured over a few, the best of which counts, since the machine may be busy."""
    work = forward_workload(build_graph("densenet121", batch=16))
    taken = []
    for megabytes in range(24, 1000, 200):
        begun = time.process_time()
        on(work, megabytes)
        taken.append(time.process_time() - begun)
    assert min(taken) < 0.1
