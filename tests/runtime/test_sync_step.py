"""SyncBN compiled: ranks in threads of one process against one rank at the global batch, and against float64."""

from __future__ import annotations

import pathlib

import numpy as np
import onnx_ir as ir
import pytest
import simulated_ranks
from source_files import load
from thread_ranks import together

from bnfuse.build import build_training_graph
from bnfuse.graph.batches import with_batch
from bnfuse.graph.training_graph import open_graph
from bnfuse.passes import rewrite
from bnfuse.runtime import SGD, compile_step

nets = load(pathlib.Path(__file__).parent / "test_session.py")
SIZE = 2


def tiny_net():
    """A convolution, and another one concatenated to it: two BatchNorms share channels."""
    net = nets.Net()
    x = net.op("Relu", net.bn(net.conv("image", 3, 8), 8))
    both = net.op("Concat", x, net.conv(x, 8, 8), axis=1)
    return net.model(net.op("Relu", net.bn(both, 16)), 16)


def batches(seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Images and labels of each rank; the ranks' images have other means."""
    parts = [nets.batch(seed + rank) for rank in range(SIZE)]
    return [images + np.float32(rank) for rank, (images, _) in enumerate(parts)], [labels for _, labels in parts]


def graph(net, level: str, **sync):
    return open_graph(
        rewrite(open_graph(build_training_graph(net(), running_variance="torch")).model, level=level, **sync).model
    )


def test_ranks_train_as_one_rank_at_the_global_batch():
    """Losses, weights and running statistics of some steps."""
    synced, plain = graph(tiny_net, "icf", sync=True), graph(tiny_net, "icf")
    given = [batches(seed) for seed in (0, 10, 20)]

    def run(world):
        step = compile_step(synced, optimizer=SGD(lr=0.05, momentum=0.9), threads=1, world=world, evaluates=False)
        losses = [float(step(images[world.rank], labels[world.rank])) for images, labels in given]
        return losses, step.state_dict()

    results = together(SIZE, run)
    whole = with_batch(plain, SIZE * nets.BATCH)
    step = compile_step(whole, optimizer=SGD(lr=0.05, momentum=0.9), threads=1, evaluates=False)
    losses = [float(step(np.concatenate(images), np.concatenate(labels))) for images, labels in given]
    expected = step.state_dict()
    for found, state in results:
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        for name, value in expected.items():
            np.testing.assert_allclose(state[name], value, rtol=2e-4, atol=2e-5, err_msg=name)
    for name, value in results[0][1].items():
        np.testing.assert_array_equal(value, results[1][1][name], err_msg=name)


@pytest.mark.torch
def test_statistics_of_one_rank_serve_both(oracle):
    """Gradients are the means over the ranks."""
    synced = graph(tiny_net, "icf", sync=True, sync_ranks=1)
    images, labels = batches()
    label = synced.signature.labels[0]
    feeds = [{"image": x.astype(np.float64), label: y} for x, y in zip(images, labels, strict=True)]
    results = simulated_ranks.evaluate(oracle, ir.to_proto(synced.model), feeds)
    wide = simulated_ranks.of_all(results, synced.signature.logits)

    def run(world):
        step = compile_step(synced, threads=1, world=world, evaluates=False)
        step.forward(images[world.rank], labels[world.rank])
        step.backward()
        return step.gradients()

    for found in together(SIZE, run):
        for name, value in found.items():
            expected = wide[synced.signature.gradients[name]]
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=2e-5, err_msg=name)
