"""What operators draw at random: distributions, the graph that is fed with it, and `verify`, which feeds both sides."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from random_networks import DROP_PATH, forward_model, training_graph

import bnfuse
from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.drawing import draws, separated
from bnfuse.graph.sampling import Random, Sampling

MANY = (1 << 16,)


def values(random: Random, dtype: str = "float32", *, seed: int = 0, step: int = 0, name: str = "u") -> np.ndarray:
    return random.draw(MANY, dtype, seed=seed, step=step, name=name)


def test_values_follow_from_seed_step_and_name_alone():
    uniform = Random("uniform", 0.0, 1.0)
    first = values(uniform)
    np.testing.assert_array_equal(first, values(uniform))
    for other in (values(uniform, seed=1), values(uniform, step=1), values(uniform, name="v")):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.02


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_distributions_in_each_type(dtype):
    for random, mean, deviation in (
        (Random("uniform", 0.0, 1.0), 0.5, 12**-0.5),
        (Random("uniform", -1.0, 3.0), 1.0, 4 * 12**-0.5),
        (Random("normal", 2.0, 0.5), 2.0, 0.5),
        (Random("bernoulli", 0.25), 0.25, (0.25 * 0.75) ** 0.5),
    ):
        found = values(random, dtype)
        assert found.dtype == np.dtype(dtype)
        wide = found.astype(np.float64)
        assert abs(wide.mean() - mean) < 0.02
        assert abs(wide.std() - deviation) < 0.02
        if random.kind == "uniform":
            assert random.a <= wide.min() and wide.max() < random.b
        assert abs(random.quantiles((np.arange(512) + 0.5) / 512).mean() - mean) < 0.01


def test_the_json_of_what_is_drawn_is_checked():
    sampling = Sampling(random={"u": Random("normal", 0.0, 2.0)})
    assert Sampling.from_json(sampling.to_json()) == sampling
    for damage in (
        '["normal", 0, -1]',
        '["odd", 0, 1]',
        '["uniform", 0, NaN]',
        '["uniform", true, 1]',
        "[1, 2, 3]",
        "7",
    ):
        with pytest.raises(ValueError):
            Sampling.from_json(sampling.to_json().replace('["normal", 0.0, 2.0]', damage))


def model_of(text: str) -> ir.Model:
    head = '<ir_version: 8, opset_import: ["": 17]> g (float[2,3] p) => (float[2,3] y)'
    return ir.from_proto(onnx.parser.parse_model(f"{head} {{ {text} }}"))


@pytest.mark.parametrize(
    ("text", "name", "random"),
    [
        ("y = RandomUniformLike<low = -1.0, high = 2.0>(p)", "y", Random("uniform", -1.0, 2.0)),
        ("y = RandomNormal<shape = [2,3], mean = 1.0, scale = 3.0>()", "y", Random("normal", 1.0, 3.0)),
        (
            "half = Constant<value = float[2,3] {0.5,0.5,0.5,0.5,0.5,0.5}>() y = Bernoulli(half)",
            "y",
            Random("bernoulli", 0.5),
        ),
        ("y = Bernoulli(p)", "y/uniform", Random("uniform", 0.0, 1.0)),
    ],
)
def test_an_input_takes_the_place_of_what_draws(text, name, random):
    copy, found = separated(model_of(text))
    assert found == {name: random}
    assert not any(draws(node) for node in copy.graph)
    fed = next(value for value in copy.graph.inputs if value.name == name)
    assert list(fed.shape) == [2, 3]
    assert [value.name for value in copy.graph.outputs] == ["y"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("y = Multinomial<sample_size = 3>(p)", r"\(Multinomial\) draws at random what a step cannot: feed it"),
        ("y = RandomNormalLike<scale = -1.0>(p)", "draws from no distribution that there is"),
        ("y = RandomUniformLike<dtype = 7>(p)", "let it draw floats"),
    ],
)
def test_what_cannot_be_fed_is_refused(text, message):
    with pytest.raises(BnfuseError, match=message):
        separated(model_of(text), "net.onnx")


def test_two_bernoullis_of_one_probability_stay_two():
    body = "a = Bernoulli(keeps) b = Bernoulli(keeps) ab = Mul(x, a) d = Mul(ab, b)"
    model = training_graph(body)
    found = [node for node in model.graph.node if node.op_type == "Bernoulli"]
    assert len(found) == 2
    assert not any(node.attribute for node in found)


def test_a_computed_probability_has_a_gradient_of_zero():
    body = "s = Sigmoid(x) b = Bernoulli(s) d = Mul(x, b)"
    ops = [node.op_type for node in build_training_graph(forward_model(body)).graph.node]
    assert "Bernoulli" not in ops
    assert {"RandomUniformLike", "Less"} <= set(ops)


def test_verify_feeds_both_sides_the_same_and_each_step_anew():
    model = training_graph()
    fused = bnfuse.rewrite(model)
    for runtime in ("ort", "tvm"):
        found = bnfuse.verify(model, fused, runtime=runtime, steps=3, threads=1)
        assert found.equal
        assert max(tensor.tolerance for tensor in found.tensors) < 1e-3
        assert len(set(found.curves.before)) == 3


def test_verify_sees_another_mask():
    model = training_graph()
    wrong = training_graph(DROP_PATH.replace("Less(u, keep)", "Less(u, half)"))
    assert not bnfuse.verify(model, wrong)


def test_verify_names_what_only_one_side_draws():
    model = training_graph()
    with pytest.raises(BnfuseError, match=r"draws 'u' at random, which .* does not"):
        bnfuse.verify(model, training_graph("d = Mul(x, keep)"))
    with pytest.raises(BnfuseError, match=r"draws 'u' from .*b=2\.0.* it is another network"):
        bnfuse.verify(training_graph(DROP_PATH.replace("Like(", "Like<high = 2.0>(")), model)


def test_a_draw_is_no_constant_to_the_estimate():
    from bnfuse.analysis.executed import executed

    nodes, constants = executed(ir.from_proto(training_graph()).graph)
    assert {"RandomUniformLike", "Less"} <= {node.op_type for node in nodes}
    assert not {"u", "mask"} & {value.name for value in constants}


def test_a_function_that_draws_is_named():
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "own": 1]>
        g (float[2,3] p) => (float[2,3] y) { y = own.Drop(p) }
        <opset_import: ["": 17], domain: "own"> Drop (x) => (z) { u = RandomUniformLike(x) z = Mul(x, u) }""")
    with pytest.raises(BnfuseError, match=r"\(Drop\) is a function that draws at random: inline it"):
        separated(ir.from_proto(model))
