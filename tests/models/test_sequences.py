"""Networks of shapes only: sizes as published, weights shared in time, refusals."""

from __future__ import annotations

from collections import Counter

import onnx_graphsurgeon as gs
import pytest

from bnfuse.build.named import build_model
from bnfuse.build.zoo import zoo_entries
from bnfuse.core.errors import BnfuseError
from bnfuse.models import SHAPE_ONLY, build_forward, build_graph, count, count_forward

SMALL = {"batch": 2, "hidden": 8, "steps": 3, "vocabulary": 11}


def small(name: str, **settings) -> gs.Graph:
    return build_graph(name, **{**SMALL, **({"heads": 2} if name == "transformer" else {}), **settings})


def test_the_big_transformer_has_its_published_parameters():
    found = count_forward("transformer", vocabulary=37000).parameters  # the English-German vocabulary
    assert found / 1e6 == pytest.approx(213, rel=0.01)


def test_transformer_operations_are_those_of_its_products():
    h, f, t, layers = 1024, 4096, 50, 6
    attention = 4 * h * h + 2 * t * h  # multiply-adds of a word: projections, then scores and their mix
    word = layers * (3 * attention + 2 * 2 * h * f) + 32000 * h
    assert count_forward("transformer", batch=1).flops == 2 * t * word


def test_gnmt_parameters_are_those_of_its_cells():
    h, v = 1024, 32000
    cells = (
        [2] * 2 + [3] + [2] * 6 + [2] + [3] * 7
    )  # inputs and state in units of h: encoder 1 (two ways) to 8, decoder
    lstm = sum(4 * (width * h * h + h) for width in cells)
    attention = h * h + h + h * h + h
    assert count_forward("gnmt").parameters == lstm + attention + 3 * v * h + v


def test_a_cell_is_that_of_papers_004_section_3_3_4():
    graph = small("gnmt", layers=3)
    cell = [n for n in graph.nodes if n.name.startswith("encoder/layer3/step2/")]
    rest = {"Concat": 1, "Dropout": 1, "Add": 2}  # of the sums one is the residual
    assert Counter(n.op for n in cell) == {"Gemm": 4, "Sigmoid": 4, "Tanh": 2, "Mul": 3, **rest}
    assert {n.attrs["recurrence"] for n in cell} == {2}


def test_the_steps_of_a_layer_share_its_weights_and_hand_on_their_state():
    graph = small("gnmt", layers=2)
    nodes = {n.name: n for n in graph.nodes}
    weights = {id(nodes[f"decoder/layer2/step{step}/forget"].inputs[1]) for step in (1, 2, 3)}
    assert len(weights) == 1
    assert nodes["decoder/layer2/step2/join"].inputs[-1] is nodes["decoder/layer2/step1/output/mul"].outputs[0]
    first = nodes["encoder/layer1/reverse/step1/join"]
    assert first.inputs[-1] is nodes["encoder/layer1/reverse/step2/output/mul"].outputs[0]


@pytest.mark.parametrize(
    ("unroll", "names"),
    [
        ("layer", ["layer2/step1", "layer2/step2", "layer2/step3", "layer3/step1", "layer3/step2", "layer3/step3"]),
        ("step", ["layer2/step1", "layer3/step1", "layer2/step2", "layer3/step2", "layer2/step3", "layer3/step3"]),
    ],
)
def test_unroll_is_the_order_of_layers_and_steps(unroll, names):
    graph = small("gnmt", layers=3, unroll=unroll)
    for side in ("encoder", "decoder"):
        found = [n.name.removeprefix(f"{side}/").removesuffix("/join") for n in graph.nodes if n.op == "Concat"]
        wanted = [
            name for name in found if name.startswith(("layer2", "layer3")) and f"{side}/{name}/cell" in named(graph)
        ]
        assert wanted == names


def named(graph: gs.Graph) -> set[str]:
    return {n.name for n in graph.nodes}


def test_the_order_of_unrolling_changes_no_count():
    assert count(small("gnmt", unroll="step")) == count(small("gnmt"))
    names = [named(small("gnmt", unroll=how)) for how in ("layer", "step")]
    assert names[0] == names[1]


