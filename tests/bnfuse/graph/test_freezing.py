"""Parameters and BatchNorms that are frozen, of a graph that is built and while one is built."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from small_training import BATCH, CLASSES, forward_model, small_graph

import bnfuse
from bnfuse.build import build
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.freezing import frozen
from bnfuse.graph.training_graph import TrainingGraph, open_graph
from bnfuse.ort.oracle import OrtGraph


def batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((BATCH, 1, 8, 8)).astype(np.float32), rng.integers(0, CLASSES, BATCH)


def built(**options) -> TrainingGraph:
    return open_graph(build(forward_model(dropout=0.0), **options).model)


def results(graph: TrainingGraph) -> dict[str, np.ndarray]:
    names = [value.name for value in graph.model.graph.outputs]
    feeds = dict(zip((*graph.signature.data, *graph.signature.labels), batch(), strict=True))
    return OrtGraph(graph.model, name=graph.name).run({**feeds, **graph.state()}, names)


@pytest.mark.parametrize("level", ["source", "icf"])
def test_what_is_left_is_as_it_was(level):
    whole = built()
    if level == "icf":
        whole = open_graph(bnfuse.rewrite(whole.model, level=level).model)
    some = frozen(whole, ["conv1/*", "head/bias"])
    assert {*some.signature.frozen} - {*whole.signature.frozen} == {
        "conv1/weight",
        "conv1/bn/scale",
        "conv1/bn/bias",
        "head/bias",
    }
    assert some.signature.gradients.keys() == set(some.signature.trainable)
    assert "conv1/weight" in whole.signature.trainable  # the graph that was given stays as it is
    wanted, found = results(whole), results(some)
    assert wanted.keys() - found.keys() == {whole.signature.gradients[n] for n in some.signature.frozen}
    for name, value in found.items():
        np.testing.assert_array_equal(value, wanted[name], err_msg=name)
    ops = [node.op_type for node in some.model.graph]
    assert len(ops) < len(list(whole.model.graph))  # the backward pass ends before conv1
    again = open_graph(ir.to_proto(some.model))
    assert again.signature == some.signature


def test_a_step_trains_the_others(tmp_path):
    step = bnfuse.compile(small_graph(None), optimizer=bnfuse.AdamW(0.1), threads=1, freeze=["conv?/bn/*"])
    before = step.state_dict()
    step(*batch())
    after = step.state_dict()
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    statistics = {f"conv{i}/bn/{what}" for i in (1, 2) for what in ("mean", "var")}  # they move, as in torch
    assert changed == {"conv1/weight", "conv2/weight", "head/weight", "head/bias", *statistics}
    step.export(tmp_path / "step.bnf")
    assert step.optimizer == bnfuse.open_step(tmp_path / "step.bnf", threads=1).optimizer


@pytest.mark.parametrize(
    ("globs", "what"),
    [
        (["conv3/*"], r"--freeze 'conv3/\*' matches no parameter that trains \(there are "),
        (["*"], "--freeze leaves no parameter to train"),
    ],
)
def test_globs_that_cannot_be_meant_are_refused(globs, what):
    with pytest.raises(BnfuseError, match=what):
        frozen(built(), globs)


# -- BatchNorms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("glob", ["conv1/bn", "conv1/bn/scale", "conv1/*"])
def test_a_frozen_batch_norm_takes_its_running_statistics(glob):
    found = build(forward_model(dropout=0.0), freeze_bn=[glob])
    assert any("1 BatchNormalization nodes are frozen by --freeze-bn (conv1/bn)" in note for note in found.notes)
    graph = open_graph(found.model)
    assert graph.signature.running.keys() == {"conv2/bn/mean", "conv2/bn/var"}
    assert {"conv1/bn/mean", "conv1/bn/var"} <= {*graph.signature.frozen}
    assert {"conv1/bn/scale", "conv1/bn/bias"} <= {*graph.signature.trainable}


@pytest.mark.torch
def test_its_step_is_that_of_torch():
    import torch
    from torch import nn

    graph = built(freeze_bn=["conv1/*"])
    state = graph.state()
    rng = np.random.default_rng(3)
    state["conv1/bn/mean"] = rng.standard_normal(8).astype(np.float32)
    state["conv1/bn/var"] = rng.uniform(0.5, 2, 8).astype(np.float32)
    step = bnfuse.compile(bnfuse.rewrite(graph.model), threads=1)
    step.load_state_dict(state)
    loss = step.forward(*batch())
    step.backward()

    w = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in state.items()}
    x, y = (torch.tensor(array) for array in batch())
    x = x.double()
    for name, stride, training in (("conv1", 1, False), ("conv2", 2, True)):
        x = nn.functional.conv2d(x, w[f"{name}/weight"], stride=stride, padding=1)
        bn = [w[f"{name}/bn/{part}"] for part in ("mean", "var", "scale", "bias")]
        statistics = [value.detach().clone() for value in bn[:2]]
        x = nn.functional.relu(nn.functional.batch_norm(x, *statistics, *bn[2:], training=training))
    logits = x.mean((2, 3)) @ w["head/weight"].T + w["head/bias"]
    wanted = nn.functional.cross_entropy(logits, y)
    wanted.backward()
    assert float(loss) == pytest.approx(wanted.item(), rel=1e-6)
    gradients = step.gradients()
    assert "conv1/bn/scale" in gradients
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, w[name].grad.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
    step.update()
    for name in ("conv1/bn/mean", "conv1/bn/var"):
        np.testing.assert_array_equal(step.state_dict()[name], state[name])


def test_a_glob_of_no_batch_norm_is_refused():
    with pytest.raises(BnfuseError, match=r"--freeze-bn 'conv3/\*' matches no BatchNormalization \(there are conv1/bn"):
        build(forward_model(), freeze_bn=["conv3/*"])
