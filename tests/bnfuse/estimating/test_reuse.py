"""Reuse frequency, the modified roofline, and reuse by scope."""

from __future__ import annotations

import dataclasses
import json

import pytest

from bnfuse.core.text import join
from bnfuse.estimating.assumptions import Assumptions
from bnfuse.estimating.estimate import estimate
from bnfuse.estimating.hardware import MIB, Hardware, profile
from bnfuse.estimating.layerwise import forward_workload
from bnfuse.estimating.reuse import (
    ADJACENT,
    BLOCK,
    FORWARD_BACKWARD,
    INTRA,
    RECURRENT,
    SCOPES,
    UNBOUNDED,
    captured,
    requirements,
    reuse,
)
from bnfuse.estimating.roofline import layer_reuse_frequency, roofline, tensor_reuse_frequency
from bnfuse.estimating.workload import Access, Layer, Tensor, Workload
from bnfuse.models import build_graph

MACHINE = Hardware("machine", "", 1e12, 1e11, 0)


def workload(tensors: dict[str, Tensor], *layers: tuple) -> Workload:
    """Layers (name, reads, writes, more) over named tensors; `more` sets fields."""
    index = {name: i for i, name in enumerate(tensors)}
    made = []
    for name, reads, writes, more in layers:
        fields = {"type": "Add", "phase": "forward", "flops": 0, **more}
        sweeps = fields.pop("sweeps", 1)
        read = tuple(Access(index[t], tensors[t].bytes, sweeps) for t in reads.split())
        written = tuple(Access(index[t], tensors[t].bytes) for t in writes.split())
        made.append(Layer(name, reads=read, writes=written, **fields))
    return Workload("net", 1, tuple(tensors.values()), tuple(made))


def maps(**sizes: int) -> dict[str, Tensor]:
    return {name: Tensor(name, size, "map") for name, size in sizes.items()}


def test_reuse_frequency_is_operations_for_each_byte():
    tensors = {**maps(y=40), "x": Tensor("x", 60, "data", given=True), "w": Tensor("w", 100, "weight", given=True)}
    net = workload(tensors, ("conv", "x w", "y", {"type": "Conv2D", "flops": 4000}))
    (layer,) = net.layers
    one = Assumptions(mac_operations=1)
    assert layer_reuse_frequency(net, layer, one) == 2000 / 200
    assert tensor_reuse_frequency(net, layer, 1, one) == 2000 / 60
    assert layer_reuse_frequency(net, layer, dataclasses.replace(one, mac_operations=2)) == 4000 / 200
    with pytest.raises(KeyError, match="does not use"):
        tensor_reuse_frequency(net, dataclasses.replace(layer, reads=()), 1)


def test_a_backward_product_uses_the_incoming_gradient_twice_and_the_rest_once():
    tensors = {
        "x": Tensor("x", 10, "map"),
        "w": Tensor("w", 20, "weight", given=True),
        "dy": Tensor("dy", 5, "map_gradient"),
        "dx": Tensor("dx", 10, "map_gradient"),
        "dw": Tensor("dw", 20, "weight_gradient", kept=True),
    }
    net = workload(tensors, ("conv/backward", "dy x w", "dx dw", {"type": "Conv2D", "phase": "backward", "flops": 800}))
    frequency = [tensor_reuse_frequency(net, net.layers[0], t, Assumptions(mac_operations=1)) for t in range(5)]
    assert frequency == [200 / 10, 200 / 20, 400 / 5, 200 / 10, 200 / 20]


def test_the_modified_roofline_is_bound_by_bandwidth_left_of_the_ridge_point():
    tensors = maps(x=50, y=50)
    add = ("add", "x", "y", {"flops": 100})
    conv = ("conv", "x", "y", {"type": "Conv2D", "flops": 2 * 10_000})
    found = roofline(workload(tensors, add, conv), MACHINE, Assumptions(mac_operations=1))
    assert found.ridge_point == 10
    assert [(p.attainable, p.compute_bound, p.dense) for p in found.points] == [
        (1e11, False, False),
        (1e12, True, True),
    ]
    assert "ridge point 10" in join(found.sections()) and json.dumps(found.to_json())


def test_an_access_counts_for_the_scope_of_the_access_before_it():
    tensors = {**maps(a=1, b=1, c=1, d=1, e=1), "w": Tensor("w", 1, "weight", given=True)}
    step = {"type": "Dense"}
    net = workload(
        tensors,
        ("one", "", "a", {}),
        ("two", "a w", "b", {**step, "recurrence": 1}),  # a adjacent
        ("three", "b w", "c", {**step, "recurrence": 2}),  # b adjacent, w recurrent
        ("four", "c a", "d", {}),  # c adjacent, a block
        ("back", "d b", "e", {"phase": "backward"}),  # d and b forward-backward
    )
    found = captured(net, UNBOUNDED).saved_in
    assert found == {INTRA: 0, ADJACENT: 3, BLOCK: 1, RECURRENT: 1, FORWARD_BACKWARD: 2}


