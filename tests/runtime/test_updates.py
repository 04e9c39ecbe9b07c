"""Updates as recipes ask for them: groups, clipping, accumulation, averages; gradients are the step's own."""

from __future__ import annotations

import functools
import json
import math

import numpy as np
import pytest
from small_training import BATCH, CLASSES, forward_model, small_graph

from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.training_graph import open_graph
from bnfuse.passes import rewrite
from bnfuse.runtime import EMA, SGD, AdamW, Group, Lion, RMSprop, Step, compile_step, load_step
from bnfuse.runtime.program.groups import layer_factors
from bnfuse.runtime.program.optim import from_data, to_data

STEPS = 5
GROUPS = (Group("head/*", lr=10, weight_decay=0.5), Group("*/bias", weight_decay=0.0), Group("conv1/*", lr=0.1))


@functools.cache
def graph():
    return small_graph(None)


def compiled(optimizer, **options) -> Step:
    return compile_step(graph(), threads=1, optimizer=optimizer, **options)


def batch(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((BATCH, 1, 8, 8)).astype(np.float32), rng.integers(0, CLASSES, BATCH)


def trained(step: Step) -> dict[str, np.ndarray]:
    """The parameters, in float64."""
    state = step.state_dict()
    return {name: state[name].astype(np.float64) for name in step.program.signature["trainable"]}


def close(found, wanted) -> None:
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def same(found, wanted) -> None:
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


class Torch:
    """torch's optimiser on copies of a step's parameters, in float64, fed with the step's gradients."""

    def __init__(self, step: Step, make, rates=lambda name: 1.0, decays=lambda name: 0.0) -> None:
        import torch

        self.step = step
        self.weights = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in trained(step).items()}
        lr = step.lr
        groups = [{"params": [w], "lr": lr * rates(n), "weight_decay": decays(n)} for n, w in self.weights.items()]
        self.optimizer = make(groups, lr)

    def add(self, share: float = 1.0) -> None:
        import torch

        for name, gradient in self.step.gradients().items():
            value = torch.tensor(gradient.astype(np.float64)) * share
            held = self.weights[name].grad
            self.weights[name].grad = value if held is None else held + value

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def values(self) -> dict[str, np.ndarray]:
        return {name: w.detach().numpy() for name, w in self.weights.items()}


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_groups_are_those_of_torch(kind):
    import torch

    if kind == "sgd":
        ours = SGD(0.05, momentum=0.9, weight_decay=0.01, groups=GROUPS)
        make = lambda groups, lr: torch.optim.SGD(groups, lr, momentum=0.9)  # noqa: E731
    else:
        ours = AdamW(0.01, weight_decay=0.1, groups=GROUPS, layer_decay=0.5)
        make = torch.optim.AdamW
    layers = {"conv1": 0.25, "conv2": 0.5, "head": 1.0} if kind == "adamw" else {}
    decay = ours.weight_decay
    factor = {"head": 10.0, "conv1": 0.1, "conv2": 1.0}

    def rate(name: str) -> float:
        layer = name.partition("/")[0]
        return factor[layer] * layers.get(layer, 1.0)

    def decays(name: str) -> float:
        return 0.5 if name.startswith("head/") else 0.0 if name.endswith("/bias") else decay

    step = compiled(ours)
    theirs = Torch(step, make, rate, decays)
    for seed in range(STEPS):
        step(*batch(seed))
        theirs.add()
        theirs.update()
    close(trained(step), theirs.values)


def test_layers_are_counted_from_the_end():
    order = ["scale", "w1", "bias", "w2", "scale2", "bias2", "w3"]
    found = layer_factors(order, {name: 2 if name.startswith("w") else 1 for name in order}, 0.5)
    assert found == {"scale": 0.25, "w1": 0.25, "bias": 0.25, "w2": 0.5, "scale2": 0.5, "bias2": 0.5, "w3": 1.0}


@pytest.mark.parametrize(
    ("groups", "what"),
    [
        ((Group("haed/*", lr=2),), r"group: no parameter is named like 'haed/\*'"),
        ((Group("*", lr=2), Group("head/*", lr=3)), "groups before it say lr of all parameters named like 'head/"),
    ],
)
def test_groups_that_reach_no_parameter_are_refused(groups, what):
    with pytest.raises(BnfuseError, match=what):
        compiled(SGD(0.1, groups=groups))


