"""Random operators in a compiled step: drawn anew each step from seed and count, fed by name, evaluated without."""

from __future__ import annotations

import io
import json
import zipfile

import numpy as np
import pytest
from random_networks import BATCH, batch, step_of, training_graph

import bnfuse
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.drawing import separated
from bnfuse.graph.training_graph import open_graph
from bnfuse.ort.oracle import OrtGraph
from bnfuse.runtime import load_step


@pytest.fixture(scope="module")
def model():
    return training_graph()


def losses(step, count: int = 5) -> list[float]:
    x, y = batch()
    return [step(x, y) for _ in range(count)]


@pytest.mark.parametrize("level", ["none", "icf"])
def test_masks_are_drawn_anew_each_step_from_the_seed(model, level):
    first, again, other = (step_of(model, level) for _ in range(3))
    other.seed = 1
    found = losses(first)
    assert len(set(found)) > 2
    assert losses(again) == found
    assert losses(other) != found


def test_a_constant_operand_of_dropout_is_not_folded_either():
    assert len(set(losses(step_of(training_graph("s = Dropout(ones, half, yes) d = Mul(x, s)")), 8))) > 1


def test_what_a_step_cannot_draw_is_refused():
    body = (
        "l = Constant<value = float[1,2] {0,0}>() i = Multinomial<sample_size = 1>(l) c = Cast<to = 1>(i) d = Mul(x, c)"
    )
    with pytest.raises(BnfuseError, match=r"node 'i/Multinomial' \(Multinomial\) draws at random what a step cannot"):
        step_of(training_graph(body))


def test_values_of_ones_own_take_the_place_of_draws(model):
    """By the name of the node's output; the loss and the gradients are onnxruntime's for the same values."""
    step, graph = step_of(model), open_graph(model)
    own = np.array([0.1, 0.9, 0.2, 0.8], np.float32).reshape(BATCH, 1, 1, 1)
    step.fix({"u": own})
    x, y = batch()
    loss = step.forward(x, y)
    step.backward()
    fed = OrtGraph(separated(graph.model)[0], name="fed")
    names = [graph.signature.loss, *graph.signature.gradients.values()]
    wanted = fed.run({**graph.state(), "image": x, "labels": y, "u": own}, names)
    assert loss == pytest.approx(float(wanted[graph.signature.loss]), rel=1e-5)
    for name, found in step.gradients().items():
        np.testing.assert_allclose(found, wanted[graph.signature.gradients[name]], rtol=1e-3, atol=1e-5)
    step.fix({"u": 1 - own})
    assert step.forward(x, y) != loss
    with pytest.raises(BnfuseError, match="has the shape"):
        step.fix({"u": own[:2]})
    with pytest.raises(BnfuseError, match="none that the step draws: those are u"):
        step.fix({"v": own})


def test_evaluation_has_no_mask(model):
    step, plain = step_of(model), step_of(training_graph("d = Identity(x)"))
    x, _ = batch()
    np.testing.assert_allclose(step.evaluate(x), plain.evaluate(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(step.evaluate(x), step.evaluate(x))


def test_a_run_that_is_resumed_draws_what_it_would_have_drawn(model, tmp_path):
    step = step_of(model, lr=0.05)
    losses(step, 3)
    step.save(tmp_path / "state.safetensors")
    rest = losses(step, 4)
    resumed = step_of(model, lr=0.05)
    resumed.load(tmp_path / "state.safetensors")
    assert losses(resumed, 4) == rest


def test_an_exported_step_draws_the_same_and_is_checked(model, tmp_path):
    file = tmp_path / "step.bnf"
    step_of(model).export(file)
    assert losses(load_step(file)) == losses(step_of(model))
    for what, damage in (
        ("distribution", lambda program, sampling: sampling["random"].update(u=["uniform", 0, "x"])),
        ("no room", lambda program, sampling: sampling["random"].update(nobody=["uniform", 0, 1])),
        ("no room", lambda program, sampling: program["inputs"]["u"].__setitem__(1, [1 << 40])),
    ):
        (tmp_path / "bad.bnf").write_bytes(damaged(file.read_bytes(), damage))
        with pytest.raises(BnfuseError, match=what):
            load_step(tmp_path / "bad.bnf")


def damaged(archive: bytes, damage) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name == "manifest.json":
                manifest = json.loads(data)
                program = json.loads(manifest["programs"]["training"])
                sampling = json.loads(program["sampling"])
                damage(program, sampling)
                program["sampling"] = json.dumps(sampling)
                manifest["programs"]["training"] = json.dumps(program)
                data = json.dumps(manifest).encode()
            new.writestr(name, data)
    return made.getvalue()


def test_a_loss_that_is_not_finite_is_traced_through_the_same_masks(model):
    from bnfuse.training.nonfinite import first_not_finite

    step = step_of(model, "none")
    state = step.state_dict()
    state["w1"] = np.full_like(state["w1"], 3e38)
    step.load_state_dict(state)
    x, y = batch()
    step.forward(x, y)
    assert "y1" in str(first_not_finite(step, x, y))


def test_the_level_does_not_change_what_is_drawn(model):
    np.testing.assert_allclose(losses(step_of(model, "none")), losses(step_of(model, "icf")), rtol=1e-5)
    assert bnfuse.verify(model, bnfuse.rewrite(model))
