"""A synced graph as several ranks run it, in one process: each in a thread, in float64, with exchanges by hand.

    results = evaluate(oracle, model, [feeds of rank 0, feeds of rank 1])

What an exchange gives is said by bnfuse/opset/reference_ranks.py; all else is the yardstick's (tests/oracle.py).
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx

from bnfuse.opset import reference_ranks

Feeds = dict[str, np.ndarray]
LIMIT = 60.0  # seconds that a rank waits for the others


class Meeting:
    """Where ranks put what they have, and take what all have."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size)
        self.values: list[Any] = [None] * size

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait(LIMIT)
        found = list(self.values)
        self.barrier.wait(LIMIT)
        return found


def evaluate(oracle: types.ModuleType, model: onnx.ModelProto, feeds: Sequence[Feeds]) -> list[Feeds]:
    """The outputs of each rank."""
    meeting = Meeting(len(feeds))
    return in_threads(
        meeting, [lambda rank=rank: one(oracle, model, feeds[rank], meeting, rank) for rank in range(len(feeds))]
    )


def in_threads(meeting: Meeting, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What some calls give that wait for each other; the first error of any of them is raised."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = calls[rank]()
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results


def one(oracle: types.ModuleType, model: onnx.ModelProto, feeds: Feeds, meeting: Meeting, rank: int) -> Feeds:
    """The outputs of one rank."""

    class Evaluator(oracle.Evaluator):
        def call(self, node: onnx.NodeProto, inputs: list[Any], attributes: dict[str, Any]) -> tuple[Any, ...]:
            if node.op_type in ("AllReduceMoments", "AllReduceTerms"):
                everyone = meeting.gather(rank, (node.name, [value.numpy() for value in inputs]))
                assert {name for name, _ in everyone} == {node.name}, "ranks exchange in different orders"
                parts = list(zip(*(arrays for _, arrays in everyone), strict=True))
                if node.op_type == "AllReduceMoments":
                    results = reference_ranks.moments_of_all(*parts, attributes)
                else:
                    results = reference_ranks.terms_of_all(*parts, rank, attributes)
                return tuple(self.tensor(value) for value in results)
            if node.op_type == "BatchNormFinalize" and attributes.get("elements"):
                elements, own = attributes["elements"], attributes.get("own_share", 0.0)
                ranks = attributes.get("of_ranks", 1) or meeting.size
                attributes = {**attributes, "elements": 1 / (own + (1 / elements - own) / ranks)}
            return super().call(node, inputs, attributes)

    evaluator = Evaluator(model, "float64")
    env = {tensor.name: evaluator.tensor(onnx.numpy_helper.to_array(tensor)) for tensor in model.graph.initializer}
    env |= {name: evaluator.tensor(value) for name, value in feeds.items()}
    wanted = {value.name for value in model.graph.output}
    evaluator.nodes(model.graph.node, env, {}, wanted)
    return {value.name: env[value.name].numpy() for value in model.graph.output}


def of_all(results: Sequence[Feeds], logits: str = "logits") -> Feeds:
    """What one rank at the global batch would give: loss and gradients are the mean, logits come one behind the other;
    running statistics are the same on all."""
    found: Feeds = {}
    for name, first in results[0].items():
        parts = [each[name] for each in results]
        if name == "loss" or name.endswith("_grad"):
            found[name] = np.mean(parts, axis=0)
        elif name == logits:
            found[name] = np.concatenate(parts)
        else:
            for other in parts[1:]:
                np.testing.assert_array_equal(first, other, err_msg=name)
            found[name] = first
    return found