# -- clipping ----------------------------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("clip", ["norm", "value", "measured"])
def test_gradients_are_clipped_as_torch_does_it(clip):
    import torch

    options = {"norm": {"clip_norm": 0.5}, "value": {"clip_value": 0.01}, "measured": {"clip_norm": math.inf}}[clip]
    step = compiled(SGD(0.05, momentum=0.9, weight_decay=0.01, **options))
    theirs = Torch(step, lambda groups, lr: torch.optim.SGD(groups, lr, momentum=0.9), decays=lambda name: 0.01)
    clipped = 0
    for seed in range(STEPS):
        step(*batch(seed))
        theirs.add()
        if clip == "value":
            torch.nn.utils.clip_grad_value_(theirs.weights.values(), 0.01)
        else:
            norm = float(torch.nn.utils.clip_grad_norm_(theirs.weights.values(), options["clip_norm"]))
            assert step.gradient_norm == pytest.approx(norm, rel=1e-6)
            clipped += norm > 0.5
        theirs.update()
    assert clipped or clip == "value"
    close(trained(step), theirs.values)
    if clip == "value":
        with pytest.raises(BnfuseError, match="takes no norm of its gradients: compile it with clip_norm="):
            _ = step.gradient_norm


# -- accumulation ------------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_an_update_of_several_steps_is_that_of_their_mean():
    import torch

    step = compiled(SGD(0.05, momentum=0.9, accumulate=3, clip_norm=0.5))
    theirs = Torch(step, lambda groups, lr: torch.optim.SGD(groups, lr, momentum=0.9))
    for seed in range(6):
        before, running = trained(step), step.state_dict()["conv1/bn/mean"]
        assert step.pending == seed % 3
        if seed % 2:
            step(*batch(seed))
        else:
            step.forward(*batch(seed))
            step.backward()
            step.update()
        theirs.add(1 / 3)
        assert np.abs(step.state_dict()["conv1/bn/mean"] - running).max() > 0  # they move with each, as in torch
        if seed % 3 < 2:
            same(trained(step), before)
            continue
        norm = float(torch.nn.utils.clip_grad_norm_(theirs.weights.values(), 0.5))
        assert step.gradient_norm == pytest.approx(norm, rel=1e-6)
        theirs.update()
        close(trained(step), theirs.values)
    assert (step.steps, step.pending, step.accumulate) == (2, 0, 3)


@pytest.mark.torch
def test_what_is_left_over_is_flushed_by_its_own_mean():
    import torch

    step = compiled(SGD(0.05, momentum=0.9, accumulate=3))
    theirs = Torch(step, lambda groups, lr: torch.optim.SGD(groups, lr, momentum=0.9))
    assert not step.flush()
    for seed in range(2):
        step(*batch(seed))
        theirs.add(1 / 2)
    assert step.flush()
    theirs.update()
    close(trained(step), theirs.values)
    assert (step.steps, step.pending) == (1, 0)
    before = step.state_dict()
    assert not step.flush()
    same(step.state_dict(), before)


def test_each_of_them_draws_anew():
    step = compiled(SGD(0.0, accumulate=3))
    losses = [step(*batch(0)) for _ in range(6)]
    assert len(set(losses)) == 6
    again = compiled(SGD(0.0, accumulate=3))
    assert [again(*batch(0)) for _ in range(6)] == losses


# -- averages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("ema", [EMA(0.8), EMA(0.8, warm_up=True)], ids=["plain", "warm-up"])
def test_parameters_and_statistics_are_averaged_over_the_updates(ema, accumulate, tmp_path):
    step = compiled(AdamW(0.01, ema=ema, accumulate=accumulate))
    mean = {name: value.astype(np.float64) for name, value in step.state_dict().items()}
    same(step.state_dict(ema=True), step.state_dict())
    for update in range(1, STEPS):
        for part in range(accumulate):
            step(*batch(update * accumulate + part))
        decay = min(0.8, (1 + update) / (10 + update)) if ema.warm_up else 0.8
        mean = {name: decay * value + (1 - decay) * step.state_dict()[name] for name, value in mean.items()}
    close(step.state_dict(ema=True), mean)
    plain = compiled(None)
    for averaged in (False, True):
        plain.load_state_dict(step.state_dict(ema=averaged))
        images, _ = batch(99)
        np.testing.assert_array_equal(step.evaluate(images[:10], ema=averaged), plain.evaluate(images[:10]))
    step.load_state_dict(plain.state_dict())
    same(step.state_dict(ema=True), plain.state_dict())  # it begins anew


