"""States between a step and the torch module that its graph was made of."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import bnfuse
from bnfuse.core.errors import BnfuseError

pytestmark = [pytest.mark.torch, pytest.mark.exporter]


@pytest.fixture(scope="module")
def step():
    from torch_modules import images, small

    fused = bnfuse.rewrite(bnfuse.build_training_graph(small(tied=True), example=images()))
    return bnfuse.compile(fused, optimizer=bnfuse.SGD(lr=0.1, momentum=0.9), threads=1)


def module(seed=3):
    from torch_modules import small

    return small(seed, tied=True)


def same(a, b):
    return a.keys() == b.keys() and all((np.asarray(a[name]) == np.asarray(b[name])).all() for name in a)


def test_a_modules_state_goes_in_and_comes_back(step):
    import torch

    source = module()
    with torch.no_grad():
        source.norm1.num_batches_tracked.fill_(41)
    assert step.load_state_dict(source.state_dict()) == ([], [])
    found, target = step.state_dict(torch=True), module(4)
    assert all(isinstance(value, torch.Tensor) for value in found.values())
    assert not any(name.startswith("optimizer.") for name in found)
    lost = target.load_state_dict(found, strict=False)
    assert (lost.missing_keys, lost.unexpected_keys) == (["spare"], [])
    expected = {name: value for name, value in source.state_dict().items() if name != "spare"}
    assert same({name: value for name, value in target.state_dict().items() if name != "spare"}, expected)


def test_steps_follow_torch_and_count_batches(step):
    import torch
    from torch_modules import images, labels

    source = module()
    step.load_state_dict(source.state_dict())
    step.reset_optimizer()
    wide = copy.deepcopy(source).double()
    optimizer = torch.optim.SGD(wide.parameters(), lr=0.1, momentum=0.9)
    for seed in range(3):
        ours = step(images(seed), labels())
        loss = torch.nn.functional.cross_entropy(wide(images(seed).double()), labels())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert ours == pytest.approx(float(loss.detach()), rel=1e-5)
    found = step.state_dict(torch=True)
    for name, value in wide.state_dict().items():
        if name != "spare":
            np.testing.assert_allclose(found[name], value, rtol=2e-4, atol=1e-5, err_msg=name)
    assert int(found["norm1.num_batches_tracked"]) == 10


def test_counts_survive_a_checkpoint_and_a_compiled_file(step, tmp_path):
    from torch_modules import images, labels

    step.load_state_dict(module().state_dict())
    step(images(), labels())
    assert int(step.state_dict(torch=True)["norm2.num_batches_tracked"]) == 8
    step.save(tmp_path / "c.safetensors")
    step.export(tmp_path / "s.bnf")
    for seed in range(2):
        step(images(seed), labels())
    assert int(step.state_dict(torch=True)["norm2.num_batches_tracked"]) == 10
    opened = bnfuse.open_step(tmp_path / "s.bnf")
    assert int(opened.state_dict(torch=True)["norm2.num_batches_tracked"]) == 8
    step.load(tmp_path / "c.safetensors")
    assert int(step.state_dict(torch=True)["norm2.num_batches_tracked"]) == 8
    assert same(step.state_dict(torch=True), opened.state_dict(torch=True))


def test_a_forward_whose_statistics_are_taken_over_is_counted_once(step):
    from torch_modules import images, labels

    step.load_state_dict(module().state_dict())
    step.run_forward(images(), labels(), commit_statistics=True)
    step.commit_statistics()
    assert int(step.state_dict(torch=True)["norm2.num_batches_tracked"]) == 8
    step.backward()
    step.update()
    assert int(step.state_dict(torch=True)["norm2.num_batches_tracked"]) == 8
    step.forward(images(), labels())
    assert int(step.state_dict(torch=True)["norm2.num_batches_tracked"]) == 8


def test_states_of_wrapped_modules_and_other_types_are_taken(step):
    import torch

    source = module(5)
    wrapped = torch.nn.DataParallel(source).state_dict()
    assert next(iter(wrapped)).startswith("module.")
    step.load_state_dict(wrapped)
    assert same(step.state_dict(torch=True), {k: v for k, v in source.state_dict().items() if k != "spare"})
    parameters = {**source.state_dict(), **dict(source.named_parameters())}  # with gradients, not detached
    step.load_state_dict({f"_orig_mod.{name}": value for name, value in parameters.items()})
    small = {name: value.bfloat16() if value.is_floating_point() else value for name, value in wrapped.items()}
    small["module.gain"] = wrapped["module.gain"]
    step.load_state_dict(small)
    rounded = source.state_dict()["stem.weight"].bfloat16().float()
    assert (step.state_dict()["stem.weight"] == rounded.numpy()).all()


def test_what_does_not_fit_is_told_and_nothing_is_changed(step):
    from torch_modules import small

    step.load_state_dict(module().state_dict())
    before = step.state_dict()
    state = module(6).state_dict()
    del state["head.bias"], state["norm1.weight"]
    state["extra"] = state["head.weight"]
    with pytest.raises(BnfuseError, match=r"lacks 'norm1.weight', 'head.bias' .* has 'extra' .*strict=False") as caught:
        step.load_state_dict(state)
    assert "\n" not in str(caught.value)
    other = small(classes=5, tied=True).state_dict()
    with pytest.raises(BnfuseError, match=r"'head.weight' has the shape \[5, 4\], not \[3, 4\] .*skip_head=True"):
        step.load_state_dict(other, strict=False)
    assert same(step.state_dict(), before)
    found = step.load_state_dict(state, strict=False)
    assert (sorted(found.missing_keys), found.unexpected_keys) == (["head.bias", "norm1.weight"], ["extra"])
    assert (step.state_dict()["head.bias"] == before["head.bias"]).all()
    assert (step.state_dict()["stem.weight"] == state["stem.weight"].numpy()).all()
    assert step.load_state_dict(other, skip_head=True).missing_keys == ["head.weight", "head.bias"]
    assert (step.state_dict()["stem.weight"] == other["stem.weight"].numpy()).all()


def test_states_of_torch_are_exported_and_evaluated(step, tmp_path):
    import onnxruntime
    import torch
    from torch_modules import images, labels

    source = module(8)
    bnfuse.export_inference(step, tmp_path / "net.onnx", state=torch.nn.DataParallel(source).state_dict())
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"images": images().numpy()})
    with torch.no_grad():
        expected = source.eval().double()(images().double()).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    torch.save({"state_dict": source.float().state_dict()}, tmp_path / "net.pth")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images(), labels()), batch_size=4)
    score = bnfuse.evaluate(step, loader, state=tmp_path / "net.pth")
    assert score.right == int((expected.argmax(1) == labels().numpy()).sum())
    state = source.state_dict()
    del state["head.bias"]
    with pytest.raises(BnfuseError, match=r"the state lacks 'head.bias': is it of this network"):
        bnfuse.export_inference(step, tmp_path / "net.onnx", state=state)


def test_states_that_are_none_are_refused(step):
    import torch

    with pytest.raises(BnfuseError, match=r"as module.state_dict\(\) gives it, not Linear$"):
        step.load_state_dict(torch.nn.Linear(2, 2))
    with pytest.raises(BnfuseError, match=r"not a path: step.load reads checkpoints$"):
        step.load_state_dict("w.pth")


def test_tensors_of_float64_become_the_graphs(step):
    import torch

    state = step.state_dict()
    assert step.load_state_dict({name: torch.from_numpy(value).double() for name, value in state.items()}) == ([], [])
    assert same(step.state_dict(), state)
