"""`torch.compile(model, backend=...)`: what dynamo cuts out runs fused, or is left to torch with one line."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.exporter]


@pytest.fixture(autouse=True)
def dynamo():
    import torch

    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def backend_of_ours():
    from bnfuse.torch.backend import backend

    return backend


def test_a_compiled_model_trains_and_evaluates_as_torch_does():
    """With whatever batch: dynamo gives its size as an input, and the step is compiled for it once."""
    import torch
    from fused_networks import distance, doubled, gradients, images, made, state

    ours, exact = made(), doubled(made())
    fused = torch.compile(ours, backend=backend_of_ours(), dynamic=True, options={"fallback": "error"})
    for module, called, kind in ((ours, fused, torch.float32), (exact, exact, torch.float64)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for count in (4, 2, 4):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(called(images(count).to(kind)), torch.arange(count)).backward()
            optimizer.step()
    assert distance(gradients(ours), gradients(exact)) < 1e-5
    assert distance(state(ours), state(exact)) < 1e-5
    assert type(fused(images()).grad_fn).__name__ == "FusedBackward"


def test_blocks_that_share_a_graph_have_their_own_state():
    import torch
    from fused_networks import conv_norm, distance, doubled, gradients, made, state

    def blocks():
        return made(lambda: torch.nn.Sequential(conv_norm(3, 3), conv_norm(3, 3)))

    ours, exact = blocks(), doubled(blocks())
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    for block in ours:
        block.compile(backend=backend_of_ours(), options={"fallback": "error"})
    for module, given in ((ours, x), (exact, x.double())):
        for _ in range(2):
            module(given).square().sum().backward()
    assert distance(gradients(ours), gradients(exact)) < 1e-5
    assert distance(state(ours), state(exact)) < 1e-5


def test_what_cannot_be_fused_is_torch_s_and_is_told_once(caplog):
    import torch
    from torch import nn

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.linear = nn.Linear(4, 2)

        def forward(self, x):
            y = torch.fft.fft2(self.conv(x)).abs().mean((2, 3))
            torch._dynamo.graph_break()
            return self.linear(y)

    module, x = Broken(), torch.randn(2, 3, 8, 8)
    expected = module(x)
    with caplog.at_level(logging.INFO, logger="bnfuse"):
        called = torch.compile(module, backend=backend_of_ours())
        for _ in range(2):
            torch.testing.assert_close(called(x), expected)
    lines = [record.getMessage() for record in caplog.records if record.name == "bnfuse"]
    assert [line for line in lines if "is left to torch: " in line] == lines[:1] and len(lines) == 2
    assert "has nothing to fuse, and is torch's" in lines[1]


def test_modes_and_unknown_options_are_refused():
    import torch

    from bnfuse.core.errors import BnfuseError
    from bnfuse.torch.backend import backend

    graph = torch.fx.symbolic_trace(torch.nn.ReLU())
    for given, message in (
        ({"mode": "reduce-overhead"}, "is inductor's"),
        ({"options": {"triton.cudagraphs": True}}, "has no option 'triton.cudagraphs': it has level"),
        ({"options": {"fallback": "never"}}, "fallback 'never' is unknown"),
        ({"options": {"level": "most"}}, "there is no level 'most'"),
        ({"options": {"precision": "fp8"}}, "there is no precision 'fp8'"),
    ):
        with pytest.raises(BnfuseError, match=message):
            backend(graph, [torch.zeros(1)], **given)


def test_a_part_of_a_graph_does_not_say_whose_its_parameters_are(caplog):
    """As torch.compile(DistributedDataParallel(model)) hands them over."""
    import torch

    from bnfuse.torch.backend import backend

    graph, given = torch.fx.symbolic_trace(torch.nn.ReLU()), torch.nn.Parameter(torch.ones(2))
    with caplog.at_level(logging.WARNING, logger="bnfuse"):
        found = backend(graph, [given])
    assert "is left to torch: it is a part of a graph, and does not say whose parameter" in caplog.text
    assert torch.equal(found(given), given)


def test_the_backend_is_found_by_its_name():
    from bnfuse.torch import backend

    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert 'bnfuse = "bnfuse.torch.backend:backend"' in text.partition("torch_dynamo_backends")[2][:80]
    assert callable(backend.backend)