def test_without_an_average_none_is_to_be_had():
    step = compiled(SGD(0.05, momentum=0.9, accumulate=3))
    for ask in (lambda: step.evaluate(batch(0)[0], ema=True), lambda: step.state_dict(ema=True)):
        with pytest.raises(BnfuseError, match="keeps no average of its weights: compile it with ema="):
            ask()


@pytest.mark.torch
def test_a_whole_training_is_that_of_torch():
    """Its own forward and backward, in float64: batches of 16 and of 3, added up, clipped, in groups, averaged."""
    import torch
    from torch import nn
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = (
                nn.ModuleDict({"conv": nn.Conv2d(i, o, 3, s, 1, bias=False), "bn": nn.BatchNorm2d(o)})
                for i, o, s in ((1, 8, 1), (8, 16, 2))
            )
            self.head = nn.Linear(16, CLASSES)

        def forward(self, x):
            for layer in (self.conv1, self.conv2):
                x = torch.relu(layer["bn"](layer["conv"](x)))
            return self.head(x.mean((2, 3)))

    parts = {"bn.weight": "bn/scale", "bn.bias": "bn/bias", "bn.running_mean": "bn/mean", "bn.running_var": "bn/var"}

    def name_of(name: str) -> str:
        layer, _, part = name.partition(".")
        return f"{layer}/{parts.get(part, part.removeprefix('conv.'))}"

    model = build_training_graph(forward_model(dropout=0.0), running_variance="torch")
    recipe = SGD(0.05, 0.9, True, 0.01, groups=GROUPS, clip_norm=0.5, accumulate=3, ema=EMA(0.8))
    step = compile_step(rewrite(open_graph(model).model), threads=1, optimizer=recipe, batches=(16, 3))
    net, start = Net().double(), step.state_dict()
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            if not name.endswith("num_batches_tracked"):
                tensor.copy_(torch.tensor(start[name_of(name)]))
    rates = {"conv1": 0.1, "conv2": 1.0, "head": 10.0}
    groups = [
        {
            "params": [value],
            "lr": 0.05 * rates[name.partition(".")[0]],
            "weight_decay": 0.5 if name.startswith("head") else 0.0 if name.endswith("bias") else 0.01,
        }
        for name, value in net.named_parameters()
    ]
    theirs = torch.optim.SGD(groups, 0.05, momentum=0.9, nesterov=True)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    average.update_parameters(net)  # the first call copies
    for index, size in enumerate((16, 16, 3, 16, 3, 16)):
        x, y = (array[:size] for array in batch(index))
        loss = step(x, y)
        wanted = nn.functional.cross_entropy(net(torch.tensor(x, dtype=torch.float64)), torch.tensor(y))
        assert loss == pytest.approx(wanted.item(), rel=1e-5)
        (wanted / 3).backward()
        if index % 3 == 2:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            theirs.step()
            theirs.zero_grad()
            average.update_parameters(net)
    assert (step.steps, step.pending) == (2, 0)
    for module, state in ((net, step.state_dict()), (average.module, step.state_dict(ema=True))):
        for name, tensor in module.state_dict().items():
            if not name.endswith("num_batches_tracked"):
                found, wanted = state[name_of(name)], tensor.numpy()
                np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5, err_msg=name)
    for images in (batch(8)[0], batch(9)[0][:3]):
        found = step.evaluate(images, ema=True)
        wanted = average.module.eval()(torch.tensor(images, dtype=torch.float64)).detach().numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


# -- what is kept ------------------------------------------------------------------------------------------------------

WHOLE = AdamW(0.01, groups=GROUPS, layer_decay=0.9, clip_norm=0.5, accumulate=3, ema=EMA(0.9, True))


