"""Sizes, FLOPs and traffic against figures worked out by hand, the zoo's own count and `bnfuse diff`."""

import csv
import io
import json
from pathlib import Path

import pytest

import bnfuse
from bnfuse.analysis.traffic import graph_traffic
from bnfuse.build.named import build_model
from bnfuse.commands.output import to_json
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.training_graph import open_graph
from bnfuse.inspecting import FIELDS
from bnfuse.inspecting.training import UNOWNED
from bnfuse.models import MODELS, count_forward


@pytest.fixture(scope="module")
def model():
    return build_model("resnet20", zoo={"batch": 2, "image": 16}).model


def layer(found, name):
    return next(x for x in found.layers if x.name == name)


def test_totals_are_the_sums_of_the_layers(model):
    found = bnfuse.inspect(model)
    assert found.total == {f: sum(getattr(x, f) for x in found.layers) for f in FIELDS}


@pytest.mark.parametrize("name", ["densenet40", "resnet20", "mobilenetv2", "squeezenet"])
def test_forward_work_and_parameters_agree_with_the_zoo(name):
    sizes = {"batch": 2, "image": 32}
    total = bnfuse.inspect(build_model(name, zoo=sizes).model).total
    expected = count_forward(name, **sizes)
    assert (total["parameters"], total["flops_forward"]) == (expected.parameters, expected.flops)


def test_a_convolution_is_two_operations_for_each_multiply_add(model):
    first = layer(bnfuse.inspect(model), "stem/conv")
    assert first.output_shape == (2, 16, 16, 16)
    assert first.flops_forward == 2 * (2 * 16 * 16 * 16) * (3 * 3 * 3)
    assert first.output_bytes == 4 * 2 * 16 * 16 * 16
    assert (first.parameters, first.parameter_bytes) == (16 * 27, 4 * 16 * 27)


def test_the_first_convolution_needs_no_input_gradient_and_others_both(model):
    found = bnfuse.inspect(model)
    convs = [x for x in found.layers if x.op == "Conv"]
    assert convs[0].flops_backward == convs[0].flops_forward
    assert all(x.flops_backward == 2 * x.flops_forward for x in convs[1:])


def test_rewriting_keeps_the_work_and_the_parameters(model):
    before = bnfuse.inspect(model).total
    after = bnfuse.inspect(bnfuse.rewrite(model, level="icf")).total
    for field in ("parameters", "parameter_bytes", "flops_forward", "flops_backward"):
        assert after[field] == before[field]
    assert after["output_bytes"] < 0.7 * before["output_bytes"]


def test_the_classifiers_gradients_are_its_own(model):
    (gemm,) = [x for x in bnfuse.inspect(model).layers if x.op == "Gemm"]
    assert gemm.flops_forward == 2 * 2 * 64 * 10
    assert gemm.flops_backward == 2 * gemm.flops_forward


def test_the_json_has_the_documented_keys(model):
    found = bnfuse.inspect(model).to_json()
    assert json.loads(to_json(found))["total"] == found["total"]
    assert {"name", "inputs", "batch", "source", "total", "layers"} == found.keys()
    assert {*FIELDS, "batch_norm_share"} == found["total"].keys()
    documented = " ".join((Path(__file__).parents[3] / "docs" / "cli.md").read_text().split())
    assert f"`{found['source']}`" in documented
    assert f"`{bnfuse.inspect('resnet20').source}`" in documented
    assert {"name", "op", "output_shape", "kernel_shape", "strides", *FIELDS} == found["layers"][0].keys()
    assert {"output_bytes", "parameters", "parameter_bytes", "flops_forward", "flops_backward"} < {*FIELDS}


def test_the_csv_has_a_row_a_layer_and_adds_up_to_the_total(model):
    found = bnfuse.inspect(model)
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [row["name"] for row in rows] == [x.name for x in found.layers]
    assert {f: sum(int(row[f]) for row in rows) for f in FIELDS} == found.total
    assert rows[0]["output_shape"] == "2x16x16x16" and rows[0]["kernel_shape"] == "3x3"


@pytest.mark.parametrize("units", ["decimal", "binary"])
@pytest.mark.parametrize("name", ["densenet121", "googlenet", "mobilenetv2"])
def test_the_text_ends_with_the_total_and_fits_100_columns(name, units):
    lines = "\n\n".join(str(x) for x in bnfuse.inspect(name, zoo={"batch": 1024}).sections(units)).splitlines()
    assert lines[-1].split()[0] == "total"
    assert max(map(len, lines)) <= 100
    assert any(unit in lines[-1] for unit in (("TB", "GB") if units == "decimal" else ("TiB", "GiB")))


def test_the_text_has_a_column_for_batch_norms_where_there_are_any(model):
    def last_cells(found):
        lines = str(found).splitlines()
        return {
            line.split()[0]: line.split("  ")[-1].strip()
            for line in lines[lines.index("Layers (batch of 2; F: FLOP)") + 1 :]
        }

    cells = last_cells(bnfuse.inspect(model))
    assert (cells["layer"], cells["stem/conv"], cells["stem/norm"], cells["total"]) == ("BN", "-", "100 %", "28 %")
    assert last_cells(bnfuse.inspect("nin", zoo={"batch": 2}))["layer"] == "sweeps"


