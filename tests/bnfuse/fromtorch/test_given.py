"""What is torch's and not taken is one line, with what to give instead."""

from __future__ import annotations

import pytest
from small_training import forward_model

import bnfuse
from bnfuse.build import build, build_training_graph
from bnfuse.core.errors import BnfuseError

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def graph():
    return build_training_graph(forward_model())


def refused(action, message):
    with pytest.raises(BnfuseError, match=message) as caught:
        action()
    assert "\n" not in str(caught.value)


def test_modules_in_the_place_of_graphs(graph):
    import torch

    module = torch.nn.Linear(2, 2)
    for action in (bnfuse.rewrite, bnfuse.compile, bnfuse.inspect, lambda m: bnfuse.train(m, "digits")):
        refused(
            lambda action=action: action(module), r"cannot load a Linear: bnfuse.build_training_graph\(module, example"
        )


def test_optimisers_are_told_with_ours(graph):
    import torch

    weights = [torch.nn.Parameter(torch.ones(2))]
    cases = [
        (
            torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True),
            r"use bnfuse.SGD\(lr=0.1, momentum=0.9, nesterov=True\)",
        ),
        (torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.1), r"use bnfuse.AdamW\(lr=0.001, weight_decay=0.1\)"),
        (torch.optim.SGD(weights, lr=0.1, momentum=0.9, dampening=0.5), r"use bnfuse.SGD\(lr=...\) or"),
        (torch.optim.Adagrad(weights), r"use bnfuse.SGD\(lr=...\) or"),
    ]
    for optimizer, message in cases:
        refused(lambda optimizer=optimizer: bnfuse.compile(graph, optimizer=optimizer), message)


def test_the_suggested_optimiser_is_made_as_written():
    import torch

    from bnfuse.runtime.program.optim import ours_for

    theirs = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9, weight_decay=1e-4)
    assert eval(ours_for(theirs)) == bnfuse.SGD(lr=0.1, momentum=0.9, weight_decay=1e-4)


def test_other_things_of_torch(graph, tmp_path):
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    refused(lambda: bnfuse.train(graph, "digits", schedule=schedule), 'a schedule is a text such as "cosine"')
    refused(lambda: bnfuse.train(graph, "digits", augment=lambda x: x), "augment is a function: write it as text")
    refused(lambda: bnfuse.compile(graph, target=torch.device("cpu")), "target is a device: write it as text")
    refused(
        lambda: build(forward_model(), loss=torch.nn.CrossEntropyLoss()), "loss is a CrossEntropyLoss: write it as text"
    )
    path = tmp_path / "net.pth"
    torch.save({"a": torch.ones(1)}, path)
    refused(lambda: bnfuse.load(path), "net.pth: is of torch, and no ONNX model: `bnfuse build`")