@pytest.mark.parametrize("name", SHAPE_ONLY)
def test_nodes_come_after_what_they_read_and_names_are_unique(name):
    graph = small(name, layers=3)
    known = {id(x) for x in graph.inputs}
    for node in graph.nodes:
        for x in node.inputs:
            assert isinstance(x, gs.Constant) or id(x) in known, (node.name, x.name)
        known |= {id(y) for y in node.outputs}
    assert len(named(graph)) == len(graph.nodes)
    tensors = [y.name for n in graph.nodes for y in n.outputs]
    assert len(set(tensors)) == len(tensors)


@pytest.mark.parametrize("name", SHAPE_ONLY)
def test_shapes_are_those_that_onnx_infers(name):
    import onnx

    graph = small(name, layers=2)
    for node in graph.nodes:
        node.attrs.pop("recurrence", None)
    model = gs.export_onnx(graph, do_type_check=False)
    onnx.checker.check_model(model)
    shapes = {v.name: v.type.tensor_type for v in model.graph.value_info}
    del model.graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, check_type=True)
    found = {v.name: v.type.tensor_type for v in inferred.graph.value_info}
    assert shapes and [name for name in shapes if found[name] != shapes[name]] == []


@pytest.mark.parametrize(("name", "output"), [("gnmt", [6, 8]), ("transformer", [6, 8])])
def test_without_a_vocabulary_the_maps_are_all_of_the_hidden_size(name, output):
    graph = small(name, vocabulary=0)
    assert graph.outputs[0].shape == output
    assert not any(n.op == "Gather" for n in graph.nodes)
    assert all(len(x.shape) in (2, 3) and x.shape[-1] == 8 for x in graph.inputs)


def test_the_transformer_s_variants_change_the_layers_that_they_name():
    def ops(**settings) -> Counter:
        return Counter(n.op for n in small("transformer", layers=2, **settings).nodes)

    plain, attentions = ops(), 2 + 2 * 2  # in two encoder layers, and two in each of two decoder layers
    assert ops(projection_relu=True) - plain == {"Relu": 3 * attentions}
    assert plain - ops(attention_output=False) == {"Gemm": attentions}
    assert ops(attention_dropout=0.1) - plain == {"Dropout": attentions}
    assert ops(relu_dropout=0.1) - plain == {"Dropout": 4}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gnmt", {"image": 32}, "gnmt: it reads sequences, not images"),
        ("gnmt", {"unroll": "time"}, "gnmt: unroll=time is unknown: it is layer or step"),
        ("gnmt", {"layers": 1}, "gnmt: hidden and steps must be at least 1, layers at least 2"),
        ("gnmt", {"vocabulary": 1 << 21}, "gnmt: vocabulary=2097152 is out of range"),
        ("gnmt", {"steps": 16384}, "gnmt: 8 layers of 16384 steps are more than 4,096 cells"),
        ("gnmt", {"layers": 16384}, "gnmt: layers=16384 is out of range"),
        ("transformer", {"layers": 513}, "transformer: layers=513 is out of range"),
        ("gnmt", {"batch": 0}, "gnmt: batch=0 is out of range"),
        ("transformer", {"heads": 3}, "transformer: layers, hidden, heads"),
        ("transformer", {"depth": 3}, "transformer has no metaparameter 'depth'"),
        ("transformer", {"classes": 7}, "transformer: it reads sequences"),
    ],
)
def test_bad_requests_are_one_line(name, settings, message):
    with pytest.raises(BnfuseError) as caught:
        build_graph(name, **settings)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", SHAPE_ONLY)
def test_they_are_not_built_but_estimated(name):
    for make in (build_forward, build_model):
        with pytest.raises(BnfuseError, match=f"bnfuse estimate {name}"):
            make(name)


def test_the_list_says_which_have_shapes_only():
    assert {entry.name for entry in zoo_entries() if entry.shape_only} == {"gnmt", "transformer"}
