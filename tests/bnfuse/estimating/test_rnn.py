"""Estimates of the networks of sequences: what [Tsai21] observes of them (observations 3, 4, 9)."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from bnfuse.estimating.estimate import estimate
from bnfuse.estimating.hardware import MIB, Hardware
from bnfuse.estimating.layerwise import forward_workload
from bnfuse.estimating.reuse import RECURRENT, captured
from bnfuse.models import build_graph

SMALL = {"batch": 2, "hidden": 64, "steps": 10, "layers": 4, "vocabulary": 0}
WEIGHT = 4 * 2 * 64 * 64  # bytes of a gate of one input and the state


@pytest.fixture(scope="module")
def gnmt():
    return forward_workload(build_graph("gnmt", **SMALL))


def test_layers_know_their_time_step_in_both_passes(gnmt):
    for layer in gnmt.layers:
        expected = int(layer.name.split("/step")[1].split("/")[0]) if "/step" in layer.name else None
        assert layer.recurrence == expected, layer.name
    cell = [layer for layer in gnmt.layers if layer.part.endswith("/forget") and "encoder/layer3/" in layer.part]
    forget = [layer for layer in cell if layer.type == "Dense"]
    assert {layer.type for layer in cell} == {"Dense", "Add"}  # which sum the gradients
    phases = {phase: [x.recurrence for x in forget if x.phase == phase] for phase in ("forward", "backward")}
    assert phases == {"forward": list(range(1, 11)), "backward": list(range(10, 0, -1))}


def test_a_weight_is_one_tensor_that_every_step_reads_and_one_gradient_that_all_steps_add_to(gnmt):
    names = [tensor.name for tensor in gnmt.tensors]
    weight = names.index("encoder/layer3/forget/weight")
    readers = [layer for layer in gnmt.layers if any(a.tensor == weight for a in layer.reads)]
    assert Counter(layer.phase for layer in readers) == {"forward": 10, "backward": 10}
    gradients = {
        access.tensor
        for layer in readers
        for access in layer.writes
        if gnmt.tensors[access.tensor].kind == "weight_gradient"
    }
    kept = [gradient for gradient in gradients if gnmt.tensors[gradient].kept]
    assert (
        len(gradients) == 10 and len(kept) == 1
    )  # of each step, and of the first of the pass, to which they are added
    assert {gnmt.tensors[gradient].bytes for gradient in gradients} == {WEIGHT}


def machine(cache: int) -> Hardware:
    return Hardware("machine", "", 13.45e12, 616e9, cache)


def test_weights_are_fetched_anew_at_each_step_where_the_cache_does_not_hold_a_cell(gnmt):
    small, large = (estimate(gnmt, machine(cache)) for cache in (2 * WEIGHT, 64 * WEIGHT))
    weights = sum(tensor.bytes for tensor in gnmt.tensors if tensor.kind == "weight")
    assert small.traffic_in_bytes > 2 * 10 * weights  # forward and backward
    assert large.traffic_bytes < 0.15 * small.traffic_bytes
    saved = [captured(gnmt, cache).saved_in[RECURRENT] for cache in (2 * WEIGHT, 64 * WEIGHT)]
    assert saved[1] > 10 * saved[0]


def test_more_arithmetic_helps_gnmt_only_with_a_cache_that_holds_a_cell(gnmt):
    def speedup(cache: int) -> float:
        slow, fast = machine(cache), dataclasses.replace(machine(cache), flops=23.04e12)
        return estimate(gnmt, slow).time_s / estimate(gnmt, fast).time_s

    assert speedup(2 * WEIGHT) < 1.1
    assert speedup(2 * WEIGHT) < speedup(MIB * 64)


def test_all_layers_of_a_step_need_the_weights_of_a_side():
    """unroll=step keeps no weight until every layer's weights fit; unroll=layer one layer's."""
    nets = {how: forward_workload(build_graph("gnmt", **SMALL, unroll=how)) for how in ("layer", "step")}
    assert nets["layer"].flops == nets["step"].flops
    traffic = {how: estimate(net, machine(32 * WEIGHT)).traffic_bytes for how, net in nets.items()}
    assert traffic["step"] > 2 * traffic["layer"]


def test_a_transformer_reads_each_weight_once_in_each_pass():
    net = forward_workload(build_graph("transformer", batch=2, hidden=32, heads=2, steps=4, layers=2, vocabulary=50))
    weights = [i for i, tensor in enumerate(net.tensors) if tensor.kind == "weight" and "table" not in tensor.name]
    reads = Counter(access.tensor for layer in net.layers for access in layer.reads)
    assert {reads[weight] for weight in weights} == {2}
    assert not any(layer.recurrence for layer in net.layers)
