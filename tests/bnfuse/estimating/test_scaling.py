"""Equations 3.3 and 3.4 of [Iandola16] by hand, and what follows from them."""

import csv
import dataclasses
import io
import json

import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.estimating.estimate import estimate
from bnfuse.estimating.hardware import Hardware
from bnfuse.estimating.layerwise import forward_workload
from bnfuse.estimating.parallel.scaling import Network, Quantities, communication_s, gradient_bytes, network, scale
from bnfuse.models import build_graph

GIGABYTE = Network(1e9)
NETWORK = Quantities("net", batch=1024, gradient_bytes=30e6, step_s=8.0)


def test_a_parameter_server_takes_a_message_from_each_worker():
    assert communication_s(30e6, 8, GIGABYTE, "server") == pytest.approx(8 * 0.03)
    assert communication_s(30e6, 16, GIGABYTE, "server") == pytest.approx(16 * 0.03)


def test_a_reduction_tree_takes_two_messages_a_level():
    assert communication_s(30e6, 8, GIGABYTE, "tree") == pytest.approx(2 * 3 * 0.03)
    assert communication_s(30e6, 128, GIGABYTE, "tree") == pytest.approx(2 * 7 * 0.03)
    assert communication_s(30e6, 48, GIGABYTE, "tree") == pytest.approx(2 * 5.584962500721156 * 0.03)


def test_one_worker_does_not_communicate():
    assert communication_s(30e6, 1, GIGABYTE, "server") == communication_s(30e6, 1, GIGABYTE, "tree") == 0


def test_both_are_equal_at_two_and_four_workers_and_the_tree_is_faster_beyond():
    times = {p: [communication_s(1e6, p, GIGABYTE, s) for s in ("tree", "server")] for p in (2, 4, 8, 64)}
    assert times[2][0] == times[2][1] and times[4][0] == times[4][1]
    assert times[8][0] < times[8][1] and times[64][0] < times[64][1] / 5


def test_latency_is_paid_for_every_message():
    slow = Network(1e9, latency=0.01)
    assert communication_s(30e6, 8, slow, "tree") == pytest.approx(6 * 0.04)
    assert communication_s(30e6, 8, slow, "server") == pytest.approx(8 * 0.04)


def test_strong_scaling_shares_the_batch():
    found = scale(NETWORK, workers=[1, 32], network=GIGABYTE)
    one, many = found.points
    assert (one.share, one.step_s, one.speedup, one.efficiency) == (1024, 8.0, 1.0, 1.0)
    assert (many.share, many.batch, many.compute_s) == (32, 1024, 0.25)
    assert many.step_s == pytest.approx(0.25 + 10 * 0.03)
    assert many.speedup == pytest.approx(8 / 0.55)
    assert many.efficiency == pytest.approx(8 / 0.55 / 32)


def test_the_slowest_worker_has_the_rest():
    assert scale(NETWORK, workers=[3], network=GIGABYTE).points[0].share == 342


def test_weak_scaling_keeps_the_share():
    (many,) = scale(NETWORK, workers=[32], network=GIGABYTE, mode="weak").points
    assert (many.share, many.batch, many.compute_s) == (1024, 32 * 1024, 8.0)
    assert many.speedup == pytest.approx(32 * 8 / 8.3)
    assert many.samples_per_s == pytest.approx(32 * 1024 / 8.3)


def test_communication_hides_behind_the_backward_pass():
    hidden = scale(NETWORK, workers=[32], network=GIGABYTE, overlap=1.0).points[0]
    assert hidden.exposed_s == pytest.approx(0.3 - 0.25 * 2 / 3)
    assert scale(NETWORK, workers=[2], network=GIGABYTE, overlap=1.0).points[0].step_s == 4.0


@pytest.mark.parametrize(
    ("strategy", "mode", "step_s"),
    [("tree", "strong", 8.0), ("server", "strong", 8.0), ("server", "weak", 8.0), ("tree", "weak", 0.5)],
)
def test_at_the_balance_communication_takes_as_long_as_computing(strategy, mode, step_s):
    source = dataclasses.replace(NETWORK, step_s=step_s)
    p = scale(source, network=GIGABYTE, strategy=strategy, mode=mode).balance
    computing = step_s / p if mode == "strong" else step_s
    assert communication_s(30e6, p, GIGABYTE, strategy) == pytest.approx(computing, rel=1e-6)