def test_weights_of_one_time_step_are_no_recurrent_reuse():
    tensors = {**maps(a=1, b=1), "w": Tensor("w", 1, "weight", given=True)}
    dense = {"type": "Dense", "recurrence": 4}
    net = workload(tensors, ("one", "w", "a", dense), ("two", "w", "b", dense))
    assert captured(net, UNBOUNDED).saved_in[ADJACENT] == 1


def test_further_sweeps_of_a_tensor_that_stays_are_intra_layer():
    tensors = maps(x=10, y=10)
    net = workload(tensors, ("make", "", "x", {}), ("norm", "x", "y", {"sweeps": 3}))
    assert captured(net, 100).saved_in == {**dict.fromkeys(SCOPES, 0), INTRA: 20, ADJACENT: 10}
    assert sum(captured(net, 5).saved_in.values()) == 0


def test_a_value_that_dies_in_the_cache_saves_its_write_in_its_widest_scope():
    tensors = maps(x=10, y=1, z=1)
    net = workload(
        tensors, ("make", "", "x", {}), ("use", "x", "y", {}), ("pass", "y", "z", {}), ("join", "x z", "", {})
    )
    assert captured(net, 100).saved_out == {**dict.fromkeys(SCOPES, 0), BLOCK: 10, ADJACENT: 2}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("resnet20", {"batch": 4}),
        ("densenet40", {"batch": 2, "depth": 2}),
        ("squeezenet", {"batch": 1, "image": 64, "bypass": "simple"}),
        ("gnmt", {"batch": 2, "hidden": 16, "steps": 4, "layers": 3, "vocabulary": 50}),
        ("transformer", {"batch": 2, "hidden": 16, "heads": 2, "steps": 4, "layers": 2, "vocabulary": 50}),
    ],
)
def test_what_is_saved_and_what_moves_are_all_accesses(name, settings):
    net = forward_workload(build_graph(name, **settings))
    reads = sum(a.bytes * a.sweeps for layer in net.layers for a in layer.reads)
    writes = sum(a.bytes * a.sweeps for layer in net.layers for a in layer.writes)
    largest = max(tensor.bytes for tensor in net.tensors)
    for capacity in (0, largest // 2, 2 * largest, 8 * largest, 1 << 40):
        found = captured(net, capacity)
        moved = estimate(net, dataclasses.replace(profile("a100"), cache=capacity))
        assert reads - sum(found.saved_in.values()) == moved.traffic_in_bytes
        assert writes - sum(found.saved_out.values()) == moved.traffic_out_bytes


def test_requirements_are_those_of_section_3_3():
    sizes = {"x1": 7, "x2": 5, "x3": 3, "y": 2}
    tensors = {**maps(**sizes), "w2": Tensor("w2", 11, "weight", given=True)}
    net = workload(
        tensors,
        ("layer1", "", "x1", {}),
        ("layer1b", "x1", "x2", {}),
        ("layer2", "x2 w2", "x3", {}),  # figure 3.3: x2, w2, x3 and the waiting x1
        ("add", "x1 x3", "y", {}),
    )
    found = requirements(net)
    assert set(found) == {ADJACENT, BLOCK}
    assert (found[ADJACENT].bytes, found[ADJACENT].layer) == (5 + 11 + 3, "layer2")
    assert (found[BLOCK].bytes, found[BLOCK].layer) == (5 + 11 + 3 + 7, "layer2")


def test_a_cache_of_the_requirement_captures_the_scope():
    net = forward_workload(build_graph("resnet20", batch=4))
    need = requirements(net)
    for scope in (ADJACENT, BLOCK, FORWARD_BACKWARD):
        possible = captured(net, UNBOUNDED).saved_in[scope]
        enough = max(need[narrower].bytes for narrower in SCOPES[: SCOPES.index(scope) + 1] if narrower in need)
        assert captured(net, enough).saved_in[scope] >= 0.95 * possible


def test_recurrent_weights_need_the_weights_of_a_cell():
    net = forward_workload(build_graph("gnmt", batch=2, hidden=64, steps=6, layers=4, vocabulary=0))
    need = requirements(net)[RECURRENT].bytes
    cell = 4 * 3 * 64 * 64 * 4  # 4 gates of [2 inputs and the state], in bytes
    assert 2 * cell < need < 2.5 * cell  # backward: the weights and their gradients
    assert captured(net, need).saved_in[RECURRENT] > 0.9 * captured(net, UNBOUNDED).saved_in[RECURRENT]
    assert captured(net, cell // 4).saved_in[RECURRENT] < captured(net, UNBOUNDED).saved_in[RECURRENT] // 10


def test_the_table_has_a_column_for_each_cache():
    net = forward_workload(build_graph("resnet20", batch=4))
    found = reuse(net, [MIB, 8 * MIB])
    text = join(found.sections())
    assert "1 MB" in text and "8 MB" in text and FORWARD_BACKWARD in text
    assert [entry["cache"] for entry in json.loads(json.dumps(found.to_json()))["caches"]] == [MIB, 8 * MIB]
