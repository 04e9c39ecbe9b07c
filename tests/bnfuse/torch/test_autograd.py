"""The one node of autograd: several forwards, freed and changed tensors, what gradients reach."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.exporter]


def both(fused):
    from fused_networks import doubled, made

    return fused, doubled(made())


def test_two_forwards_before_a_backward(fused):
    """Their maps are made anew; statistics move twice, and not three times."""
    from fused_networks import distance, gradients, images, state

    ours, exact = both(fused)
    for module, a, b in ((ours, images(), images(seed=2)), (exact, images().double(), images(seed=2).double())):
        (module(a).square().sum() + module(b).exp().sum()).backward()
    assert distance(gradients(ours), gradients(exact)) < 1e-5
    assert distance(state(ours), state(exact)) < 1e-5


def test_gradients_are_left_alone_by_later_backwards(fused):
    import torch
    from fused_networks import images, loss_of

    loss_of(fused, images()).backward()
    kept = {name: one.grad for name, one in fused.named_parameters()}
    before = {name: one.clone() for name, one in kept.items()}
    fused.zero_grad(set_to_none=True)
    outputs = fused(images(seed=2))
    copied = outputs.detach().clone()
    outputs.sum().backward()
    fused(images(seed=3))
    assert all(torch.equal(kept[name], before[name]) for name in kept)
    assert torch.equal(outputs, copied)


def test_gradients_are_handed_out_as_they_lie_and_their_memory_is_used_in_turns(fused):
    import torch
    from fused_networks import distance, doubled, gradients, images, loss_of, made

    places, kept = set(), []
    for seed in range(4):
        fused.zero_grad()
        loss_of(fused, images(seed=seed)).backward()
        places.add(fused.head.weight.grad.data_ptr())
    assert len(places) <= 2
    exact = doubled(made())
    fused.zero_grad(), fused.load_state_dict(made().state_dict())
    for seed in range(3):  # added up by torch; each is kept besides, as hooks do
        handle = fused.head.weight.register_hook(lambda gradient: kept.append((gradient, gradient.clone())))
        loss_of(fused, images(seed=seed)).backward()
        loss_of(exact, images(seed=seed).double()).backward()
        handle.remove()
    assert distance(gradients(fused), gradients(exact)) < 1e-5
    assert all(torch.equal(gradient, copied) for gradient, copied in kept[1:])  # the first became .grad
    fused.head.bias.grad.share_memory_()
    before = gradients(fused)
    loss_of(fused, images()).backward()
    loss_of(exact, images().double()).backward()
    assert distance(gradients(fused), gradients(exact)) < 1e-5 < distance(gradients(fused), before)


def test_copies_of_gradients_as_on_a_gpu_are_those_and_their_memory_is_torch_s_again(fused):
    """What dropped them may still read there, on another stream: torch's allocator knows."""
    import torch
    from fused_networks import images, loss_of
    from torch.multiprocessing.reductions import StorageWeakRef

    from bnfuse.torch.gradients import Copied

    loss_of(fused, images()).backward()
    engine = fused._bnfuse
    entry = next(one for key, one in engine.programs.entries.items() if key.gradients and key.inputs[0].shape[0] == 4)
    views = entry.program.place_for(engine.watch.tensors()).step.gradient_views()
    on_gpu = SimpleNamespace(  # what a DeviceArray has of a tensor
        shape=views.flat.shape, __dlpack__=views.flat.__dlpack__, __dlpack_device__=views.flat.__dlpack_device__
    )
    held = Copied(SimpleNamespace(gradient_views=lambda: dataclasses.replace(views, flat=on_gpu)))
    held.begin()
    first = held.all()
    wanted = dict(fused.named_parameters())
    assert first.keys() == wanted.keys() and all(torch.equal(one, wanted[name].grad) for name, one in first.items())
    assert all(torch.equal(one, first[name]) for name, one in held.some(held.names[2:5]).items())
    one, other = first.pop(held.names[0]), held.all()[held.names[0]]
    assert other.data_ptr() != one.data_ptr()
    memory = StorageWeakRef(one.untyped_storage())
    del first, one
    assert memory.expired()


def test_what_is_captured_inside_a_checkpoint(fused):
    """The first call with images that want gradients: what capturing it saves is no part of what is checkpointed."""
    from fused_networks import images
    from torch.utils.checkpoint import checkpoint

    found = []
    for call in (lambda x: checkpoint(fused, x, use_reentrant=False), fused):
        x = images(5).requires_grad_()
        call(x).square().sum().backward()
        found.append(x.grad)
    assert float((found[0] - found[1]).abs().max()) < 1e-5 * float(found[1].abs().max())


