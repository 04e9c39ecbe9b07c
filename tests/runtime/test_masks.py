"""Random masks in inference: left out however they are spelt; all else that is drawn is refused, and still trains."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from random_networks import BATCH, batch, forward_model, step_of, training_graph

import bnfuse
from bnfuse.core.errors import BnfuseError
from bnfuse.data import Dataset
from bnfuse.exporting import inference_model
from bnfuse.graph.training_graph import open_graph
from bnfuse.training import train_step

U = "u = RandomUniformLike(rows)"
M = f"{U} l = Less(u, keep) m = Cast<to = 1>(l)"  # 0 or 1
S = f"{M} s = Div(m, keep)"  # 0 or 4/3
MASKS = {
    "torch's StochasticDepth": f"{S} d = Mul(x, s)",
    "mask first": f"{S} d = Mul(s, x)",
    "of the batch": "u = RandomUniform<shape = [1,1,1,1]>() l = Less(u, keep) m = Cast<to = 1>(l) d = Mul(x, m)",
    "timm's, not scaled": f"{U} l = Less(u, keep) m = CastLike(l, x) d = Mul(x, m)",
    "floor, divided before": f"{U} a = Add(keep, u) m = Floor(a) b = Div(x, keep) d = Mul(b, m)",
    "floor, divided after": f"{U} a = Add(u, keep) m = Floor(a) b = Mul(x, m) d = Div(b, keep)",
    "scaled after": f"{U} l = GreaterOrEqual(u, drop) m = Cast<to = 1>(l) b = Mul(x, m) d = Mul(b, inverse)",
    "scaled before": f"{M} b = Mul(inverse, x) d = Mul(b, m)",
    "scaled before, and read elsewhere": f"{M} b = Mul(inverse, x) e = Mul(b, m) f = Add(e, b) d = Sub(f, b)",
    "scaled after, and read elsewhere": f"{M} b = Mul(x, m) e = Mul(b, inverse) f = Add(e, b) d = Sub(f, b)",
    "another branch, scaled before": f"{M} b = Mul(n1, inverse) e = Mul(b, m) f = Sub(e, n1) d = Add(f, x)",
    "two masks, scaled before": f"{M} b = Mul(x, inverse) e = Mul(b, m) n = Bernoulli(keeps) "
    "f = Mul(b, n) g = Add(e, f) d = Mul(g, half)",
    "dropout written out": f"{M.replace('rows', 'x')} b = Mul(x, m) d = Div(b, keep)",
    "feature dropout": f"{S.replace('Like(rows)', '<shape = [4,8,1,1]>()')} d = Mul(x, s)",
    "bernoulli": "m = Bernoulli(keeps) s = Div(m, keep) d = Mul(x, s)",
    "dropout of ones": "s = Dropout(ones, drop, yes) d = Mul(x, s)",
    "normal": "u = RandomNormalLike(rows) l = Less(u, zero) m = Cast<to = 1>(l) b = Mul(x, m) d = Div(b, half)",
    "where": f"{U} l = Less(u, keep) b = Div(x, keep) d = Where(l, b, zero)",
    "where not": f"{U} l = GreaterOrEqual(u, keep) b = Where(l, zero, x) d = Div(b, keep)",
    "one less dropped": f"{U} l = Less(u, drop) c = Cast<to = 1>(l) m = Sub(one, c) s = Div(m, keep) d = Mul(x, s)",
    "rate in a vector": f"{U} l = Less(u, keep) m = Cast<to = 1>(l) s = Div(m, keeps) d = Mul(x, s)",
    "two in a row": f"{S} b = Mul(x, s) n = Bernoulli(keeps) d = Mul(b, n)",
    "one for two": f"{S} b = Mul(x, s) e = Mul(r1, s) f = Sub(e, r1) d = Add(b, f)",
}
MASKS["read twice, forty times over"] = " ".join(
    [M, "q0 = Mul(m, m)", *(f"q{k + 1} = Mul(q{k}, q{k})" for k in range(39)), "s = Div(q39, keep) d = Mul(x, s)"]
)
MASKS["behind 400 layers, and of as many steps"] = " ".join(
    [
        *(f"q{k + 1} = Relu({'r1' if k < 0 else f'q{k}'})" for k in range(-1, 399)),
        *(f"{M} o0 = Abs(m)", *(f"o{k + 1} = Abs(o{k})" for k in range(399))),
        "s = Div(o399, keep) e = Mul(q399, s) f = Sub(e, q399) d = Add(x, f)",
    ]
)
REFUSED = {
    "noise": ("u = RandomNormalLike(x) n = Mul(u, tenth) d = Add(x, n)", "u/RandomNormalLike", "multiplies by no mask"),
    "gaussian dropout": (
        "u = RandomNormalLike(rows) n = Mul(u, tenth) m = Add(one, n) d = Mul(x, m)",
        "u/RandomNormalLike",
        "no mask of 0 and one other value",
    ),
    "another mean": (f"{M} s = Div(m, half) d = Mul(x, s)", "u/", "changes the mean"),
    "of two signs": (f"{U} m = Sub(u, half) s = Sign(m) d = Mul(x, s)", "u/", "no mask of 0"),
    "uneven": (
        "m = Bernoulli(uneven) s = Div(m, uneven) d = Mul(x, s)",
        "m/Bernoulli/randomuniformlike",
        "not all drawn alike",
    ),
    "of the data": ("s = Sigmoid(x) m = Bernoulli(s) d = Mul(x, m)", "m/", "reads it together with the data"),
}


def images() -> np.ndarray:
    return batch(1)[0]


def exported(model: onnx.ModelProto) -> onnx.ModelProto:
    graph = open_graph(model)
    return inference_model(graph, graph.state())


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"image": x})[0]


@pytest.mark.parametrize("level", ["none", "icf"])
@pytest.mark.parametrize("body", MASKS.values(), ids=MASKS)
def test_a_mask_is_left_out_of_the_export(body, level):
    """The same as the network without it, with the batch open, and nothing random in it."""
    found = exported(ir.to_proto(bnfuse.rewrite(training_graph(body), level=level).model))
    plain = exported(training_graph("d = Identity(x)"))
    assert not {"Bernoulli", "Dropout"} & {node.op_type for node in found.graph.node}
    assert not any(node.op_type.startswith("Random") for node in found.graph.node)
    x = np.concatenate([images(), images()])[: BATCH + 1]
    np.testing.assert_allclose(run(found, x), run(plain, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", ["none", "icf"])
@pytest.mark.parametrize(("body", "node", "why"), REFUSED.values(), ids=REFUSED)
def test_what_inference_has_no_place_for_is_refused(body, node, why, level):
    model = ir.to_proto(bnfuse.rewrite(training_graph(body), level=level).model)
    with pytest.raises(BnfuseError, match=f"node '.*{node}.* draws at random what inference .*{why}"):
        exported(model)


@pytest.mark.parametrize("scale", ["half", "keep"])
def test_a_scale_beside_a_mask_that_is_scaled_stays(scale):
    found, plain = (training_graph(f"{S} b = Div(x, {scale}) d = {d}") for d in ("Mul(b, s)", "Identity(b)"))
    np.testing.assert_allclose(run(exported(found), images()), run(exported(plain), images()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", ["none", "icf"])
@pytest.mark.parametrize("of", ["r1", "n1"])
def test_a_scale_of_a_sum_stays(of, level):
    """It makes up for no mask of one of the terms alone."""
    found = training_graph(f"{M} b = Mul(x, m) e = Add(b, {of}) d = Mul(e, inverse)")
    plain = exported(training_graph(f"e = Add(x, {of}) d = Mul(e, inverse)"))
    found = exported(ir.to_proto(bnfuse.rewrite(found, level=level).model))
    np.testing.assert_allclose(run(found, images()), run(plain, images()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("body", ["scaled before", "two masks, scaled before"])
def test_a_step_evaluates_without_a_mask_and_its_scale(body):
    found = step_of(training_graph(MASKS[body])).evaluate(images())
    plain = run(exported(training_graph("d = Identity(x)")), images())
    np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-6)


def test_a_network_that_ends_in_a_mask_keeps_the_name_of_its_result():
    model = forward_model("d = Identity(x)")
    model.graph.node[-1].output[0] = "head"
    more = onnx.parser.parse_graph(
        "g () => () { q = RandomUniform<shape = [4,1]>() t = Less(q, half) c = Cast<to = 1>(t) logits = Mul(head, c) }"
    )
    for node in more.node:
        node.name = node.output[0]
        model.graph.node.append(node)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "half"))
    found = exported(bnfuse.build.build_training_graph(model))
    assert [value.name for value in found.graph.output] == ["logits"]
    np.testing.assert_allclose(
        run(found, images()), run(exported(training_graph("d = Identity(x)")), images()), rtol=1e-5
    )


def test_what_is_refused_trains_and_says_so_before_a_training(monkeypatch, tmp_path):
    model = training_graph(REFUSED["noise"][0])
    step = step_of(model, "none")
    x, y = batch()
    assert len({step(x, y) for _ in range(3)}) == 3
    refusal = "'u/RandomNormalLike' .* draws at random what inference"
    with pytest.raises(BnfuseError, match=refusal):
        step.evaluate(x)
    data = Dataset(x, y, x, y, 5)
    with pytest.raises(BnfuseError, match=refusal):
        train_step(step, data, epochs=1)
    step.export(tmp_path / "step.bnf")
    with pytest.raises(BnfuseError, match=refusal):
        bnfuse.open_step(tmp_path / "step.bnf").evaluate(x)
    monkeypatch.setattr(bnfuse.runtime, "compile_step", None)
    with pytest.raises(BnfuseError, match=refusal):
        bnfuse.train(model, data, epochs=1)
    train_step(step, Dataset(x, y, x[:0], y[:0], 5), epochs=1)
