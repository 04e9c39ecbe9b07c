"""Sizes and FLOPs against figures worked out by hand and against the zoo's own count."""

import json

import pytest

import bnfuse
from bnfuse.building import build_model
from bnfuse.inspection import FIELDS
from bnfuse.models import count_forward


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
    assert json.loads(json.dumps(found))["total"] == found["total"]
    assert {"name", "inputs", "total", "layers"} == found.keys()
    assert {"name", "op", "output_shape", *FIELDS} == found["layers"][0].keys()


def test_the_text_ends_with_the_total(model):
    assert str(bnfuse.inspect(model)).splitlines()[-1].split()[0] == "total"