def test_backward_twice(fused):
    import torch
    from fused_networks import images, loss_of

    loss = loss_of(fused, images())
    loss.backward(retain_graph=True)
    first = fused.head.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(fused.head.weight.grad, 2 * first, rtol=1e-5, atol=1e-7)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_what_is_changed_before_backward_is_told_by_autograd(fused):
    import torch
    from fused_networks import images, loss_of

    loss = loss_of(fused, images())
    torch.optim.SGD(fused.parameters(), lr=0.1)
    with torch.no_grad():
        fused.head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_second_derivatives_are_refused(fused):
    import torch
    from fused_networks import images, loss_of

    loss = loss_of(fused, images())
    (gradient,) = torch.autograd.grad(loss, [fused.head.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


def test_transforms_of_functions_are_refused(fused):
    import torch
    from fused_networks import images

    from bnfuse.core.errors import BnfuseError

    with pytest.raises(BnfuseError, match=r"torch\.func"):
        torch.func.vmap(fused)(images()[None])
    with pytest.raises(BnfuseError, match=r"torch\.func"):
        torch.func.grad(lambda x: fused(x).sum())(images())
    state = {name: 2 * one.detach() for name, one in fused.named_parameters()}
    found = torch.func.functional_call(fused, state, images())  # other tensors in the place of parameters
    fused.load_state_dict({**fused.state_dict(), **state})
    torch.testing.assert_close(found, fused(images()))


def test_inputs_in_any_layout(fused):
    import torch
    from fused_networks import distance, gradients, images, loss_of

    found = []
    x = images()
    for given in (x, x.to(memory_format=torch.channels_last), torch.stack([x, x], -1)[..., 1], x.double()[::1].float()):
        fused.zero_grad()
        loss_of(fused, given).backward()
        found.append(gradients(fused))
    assert all(distance(one, found[0]) < 1e-6 for one in found)


def test_another_batch_is_compiled_once(fused, caplog):
    import logging

    from fused_networks import distance, gradients, images, loss_of

    ours, exact = both(fused)
    with caplog.at_level(logging.INFO, "bnfuse"):
        for count in (4, 3, 4, 3):
            loss_of(ours, images(count)).backward()
            loss_of(exact, images(count).double()).backward()
    assert distance(gradients(ours), gradients(exact)) < 1e-5
    assert [one.getMessage() for one in caplog.records if "batch of 3" in one.getMessage()].__len__() <= 1


def test_without_gradients_statistics_still_move(fused):
    import torch
    from fused_networks import distance, images, state

    ours, exact = both(fused)
    with torch.no_grad():
        for module, x in ((ours, images()), (exact, images().double())):
            module(x)
            module(3 * x)
    assert distance(state(ours), state(exact)) < 1e-5


def test_frozen_norms_and_parameters():
    import torch
    from fused_networks import distance, doubled, gradients, images, loss_of, made, state

    import bnfuse.torch

    module = made()
    module.stem.eval().requires_grad_(False)
    exact = doubled(module)
    fused = bnfuse.torch.fuse(module, images())
    for one, x in ((fused, images()), (exact, images().double())):
        loss_of(one, x).backward()
    assert distance(gradients(fused), gradients(exact)) < 1e-5 and fused.stem[0].weight.grad is None
    assert distance(state(fused), state(exact)) < 1e-5
    fused.stem.requires_grad_(True)  # thawed: captured anew
    exact.stem.requires_grad_(True)
    fused.zero_grad(), exact.zero_grad()
    with torch.no_grad():
        fused.stem[1].running_mean.add_(0.1), exact.stem[1].running_mean.add_(0.1)
    for one, x in ((fused, images()), (exact, images().double())):
        loss_of(one, x).backward()
    assert distance(gradients(fused), gradients(exact)) < 1e-5


def test_several_outputs_in_a_dict_and_an_unused_one():
    import torch
    from fused_networks import conv_norm, distance, doubled, gradients, images, made
    from torch import nn

    import bnfuse.torch

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a, self.b = conv_norm(3, 8), nn.Conv2d(8, 2, 1), nn.Conv2d(8, 2, 1)

        def forward(self, given, *, scale):
            x = self.stem(given["images"] * scale)
            return {"a": self.a(x), "rest": (self.b(x), None, 3)}

    module = made(Heads)
    exact = doubled(module)
    fused = bnfuse.torch.fuse(module, {"images": images()}, {"scale": 2.0})
    for one, x in ((fused, images()), (exact, images().double())):
        found = one({"images": x}, scale=2.0)
        assert list(found) == ["a", "rest"] and found["rest"][1:] == (None, 3)
        found["a"].square().mean().backward()
    assert fused.b.weight.grad is None
    assert distance(gradients(fused), gradients(exact)) < 1e-5
    torch.testing.assert_close(fused({"images": images()}, scale=2.0)["rest"][0].double(), exact(
        {"images": images().double()}, scale=2.0
    )["rest"][0], rtol=1e-4, atol=1e-5)  # fmt: skip


def test_what_is_drawn_follows_torch_s_generator():
    """Masks are new in each call, repeated after manual_seed, and the same in a forward that is run again."""
    import torch
    from fused_networks import conv_norm, images, made
    from torch import nn

    import bnfuse.torch

    fused = bnfuse.torch.fuse(made(lambda: nn.Sequential(conv_norm(3, 8), nn.Dropout(0.5))), images().requires_grad_())
    torch.manual_seed(5)
    a, b = fused(images()), fused(images())
    torch.manual_seed(5)
    x = images().requires_grad_()
    c = fused(x)
    fused(images())  # the maps of `c` are gone
    assert not torch.equal(a, b) and torch.equal(a, c)
    c.sum().backward()
    again = torch.autograd.grad(fused(images().requires_grad_()).sum(), fused.parameters())
    torch.manual_seed(5)
    (expected,) = torch.autograd.grad(fused(x).sum(), [x])
    torch.testing.assert_close(x.grad, expected, rtol=1e-5, atol=1e-6)
    assert len(again) == 3
    fused.eval()
    assert torch.equal(fused(images()), fused(images()))


def test_autocast_on_a_cpu_gives_its_types(fused):
    import torch
    from fused_networks import distance, gradients, images, loss_of, made

    plain = made()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = fused(images()), plain(images())
        assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
    fused.load_state_dict(made().state_dict())
    rounded = made()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss_of(fused, images()).backward()
        loss_of(rounded, images()).backward()
    loss_of(plain, images()).backward()
    own = distance(gradients(rounded), gradients(plain))
    assert 0 < distance(gradients(fused), gradients(plain)) < 1.5 * own + 0.01