def test_many_inputs_are_not_all_listed():
    head = str(bnfuse.inspect("gnmt", zoo={"batch": 2, "steps": 4, "layers": 2})).split("\n\n")[0].splitlines()
    assert head[1:] == [
        "  zero_state: float[2, 1024]",
        *(f"  source/step{n}/words: int64[2]" for n in (1, 2, 3)),
        head[-1],
    ]
    assert head[-1] == "  and 5 inputs more"


def test_unknown_units_are_refused(model):
    with pytest.raises(BnfuseError, match="decimal or binary"):
        bnfuse.inspect(model).sections("metric")


@pytest.mark.parametrize("level", ["none", "rcf", "bnff", "icf"])
def test_traffic_is_that_of_diff_at_every_level(model, level):
    graph = open_graph(bnfuse.rewrite(model, level=level))
    total, expected = bnfuse.inspect(graph).total, graph_traffic(graph)
    assert (total["sweeps_forward"], total["moved_bytes_forward"]) == (expected.forward.sweeps, expected.forward.bytes)
    assert (total["sweeps_backward"], total["moved_bytes_backward"]) == (
        expected.backward.sweeps,
        expected.backward.bytes,
    )


def test_batch_norms_of_the_source_are_five_sweeps_each(model):
    found = bnfuse.inspect(model)
    norms = [x for x in found.layers if x.op == "BatchNorm"]
    assert len(norms) == 21
    assert found.total["batch_norm_sweeps"] == 21 * (2 + 3)  # x, z; dz, x, dx
    assert found.total["batch_norm_bytes"] == 5 * sum(x.output_bytes for x in norms)
    assert {x.batch_norm_sweeps for x in found.layers} == {0, 5}


def test_fusion_lowers_the_share_of_batch_norms(model):
    before, after = bnfuse.inspect(model), bnfuse.inspect(bnfuse.rewrite(model, level="icf"))
    assert 0 < after.total["batch_norm_bytes"] < before.total["batch_norm_bytes"] / 2
    assert after.batch_norm_share["sweeps"] < before.batch_norm_share["sweeps"]


NETWORKS = [
    ("alexnet", {"hidden": 32}),
    ("densenet40", {"concat": "nested", "depth": 4}),
    ("densenet40", {"depth": 4}),
    ("googlenet", {}),
    ("mobilenetv2", {}),
    ("nin", {}),
    ("resnet20", {}),
    ("squeezenet", {"bypass": "complex"}),
    ("squeezenet-plain", {"bypass": "simple"}),
    ("vgg11", {"hidden": 32}),
]


@pytest.mark.parametrize(("name", "settings"), NETWORKS)
def test_a_forward_graph_counts_as_its_training_graph_does(name, settings):
    zoo = {"batch": 2, "image": 32, **settings}
    by_rule = bnfuse.inspect(name, zoo=zoo)
    built = bnfuse.inspect(build_model(name, zoo=zoo).model)
    same = [f for f in FIELDS if f != "output_bytes"]
    layers = {x.name: x for x in built.layers}
    assert {*layers} == {"loss", *(x.name for x in by_rule.layers)}
    for layer in by_rule.layers:
        assert {f: getattr(layer, f) for f in same} == {f: getattr(layers[layer.name], f) for f in same}
    stored = {x.name: layers[x.name].output_bytes - x.output_bytes for x in by_rule.layers}
    more = {"MaxPool": 2, "Dropout": 0.25}  # indices of int64, a mask of bytes
    extra = {x.name: x.output_bytes * more[x.op] for x in by_rule.layers if x.op in more}
    assert {name: size for name, size in stored.items() if size} == extra


def test_every_network_of_the_zoo_is_inspected_by_name():
    for name in MODELS:
        found = bnfuse.inspect(name, zoo={"batch": 1})
        expected = count_forward(name, batch=1)
        assert (found.total["parameters"], found.total["flops_forward"]) == (expected.parameters, expected.flops)
        assert UNOWNED not in {x.name for x in found.layers}


def test_sizes_and_metaparameters_are_for_names_alone(tmp_path, model):
    bnfuse.save(model, tmp_path / "t.onnx")
    with pytest.raises(BnfuseError, match=r"t\.onnx: batch, growth can be chosen for networks of the zoo only"):
        bnfuse.inspect(str(tmp_path / "t.onnx"), zoo={"batch": 2, "growth": 3, "image": None})


def test_a_name_that_is_none_is_refused_with_those_there_are():
    with pytest.raises(BnfuseError, match="no network named 'densenet' in the zoo: there are alexnet"):
        bnfuse.inspect("densenet")


def test_roles_are_for_training_graphs_alone():
    with pytest.raises(BnfuseError, match="--data-input, --labels-input: about training graphs"):
        bnfuse.inspect("resnet20", data_input=["x"], labels_input=["y"])