def test_a_tree_of_any_height_may_be_cheaper_than_a_large_share():
    assert scale(NETWORK, network=GIGABYTE, mode="weak").balance is None  # a tree of 133 levels


def test_without_gradients_there_is_no_balance():
    assert scale(Quantities("net", 64, 0.0, step_s=1.0), workers=[8]).balance is None


def test_more_workers_on_a_parameter_server_make_steps_longer_in_the_end():
    steps = [p.step_s for p in scale(NETWORK, network=GIGABYTE, strategy="server").points]
    assert steps.index(min(steps)) == 4 and steps[-1] > steps[-2] > steps[-3]  # 16: sqrt(8 s / 0.03 s) = 16.3


def test_quantities_without_a_time_compute_at_the_rate_of_the_hardware():
    found = scale(Quantities("net", 64, 1e6, flops=6e12), Hardware("h", "", 2e12, 1e9, 1), [4], GIGABYTE)
    assert found.points[0].compute_s == pytest.approx(0.75)


@pytest.fixture(scope="module")
def workload():
    return forward_workload(build_graph("resnet20", batch=64))


MACHINE = Hardware("machine", "for tests", 1e12, 50e9, 2**20)


def test_a_workload_is_estimated_once_and_shared(workload):
    found = scale(workload, MACHINE, [1, 4], GIGABYTE)
    whole = estimate(workload, MACHINE).time_s
    assert [p.compute_s for p in found.points] == pytest.approx([whole, whole / 4])
    assert found.gradient_bytes == gradient_bytes(workload) == 4 * (272_474 - 2 * 784 - 10)  # no BN's, no bias's


def test_a_function_is_estimated_for_every_share():
    def make(batch):
        return forward_workload(build_graph("resnet20", batch=batch))

    found = scale(make, MACHINE, [1, 4], GIGABYTE, batch=64)
    assert [p.compute_s for p in found.points] == [estimate(make(n), MACHINE).time_s for n in (64, 16)]
    assert found.points[0].speedup == 1.0


def test_json_csv_and_text_have_every_point():
    found = scale(NETWORK, network=GIGABYTE)
    assert json.loads(json.dumps(found.to_json()))["points"][5]["workers"] == 32
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [int(row["workers"]) for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert float(rows[5]["speedup"]) == found.at(32).speedup
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 100 and lines[-1].split()[0] == "128"
    assert "reduction tree (eq. 3.4), 1 GB/s" in str(found)


@pytest.mark.parametrize(
    ("text", "bandwidth"), [("6GB/s", 6e9), ("6 GB/s", 6e9), ("100Gbit/s", 12.5e9), ("2.5e9", 2.5e9), ("10MB/s", 1e7)]
)
def test_networks_in_words(text, bandwidth):
    assert network(text).bandwidth == pytest.approx(bandwidth)


@pytest.mark.parametrize("text", ["", "fast", "6 furlongs", "0GB/s", "-1GB/s", "1.2.3GB/s", "6GB/h"])
def test_what_is_no_network_is_refused(text):
    with pytest.raises(BnfuseError, match="6GB/s"):
        network(text)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"workers": [2048]}, "2048 workers have no sample each of a batch of 1024"),
        ({"workers": []}, "at least 1"),
        ({"workers": [0]}, "at least 1"),
        ({"strategy": "ring"}, "tree or server"),
        ({"mode": "fast"}, "strong or weak"),
        ({"overlap": 1.5}, "from 0 to 1"),
    ],
)
def test_refusals(change, says):
    with pytest.raises(BnfuseError, match=says):
        scale(NETWORK, **change)


def test_a_time_or_a_rate_is_needed():
    with pytest.raises(BnfuseError, match="step_s, or its flops and a hardware"):
        scale(Quantities("net", 64, 1e6))


def test_curves_are_drawn(tmp_path):
    from bnfuse.estimating.parallel.plot import plot

    curves = [scale(NETWORK, network=GIGABYTE, mode=mode) for mode in ("strong", "weak")]
    plot(curves, tmp_path / "s.svg", marks=[("net", 32, 12.0)])
    text = (tmp_path / "s.svg").read_text()
    assert text.count("<!-- net, ") == 2 and "<!-- measured -->" in text
