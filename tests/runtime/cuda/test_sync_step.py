"""SyncBN on two ranks with GPUs, their kernels interpreted and NCCL stood in for, beside one rank on a CPU."""

from __future__ import annotations

import functools
import pathlib
import threading

import numpy as np
import onnx
import onnx.helper as h
import pytest
from source_files import load
from thread_ranks import Meeting, ThreadWorld, together

from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.batches import with_batch
from bnfuse.graph.training_graph import TrainingGraph, open_graph
from bnfuse.parallel.ranks import Ranks
from bnfuse.passes import rewrite
from bnfuse.runtime import compile_step
from bnfuse.runtime.compile import lower_graph
from bnfuse.runtime.program import program as p
from bnfuse.runtime.together import likeness

ranks = load(pathlib.Path(__file__).parent / "test_ranks_step.py")
ROWS, SIDE, CHANNELS, CLASSES = 2, 2, 4, 3


@functools.cache
def graph(**sync) -> TrainingGraph:
    """A convolution with a BatchNorm between it and the pooling in front of the classifier."""
    rng = np.random.default_rng(0)
    shapes = {"w": (CHANNELS, 3, 1, 1), "scale": (CHANNELS,), "bias": (CHANNELS,), "head": (CLASSES, CHANNELS)}
    values = {name: rng.normal(0, 0.5, shape) for name, shape in shapes.items()}
    values |= {"mean": np.zeros(CHANNELS), "var": np.ones(CHANNELS), "rest": np.zeros(CLASSES)}
    values["scale"] += 1
    nodes = [
        h.make_node("Conv", ["x", "w"], ["a"], "conv", kernel_shape=[1, 1]),
        h.make_node(
            "BatchNormalization", ["a", "scale", "bias", "mean", "var"], ["b", "m", "v"], "bn", training_mode=1
        ),
        h.make_node("Relu", ["b"], ["r"], "relu"),
        h.make_node("GlobalAveragePool", ["r"], ["q"], "pool"),
        h.make_node("Flatten", ["q"], ["f"], "flat"),
        h.make_node("Gemm", ["f", "head", "rest"], ["logits"], "gemm", transB=1),
    ]
    weights = [onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in values.items()]
    x = h.make_tensor_value_info("x", 1, [ROWS, 3, SIDE, SIDE])
    logits = h.make_tensor_value_info("logits", 1, [ROWS, CLASSES])
    model = h.make_model(h.make_graph(nodes, "tiny", [x], [logits], weights), opset_imports=[h.make_opsetid("", 17)])
    model.ir_version = 8
    built = build_training_graph(model, running_variance="torch")
    return open_graph(rewrite(open_graph(built).model, level="icf", **sync).model)


@pytest.mark.parametrize("mapped", [False, True], ids=["by NCCL", "by kernels"])
def test_two_ranks_are_one_at_the_global_batch(monkeypatch, mapped):
    rng = np.random.default_rng(1)
    images = (rng.standard_normal((2 * ROWS, 3, SIDE, SIDE)) + rng.standard_normal((2 * ROWS, 1, 1, 1))).astype(
        np.float32
    )
    labels = rng.integers(0, CLASSES, 2 * ROWS)
    one = compile_step(with_batch(graph(), 2 * ROWS), threads=1, optimizer=ranks.OPTIMIZER, evaluates=False)
    losses = [float(one(images, labels)) for _ in range(2)]
    made = lower_graph(graph(sync=True), ranks.TARGET, ranks.OPTIMIZER, evaluates=False, ranks=Ranks(2, mapped=mapped))
    kinds = [launch.kernel for launch in made[0].program.launches if launch.exchanges]
    # statistics; loss and running ones; terms; gradients
    assert kinds == [p.SUM, p.SUM] if mapped else [p.GATHER, p.SUM, p.SUM, p.SUM]
    gpus = ranks.Gpus(monkeypatch, made, maps=mapped)

    def work(world):
        step, _ = gpus.step(world)
        step.load_state_dict(graph().state())
        step.share_state()
        mine = slice(world.rank * ROWS, (world.rank + 1) * ROWS)
        found = [float(step(images[mine], labels[mine])) for _ in range(2)]
        step.same_everywhere()
        return found, step.state_dict()

    for found, state in together(2, work):
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        for name, value in one.state_dict().items():
            np.testing.assert_allclose(state[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_rank_may_evaluate_alone_before_the_first_step(monkeypatch):
    """Memory that ranks share is looked for by all of them, where they train."""
    made = lower_graph(graph(sync=True), ranks.TARGET, ranks.OPTIMIZER, ranks=Ranks(2, mapped=True))
    gpus = ranks.Gpus(monkeypatch, made, maps=True)
    images, labels = np.ones((ROWS, 3, SIDE, SIDE), np.float32), np.zeros(ROWS, np.int64)
    is_evaluated = threading.Event()

    def work(world):
        step, _ = gpus.step(world)
        step.load_state_dict(graph().state())
        if world.rank == 0:
            step.evaluate(images)
            is_evaluated.set()
        assert is_evaluated.wait(30)
        return float(step(images, labels))

    ours, others = together(2, work)
    assert ours == others


def test_a_step_that_exchanges_by_kernels_is_refused_where_gpus_do_not_reach_each_other(monkeypatch):
    """When it is made: what it is to train on has not been read then."""
    made = lower_graph(graph(sync=True), ranks.TARGET, ranks.OPTIMIZER, evaluates=False, ranks=Ranks(2, mapped=True))
    gpus = ranks.Gpus(monkeypatch, made, maps=False)
    with pytest.raises(BnfuseError, match="these do not: compile it again here"):
        gpus.step(ThreadWorld(Meeting(2), 0))


def test_ranks_that_exchange_by_kernels_are_seen_to_exchange_the_same():
    programs = [
        lower_graph(graph(**sync), ranks.TARGET, None, evaluates=False, ranks=Ranks(2, mapped=True))[0].program
        for sync in ({"sync": True}, {})
    ]
    assert likeness(programs[0], None) != likeness(programs[1], None)


def test_ranks_that_do_not_count_know_it(monkeypatch):
    """Before the step has run its memory is not on the GPU."""
    made = lower_graph(graph(sync=True, sync_ranks=1), ranks.TARGET, None, evaluates=False, ranks=Ranks(2))
    gpus = ranks.Gpus(monkeypatch, made)

    def work(world):
        step, _ = gpus.step(world)
        program, device = step.program, step._train.device
        return device.memory.load(program.storages[program.counts]).tolist()

    assert together(2, work) == [[1.0], [0.0]]
