"""A fused module in plain torch loops: losses and weights follow torch's, judged by float64."""

from __future__ import annotations

import copy

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.exporter]

STEPS = 5


def optimizer_of(kind, module):
    import torch

    if kind == "sgd":
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def trained(module, kind, x, *, clip=0.0, accumulate=1, scheduled=False, scaler=None):
    import torch
    from fused_networks import loss_of

    optimizer, losses = optimizer_of(kind, module), []
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, STEPS) if scheduled else None
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in x.chunk(accumulate):
            loss = loss_of(module, part) / accumulate
            (scaler.scale(loss) if scaler else loss).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        scaler.step(optimizer) if scaler else optimizer.step()
        if scaler:
            scaler.update()
        if schedule:
            schedule.step()
        losses.append(loss.item())
    return losses


def test_losses_and_weights_follow_torch(fused):
    import torch
    from fused_networks import distance, doubled, images, made, state

    x = images()
    for kind, options in (
        ("sgd", {}),
        ("adamw", {}),
        ("sgd", {"clip": 0.5, "scheduled": True}),
        ("adamw", {"accumulate": 2}),
        ("sgd", {"scaler": torch.amp.GradScaler("cpu", enabled=False)}),
    ):
        start = made().state_dict()
        fused.load_state_dict(start)
        theirs = made()
        exact = doubled(theirs)
        losses = [trained(m, kind, b, **options) for m, b in ((fused, x), (theirs, x), (exact, x.double()))]
        ours, torchs = (max(abs(a - b) for a, b in zip(one, losses[2], strict=True)) for one in losses[:2])
        assert ours < 4 * torchs + 1e-6, (kind, options)
        error, yardstick = (distance(state(m), state(exact)) for m in (fused, theirs))
        assert error < 4 * yardstick + 1e-6, (kind, options)
        assert state(fused)["stem.1.num_batches_tracked"] == STEPS * options.get("accumulate", 1)


def test_a_moving_average_of_the_weights(fused):
    """AveragedModel copies the module, and update_bn runs it with momentum=None: the mean of all batches."""
    import torch
    from fused_networks import distance, doubled, images, made, state
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

    found = []
    for module, x in ((fused, images()), (doubled(made()), images().double())):
        averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            torch.nn.functional.cross_entropy(module(x), torch.arange(4)).backward()
            optimizer.step()
            averaged.update_parameters(module)
        update_bn([x, 2 * x + 1], averaged)
        averaged.eval()
        with torch.no_grad():
            found.append((state(averaged.module), averaged(x).double()))
    assert distance(found[0][0], found[1][0]) < 1e-4
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-4)


def test_it_is_the_module_that_it_was(first):
    import torch
    from fused_networks import made

    import bnfuse.torch

    module, fused = first
    assert isinstance(fused, type(module)) and repr(fused) == repr(module)
    assert [id(one) for one in fused.parameters()] == [id(one) for one in module.parameters()]
    assert [id(one) for one in fused.buffers()] == [id(one) for one in module.buffers()]
    fresh = made()
    assert list(fused.state_dict()) == list(fresh.state_dict())
    fresh.load_state_dict(fused.state_dict())
    fused.load_state_dict(fresh.state_dict())
    before = torch.random.get_rng_state()
    rewritten = copy.deepcopy(fused)
    assert torch.equal(before, torch.random.get_rng_state()) and type(rewritten) is type(fused)
    assert str(bnfuse.torch.report(fused)).startswith("the whole module: fused at level icf (3 BatchNorms")


def test_capturing_changes_nothing(first):
    import torch
    from fused_networks import Small, images

    import bnfuse.torch

    torch.manual_seed(3)
    module = Small()
    before = {name: one.clone() for name, one in module.state_dict().items()}
    drawn = torch.random.get_rng_state()
    fused = bnfuse.torch.fuse(module.eval(), images())
    assert torch.equal(drawn, torch.random.get_rng_state()) and not module.training and not fused.training
    assert all(torch.equal(one, before[name]) for name, one in module.state_dict().items())
    assert bnfuse.torch.report(fused).fused == ("",)


def test_evaluation_and_its_gradients(fused):
    import torch
    from fused_networks import distance, doubled, gradients, images, made

    exact = doubled(made())
    x, y = images().requires_grad_(), images().double().requires_grad_()
    fused(x.detach()), exact(y.detach())
    fused.eval(), exact.eval()
    with torch.no_grad():
        torch.testing.assert_close(fused(x).double(), exact(y), rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(fused(x).double(), exact(y), rtol=1e-4, atol=1e-5)
    fused(x)[:, 1].sum().backward()
    exact(y)[:, 1].sum().backward()
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-4, atol=1e-5)
    assert distance(gradients(fused), gradients(exact)) < 1e-5
    assert fused.stem[1].num_batches_tracked == 1
