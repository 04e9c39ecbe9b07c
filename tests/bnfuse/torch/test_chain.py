"""Backward in pieces: the same gradients, piece by piece; in two processes that average them meanwhile."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.exporter]

HELPERS = Path(__file__).parents[2] / "helpers"


def in_pieces(fused, count=3):
    fused._bnfuse.options = dataclasses.replace(fused._bnfuse.options, pieces=count)
    return fused


def gradients_of(module):
    return {name: one.grad.clone() for name, one in module.named_parameters()}


def test_gradients_are_the_same_and_come_piece_by_piece(fused):
    import torch
    from fused_networks import images, loss_of

    loss_of(fused, images()).backward()
    expected = gradients_of(fused)
    fused.zero_grad()
    fused.load_state_dict(fused.state_dict())
    engine = fused._bnfuse
    program = next(iter(engine.programs.entries.values())).program.place_for(engine.watch.tensors())
    pieces = program.step.pieces(3)
    came = []
    for name, one in fused.named_parameters():
        one.register_post_accumulate_grad_hook(lambda one, name=name: came.append((name, program.step._under.next)))
    loss_of(in_pieces(fused), images()).backward()
    for name, value in gradients_of(fused).items():
        assert torch.equal(value, expected[name]), name
    behind = {name: piece.index + 1 if piece.index + 1 < 3 else 0 for piece in pieces for name in piece.parameters}
    assert len(pieces) == 3 and dict(came) == behind  # a gradient is accumulated before the next piece runs


def test_gradients_may_be_changed_and_parameters_stepped_while_backward_goes_on(fused):
    """As an optimiser in the hooks of a backward does: nothing that is computed later is of what it wrote."""
    import torch
    from fused_networks import distance, doubled, images, loss_of, made

    fused.load_state_dict(made().state_dict())
    found = []

    def step(parameter, seen, name):
        seen[name] = parameter.grad.clone().double()
        with torch.no_grad():
            parameter.sub_(100 * parameter.grad)
        parameter.grad.zero_()

    for module, x in ((in_pieces(fused, 8), images()), (doubled(made()), images().double())):
        found.append({})
        for name, one in module.named_parameters():
            one.register_post_accumulate_grad_hook(functools.partial(step, seen=found[-1], name=name))
        loss_of(module, x).backward()
    assert distance(*found) < 1e-5


def test_inputs_parts_of_the_gradients_and_backward_twice(fused):
    import torch
    from fused_networks import distance, doubled, images, made

    found = []
    start = made().state_dict()
    fused.load_state_dict(start)
    for module, x in ((in_pieces(fused), images()), (doubled(made()), images().double())):
        x.requires_grad_(True)
        results = module(x)
        head = module.head.weight
        (alone,) = torch.autograd.grad(results.square().sum(), [head], retain_graph=True)
        (of_x,) = torch.autograd.grad(results.exp().sum(), [x], retain_graph=True)
        results.square().sum().backward(retain_graph=True)
        results.square().sum().backward()
        gradients = {name: one.grad for name, one in module.named_parameters()}
        found.append({"alone": alone, "x": of_x, "x twice": x.grad, **gradients})
    assert distance(*found) < 1e-5


def test_other_calls_in_between_are_noticed(fused):
    """Two forwards, and a forward in the middle of a backward: what was computed is computed again."""
    from fused_networks import distance, doubled, gradients, images, made

    fused.load_state_dict(made().state_dict())
    for module, a, b in (
        (in_pieces(fused), images(), images(seed=2)),
        (doubled(made()), images().double(), images(seed=2).double()),
    ):
        first = module(a)

        def look(_, module=module, b=b):
            module.eval()(b)
            module.train()

        handle = module.grown[0].weight.register_post_accumulate_grad_hook(look)
        (first.square().sum() + module(b).exp().sum()).backward()
        handle.remove()
        theirs = gradients(module) if module is not fused else None
    assert distance(gradients(fused), theirs) < 1e-5


def test_two_processes_average_while_they_compute(fused, tmp_path):
    """DistributedDataParallel over gloo does with a fused module what it does with the module."""
    import torch
    from fused_networks import made
    from two_processes import trained

    fused.load_state_dict(made().state_dict())
    command = [sys.executable, str(HELPERS / "two_processes.py"), str(tmp_path / "meeting"), str(tmp_path / "1.pt")]
    paths = [str(HELPERS), *filter(None, sys.path)]
    other = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    try:
        mine = trained(0, tmp_path / "meeting", fused)
        assert other.wait(timeout=120) == 0
    finally:
        other.kill()
    theirs = torch.load(tmp_path / "1.pt")
    for key in ("plain", "fused"):
        for name, value in mine[key]["state"].items():
            if "running" not in name:  # the averages are one
                torch.testing.assert_close(theirs[key]["state"][name], value, rtol=0, atol=0)
    for rank in (mine, theirs):
        torch.testing.assert_close(rank["fused"]["losses"], rank["plain"]["losses"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rank["fused"]["state"], rank["plain"]["state"], rtol=1e-4, atol=1e-5)
    assert mine["plain"]["losses"].tolist() != theirs["plain"]["losses"].tolist()
    assert mine["fused"]["node"] == "HeadBackward"
