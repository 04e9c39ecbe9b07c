"""State that others replace: it is seen, or refused."""

from __future__ import annotations

import copy
import pickle

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.exporter]


def agrees(fused) -> None:
    """The module's results and gradients are those of its state as it is now."""
    import torch
    from fused_networks import Small, distance, doubled, gradients, images, loss_of

    plain = Small()
    plain.load_state_dict(fused.state_dict())
    exact = doubled(plain)
    fused.zero_grad()
    loss_of(fused, images()).backward()
    loss_of(exact, images().double()).backward()
    assert distance(gradients(fused), gradients(exact)) < 1e-5
    for key, one in fused.state_dict().items():
        torch.testing.assert_close(one.double(), exact.state_dict()[key].double(), rtol=1e-4, atol=1e-5)


def test_replaced_data_is_seen(fused):
    import torch
    from torch import nn

    agrees(fused)
    fused.head.weight.data = fused.head.weight.data * 2
    fused.stem[1].running_var.data = fused.stem[1].running_var + 1
    agrees(fused)
    fused.load_state_dict(
        {name: one + one / 8 if one.dim() else one for name, one in fused.state_dict().items()}, assign=True
    )
    agrees(fused)
    fused.head.weight = nn.Parameter(fused.head.weight.detach() * 2)
    agrees(fused)
    fused.to(memory_format=torch.channels_last)
    agrees(fused)
    fused.head.bias.data.add_(1)  # behind autograd's back, as EMA and ZeRO do
    agrees(fused)


def test_an_optimiser_s_update_is_seen_without_a_copy(fused):
    from fused_networks import images, loss_of

    loss_of(fused, images()).backward()
    state = fused._bnfuse.watch.tensors()
    programs = [entry.program for entry in fused._bnfuse.programs.entries.values()]
    assert any(program.place_for(state).elsewhere(state) == [] for program in programs)
    agrees(fused)


def test_what_others_hold_is_left_alone(fused):
    """Tensors that a call uses in the place of parameters, and those that were parameters, keep their values."""
    import torch
    from fused_networks import images

    held = fused.state_dict()
    before = {name: one.clone() for name, one in held.items()}
    other = {name: 2 * one.detach() for name, one in fused.named_parameters()}
    wanted = {name: one.clone() for name, one in other.items()}
    found = torch.func.functional_call(fused.eval(), other, images())
    assert all(torch.equal(one, wanted[name]) for name, one in other.items())
    assert all(torch.equal(one, before[name]) for name, one in fused.state_dict().items())
    fused.load_state_dict({**held, **other}, assign=True)
    torch.testing.assert_close(fused(images()), found)
    assert all(torch.equal(one, before[name]) for name, one in held.items())


def test_other_types_are_refused(fused):
    import torch
    from fused_networks import images

    from bnfuse.core.errors import BnfuseError

    with pytest.raises(BnfuseError, match="is float64"):
        fused.double()(images().double())
    with pytest.raises(BnfuseError, match="int64"):
        fused.float()(torch.ones(4, 3, 8, 8, dtype=torch.int64))
    agrees(fused)


def test_another_submodule_is_captured_anew(first):
    from fused_networks import distance as far
    from fused_networks import doubled, gradients, images, loss_of, made
    from torch import nn

    fused = copy.deepcopy(first[1])
    fused.load_state_dict(made().state_dict())
    fused.head = nn.Linear(8, 4)
    plain = made()
    plain.head = copy.deepcopy(fused.head)
    exact = doubled(plain)
    loss_of(fused, images()).backward()
    loss_of(exact, images().double()).backward()
    assert far(gradients(fused), gradients(exact)) < 1e-5
    assert first[1].head is not fused.head and first[1](images()).shape == (4, 4)


def test_an_attribute_that_changes_is_captured_anew_and_one_that_does_all_the_time_is_told(fused, monkeypatch):
    from fused_networks import distance as far
    from fused_networks import doubled, images, loss_of, made, state

    from bnfuse.core.errors import BnfuseError
    from bnfuse.torch import engine

    exact = doubled(made())
    fused.stem[1].momentum = exact.stem[1].momentum = 0.5
    loss_of(fused, images()).backward()
    loss_of(exact, images().double()).backward()
    assert far(state(fused), state(exact)) < 1e-5
    monkeypatch.setattr(engine, "MOST_CHANGES", 0)
    fused.stem[1].momentum = 0.25
    with pytest.raises(BnfuseError, match=r"'stem\.1\.momentum' changes all the time"):
        fused(images())


