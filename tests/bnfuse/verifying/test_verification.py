"""verify says yes to what is equal, no to what is not, and names the tensor."""

import dataclasses
import json

import numpy as np
import onnx
import pytest

import bnfuse
from bnfuse.build.named import build_model
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.feeds import draw_feeds
from bnfuse.graph.training_graph import dropouts, open_graph, without_dropout
from bnfuse.verifying.noise import (
    FLOOR,
    MINIMUM,
    MINIMUM_IN_FLOAT64,
    compare,
    curve_tolerances,
    distance,
    disturbed,
    tolerance,
)
from bnfuse.verifying.runners import CompiledRunner, OrtRunner, Where
from bnfuse.verifying.verdict import ROUNDINGS, Curves, TensorError, Verification


def small(name="densenet40", **settings):
    return build_model(name, zoo={"batch": 2, "image": 16, "growth": 4, "depth": 2, **settings}).model


@pytest.fixture(scope="module")
def before():
    return small()


@pytest.fixture(scope="module")
def after(before):
    return bnfuse.rewrite(before, level="icf")


def with_node(model: onnx.ModelProto, op_type: str, **attributes) -> onnx.ModelProto:
    """A copy in which the first node of this type has other attributes."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    node = next(n for n in copy.graph.node if n.op_type == op_type)
    for name, value in attributes.items():
        next(a for a in node.attribute if a.name == name).CopyFrom(onnx.helper.make_attribute(name, value))
    return copy


@pytest.mark.parametrize("level", ["none", "rcf", "mvf", "bnff", "icf"])
def test_every_level_is_equal_to_its_source_in_onnxruntime(before, level):
    found = bnfuse.verify(before, bnfuse.rewrite(before, level=level))
    assert found.equal, found
    kinds = [tensor.kind for tensor in found.tensors]
    assert kinds.count("loss") == 1
    assert kinds.count("gradient") == sum(1 for o in before.graph.output if o.name.endswith("_grad"))
    assert kinds.count("running") == 2 * len(bnfuse.diff(before, before).batch_norms)


def test_a_wrong_epsilon_is_found_and_the_tensor_named(before):
    found = bnfuse.verify(before, with_node(before, "BatchNorm", epsilon=0.1))
    assert not found.equal
    assert found.worst.error > found.worst.tolerance
    assert found.worst.tensor.endswith("_grad")
    assert str(found).startswith("NOT equal")


def test_a_wrong_momentum_is_found_in_the_running_statistics_alone(before):
    found = bnfuse.verify(before, with_node(before, "BatchNorm", momentum=0.8))
    assert {tensor.kind for tensor in found.tensors if not tensor.ok} == {"running"}


def test_float64_judges_what_rounding_takes_apart():
    model = small("squeezenet", image=32, growth=None, depth=None)
    fused = bnfuse.rewrite(model, level="icf")
    assert not bnfuse.verify(model, fused).judged
    found = bnfuse.verify(model, fused, runtime="float64")
    assert found.equal and found.precision == "fp64"
    assert all(tensor.tolerance == MINIMUM_IN_FLOAT64 for tensor in found.tensors)


def test_float64_finds_what_float32_cannot_tell(before):
    wrong = with_node(before, "BatchNorm", epsilon=1.1e-5)
    assert bnfuse.verify(before, wrong).equal
    assert not bnfuse.verify(before, wrong, runtime="float64")


def test_float64_trains_too(before, after):
    found = bnfuse.verify(before, after, runtime="float64", steps=2)
    assert found.equal and len(found.curves.after) == 2
    assert found.curves.after[1] < found.curves.after[0]


def test_training_follows_the_source_and_learns(before, after):
    found = bnfuse.verify(before, after, steps=4, lr=0.05)
    assert found.equal
    assert len(found.curves.before) == len(found.curves.after) == 4
    assert found.curves.after[-1] < found.curves.after[0]
    assert "step" in str(found)


def test_a_curve_that_parts_from_its_source_is_not_equal():
    assert Curves((1.0, 0.9), (1.0, 0.9), (1e-5, 1e-5)).ok
    assert not Curves((1.0, 0.9), (1.0, 0.91), (1e-5, 1e-5)).ok
    assert not Curves((1.0, 0.9), (1.0, float("nan")), (1e-5, 1e-5)).ok


def test_the_tolerance_of_a_curve_never_falls():
    tolerances = curve_tolerances([1.0, 1.0, 1.0], [[1.0, 1.01, 1.0]])
    assert tolerances == pytest.approx((MINIMUM, 0.08, 0.08))


def test_graphs_are_compared_at_another_batch(before, after):
    found = bnfuse.verify(before, after, batch=3)
    assert found.equal
    assert found.loss_before != bnfuse.verify(before, after).loss_before


def test_the_same_seed_gives_the_same_figures(before, after):
    first, again, other = (bnfuse.verify(before, after, seed=seed) for seed in (3, 3, 4))
    assert first.loss_before == again.loss_before != other.loss_before


def test_dropout_is_switched_off_in_both_and_told():
    model = small("squeezenet", batch=4, image=64, growth=None, depth=None)
    found = bnfuse.verify(model, model)
    assert found.equal
    assert any("dropout ratio set to 0" in note for note in found.notes)


def test_switching_dropout_off_leaves_the_model_as_it_was():
    graph = open_graph(small("squeezenet", image=32, growth=None, depth=None))
    ratio = next(n for n in graph.model.graph if n.op_type == "Dropout").inputs[1].name
    quiet = without_dropout(graph.model)
    assert next(n for n in graph.model.graph if n.op_type == "Dropout").inputs[1].name == ratio
    changed = next(n for n in quiet.graph if n.op_type == "Dropout").inputs[1]
    assert changed.const_value.numpy() == 0
    assert dropouts(quiet) == dropouts(graph.model)


def test_the_callers_initial_values_are_not_touched(before, after):
    graph = open_graph(before)
    kept = {name: value.copy() for name, value in graph.state().items()}
    bnfuse.verify(before, after, steps=1)
    assert all(np.array_equal(kept[name], value) for name, value in graph.state().items())


def test_another_network_is_refused_in_one_line(before):
    with pytest.raises(BnfuseError, match=r"has no input .* another network"):
        bnfuse.verify(before, small("resnet20", growth=None, depth=None))
    with pytest.raises(BnfuseError, match="it is another network"):
        bnfuse.verify(before, small(batch=3))


def test_an_unknown_runtime_is_refused(before):
    with pytest.raises(BnfuseError, match="ort, tvm or float64"):
        bnfuse.verify(before, before, runtime="xla")


def test_noise_is_one_rounding_and_spares_labels_and_statistics(before):
    graph, rng = open_graph(before), np.random.default_rng(0)
    feeds, state = draw_feeds(graph, rng), graph.state()
    noisy_feeds, noisy_state = disturbed(feeds, state, graph.signature, rng)
    data = graph.signature.data[0]
    change = np.abs(noisy_feeds[data] - feeds[data]) / np.abs(feeds[data])
    assert 0 < change.max() <= 2.0**-23
    assert np.array_equal(noisy_feeds[graph.signature.labels[0]], feeds[graph.signature.labels[0]])
    assert all(np.array_equal(noisy_state[name], state[name]) for name in graph.signature.running)
    assert any(not np.array_equal(noisy_state[name], state[name]) for name in graph.signature.trainable)


@pytest.mark.parametrize("precision", [None, *(name for name in ROUNDINGS if name != "fp64")])
def test_one_rounding_is_that_of_the_precision(before, precision):
    graph, rng = open_graph(before), np.random.default_rng(0)
    feeds, state = draw_feeds(graph, rng), graph.state()
    rounding = Where(precision=precision).rounding
    noisy, _ = disturbed(feeds, state, graph.signature, rng, rounding)
    data = graph.signature.data[0]
    assert np.abs(noisy[data] / feeds[data] - 1).max() == pytest.approx(rounding, abs=2.0**-23)
    bits = {None: 24, "fp32": 24, "tf32": 11, "bf16": 8, "fp16": 11}[precision]  # of a significand
    assert rounding == 2.0**-bits


def test_a_tolerance_is_a_multiple_of_the_spread_and_no_less_than_a_few_roundings():
    assert tolerance(1e-3) == 8e-3
    assert tolerance(0.0) == tolerance(1e-7) == MINIMUM
    assert tolerance(0.0, ROUNDINGS["bf16"]) == 2.0**-7
    assert tolerance(0.0, ROUNDINGS["tf32"]) == tolerance(0.0, ROUNDINGS["fp16"]) == 2.0**-10
    assert tolerance(0.1, ROUNDINGS["bf16"]) == pytest.approx(0.15)  # of what the precision itself does
    assert curve_tolerances([1.0, 1.0], [[1.0, 1.1]], ROUNDINGS["bf16"]) == pytest.approx((2.0**-7, 0.15))


@pytest.mark.parametrize(
    ("precision", "tolerance", "judged"),
    [("fp32", 0.09, True), ("fp32", 0.1, False), ("bf16", 0.9, True), ("bf16", 1.0, False), ("tf32", 7.0, False)],
)
def test_a_tolerance_that_lets_all_pass_is_no_verdict(precision, tolerance, judged):
    tensors = (TensorError("loss", "loss", 1e-6, 1e-2), TensorError("w_grad", "gradient", 0.01, tolerance))
    found = Verification("ort", 0, 1.0, 1.0, tensors, precision=precision)
    assert (found.equal, found.judged, bool(found)) == (judged, judged, judged)
    assert found.to_json()["unjudged"] == ([] if judged else ["w_grad"])
    said = "Equal: loss" if judged else "cannot be judged: 1 of 2 tensors (w_grad) are moved too far by rounding noise"
    assert str(found).startswith(said)


def test_what_is_wrong_is_wrong_beside_what_cannot_be_judged():
    tensors = (TensorError("loss", "loss", 1e-1, 1e-2), TensorError("w_grad", "gradient", 0.01, 0.5))
    found = Verification("ort", 0, 1.0, 1.1, tensors)
    assert str(found).startswith("NOT equal") and not found.equal and not found.judged


def test_a_step_of_training_beyond_judgement_is_named():
    tensors = (TensorError("loss", "loss", 1e-6, 1e-2),)
    found = Verification("ort", 0, 1.0, 1.0, tensors, Curves((1.0, 0.9), (1.0, 0.9), (1e-5, 0.2)))
    assert found.unjudged == ("the loss of step 2",) and not found.equal


def test_a_network_that_rounding_takes_apart_cannot_be_judged(before):
    """What a convolution gives beside a copy of itself, a million times: rounding noise alone."""
    copy = onnx.ModelProto()
    copy.CopyFrom(before)
    conv = next(node for node in copy.graph.node if node.op_type == "Conv")
    value = next(v for v in copy.graph.value_info if v.name == conv.output[0])
    weight = next(tensor for tensor in copy.graph.initializer if tensor.name == conv.input[1])
    fixed = copy.graph.initializer.add()
    fixed.CopyFrom(weight)
    fixed.name = "fixed"
    copy.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1e6, np.float32), "million"))
    for node in copy.graph.node:
        for index, name in enumerate(node.input):
            if name == conv.output[0]:
                node.input[index] = "noise"
    twin = onnx.NodeProto()
    twin.CopyFrom(conv)
    twin.name, twin.input[1], twin.output[0] = "twin", "fixed", "twin"
    place = list(copy.graph.node).index(conv) + 1
    more = [
        twin,
        onnx.helper.make_node("Sub", [conv.output[0], "twin"], ["nothing"], name="sub"),
        onnx.helper.make_node("Mul", ["nothing", "million"], ["noise"], name="times"),
    ]
    for offset, node in enumerate(more):
        copy.graph.node.insert(place + offset, node)
    for name in ("twin", "nothing", "noise"):
        added = copy.graph.value_info.add()
        added.CopyFrom(value)
        added.name = name
    found = bnfuse.verify(copy, copy)
    assert not found.equal and not found.judged
    assert str(found).startswith("cannot be judged: ") and found.to_json()["equal"] is False


def test_an_unknown_precision_is_refused_before_anything_runs(before):
    with pytest.raises(BnfuseError, match="precision 'int8' is unknown: it is one of fp32, tf32, bf16, fp16"):
        bnfuse.verify(before, before, runtime="tvm", target="cuda:sm_90", precision="int8")


def test_labels_run_over_all_classes(before):
    graph = open_graph(before)
    drawn = [draw_feeds(graph, np.random.default_rng(s))[graph.signature.labels[0]] for s in range(40)]
    assert {int(v) for part in drawn for v in part} == set(range(graph.classes()))


def test_distance_is_relative_above_the_floor_and_absolute_below_it():
    assert distance(np.array([3.0, 4.0]), np.array([3.0, 4.5]), 0.0) == pytest.approx(0.5 / np.hypot(3, 4.5))
    assert distance(np.array([1e-9]), np.array([0.0]), 1e-3) == pytest.approx(1e-6)
    assert distance(np.array([0.0]), np.array([0.0]), 0.0) == 0.0
    assert np.isnan(distance(np.array([np.nan]), np.array([1.0]), 0.0))
    assert distance(np.zeros(2), np.zeros(3), 1.0) == float("inf")


def test_a_nan_is_never_equal(before):
    graph = open_graph(before)
    feeds, state = draw_feeds(graph, np.random.default_rng(0)), graph.state()
    reference = OrtRunner(graph, Where()).evaluate(feeds, state)
    name = next(iter(graph.signature.gradients.values()))
    broken = {**reference, name: np.full_like(reference[name], np.nan)}
    bad = [t for t in compare(reference, broken, [reference], graph.signature) if not t.ok]
    assert [t.tensor for t in bad] == [name]
    found = dataclasses.replace(bnfuse.verify(before, before), tensors=tuple(bad))
    assert found.worst.tensor == name
    assert not found.equal


def test_the_floor_is_a_millionth_of_the_largest_gradient(before):
    graph = open_graph(before)
    feeds, state = draw_feeds(graph, np.random.default_rng(0)), graph.state()
    reference = OrtRunner(graph, Where()).evaluate(feeds, state)
    gradients = list(graph.signature.gradients.values())
    largest = max(np.linalg.norm(reference[name]) for name in gradients)
    name = gradients[0]
    base = {**reference, name: np.zeros_like(reference[name])}
    off = np.zeros_like(reference[name])
    off.flat[0] = 0.5 * MINIMUM * FLOOR * largest
    verdict = {t.tensor: t for t in compare(base, {**base, name: off}, [base], graph.signature)}
    assert verdict[name].ok and verdict[name].error > 0


def test_the_json_has_the_documented_keys_and_is_json(before, after):
    found = bnfuse.verify(before, after, steps=1).to_json()
    assert json.loads(json.dumps(found))["equal"] is True
    assert {"equal", "loss_error", "worst", "tensors", "notes", "curves"} <= found.keys()
    assert found["worst"].keys() == {"tensor", "error", "tolerance"}


@pytest.mark.torch
@pytest.mark.parametrize("name", ["densenet40", "resnet20"])
def test_errors_against_float64_are_no_worse_than_torchs_own(oracle, name):
    """Source and rewritten, in onnxruntime and compiled; what torch's float32 does on the same graph is the measure."""
    model = small(name, **{"densenet40": {"depth": 1}, "resnet20": {"growth": None, "depth": None}}[name])
    graph = open_graph(model)
    feeds, state = draw_feeds(graph, np.random.default_rng(1)), graph.state()
    exact = oracle.evaluate(model, {**feeds, **state}, "float64")
    torch32 = oracle.evaluate(model, {**feeds, **state}, "float32")
    fused = open_graph(bnfuse.rewrite(model, level="icf"))
    where = Where(threads=2)
    for runner in (
        *(OrtRunner(g, Where()) for g in (graph, fused)),
        *(CompiledRunner(g, where) for g in (graph, fused)),
    ):
        result = runner.evaluate(feeds, state)
        floor = FLOOR * max(np.linalg.norm(exact[key]) for key in graph.signature.gradients.values())
        for key, value in result.items():
            error, own = distance(value, exact[key], floor), distance(torch32[key], exact[key], floor)
            assert error <= 2 * own + 2e-6, (type(runner).__name__, key)


def test_one_unlucky_seed_is_noted_and_a_mistake_is_wrong_on_all(before, after, monkeypatch):
    right = bnfuse.verify(before, after)
    tensors = (*right.tensors[:1], dataclasses.replace(right.tensors[1], error=1.0), *right.tensors[2:])
    asked = []

    def unlucky(*arguments):
        asked.append(arguments[4])
        return dataclasses.replace(
            right, seed=arguments[4], tensors=tensors if arguments[4] in wrong else right.tensors
        )

    monkeypatch.setattr("bnfuse.verifying.verification.verify_once", unlucky)
    wrong = {5}
    found = bnfuse.verify(before, after, seed=5)
    assert (found.equal, asked) == (True, [5, 6])
    assert found.notes[-1].startswith(f"seed 5 said no ({right.tensors[1].tensor}: 1.0e+00 of ")
    wrong = {5, 6, 7}
    assert not bnfuse.verify(before, after, seed=5).equal