def test_a_checkpoint_has_all_of_it(tmp_path):
    step = compiled(WHOLE)
    for seed in range(5):  # in the middle of an update
        step(*batch(seed))
    step.save(tmp_path / "there.safetensors")
    step.export(tmp_path / "step.bnf")
    again = load_step(tmp_path / "step.bnf", threads=1)
    assert again.optimizer == WHOLE
    again.load(tmp_path / "there.safetensors")
    assert (again.steps, again.pending) == (1, 2)
    for seed in range(5, 10):
        assert again(*batch(seed)) == step(*batch(seed))
    same(again.state_dict(), step.state_dict())
    same(again.state_dict(ema=True), step.state_dict(ema=True))


def test_a_file_without_an_average_lets_it_begin_anew(tmp_path):
    plain, step = compiled(AdamW(0.01)), compiled(AdamW(0.01, ema=0.9))
    for each in (plain, step):
        each(*batch(0))
    plain.save(tmp_path / "plain.safetensors")
    step.load(tmp_path / "plain.safetensors")
    assert step.steps == 1
    same(step.state_dict(ema=True), plain.state_dict())
    step(*batch(1))
    step.save(tmp_path / "averaged.safetensors")
    plain.load(tmp_path / "averaged.safetensors")  # and one with an average is read where there is none
    assert plain.steps == 2
    same(plain.state_dict(), step.state_dict())


def test_an_average_that_is_not_finite_is_named():
    step = compiled(SGD(0.1, ema=0.5))
    state = step.state_dict()
    step.load_state_dict({**state, "head/bias": np.full_like(state["head/bias"], np.inf)})
    memory = step._train.memory
    memory.write(step.program.parameters["head/bias"], state["head/bias"])  # the average alone has it still
    assert step.not_finite() == "the average of head/bias"


def test_memory_is_told():
    plain, whole = compiled(SGD(0.1)), compiled(WHOLE)
    size = plain.program.regions["parameters"]
    assert plain.kept_bytes == {}
    assert whole.kept_bytes["gradients of several batches"] == size
    assert whole.kept_bytes["moments"] == 2 * size
    assert whole.kept_bytes["averages"] == size + whole.program.regions["running"]
    assert whole.device_bytes > plain.device_bytes + 4 * size


# -- what is written down ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [WHOLE, SGD(0.1, 0.9), RMSprop(0.1, tensorflow=True), Lion(0.1), None])
def test_an_optimiser_goes_through_json(optimizer):
    assert from_data(json.loads(json.dumps(to_data(optimizer)))) == optimizer


def test_a_file_of_an_earlier_version_is_read():
    data = {"kind": "SGD", "lr": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0, "no_decay": ["*.bias"]}
    assert from_data(data) == SGD(0.1, 0.9, no_decay=("*.bias",))
    assert str(from_data(data)) == str(SGD(0.1, 0.9, no_decay=("*.bias",)))
    assert "groups" not in str(SGD(0.1))  # runs that began before there were any go on


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: SGD(0.1, clip_norm=0), "clip_norm=0 leaves nothing"),
        (lambda: SGD(0.1, clip_norm=1, clip_value=1), "give one of them"),
        (lambda: SGD(0.1, clip_value=math.inf), "clip_value=inf is out of range"),
        (lambda: SGD(0.1, accumulate=0), "accumulate=0 is out of range"),
        (lambda: SGD(0.1, layer_decay=0), "above 0, 1 at most"),
        (lambda: SGD(0.1, ema=1.0), "at least 0 and below 1"),
        (lambda: SGD(0.1, ema="0.9"), "must be a decay such as 0.9998"),
        (lambda: SGD(0.1, groups=[("head.*", 10)]), "must be of bnfuse.Group"),
        (lambda: Group("head.*"), "neither lr nor weight_decay"),
        (lambda: Group("head.*", lr=-1), "Group: lr=-1 is out of range"),
        (lambda: RMSprop(0.1, alpha=1), "below 1"),
        (lambda: Lion(0.1, betas=(0.9,)), "must be two numbers"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_compiled(make, what):
    with pytest.raises(BnfuseError, match=what):
        make()