def test_what_a_program_was_captured_with_is_looked_at_again():
    """Constants among buffers, attributes of every kind, also those that are not there yet, and ties."""
    import torch
    from fused_networks import images
    from torch import nn

    import bnfuse.torch

    class Odd(nn.Module):
        shift = 0.0

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
            self.b.weight = self.a.weight
            self.register_buffer("gain", torch.tensor(1.5))
            self.powers, self.scale = [1.0], torch.tensor(1.0)

        def forward(self, x):
            x = self.b(self.a(x)) * self.gain * self.powers[0] * self.scale + self.shift
            return x * getattr(self, "late", 1.0)

    fused = bnfuse.torch.fuse(Odd(), images())
    count = len(fused._bnfuse.programs.entries)

    def agree() -> None:
        wanted = Odd.forward(fused, images())
        torch.testing.assert_close(fused(images()), wanted)

    def turn() -> None:
        fused.a.weight.data = fused.a.weight.data[:, :, 0, 0].t()[:, :, None, None]

    agree()
    changes = (
        lambda: fused.gain.fill_(2),
        lambda: fused.gain.data.fill_(3),
        lambda: fused.powers.__setitem__(0, 2.0),
        lambda: setattr(fused, "scale", torch.tensor(0.5)),
        lambda: setattr(fused, "shift", 1.0),
        lambda: setattr(fused, "late", 2.0),
    )
    for change in changes:
        change()
        agree()
    fused(images())
    assert len(fused._bnfuse.programs.entries) == count + len(changes)
    turn()
    agree()
    fused.b.weight = nn.Parameter(torch.randn(3, 3, 1, 1))
    agree()


def test_a_copy_is_its_own(fused):
    import torch
    from fused_networks import images, loss_of

    double = copy.deepcopy(fused)
    loss_of(double, images()).backward()
    assert fused.head.weight.grad is None
    with torch.no_grad():
        double.head.weight.zero_()
    before = fused.head.weight.clone()
    agrees(fused)
    agrees(double)
    assert torch.equal(fused.head.weight, before) and not double.head.weight.any()


def test_pickling_and_data_parallel_are_refused(fused):
    from bnfuse.core.errors import BnfuseError

    with pytest.raises(BnfuseError, match="state_dict"):
        pickle.dumps(fused)
    with pytest.raises(BnfuseError, match="DistributedDataParallel"):
        fused._replicate_for_data_parallel()


def test_memory_that_several_processes_share_is_read_there_and_stays_there(fused):
    import torch

    fused.share_memory()
    for _ in range(2):
        with torch.no_grad():
            fused.head.weight.mul_(2)
        agrees(fused)
    assert fused.head.weight.is_shared()


def test_a_method_bound_to_the_module_reads_the_mode_of_the_fused_one(first):
    import types

    import torch
    from fused_networks import images, made
    from torch.nn import functional

    import bnfuse.torch

    def forward(self, x):
        return functional.dropout(type(self).forward(self, x), 0.5, self.training)

    module = made()
    module.forward = types.MethodType(forward, module)
    fused = bnfuse.torch.fuse(module, images()).eval()
    assert module.training
    assert torch.equal(fused(images()), fused(images()))
    assert not torch.equal(module(images()), module(images()))


def test_what_a_forward_computes_by_the_batch_and_what_has_the_name_of_a_result():
    import torch
    from fused_networks import doubled, images
    from torch import nn

    import bnfuse.torch

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)
            self.register_buffer("mean", torch.linspace(0, 1, 4)[:, None, None])

        def forward(self, x):
            y = self.conv(x) - self.mean
            return (y * y.mean((2, 3), keepdim=True)).sum((2, 3)) / x.shape[0]

    fused = bnfuse.torch.fuse(Odd(), images(4))
    exact = doubled(Odd())
    exact.load_state_dict(fused.state_dict())
    for batch in (4, 6):
        torch.testing.assert_close(fused(images(batch)).double(), exact(images(batch).double()), rtol=1e-4, atol=1e-5)
