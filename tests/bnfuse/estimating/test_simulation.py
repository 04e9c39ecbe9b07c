"""Simulated data-parallel steps: limits that are known, schedules followed by hand, fits that find what was put in."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.estimating.estimate import estimate
from bnfuse.estimating.hardware import Hardware
from bnfuse.estimating.layerwise import forward_workload
from bnfuse.estimating.parallel.collectives import ALGORITHMS, gather_s, half_s, sum_s
from bnfuse.estimating.parallel.fit import Measured, fit
from bnfuse.estimating.parallel.scaling import Network, Quantities, communication_s, gradient_bytes, scale
from bnfuse.estimating.parallel.schedule import Exchange, Schedule, bucketed, schedule_of
from bnfuse.estimating.parallel.simulation import harmonic, scale_schedule, simulate
from bnfuse.estimating.training import training_workload
from bnfuse.graph.training_graph import open_graph
from bnfuse.models import build_forward, build_graph
from bnfuse.parallel.ranks import Ranks
from bnfuse.passes import rewrite
from bnfuse.runtime import SGD
from bnfuse.runtime.backends.resolve import resolve

GIGABYTE = Network(1e9)
FREE = Network(1e300)
MACHINE = Hardware("machine", "for tests", 1e12, 50e9, 2**20)

# forward 1, 1; backward 2, 2, 2; update 1: the first bucket is whole behind the third launch
BY_HAND = Schedule(
    "by hand",
    8,
    (1.0, 1.0, 2.0, 2.0, 2.0, 1.0),
    (Exchange("gradients", 3_000_000_000, 3, 5), Exchange("gradients", 1_000_000_000, 5, 5)),
    update=5,
)


@st.composite
def schedules(draw):
    seconds = draw(st.lists(st.floats(0, 2), min_size=2, max_size=8))
    update = draw(st.integers(1, len(seconds)))
    ready = sorted(draw(st.lists(st.integers(0, update), max_size=4)))
    needed = [draw(st.integers(r, len(seconds))) for r in ready]
    sizes = [draw(st.integers(1, 10**9)) for _ in ready]
    kinds = [draw(st.sampled_from(["gradients", "sum", "gather"])) for _ in ready]
    exchanges = tuple(Exchange(*each) for each in zip(kinds, sizes, ready, needed, strict=True))
    return Schedule("drawn", 4, (*seconds, 1.0), exchanges, update)


def test_algorithms_by_hand():
    slow = Network(1e9, latency=0.5)
    assert sum_s(4e9, 4, slow, "ring") == pytest.approx(2 * 3 / 4 * 4 + 6 * 0.5)
    assert sum_s(4e9, 4, slow, "halving") == pytest.approx(2 * 3 / 4 * 4 + 4 * 0.5)
    assert sum_s(4e9, 4, slow, "tree") == pytest.approx(4 * (4 + 0.5)) == communication_s(4e9, 4, slow, "tree")
    assert half_s(4e9, 4, slow) == sum_s(4e9, 4, slow) / 2
    assert gather_s(1e9, 4, slow) == pytest.approx(3 * (1 + 0.5))
    assert [sum_s(1e9, 1, slow, each) for each in ALGORITHMS] == [0, 0, 0, 0]
    with pytest.raises(BnfuseError, match="reduce=star is unknown: it is ring, halving, tree, server"):
        sum_s(1, 2, slow, "star")


def test_buckets_go_out_beside_the_backward_pass_by_hand():
    """Two workers, a ring: a second for a gigabyte. Bucket 0 is under way from 4 to 7, so bucket 1, whole at 8, waits
    for nothing; the update begins at 9."""
    found = simulate(BY_HAND, 2, GIGABYTE)
    assert [(span.start, span.stop) for span in found.spans] == [(4, 7), (8, 9)]
    assert (found.step_s, found.compute_s, found.communication_s, found.exposed_s) == (10, 9, 4, 1)


def test_exchanges_are_one_behind_the_other_by_hand():
    """At half the bandwidth bucket 0 is under way until 10: bucket 1 and the update wait for it."""
    found = simulate(BY_HAND, 2, Network(5e8))
    assert [(span.start, span.stop) for span in found.spans] == [(4, 10), (10, 12)]
    assert found.step_s == 13 and found.exposed_s == 4


def test_an_exchange_that_the_next_launch_reads_is_waited_for_by_hand():
    """SyncBN: statistics of four workers between the first and the second launch, behind no other message."""
    sync = Schedule("sync", 1, (1.0, 1.0), (Exchange("sum", 1_000_000_000, 1, 1), Exchange("gather", 8, 2, 2)), 2)
    assert simulate(sync, 4, GIGABYTE).step_s == pytest.approx(1 + 1.5 + 1 + 3 * 8e-9)


def test_a_sharded_update_by_hand():
    """Four workers: half of 2 * 3/4 seconds for a gigabyte, a quarter of the update, then the parameters."""
    found = simulate(BY_HAND, 4, GIGABYTE, sharded=True)
    assert [s.start for s in found.spans] == pytest.approx([4, 8, 9, 11.25])
    assert [s.stop for s in found.spans] == pytest.approx([6.25, 8.75, 11.25, 12])
    assert found.step_s == pytest.approx(12) and found.compute_s == 8.25


@given(schedules(), st.integers(1, 2000), st.sampled_from(ALGORITHMS), st.booleans())
@settings(max_examples=40, deadline=None)
def test_over_a_perfect_network_every_worker_counts(schedule, workers, algorithm, sharded):
    (point,) = scale_schedule(schedule, workers=[workers], network=FREE, algorithm=algorithm, mode="weak").points
    assert point.efficiency == pytest.approx(1)
    step = simulate(schedule, workers, FREE, algorithm, sharded=sharded)
    assert step.step_s == pytest.approx(step.compute_s) and step.exposed_s == pytest.approx(0)


@given(st.integers(2, 512), st.floats(1e-3, 10), st.floats(0, 0.1), st.sampled_from(["tree", "server"]))
@settings(max_examples=40, deadline=None)
def test_one_message_behind_backward_is_the_formula_of_the_paper(workers, step_s, latency, strategy):
    network = Network(1e9, latency)
    schedule = BY_HAND.at_the_end().lasting(step_s)
    wanted = scale(Quantities("q", 8, 4e9, step_s=step_s), None, [workers], network, strategy, "weak").points[0]
    (found,) = scale_schedule(schedule, None, [workers], network, strategy, "weak").points
    assert found.step_s == pytest.approx(wanted.step_s) and found.speedup == pytest.approx(wanted.speedup)
    assert found.exposed_s == pytest.approx(wanted.exposed_s)


@given(schedules(), st.integers(2, 300), st.floats(1e6, 1e12), st.floats(0, 1e-2), st.booleans())
@settings(max_examples=60, deadline=None)
def test_steps_are_between_what_is_hidden_and_what_is_not(schedule, workers, bandwidth, latency, sharded):
    network = Network(bandwidth, latency)
    step = simulate(schedule, workers, network, sharded=sharded)
    low = max(step.compute_s, step.communication_s)
    assert low * (1 - 1e-9) <= step.step_s <= (step.compute_s + step.communication_s) * (1 + 1e-9)
    stops = [(span.start, span.stop) for span in step.spans]
    assert all(stop <= start + 1e-12 for (_, stop), (start, _) in itertools.pairwise(stops))
    faster = simulate(schedule, workers, Network(2 * bandwidth, latency), sharded=sharded)
    assert faster.step_s <= step.step_s * (1 + 1e-12)
    alone = simulate(schedule, 1, network, sharded=sharded)
    assert alone.step_s == pytest.approx(schedule.compute_s) and not alone.spans


def test_the_slowest_of_more_workers_is_slower():
    """The mean of the maximum of p exponential draws is the p-th harmonic number."""
    import numpy as np

    draws = np.random.default_rng(0).exponential(size=(200_000, 8)).max(axis=1)
    assert harmonic(8) == pytest.approx(draws.mean(), abs=4 * draws.std() / math.sqrt(len(draws)))
    assert harmonic(4096) == pytest.approx(harmonic(4097) - 1 / 4097, rel=1e-12)
    found = simulate(BY_HAND, 8, FREE, jitter=0.1)
    assert found.waiting_s == pytest.approx(9 * 0.1 * (harmonic(8) - 1)) and found.step_s == pytest.approx(
        9 + found.waiting_s
    )
    assert simulate(BY_HAND, 1, FREE, jitter=0.1).step_s == 9


@pytest.fixture(scope="module")
def workload():
    return forward_workload(build_graph("resnet20", batch=64))


def test_gradients_of_a_network_are_put_into_buckets(workload):
    seconds = [layer.time_s for layer in estimate(workload, MACHINE).layers]
    found = bucketed(workload, seconds, 200_000)
    assert found.gradient_bytes == gradient_bytes(workload) and len(found.exchanges) == 5
    assert all(each.bytes >= 200_000 for each in found.exchanges[:-1])
    assert found.exchanges[0].ready < found.exchanges[-1].ready == len(seconds) == found.update
    assert len(bucketed(workload, seconds, 1 << 30).exchanges) == 1
    with pytest.raises(BnfuseError, match="bucket"):
        bucketed(workload, seconds, 0)


def test_a_graph_of_syncbn_exchanges_what_its_report_counts():
    forward = build_forward("densenet40", growth=4, depth=2, batch=2, image=8)
    graph = open_graph(build_training_graph(forward))
    fused = rewrite(graph.model, level="icf", signature=graph.signature, sync=True)
    work = training_workload(open_graph(fused.model))
    found = bucketed(work, [1e-3] * len(work.layers), 1 << 30).exchanges
    sent = fused.report.exchanged
    by_kind = {kind: [each for each in found if each.kind == kind] for kind in ("gather", "sum", "gradients")}
    assert [len(by_kind[kind]) for kind in by_kind] == [sent.moments, sent.terms, 1]
    assert sum(each.bytes for each in by_kind["gather"]) == sent.moment_bytes
    assert sum(each.bytes for each in by_kind["sum"]) == sent.term_bytes
    assert all(each.needed > each.ready for each in found if each.kind != "gradients")


def test_a_workload_is_scaled_by_its_samples_and_a_function_by_its_shares(workload):
    def make(batch):
        return forward_workload(build_graph("resnet20", batch=batch))

    whole = estimate(workload, MACHINE).time_s
    linear = scale_schedule(workload, MACHINE, [1, 4], GIGABYTE)
    anew = scale_schedule(make, MACHINE, [1, 4], GIGABYTE, batch=64)
    assert [p.compute_s for p in linear.points] == pytest.approx([whole, whole / 4])
    assert [p.compute_s for p in anew.points] == pytest.approx([estimate(make(n), MACHINE).time_s for n in (64, 16)])
    assert linear.balance == pytest.approx(1 + whole / 4 / (gradient_bytes(workload) / 1e9) * 2, rel=1e-6)
    assert max(map(len, str(linear).splitlines())) <= 110 and "1 message by ring" in str(linear)


def test_the_schedule_of_a_compiled_step_is_that_of_its_program():
    """Without kernels: of the lowered program of two ranks, each launch a millisecond."""
    from bnfuse.runtime.compile import lower_graph

    forward = build_forward("densenet40", growth=4, depth=2, batch=2, image=8)
    graph = open_graph(build_training_graph(forward))
    low, _ = lower_graph(graph, resolve("cpu", 1, None), SGD(lr=0.1), evaluates=False, ranks=Ranks(2, bucket=8_000))
    own = [launch for launch in low.program.launches if not launch.exchanges]
    found = schedule_of(low.program, [1e-3] * len(own), "small")
    size = sum(graph.state()[name].nbytes for name in graph.signature.trainable)
    assert size <= found.gradient_bytes < size + 64 * len(graph.signature.trainable)  # what aligns goes along
    assert {each.kind for each in found.exchanges} == {"sum", "gradients"}
    buckets = [each for each in found.exchanges if each.kind == "gradients"]
    assert len(buckets) > 1 and all(each.needed >= found.update for each in buckets)
    assert buckets[0].ready < found.update - 5 and buckets[-1].ready > buckets[-2].ready
    whole = schedule_of(low.program, [1e-3] * len(low.program.launches), "small")
    assert whole == found
    step = simulate(found, 2, Network(1e9))
    assert step.exposed_s < step.communication_s == pytest.approx(found.bytes / 1e9)
    with pytest.raises(BnfuseError, match="profile this step"):
        schedule_of(low.program, [1e-3], "short")


def test_a_fit_finds_what_was_put_in():
    wanted = Network(3e9, 2e-3)
    points = [
        Measured(schedule, p, simulate(schedule, p, wanted, jitter=0.03).step_s)
        for schedule in (BY_HAND.lasting(1.0), BY_HAND.at_the_end().lasting(0.5))
        for p in (2, 4, 8, 32)
    ]
    found = fit(points)
    assert found.network.bandwidth == pytest.approx(3e9, rel=1e-3)
    assert found.network.latency == pytest.approx(2e-3, rel=1e-2) and found.jitter == pytest.approx(0.03, rel=1e-2)
    assert found.error < 1e-4 and found.held_out_error < 1e-3
    assert "error of a step: 0.0 %" in str(found) and found.to_json()["points"][3]["workers"] == 32
    known = fit(points, fixed={"latency": 2e-3, "jitter": 0.03})
    assert known.network.latency == 2e-3 and known.network.bandwidth == pytest.approx(3e9, rel=1e-3)


def test_the_error_of_a_fit_is_that_of_its_points():
    """One number for two steps that differ by a tenth: each is off by about a twentieth."""
    schedule = BY_HAND.at_the_end().lasting(1e-9)
    step = simulate(schedule, 2, GIGABYTE).step_s
    fixed = {"latency": 0.0, "jitter": 0.0}
    found = fit([Measured(schedule, 2, step), Measured(schedule, 2, 1.1 * step)], fixed=fixed)
    assert found.errors == pytest.approx((0.05, -0.05), abs=0.005) and found.error == pytest.approx(0.05, abs=0.005)
    assert found.held_out == pytest.approx((0.1, 1 / 1.1 - 1), abs=1e-3)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: fit([Measured(BY_HAND, 2, 1.0)]), "1 measured steps do not tell 3 numbers"),
        (lambda: Measured(BY_HAND, 1, 1.0), "at least two"),
        (lambda: fit([Measured(BY_HAND, 2, 1.0)], fixed={"speed": 1}), "fixed=speed is none of"),
        (lambda: Schedule("s", 1, (1.0,), (Exchange("sum", 1, 1, 0),), 1), "needed behind where they are ready"),
        (lambda: simulate(BY_HAND, 2, GIGABYTE, jitter=-1), "jitter=-1"),
        (lambda: scale_schedule(BY_HAND, workers=[16]), "16 workers have no sample each of a batch of 8"),
        (lambda: scale_schedule(BY_HAND, workers=[]), "at least 1"),
        (lambda: scale_schedule(BY_HAND, mode="fast"), "strong or weak"),
    ],
)
def test_refusals(call, says):
    with pytest.raises(BnfuseError, match=says):
        call()
